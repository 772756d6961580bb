/* Attention of many rows of one sequence, as in prefill: keys and values are packed once into panels, in the thread's
 * scratch, and rows go through them twelve at a time by the products that weights go through.
 *
 * Sums run in another order than in attend_few.h, and attention's weights are rounded to bfloat16: the same row may
 * differ in its last bits between the two ways, but not with what else is in the batch.
 */
#pragma once
#include "attention.h"
#include "panels.h"

#define CHUNK 256 /* keys between two updates of the running maximum */
#define P_STRIDE (CHUNK / 2 + 16)

static const bf16 ZEROS[D_MAX] = {0};

/* 16 rows of `d` -> pair i of row r at to[i * wide + r], for the first `columns` rows. */
INLINE void pack_rows(const bf16 *const *rows, int64_t d, uint32_t *to, int64_t wide, int columns) {
    for (int64_t i = 0; i < d / 2; i += 16) {
        __m512i v[16];
        UNROLL for (int r = 0; r < 16; r++) v[r] = load32(rows[r] + 2 * i, d - 2 * i);
        transpose16(v);
        UNROLL for (int j = 0; j < 16; j++)
            if (i + j < d / 2) _mm512_mask_storeu_epi32(to + (i + j) * wide, (__mmask16)((1u << columns) - 1), v[j]);
    }
}

/* Keys packed as panels of 32 keys over pairs of d; values as panels of 32 d over pairs of keys. Keys past the context
 * are zero, so that unused memory is never multiplied, not even by zero. */
