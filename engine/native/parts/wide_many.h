/* What attend_many.h, which includes this, does in float32: packing, scores, values. */
#pragma once
#include "wide.h"

typedef float Packed;

/* Keys as [keys / 16][d][16], values as [d / 16][keys][16]: what wide_rows reads. Keys past the context are zero, so
 * that unused memory is never multiplied, not even by zero. */
INLINE void pack_keys(const Attention *a, const int64_t *table, int64_t head, int64_t context, float *keys,
                      float *values, int64_t d) {
    int64_t value_off = a->kv_heads * a->block_size * d, padded = (context + 31) / 32 * 32;
    for (int64_t j = 0; j < padded; j += 16) {
        const bf16 *rows[16];
        for (int r = 0; r < 16; r++) rows[r] = j + r < context ? key_at(a, table, head, j + r) : ZEROS;
        for (int64_t i = 0; i < d; i += 32) {
            I16 v[16];
            UNROLL for (int r = 0; r < 16; r++) v[r] = load32(rows[r] + i, d - i);
            transpose16(v);
            float *to = keys + (j * d / 16 + i) * 16;
            UNROLL for (int k = 0; k < 16; k++)
                if (i + 2 * k < d) {
                    f_store(to + 32 * k, evens(v[k]));
                    f_store(to + 32 * k + 16, odds(v[k]));
                }
        }
        for (int r = 0; r < 16; r++) {
            const bf16 *row = j + r < context ? rows[r] + value_off : ZEROS;
            for (int64_t i = 0; i < d; i += 32) {
                I16 v = load32(row + i, d - i);
                f_store(values + (i / 16 * padded + j + r) * 16, widen(i_low(v)));
                f_store(values + ((i / 16 + 1) * padded + j + r) * 16, widen(i_high(v)));
            }
        }
    }
}

/* ROWS_MAX rows over CHUNK keys: a thread's own, in its scratch, with the packed keys and values behind it. */
typedef struct {
    float q[ROWS_MAX][D_MAX];
    float s[ROWS_MAX][CHUNK]; /* scores, then weights */
    float o[ROWS_MAX][D_MAX];
    float top[ROWS_MAX], sum[ROWS_MAX];
    int64_t sees[ROWS_MAX]; /* keys that row r may look at */
} Tile;

INLINE void pack_queries(Tile *t, const bf16 *const *rows, int64_t d) {
    for (int r = 0; r < ROWS_MAX; r++)
        for (int64_t i = 0; i < d; i += 16) f_store(t->q[r] + i, widen(load16(rows[r] + i, d - i)));
}

INLINE void clear_weights(Tile *t, int r, int64_t n) { memset(t->s[r], 0, (size_t)n * sizeof(float)); }

/* Weights of row r from key c of the chunk on. */
INLINE void store_weights(Tile *t, int r, int64_t c, F16 v) { f_store(t->s[r] + c, v); }

/* Scores of the tile's rows for the keys [first, first + n); n is a multiple of 32. */
INLINE void tile_scores(Tile *t, const float *keys, int64_t first, int64_t n, int64_t d) {
    for (int64_t c = 0; c < n; c += 16 * HALVES) {
        F16 acc[ROWS_MAX][2];
        UNROLL for (int r = 0; r < ROWS_MAX; r++) UNROLL for (int h = 0; h < HALVES; h++) acc[r][h] = f_zero();
        wide_rows(ROWS_MAX, HALVES, t->q[0], D_MAX, keys + (first + c) * d, 16 * d, d, acc, NULL, 0);
        UNROLL for (int r = 0; r < ROWS_MAX; r++) UNROLL for (int h = 0; h < HALVES; h++)
            f_store(t->s[r] + c + 16 * h, acc[r][h]);
    }
}

INLINE void tile_values(Tile *t, const float *values, int64_t first, int64_t n, int64_t padded, int64_t d) {
    for (int64_t c = 0; c < d; c += 16 * HALVES) {
        F16 acc[ROWS_MAX][2];
        UNROLL for (int r = 0; r < ROWS_MAX; r++) UNROLL for (int h = 0; h < HALVES; h++)
            acc[r][h] = first ? f_load(t->o[r] + c + 16 * h) : f_zero();
        const float *w = values + (c * padded / 16 + first) * 16;
        wide_rows(ROWS_MAX, HALVES, t->s[0], CHUNK, w, 16 * padded, n, acc, NULL, 0);
        UNROLL for (int r = 0; r < ROWS_MAX; r++) UNROLL for (int h = 0; h < HALVES; h++)
            f_store(t->o[r] + c + 16 * h, acc[r][h]);
    }
}
