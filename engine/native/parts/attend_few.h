/* Attention of few rows of a sequence, as in decoding: row by row over keys and values where they lie.
 *
 * Bounded by the reading of memory, which records scattered over the region would hold up: what comes AHEAD keys later
 * is asked for meanwhile. A row's sums run over its keys in one order, whoever computes it.
 */
#pragma once
#include "attention.h"

#define AHEAD 48 /* keys */

/* Sums of 16 vectors -> one vector of 16 sums. */
INLINE __m512 sums16(__m512 *v) {
    __m512 t[16];
    UNROLL for (int i = 0; i < 8; i++)
        t[i] = _mm512_add_ps(_mm512_unpacklo_ps(v[2 * i], v[2 * i + 1]), _mm512_unpackhi_ps(v[2 * i], v[2 * i + 1]));
    UNROLL for (int i = 0; i < 4; i++)
        t[i] = _mm512_add_ps(
            _mm512_castpd_ps(_mm512_unpacklo_pd(_mm512_castps_pd(t[2 * i]), _mm512_castps_pd(t[2 * i + 1]))),
            _mm512_castpd_ps(_mm512_unpackhi_pd(_mm512_castps_pd(t[2 * i]), _mm512_castps_pd(t[2 * i + 1]))));
    __m512 a = _mm512_add_ps(_mm512_shuffle_f32x4(t[0], t[1], 0x88), _mm512_shuffle_f32x4(t[0], t[1], 0xdd));
    __m512 b = _mm512_add_ps(_mm512_shuffle_f32x4(t[2], t[3], 0x88), _mm512_shuffle_f32x4(t[2], t[3], 0xdd));
    return _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xdd));
}

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
INLINE void store_head(bf16 *out, int64_t d, int parts, const __m512 *even, const __m512 *odd, float sum) {
    __m512 share = _mm512_set1_ps(1.0f / sum);
    UNROLL for (int i = 0; i < parts; i++) {
        __m512i low = _mm512_cvtepu16_epi32(narrow(_mm512_mul_ps(even[i], share)));
        __m512i high = _mm512_cvtepu16_epi32(narrow(_mm512_mul_ps(odd[i], share)));
        store32(out + 32 * i, d - 32 * i, _mm512_or_si512(low, _mm512_slli_epi32(high, 16)));
    }
}

/* One token of one sequence against all its keys, for `G` query heads from `h` on, which share a KV head. Keys
 * and values are asked for AHEAD keys before their turn, at the end those of `next`. */
INLINE void attend_heads(const Attention *a, const Reading *now, const Reading *next, int64_t row, int64_t h, int64_t d,
                         int parts, int G) {
    int64_t context = now->context, value_off = a->kv_heads * a->block_size * d;
    __m512i query[G][parts];
    __m512 even[G][parts], odd[G][parts];
    float top[G], sum[G], weights[G][16];
    UNROLL for (int g = 0; g < G; g++) {
        top[g] = -__builtin_inff(), sum[g] = 0.0f;
        UNROLL for (int i = 0; i < parts; i++) {
            query[g][i] = load32(a->q + row * a->q_stride + (h + g) * d + 32 * i, d - 32 * i);
            even[g][i] = odd[g][i] = _mm512_setzero_ps();
        }
    }
    for (int64_t first = 0, n; first < context; first += n) {
        n = tile_keys(a, first, context);
        const bf16 *keys = key_at(a, now->table, now->head, first), *values = keys + value_off;
        const bf16 *ahead = key_ahead(a, now, next, first + AHEAD);
        __mmask16 mask = (__mmask16)((1u << n) - 1);
        UNROLL for (int g = 0; g < G; g++) {
            __m512 dots[16];
            UNROLL for (int j = 0; j < 16; j++) {
                const bf16 *key = keys + (j < n ? j : 0) * d;
                __m512 dot = _mm512_setzero_ps();
                UNROLL for (int i = 0; i < parts; i++)
                    dot = _mm512_dpbf16_ps(dot, (__m512bh)query[g][i], (__m512bh)load32(key + 32 * i, d - 32 * i));
                dots[j] = dot;
                if (ahead && g < parts) _mm_prefetch(ahead + j * d + 32 * g, _MM_HINT_T0);
            }
            __m512 scores = _mm512_mul_ps(sums16(dots), _mm512_set1_ps(a->scale));
            float best = _mm512_mask_reduce_max_ps(mask, scores);
            if (best > top[g]) {
                __m512 shrink = exp512(_mm512_set1_ps(top[g] - best));
                if (first == 0) shrink = _mm512_setzero_ps();
                sum[g] *= _mm512_cvtss_f32(shrink);
                UNROLL for (int i = 0; i < parts; i++) {
                    even[g][i] = _mm512_mul_ps(even[g][i], shrink);
                    odd[g][i] = _mm512_mul_ps(odd[g][i], shrink);
                }
                top[g] = best;
            }
            __m512 p = _mm512_maskz_mov_ps(mask, exp512(_mm512_sub_ps(scores, _mm512_set1_ps(top[g]))));
            sum[g] += _mm512_reduce_add_ps(p);
            _mm512_storeu_ps(weights[g], p);
        }
        for (int64_t j = 0; j < n; j++) {
            if (ahead) {
                UNROLL for (int i = G; i < parts; i++) _mm_prefetch(ahead + j * d + 32 * i, _MM_HINT_T0);
                UNROLL for (int i = 0; i < parts; i++) _mm_prefetch(ahead + value_off + j * d + 32 * i, _MM_HINT_T0);
            }
            UNROLL for (int i = 0; i < parts; i++) {
                __m512i v = load32(values + j * d + 32 * i, d - 32 * i);
                __m512 v0 = _mm512_castsi512_ps(_mm512_slli_epi32(v, 16));
                __m512 v1 = _mm512_castsi512_ps(_mm512_and_si512(v, _mm512_set1_epi32((int)0xffff0000)));
                UNROLL for (int g = 0; g < G; g++) {
                    __m512 w = _mm512_set1_ps(weights[g][j]);
                    even[g][i] = _mm512_fmadd_ps(w, v0, even[g][i]);
                    odd[g][i] = _mm512_fmadd_ps(w, v1, odd[g][i]);
                }
            }
        }
    }
    UNROLL for (int g = 0; g < G; g++)
        store_head(a->out + (row * a->heads + h + g) * d, d, parts, even[g], odd[g], sum[g]);
}

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
