/* Between the product of query, key and value and attention: heads are normed and turned by their position (RoPE), and
 * each token's key and value written to its slot of the layer's region. A token is one thread's; two tokens never share
 * a slot. Nothing of the region is read.
 */
#pragma once
#include "norm.h"
#include "team.h"
#include "vectors.h"

/* One head normed, where `norm` is not NULL, and turned: pairs (i, i + d/2). Rounded where the plain way rounds. */
INLINE void turn_head(const bf16 *x, const bf16 *norm, float scale, const bf16 *cosines, const bf16 *sines, bf16 *out,
                      int64_t d) {
    int64_t half = d / 2;
    F16 factor = f_all(scale);
    for (int64_t i = 0; i < half; i += 16) {
        int64_t left = half - i;
        F16 a = widen(load16(x + i, left)), b = widen(load16(x + half + i, left));
        if (norm) {
            a = rounded(f_mul(rounded(f_mul(a, factor)), widen(load16(norm + i, left))));
            b = rounded(f_mul(rounded(f_mul(b, factor)), widen(load16(norm + half + i, left))));
        }
        F16 c = widen(load16(cosines + i, left)), s = widen(load16(sines + i, left));
        F16 first = f_sub(rounded(f_mul(a, c)), rounded(f_mul(b, s)));
        F16 second = f_add(rounded(f_mul(b, c)), rounded(f_mul(a, s)));
        store16(out + i, left, narrow(first));
        store16(out + half + i, left, narrow(second));
    }
}

enum { QUERIES = 1, RECORDS = 2, WHOLE = 3 };

typedef struct {
    bf16 *qkv;                     /* [t][(heads + 2 * kv_heads) * d] */
    const bf16 *q_norm, *k_norm;   /* [d] or NULL */
    const bf16 *cosines, *sines;   /* [t][d / 2] */
    bf16 *layer;                   /* [blocks][2][kv_heads][block_size][d] */
    const int64_t *blocks, *slots; /* [t] */
    int64_t t, heads, kv_heads, block_size, d, counter;
    float eps;
    int opening;
} Store;

INLINE bf16 *record_of(const Store *s, int64_t t) {
    return s->layer + (s->blocks[t] * 2 * s->kv_heads * s->block_size + s->slots[t]) * s->d;
}

/* The lines that a token's keys and values will be written to, asked for with the right to write. */
INLINE void own_record(const Store *s, int64_t t, int64_t d) {
    if (!(s->opening & RECORDS)) return;
    const char *row = (const char *)record_of(s, t);
    for (int64_t h = 0; h < 2 * s->kv_heads; h++, row += s->block_size * d * 2)
        for (int64_t i = 0; i < 2 * d; i += 64) __builtin_prefetch(row + i, 1, 3);
}

INLINE void store_token(const Store *s, int64_t t, int64_t d) {
    bf16 *row = s->qkv + t * (s->heads + 2 * s->kv_heads) * d, *record = record_of(s, t);
    const bf16 *cosines = s->cosines + t * (d / 2), *sines = s->sines + t * (d / 2);
    int64_t run = s->block_size * d;
    for (int64_t h = 0; h < (s->opening & QUERIES ? s->heads : 0); h++) {
        float scale = s->q_norm ? norm_scale(row + h * d, d, s->eps) : 1.0f;
        turn_head(row + h * d, s->q_norm, scale, cosines, sines, row + h * d, d);
    }
    if (!(s->opening & RECORDS)) return;
    row += s->heads * d;
    for (int64_t h = 0; h < s->kv_heads; h++) {
        float scale = s->k_norm ? norm_scale(row + h * d, d, s->eps) : 1.0f;
        turn_head(row + h * d, s->k_norm, scale, cosines, sines, record + h * run, d);
    }
    for (int64_t h = s->kv_heads; h < 2 * s->kv_heads; h++) memcpy(record + h * run, row + h * d, (size_t)d * 2);
}

static void store_tasks(void *arg) {
    Store *s = arg;
    int64_t many = s->t > 64 ? 8 : 1;
    for (int64_t first; (first = many * take(&s->counter)) < s->t;) {
        for (int64_t t = first; t < s->t && t < first + many; t++) {
            if (t == first) own_record(s, t, s->d);
            if (t + 1 < s->t && t + 1 < first + many) own_record(s, t + 1, s->d);
            switch (s->d) { /* two sizes known to the compiler */
                case 64: store_token(s, t, 64); break;
                case 128: store_token(s, t, 128); break;
                default: store_token(s, t, s->d);
            }
        }
    }
}
