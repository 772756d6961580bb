/* Attention of few rows of a sequence, as in decoding: row by row over keys and values where they lie.
 *
 * Bounded by the reading of memory, which records scattered over the region would hold up: what comes AHEAD keys later
 * is asked for meanwhile. A row's sums run over its keys in one order, whoever computes it.
 */
#pragma once
#include "attention.h"

#define AHEAD 48 /* keys */

/* What a thread reads next: asked for from memory while it still computes on what is here. */
typedef struct {
    const int64_t *table;
    int64_t head, context;
} Reading;

/* Keys from `first` on that lie together, at most 16 and not past the context. */
INLINE int64_t tile_keys(const Attention *a, int64_t first, int64_t context) {
    int64_t n = a->block_size - first % a->block_size;
    if (n > 16) n = 16;
    return n > context - first ? context - first : n;
}

/* The key at `at`, or past the context one of `next`; NULL where there is none. */
INLINE const bf16 *key_ahead(const Attention *a, const Reading *now, const Reading *next, int64_t at) {
    if (at < now->context) return key_at(a, now->table, now->head, at);
    at = (at - now->context) / 16 * 16;
    return next && at < next->context ? key_at(a, next->table, next->head, at) : NULL;
}

/* A head's weighted values over the sum of the weights: even and odd columns apart, `parts` vectors of each. */
INLINE void store_head(bf16 *out, int64_t d, int parts, const F16 *even, const F16 *odd, float sum) {
    F16 share = f_all(1.0f / sum);
    UNROLL for (int i = 0; i < parts; i++) {
        I16 low = i_of_b(narrow(f_mul(even[i], share))), high = i_of_b(narrow(f_mul(odd[i], share)));
        store32(out + 32 * i, d - 32 * i, i_or(low, i_shl(high, 16)));
    }
}

#ifdef PAIRS
#include "pairs_few.h"
#else
#include "wide_few.h"
#endif

/* Two heads at once where their sums fit into registers: keys and values are widened for both. */
INLINE void attend_one(const Attention *a, const Reading *now, const Reading *next, int64_t row, int64_t d, int parts) {
    int64_t group = a->heads / a->kv_heads, h = now->head * group, end = h + group;
    if (parts <= 4)
        for (; h + 2 <= end; h += 2) attend_heads(a, now, h + 2 == end ? next : NULL, row, h, d, parts, 2);
    for (; h < end; h++) attend_heads(a, now, h + 1 == end ? next : NULL, row, h, d, parts, 1);
}

static void attend_few(const Attention *a, int64_t b, int64_t first, int64_t count, int64_t head, const Reading *next) {
    Reading now = {.table = a->tables + a->table_at[b], .head = head};
    int64_t rows = a->rows_at[b + 1] - a->rows_at[b];
    for (int64_t i = first; i < first + count; i++) {
        int64_t row = a->rows_at[b] + i;
        const Reading *after = i + 1 == first + count ? next : &now;
        now.context = a->contexts[b] - (rows - 1 - i);
        switch (a->d) { /* two sizes known to the compiler, which leaves the masks out then */
            case 64: attend_one(a, &now, after, row, 64, 2); continue;
            case 128: attend_one(a, &now, after, row, 128, 4); continue;
        }
        switch ((a->d + 31) / 32) {
            case 1: attend_one(a, &now, after, row, a->d, 1); break;
            case 2: attend_one(a, &now, after, row, a->d, 2); break;
            case 3: attend_one(a, &now, after, row, a->d, 3); break;
            case 4: attend_one(a, &now, after, row, a->d, 4); break;
            default: attend_one(a, &now, after, row, a->d, 8); break;
        }
    }
}