INLINE void pack_keys(const Attention *a, const int64_t *table, int64_t head, int64_t context, bf16 *keys, bf16 *values,
                      int64_t d) {
    int64_t d_panels = (d + 31) / 32, value_off = a->kv_heads * a->block_size * d;
    int64_t padded = (context + 31) / 32 * 32;
    const __m512i low = _mm512_set_epi16(47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40, 8, 39, 7, 38, 6, 37,
                                         5, 36, 4, 35, 3, 34, 2, 33, 1, 32, 0);
    const __m512i high = _mm512_add_epi16(low, _mm512_set1_epi16(16));
    for (int64_t j = 0; j < padded; j += 16) {
        const bf16 *rows[16];
        for (int r = 0; r < 16; r++) rows[r] = j + r < context ? key_at(a, table, head, j + r) : ZEROS;
        pack_rows(rows, d, (uint32_t *)keys + j / 32 * (d / 2) * 32 + j % 32, 32, 16);
        for (int r = 0; r < 16; r++)
            if (j + r < context) rows[r] += value_off;
        for (int r = 0; r < 16; r += 2) {
            for (int64_t p = 0; p < d_panels; p++) {
                __m512i x = load32(rows[r] + 32 * p, d - 32 * p), y = load32(rows[r + 1] + 32 * p, d - 32 * p);
                bf16 *panel = values + (p * (padded / 2) + (j + r) / 2) * 64;
                _mm512_storeu_si512(panel, _mm512_permutex2var_epi16(x, low, y));
                _mm512_storeu_si512(panel + 32, _mm512_permutex2var_epi16(x, high, y));
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

/* Scores of the tile's rows for the keys [first, first + n); n is a multiple of 32. */
INLINE void tile_scores(Tile *t, const bf16 *keys, int64_t first, int64_t n, int64_t pairs) {
    for (int64_t c = 0; c < n; c += 32) {
        __m512 acc[ROWS_MAX][2];
        UNROLL for (int r = 0; r < ROWS_MAX; r++) acc[r][0] = acc[r][1] = _mm512_setzero_ps();
        panel_rows(ROWS_MAX, 1, ROWS_MAX, t->q, keys + (first + c) * pairs * 2, pairs, acc, NULL, 0, 0);
        UNROLL for (int r = 0; r < ROWS_MAX; r++) {
            _mm512_storeu_ps(t->s[r] + c, acc[r][0]);
            _mm512_storeu_ps(t->s[r] + c + 16, acc[r][1]);
        }
    }
}

/* 2^x for x <= 0, to 4e-6 of it: more than enough for what becomes bfloat16 (Taylor's series on [-1/2, 1/2]). */
INLINE __m512 exp2_512(__m512 x) {
    __m512 n = _mm512_roundscale_ps(x, 8);
    x = _mm512_sub_ps(x, n);
    __m512 y = _mm512_set1_ps(1.33335581e-3f);
    y = _mm512_fmadd_ps(y, x, _mm512_set1_ps(9.61812911e-3f));
    y = _mm512_fmadd_ps(y, x, _mm512_set1_ps(5.55041087e-2f));
    y = _mm512_fmadd_ps(y, x, _mm512_set1_ps(2.40226507e-1f));
    y = _mm512_fmadd_ps(y, x, _mm512_set1_ps(6.93147181e-1f));
    return _mm512_scalef_ps(_mm512_fmadd_ps(y, x, _mm512_set1_ps(1.0f)), n);
}

/* Scores -> weights in bfloat16, with what was summed so far scaled to the new maximum (Milakov & Gimelshein 2018).
 * `scale` is that of the scores times log2(e): powers are of two. */
INLINE void tile_softmax(Tile *t, int rows, int64_t first, int64_t n, float scale, int64_t d) {
    for (int r = 0; r < rows; r++) {
        int64_t seen = t->sees[r] - first;
        if (seen > n) seen = n;
        const float *s = t->s[r];
        uint32_t *p = t->p + r * P_STRIDE;
        if (seen <= 0) {
            memset(p, 0, (size_t)n * 2);
            continue;
        }
        int64_t whole = seen / 16 * 16;
        __mmask16 rest = (__mmask16)((1u << (seen - whole)) - 1);
        __m512 best = _mm512_set1_ps(-__builtin_inff());
        for (int64_t c = 0; c < whole; c += 16) best = _mm512_max_ps(best, _mm512_loadu_ps(s + c));
        if (rest) best = _mm512_mask_max_ps(best, rest, best, _mm512_loadu_ps(s + whole));
        float top = _mm512_reduce_max_ps(best) * scale;
        if (top < t->top[r]) top = t->top[r];
        __m512 sum = _mm512_setzero_ps(), factor = _mm512_set1_ps(scale), shift = _mm512_set1_ps(-top);
        for (int64_t c = 0; c < whole; c += 16) {
            __m512 e = exp2_512(_mm512_fmadd_ps(_mm512_loadu_ps(s + c), factor, shift));
            sum = _mm512_add_ps(sum, e);
            _mm256_storeu_si256((__m256i *)(p + c / 2), narrow(e));
        }
        for (int64_t c = whole; c < n; c += 16, rest = 0) {
            __m512 e = exp2_512(_mm512_fmadd_ps(_mm512_loadu_ps(s + c), factor, shift));
            e = _mm512_maskz_mov_ps(rest, e);
            sum = _mm512_add_ps(sum, e);
            _mm256_storeu_si256((__m256i *)(p + c / 2), narrow(e));
        }
        if (top > t->top[r] && first > 0) {
            __m512 shrink = exp2_512(_mm512_set1_ps(t->top[r] - top));
            t->sum[r] *= _mm512_cvtss_f32(shrink);
            for (int64_t i = 0; i < d; i += 16)
                _mm512_storeu_ps(t->o[r] + i, _mm512_mul_ps(_mm512_loadu_ps(t->o[r] + i), shrink));
        }
        t->sum[r] += _mm512_reduce_add_ps(sum);
        t->top[r] = top;
    }
}

INLINE void tile_values(Tile *t, const bf16 *values, int64_t first, int64_t n, int64_t padded, int64_t d) {
    for (int64_t c = 0; c < d; c += 32) {
        __m512 acc[ROWS_MAX][2];
        UNROLL for (int r = 0; r < ROWS_MAX; r++) {
            acc[r][0] = first ? _mm512_loadu_ps(t->o[r] + c) : _mm512_setzero_ps();
            acc[r][1] = first ? _mm512_loadu_ps(t->o[r] + c + 16) : _mm512_setzero_ps();
        }
        const bf16 *panel = values + (c / 32 * (padded / 2) + first / 2) * 64;
        panel_rows(ROWS_MAX, P_STRIDE, 1, t->p, panel, n / 2, acc, NULL, 0, 0);
        UNROLL for (int r = 0; r < ROWS_MAX; r++) {
            _mm512_storeu_ps(t->o[r] + c, acc[r][0]);
            _mm512_storeu_ps(t->o[r] + c + 16, acc[r][1]);
        }
    }
}

/* Many rows of one sequence for one KV head, 12 (token, query head) at a time, by the products that weights go
 * through. */
INLINE void attend_many(const Attention *a, int64_t b, int64_t first, int64_t count, int64_t head, char *scratch,
                        int64_t d) {
    int64_t group = a->heads / a->kv_heads, rows = a->rows_at[b + 1] - a->rows_at[b];
    int64_t start = a->contexts[b] - rows, context = start + first + count, padded = (context + 31) / 32 * 32;
    Tile *t = (Tile *)scratch;
    bf16 *keys = (bf16 *)(scratch + (sizeof(Tile) + 63) / 64 * 64), *values = keys + padded * d;
    pack_keys(a, a->tables + a->table_at[b], head, context, keys, values, d);
    memset(t->p, 0, sizeof t->p);
    for (int64_t at = 0; at < count * group; at += ROWS_MAX) {
        int n_rows = count * group - at < ROWS_MAX ? (int)(count * group - at) : ROWS_MAX;
        int64_t most = 0;
        const bf16 *queries[16];
        for (int r = 0; r < 16; r++) queries[r] = ZEROS;
        for (int r = 0; r < n_rows; r++) {
            int64_t token = first + (at + r) / group, h = head * group + (at + r) % group;
            queries[r] = a->q + (a->rows_at[b] + token) * a->q_stride + h * d;
            t->sees[r] = most = start + token + 1;
            t->top[r] = -__builtin_inff();
            t->sum[r] = 0.0f;
        }
        pack_rows(queries, d, t->q, ROWS_MAX, ROWS_MAX);
        for (int64_t key = 0; key < most; key += CHUNK) {
            int64_t n = (most - key + 31) / 32 * 32;
            if (n > CHUNK) n = CHUNK;
            tile_scores(t, keys, key, n, d / 2);
            tile_softmax(t, n_rows, key, n, a->scale * 1.44269504f, d);
            tile_values(t, values, key, n, padded, d);
        }
        for (int r = 0; r < n_rows; r++) {
            int64_t token = first + (at + r) / group, h = head * group + (at + r) % group;
            bf16 *out = a->out + ((a->rows_at[b] + token) * a->heads + h) * d;
            __m512 share = _mm512_set1_ps(1.0f / t->sum[r]);
            for (int64_t i = 0; i < d; i += 16) {
                store16(out + i, d - i, narrow(_mm512_mul_ps(_mm512_loadu_ps(t->o[r] + i), share)));
            }
        }
    }
}
