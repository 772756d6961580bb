/* Attention of many rows of one sequence, as in prefill: keys and values are packed once into panels, in the thread's
 * scratch, and rows go through them ROWS_MAX at a time by the products that weights go through.
 *
 * Sums run in another order than in attend_few.h: the same row may differ in its last bits between the two ways, but
 * not with what else is in the batch.
 */
#pragma once
#include "attention.h"

#define CHUNK 256 /* keys between two updates of the running maximum */

static const bf16 ZEROS[D_MAX] = {0};

#ifdef PAIRS
#include "pairs_many.h"
#else
#include "wide_many.h"
#endif

/* Scores -> weights, with what was summed so far scaled to the new maximum (Milakov & Gimelshein 2018).
 * `scale` is that of the scores times log2(e): powers are of two. */
INLINE void tile_softmax(Tile *t, int rows, int64_t first, int64_t n, float scale, int64_t d) {
    for (int r = 0; r < rows; r++) {
        int64_t seen = t->sees[r] - first;
        if (seen > n) seen = n;
        const float *s = t->s[r];
        if (seen <= 0) {
            clear_weights(t, r, n);
            continue;
        }
        int64_t whole = seen / 16 * 16;
        M16 rest = m_first(seen - whole);
        F16 best = f_all(-__builtin_inff());
        for (int64_t c = 0; c < whole; c += 16) best = f_max(best, f_load(s + c));
        if (seen > whole) best = f_pick(rest, f_max(best, f_load(s + whole)), best);
        float top = f_highest(best) * scale;
        if (top < t->top[r]) top = t->top[r];
        F16 sum = f_zero(), factor = f_all(scale), shift = f_all(-top);
        for (int64_t c = 0; c < whole; c += 16) {
            F16 e = power16(f_fma(f_load(s + c), factor, shift));
            sum = f_add(sum, e);
            store_weights(t, r, c, e);
        }
        for (int64_t c = whole; c < n; c += 16, rest = m_none()) {
            F16 e = power16(f_fma(f_load(s + c), factor, shift));
            e = f_keep(rest, e);
            sum = f_add(sum, e);
            store_weights(t, r, c, e);
        }
        if (top > t->top[r] && first > 0) {
            F16 shrink = power16(f_all(t->top[r] - top));
            t->sum[r] *= f_first(shrink);
            for (int64_t i = 0; i < d; i += 16)
                f_store(t->o[r] + i, f_mul(f_load(t->o[r] + i), shrink));
        }
        t->sum[r] += f_sum(sum);
        t->top[r] = top;
    }
}

/* Many rows of one sequence for one KV head, ROWS_MAX (token, query head) at a time, by the products that weights go
 * through. */
INLINE void attend_many(const Attention *a, int64_t b, int64_t first, int64_t count, int64_t head, char *scratch,
                        int64_t d) {
    int64_t group = a->heads / a->kv_heads, rows = a->rows_at[b + 1] - a->rows_at[b];
    int64_t start = a->contexts[b] - rows, context = start + first + count, padded = (context + 31) / 32 * 32;
    Tile *t = (Tile *)scratch;
    Packed *keys = (Packed *)(scratch + (sizeof(Tile) + 63) / 64 * 64), *values = keys + padded * d;
    pack_keys(a, a->tables + a->table_at[b], head, context, keys, values, d);
    for (int r = 0; r < ROWS_MAX; r++) clear_weights(t, r, CHUNK);
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
        pack_queries(t, queries, d);
        for (int64_t key = 0; key < most; key += CHUNK) {
            int64_t n = (most - key + 31) / 32 * 32;
            if (n > CHUNK) n = CHUNK;
            tile_scores(t, keys, key, n, d);
            tile_softmax(t, n_rows, key, n, a->scale * 1.44269504f, d);
            tile_values(t, values, key, n, padded, d);
        }
        for (int r = 0; r < n_rows; r++) {
            int64_t token = first + (at + r) / group, h = head * group + (at + r) % group;
            bf16 *out = a->out + ((a->rows_at[b] + token) * a->heads + h) * d;
            F16 share = f_all(1.0f / t->sum[r]);
            for (int64_t i = 0; i < d; i += 16) {
                store16(out + i, d - i, narrow(f_mul(f_load(t->o[r] + i), share)));
            }
        }
    }
}
