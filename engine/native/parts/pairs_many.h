/* What attend_many.h, which includes this, does by products of pairs: packing, scores, values. Weights of attention are
 * rounded to bfloat16. */
#pragma once
#include "pairs.h"

#define P_STRIDE (CHUNK / 2 + 16)

typedef bf16 Packed;

/* 16 rows of `d` -> pair i of row r at to[i * wide + r], for the first `columns` rows. */
INLINE void pack_rows(const bf16 *const *rows, int64_t d, uint32_t *to, int64_t wide, int columns) {
    for (int64_t i = 0; i < d / 2; i += 16) {
        I16 v[16];
        UNROLL for (int r = 0; r < 16; r++) v[r] = load32(rows[r] + 2 * i, d - 2 * i);
        transpose16(v);
        UNROLL for (int j = 0; j < 16; j++)
            if (i + j < d / 2) i_store_first(to + (i + j) * wide, columns, v[j]);
    }
}

/* Keys packed as panels of 32 keys over pairs of d; values as panels of 32 d over pairs of keys. Keys past the context
 * are zero, so that unused memory is never multiplied, not even by zero. */
INLINE void pack_keys(const Attention *a, const int64_t *table, int64_t head, int64_t context, bf16 *keys, bf16 *values,
                      int64_t d) {
    int64_t d_panels = (d + 31) / 32, value_off = a->kv_heads * a->block_size * d;
    int64_t padded = (context + 31) / 32 * 32;
    for (int64_t j = 0; j < padded; j += 16) {
        const bf16 *rows[16];
        for (int r = 0; r < 16; r++) rows[r] = j + r < context ? key_at(a, table, head, j + r) : ZEROS;
        pack_rows(rows, d, (uint32_t *)keys + j / 32 * (d / 2) * 32 + j % 32, 32, 16);
        for (int r = 0; r < 16; r++)
            if (j + r < context) rows[r] += value_off;
        for (int r = 0; r < 16; r += 2) {
            for (int64_t p = 0; p < d_panels; p++) {
                I16 x = load32(rows[r] + 32 * p, d - 32 * p), y = load32(rows[r + 1] + 32 * p, d - 32 * p);
                bf16 *panel = values + (p * (padded / 2) + (j + r) / 2) * 64;
                i_store(panel, pairs_low(x, y));
                i_store(panel + 32, pairs_high(x, y));
            }
        }
    }
}

/* ROWS_MAX rows over CHUNK keys: a thread's own, in its scratch, with the packed keys and values behind it. */
typedef struct {
    uint32_t q[D_MAX / 2 * ROWS_MAX];
    float s[ROWS_MAX][CHUNK];
    uint32_t p[ROWS_MAX * P_STRIDE];
    float o[ROWS_MAX][D_MAX];
    float top[ROWS_MAX], sum[ROWS_MAX];
    int64_t sees[ROWS_MAX]; /* keys that row r may look at */
} Tile;

INLINE void pack_queries(Tile *t, const bf16 *const *rows, int64_t d) { pack_rows(rows, d, t->q, ROWS_MAX, ROWS_MAX); }

INLINE void clear_weights(Tile *t, int r, int64_t n) { memset(t->p + r * P_STRIDE, 0, (size_t)n * 2); }

/* Weights of row r from key c of the chunk on. */
INLINE void store_weights(Tile *t, int r, int64_t c, F16 v) { b_store((bf16 *)(t->p + r * P_STRIDE) + c, narrow(v)); }

/* Scores of the tile's rows for the keys [first, first + n); n is a multiple of 32. */
INLINE void tile_scores(Tile *t, const bf16 *keys, int64_t first, int64_t n, int64_t d) {
    int64_t pairs = d / 2;
    for (int64_t c = 0; c < n; c += 32) {
        F16 acc[ROWS_MAX][2];
        UNROLL for (int r = 0; r < ROWS_MAX; r++) acc[r][0] = acc[r][1] = f_zero();
        panel_rows(ROWS_MAX, 1, ROWS_MAX, t->q, keys + (first + c) * pairs * 2, pairs, acc, NULL, 0, 0);
        UNROLL for (int r = 0; r < ROWS_MAX; r++) {
            f_store(t->s[r] + c, acc[r][0]);
            f_store(t->s[r] + c + 16, acc[r][1]);
        }
    }
}

INLINE void tile_values(Tile *t, const bf16 *values, int64_t first, int64_t n, int64_t padded, int64_t d) {
    for (int64_t c = 0; c < d; c += 32) {
        F16 acc[ROWS_MAX][2];
        UNROLL for (int r = 0; r < ROWS_MAX; r++) {
            acc[r][0] = first ? f_load(t->o[r] + c) : f_zero();
            acc[r][1] = first ? f_load(t->o[r] + c + 16) : f_zero();
        }
        const bf16 *panel = values + (c / 32 * (padded / 2) + first / 2) * 64;
        panel_rows(ROWS_MAX, P_STRIDE, 1, t->p, panel, n / 2, acc, NULL, 0, 0);
        UNROLL for (int r = 0; r < ROWS_MAX; r++) {
            f_store(t->o[r] + c, acc[r][0]);
            f_store(t->o[r] + c + 16, acc[r][1]);
        }
    }
}
