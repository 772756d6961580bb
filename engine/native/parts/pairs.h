/* Rows times one panel of a packed matrix, in registers: what products and the attention of many rows are made of where
 * a set multiplies pairs of bfloat16.
 *
 * The number of rows is known to the compiler wherever these are used, so that all sums stay in registers; each sum
 * runs over k in one order, whatever that number is.
 */
#pragma once
#include "linear.h"

#define PREFETCH(AT) __builtin_prefetch(AT, 0, 3)

/* acc[R][2] += A[R] * panel, over `pairs` pairs of k. Pair kp of row r is a[kp * a_k + r * a_r]. Asks for `lines` cache
 * lines at `ahead` with each pair, `step` bytes on from those before. */
INLINE void panel_rows(int R, int a_r, int64_t a_k, const uint32_t *a, const bf16 *panel, int64_t pairs, F16 (*acc)[2],
                       const char *ahead, int lines, int64_t step) {
    _Pragma("GCC unroll 2") for (int64_t kp = 0; kp < pairs; kp++) {
        I16 w0 = i_load(panel), w1 = i_load(panel + 32);
        if (lines) {
            PREFETCH(ahead);
            if (lines > 1) PREFETCH(ahead + 64);
            ahead += step;
        }
        UNROLL for (int r = 0; r < R; r++) {
            I16 x = i_all((int)a[kp * a_k + r * a_r]);
            acc[r][0] = f_pairs(w0, x, acc[r][0]);
            acc[r][1] = f_pairs(w1, x, acc[r][1]);
        }
        panel += 64;
    }
}

/* Quantised weights: whole numbers of 8 or 4 bits, exact in bfloat16, times a scale for each column and 64 k.
 *
 * 8 bits: [32][2] for each pair, as in bfloat16. 4 bits: [2][16][2] words of 16 bits for each 4 pairs, the nibble of
 * the first pair lowest; 0..15 stand for -8..7. */
#define SCALED_PAIRS 32

/* As panel_rows, over `pairs` pairs of quantised weights; pairs is a multiple of SCALED_PAIRS. */
INLINE void quantised_rows(int R, int64_t wide, int bits, const uint32_t *a, const uint8_t *panel, const float *scales,
                           int64_t pairs, F16 (*total)[2], const char *ahead) {
    Nibbles table = nibbles();
    for (int64_t scaled = 0; scaled < pairs; scaled += SCALED_PAIRS) {
        F16 acc[ROWS_MAX][2];
        UNROLL for (int r = 0; r < R; r++) acc[r][0] = acc[r][1] = f_zero();
        for (int64_t four = 0; four < SCALED_PAIRS; four += 4) {
            I16 x0, x1;
            if (bits == 4) {
                x0 = i_load(panel), x1 = i_load(panel + 64);
                panel += 128;
            }
            if (ahead) {
                for (int i = 0; i < (bits == 4 ? 128 : 256); i += 64) PREFETCH(ahead + i);
                ahead += bits == 4 ? 128 : 256;
            }
            UNROLL for (int j = 0; j < 4; j++) {
                I16 w0, w1;
                if (bits == 4) {
                    w0 = pairs_of_nibbles(x0, j, table);
                    w1 = pairs_of_nibbles(x1, j, table);
                } else {
                    w0 = pairs_of_bytes(panel), w1 = pairs_of_bytes(panel + 32);
                    panel += 64;
                }
                UNROLL for (int r = 0; r < R; r++) {
                    I16 x = i_all((int)a[j * wide + r]);
                    acc[r][0] = f_pairs(w0, x, acc[r][0]);
                    acc[r][1] = f_pairs(w1, x, acc[r][1]);
                }
            }
            a += 4 * wide;
        }
        F16 s0 = f_load(scales), s1 = f_load(scales + 16);
        scales += PANEL;
        UNROLL for (int r = 0; r < R; r++) {
            total[r][0] = f_fma(acc[r][0], s0, total[r][0]);
            total[r][1] = f_fma(acc[r][1], s1, total[r][1]);
        }
    }
}
