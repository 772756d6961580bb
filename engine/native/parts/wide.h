/* Rows of float32 times weights that are widened to float32, in registers: what products and attention are made of where
 * a set has no instruction for pairs of bfloat16.
 *
 * The number of rows is known to the compiler wherever these are used, so that all sums stay in registers; arrays have
 * sizes that do not depend on it, or the compiler would keep them in memory. Each sum is
 * one chain over k, from the first to the last, whatever that number is and whichever of the two ways multiplies:
 * `few_rows` widens weights in registers, `wide_rows` reads those that `widen_weights` has left in the first cache.
 */
#pragma once
#include "linear.h"

#define SCALED_PAIRS 32 /* of quantised weights, which share a scale */
#define PREFETCH(AT) __builtin_prefetch(AT, 0, 3)

/* acc[R][C] += A[R] * W over n of k: row r of A is a[r * a_r ..], columns c * 16 .. of W are w[c * w_c + k * 16 ..].
 * Asks for a cache line at `ahead` every eight k, `step` bytes on from the one before; or for up to four, so that none
 * is left out. */
INLINE void wide_rows(int R, int C, const float *a, int64_t a_r, const float *w, int64_t w_c, int64_t n, F16 (*acc)[2],
                      const char *ahead, int64_t step) {
    int64_t k = 0;
    for (; k + 8 <= n; k += 8) {
        if (ahead) {
            PREFETCH(ahead);
            if (step > 64) PREFETCH(ahead + 64);
            if (step > 128) PREFETCH(ahead + 128);
            if (step > 192) PREFETCH(ahead + 192);
            ahead += step;
        }
        UNROLL for (int i = 0; i < 8; i++) {
            F16 x[2];
            UNROLL for (int c = 0; c < C; c++) x[c] = f_load(w + c * w_c + 16 * i);
            UNROLL for (int r = 0; r < R; r++) {
                F16 s = f_all(a[r * a_r + i]);
                UNROLL for (int c = 0; c < C; c++) acc[r][c] = f_fma(x[c], s, acc[r][c]);
            }
        }
        a += 8, w += 128;
    }
    for (; k < n; k++) {
        F16 x[2];
        UNROLL for (int c = 0; c < C; c++) x[c] = f_load(w + c * w_c);
        UNROLL for (int r = 0; r < R; r++) {
            F16 s = f_all(a[r * a_r]);
            UNROLL for (int c = 0; c < C; c++) acc[r][c] = f_fma(x[c], s, acc[r][c]);
        }
        a++, w += 16;
    }
}

/* Weights of 16 columns for pair j of the four at `at`, which are those of all 32 columns; `scale` is the columns'.
 *
 * 16 bits: [32][2] bfloat16 for each pair. 8 bits: whole numbers, the same way. 4 bits: [2][16][2] words of 16 bits for
 * four pairs, the nibble of the first pair lowest; 0..15 stand for -8..7. */
INLINE void weights_at(int bits, const uint8_t *at, int j, F16 scale, F16 *even, F16 *odd) {
    if (bits == 16) {
        I16 x = i_load(at + 128 * j);
        *even = evens(x), *odd = odds(x);
    } else if (bits == 8) {
        I16 x = i_load_halves(at + 64 * j);
        *even = f_mul(f_of_whole(i_sar(i_shl(x, 24), 24)), scale);
        *odd = f_mul(f_of_whole(i_sar(x, 8)), scale);
    } else {
        I16 x = i_load(at), low = i_all(15);
        F16 eight = f_mul(scale, f_all(-8.0f));
        *even = f_fma(f_of_whole(i_and(i_shr(x, 4 * j), low)), scale, eight);
        *odd = f_fma(f_of_whole(i_and(i_shr(x, 16 + 4 * j), low)), scale, eight);
    }
}

/* From the first 16 columns of a panel to the other 16; bytes. */
INLINE int64_t half_of(int bits) { return bits == 8 ? 32 : 64; }

/* Weights of 16 columns, over `pairs` pairs, -> to[2 * pairs][16]. `panel` and `scales` are those of the first of them;
 * pairs of quantised weights are a multiple of SCALED_PAIRS. */
INLINE void widen_weights(int bits, const uint8_t *panel, const float *scales, int64_t pairs, float *to) {
    F16 scale = f_zero();
    int64_t kp = 0;
    for (; kp + 4 <= pairs; kp += 4) {
        if (bits != 16 && kp % SCALED_PAIRS == 0) scale = f_load(scales), scales += PANEL;
        UNROLL for (int j = 0; j < 4; j++) {
            F16 even, odd;
            weights_at(bits, panel, j, scale, &even, &odd);
            f_store(to + 32 * j, even);
            f_store(to + 32 * j + 16, odd);
        }
        panel += 32 * bits, to += 128;
    }
    if (bits == 16)
        for (; kp < pairs; kp++) {
            F16 even, odd;
            weights_at(16, panel, 0, scale, &even, &odd);
            f_store(to, even);
            f_store(to + 16, odd);
            panel += 128, to += 32;
        }
}

INLINE void few_pair(int R, int C, int bits, const float *a, int64_t a_r, const uint8_t *panel, int j, const F16 *scale,
                     F16 (*acc)[2]) {
    UNROLL for (int c = 0; c < C; c++) { /* one half of a pair after the other: few registers hold both */
        F16 even, odd;
        weights_at(bits, panel + c * half_of(bits), j, scale[c], &even, &odd);
        UNROLL for (int r = 0; r < R; r++) acc[r][c] = f_fma(even, f_all(a[r * a_r]), acc[r][c]);
        UNROLL for (int r = 0; r < R; r++) acc[r][c] = f_fma(odd, f_all(a[r * a_r + 1]), acc[r][c]);
    }
}

/* acc[R][C] += A[R] * W over `pairs` pairs of k, for C times 16 columns, as above. Asks for as many bytes at `ahead` as
 * it reads itself. */
INLINE void few_rows(int R, int C, int bits, const float *a, int64_t a_r, const uint8_t *panel, const float *scales,
                     int64_t pairs, F16 (*acc)[2], const char *ahead) {
    F16 scale[2];
    UNROLL for (int c = 0; c < C; c++) scale[c] = f_zero();
    int64_t kp = 0;
    for (; kp + 4 <= pairs; kp += 4) {
        if (bits != 16 && kp % SCALED_PAIRS == 0) {
            UNROLL for (int c = 0; c < C; c++) scale[c] = f_load(scales + 16 * c);
            scales += PANEL;
        }
        UNROLL for (int i = 0; i < 32 * bits; i += C == 2 ? 64 : 128) PREFETCH(ahead + i);
        ahead += 32 * bits;
        UNROLL for (int j = 0; j < 4; j++) few_pair(R, C, bits, a + 2 * j, a_r, panel, j, scale, acc);
        a += 8, panel += 32 * bits;
    }
    if (bits == 16)
        for (; kp < pairs; kp++) {
            few_pair(R, C, 16, a, a_r, panel, 0, scale, acc);
            a += 2, panel += 128;
        }
}
