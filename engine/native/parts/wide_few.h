/* Few rows of a sequence in float32: see attend_few.h, which includes this. */
#pragma once

/* Lines of the keys and values `ahead`, those of key j. */
INLINE void ask_for(const bf16 *ahead, int64_t value_off, int64_t d, int64_t j, int parts) {
    UNROLL for (int i = 0; i < parts; i++) {
        __builtin_prefetch(ahead + j * d + 32 * i, 0, 3);
        __builtin_prefetch(ahead + value_off + j * d + 32 * i, 0, 3);
    }
}

/* One token of one sequence against all its keys, for `G` query heads from `h` on, which share a KV head: each key is
 * widened once for all of them. The sums of values go through memory: few registers hold them all. Keys and values are
 * asked for AHEAD keys before their turn, at the end those of `next`. */
INLINE void attend_heads(const Attention *a, const Reading *now, const Reading *next, int64_t row, int64_t h, int64_t d,
                         int parts, int G) {
    int64_t context = now->context, value_off = a->kv_heads * a->block_size * d;
    F16 query[2][D_MAX / 32][2], even[2][D_MAX / 32], odd[2][D_MAX / 32];
    float top[2], sum[2], weights[2][16];
    UNROLL for (int g = 0; g < G; g++) {
        top[g] = -__builtin_inff(), sum[g] = 0.0f;
        UNROLL for (int i = 0; i < parts; i++) {
            I16 q = load32(a->q + row * a->q_stride + (h + g) * d + 32 * i, d - 32 * i);
            query[g][i][0] = evens(q), query[g][i][1] = odds(q);
            even[g][i] = odd[g][i] = f_zero();
        }
    }
    for (int64_t first = 0, n; first < context; first += n) {
        n = tile_keys(a, first, context);
        const bf16 *keys = key_at(a, now->table, now->head, first), *values = keys + value_off;
        const bf16 *ahead = key_ahead(a, now, next, first + AHEAD);
        F16 dots[2][16];
        for (int64_t j = 0; j < 16; j++) {
            const bf16 *key = keys + (j < n ? j : 0) * d;
            F16 dot[2];
            UNROLL for (int g = 0; g < G; g++) dot[g] = f_zero();
            UNROLL for (int i = 0; i < parts; i++) {
                I16 k = load32(key + 32 * i, d - 32 * i);
                F16 k0 = evens(k), k1 = odds(k);
                UNROLL for (int g = 0; g < G; g++) {
                    dot[g] = f_fma(query[g][i][0], k0, dot[g]);
                    dot[g] = f_fma(query[g][i][1], k1, dot[g]);
                }
            }
            UNROLL for (int g = 0; g < G; g++) dots[g][j] = dot[g];
            if (ahead) ask_for(ahead, value_off, d, j, parts);
        }
        M16 mask = m_first(n);
        UNROLL for (int g = 0; g < G; g++) {
            F16 scores = f_pick(mask, f_mul(sums16(dots[g]), f_all(a->scale)), f_all(-__builtin_inff()));
            float best = f_highest(scores);
            if (best > top[g]) {
                F16 shrink = first == 0 ? f_zero() : exp16(f_all(top[g] - best));
                sum[g] *= f_first(shrink);
                UNROLL for (int i = 0; i < parts; i++)
                    even[g][i] = f_mul(even[g][i], shrink), odd[g][i] = f_mul(odd[g][i], shrink);
                top[g] = best;
            }
            F16 p = f_keep(mask, exp16(f_sub(scores, f_all(top[g]))));
            sum[g] += f_sum(p);
            f_store(weights[g], p);
        }
        UNROLL for (int i = 0; i < parts; i++) {
            F16 e[2], o[2];
            UNROLL for (int g = 0; g < G; g++) e[g] = even[g][i], o[g] = odd[g][i];
            for (int64_t j = 0; j < n; j++) {
                I16 v = load32(values + j * d + 32 * i, d - 32 * i);
                F16 v0 = evens(v), v1 = odds(v);
                UNROLL for (int g = 0; g < G; g++) {
                    F16 w = f_all(weights[g][j]);
                    e[g] = f_fma(w, v0, e[g]), o[g] = f_fma(w, v1, o[g]);
                }
            }
            UNROLL for (int g = 0; g < G; g++) even[g][i] = e[g], odd[g][i] = o[g];
        }
    }
    UNROLL for (int g = 0; g < G; g++)
        store_head(a->out + (row * a->heads + h + g) * d, d, parts, even[g], odd[g], sum[g]);
}
