/* Few rows of a sequence by products of pairs: see attend_few.h, which includes this. */
#pragma once

/* One token of one sequence against all its keys, for `G` query heads from `h` on, which share a KV head. Keys
 * and values are asked for AHEAD keys before their turn, at the end those of `next`. */
INLINE void attend_heads(const Attention *a, const Reading *now, const Reading *next, int64_t row, int64_t h, int64_t d,
                         int parts, int G) {
    int64_t context = now->context, value_off = a->kv_heads * a->block_size * d;
    I16 query[G][parts];
    F16 even[G][parts], odd[G][parts];
    float top[G], sum[G], weights[G][16];
    UNROLL for (int g = 0; g < G; g++) {
        top[g] = -__builtin_inff(), sum[g] = 0.0f;
        UNROLL for (int i = 0; i < parts; i++) {
            query[g][i] = load32(a->q + row * a->q_stride + (h + g) * d + 32 * i, d - 32 * i);
            even[g][i] = odd[g][i] = f_zero();
        }
    }
    for (int64_t first = 0, n; first < context; first += n) {
        n = tile_keys(a, first, context);
        const bf16 *keys = key_at(a, now->table, now->head, first), *values = keys + value_off;
        const bf16 *ahead = key_ahead(a, now, next, first + AHEAD);
        M16 mask = m_first(n);
        UNROLL for (int g = 0; g < G; g++) {
            F16 dots[16];
            UNROLL for (int j = 0; j < 16; j++) {
                const bf16 *key = keys + (j < n ? j : 0) * d;
                F16 dot = f_zero();
                UNROLL for (int i = 0; i < parts; i++)
                    dot = f_pairs(query[g][i], load32(key + 32 * i, d - 32 * i), dot);
                dots[j] = dot;
                if (ahead && g < parts) __builtin_prefetch(ahead + j * d + 32 * g, 0, 3);
            }
            F16 scores = f_mul(sums16(dots), f_all(a->scale));
            float best = f_highest_of(mask, scores);
            if (best > top[g]) {
                F16 shrink = exp16(f_all(top[g] - best));
                if (first == 0) shrink = f_zero();
                sum[g] *= f_first(shrink);
                UNROLL for (int i = 0; i < parts; i++) {
                    even[g][i] = f_mul(even[g][i], shrink);
                    odd[g][i] = f_mul(odd[g][i], shrink);
                }
                top[g] = best;
            }
            F16 p = f_keep(mask, exp16(f_sub(scores, f_all(top[g]))));
            sum[g] += f_sum(p);
            f_store(weights[g], p);
        }
        for (int64_t j = 0; j < n; j++) {
            if (ahead) {
                UNROLL for (int i = G; i < parts; i++) __builtin_prefetch(ahead + j * d + 32 * i, 0, 3);
                UNROLL for (int i = 0; i < parts; i++) __builtin_prefetch(ahead + value_off + j * d + 32 * i, 0, 3);
            }
            UNROLL for (int i = 0; i < parts; i++) {
                I16 v = load32(values + j * d + 32 * i, d - 32 * i);
                F16 v0 = evens(v), v1 = odds(v);
                UNROLL for (int g = 0; g < G; g++) {
                    F16 w = f_all(weights[g][j]);
                    even[g][i] = f_fma(w, v0, even[g][i]);
                    odd[g][i] = f_fma(w, v1, odd[g][i]);
                }
            }
        }
    }
    UNROLL for (int g = 0; g < G; g++)
        store_head(a->out + (row * a->heads + h + g) * d, d, parts, even[g], odd[g], sum[g]);
}
