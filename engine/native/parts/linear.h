/* One product of rows with a packed matrix, and what becomes of it (the epilogue): what both ways to multiply share. */
#pragma once
#include "norm.h"
#include "team.h"
#include "vectors.h"

#define PANEL 32

enum { EPILOGUE_STORE = 0, EPILOGUE_ADD = 1, EPILOGUE_SWIGLU = 2 };

/* One product, shared by the threads of a region. */
typedef struct {
    const uint32_t *a;     /* rows as they were packed */
    const uint8_t *panels; /* [n / 32][pairs][32][2] of `bits` */
    const float *scales;   /* [n / 32][pairs / 32][32], where bits is not 16 */
    const bf16 *bias;      /* [n_panels * 32], or NULL */
    bf16 *out;             /* [m][stride] */
    int64_t m, pairs, panel_bytes, n_panels, n, stride, groups, rows_per_group, groups_per_block, counter, pack_counter;
    const bf16 *x;
    int64_t x_stride, k;
    uint32_t *a_writable;
    const bf16 *norm; /* [k], or NULL: what rows are normed by before */
    bf16 *normed;     /* [m][k], where norm is not NULL */
    float eps;
    int epilogue, bits;
} Linear;

INLINE void finish(const Linear *l, F16 (*acc)[2], int R, int64_t row, int64_t panel) {
    int64_t col = panel * PANEL;
    for (int r = 0; r < R; r++) {
        F16 v0 = acc[r][0], v1 = acc[r][1];
        if (l->bias) {
            v0 = f_add(v0, widen(b_load(l->bias + col)));
            v1 = f_add(v1, widen(b_load(l->bias + col + 16)));
        }
        if (l->epilogue == EPILOGUE_SWIGLU) {
            /* 16 columns of the gate, 16 of the product's other side; rounded where the plain way rounds. */
            int64_t left = l->n / 2 - col / 2;
            F16 gate = rounded(v0), up = rounded(v1);
            F16 e = exp16(f_sub(f_zero(), gate));
            gate = rounded(f_div(gate, f_add(e, f_all(1.0f))));
            store16(l->out + (row + r) * l->stride + col / 2, left, narrow(f_mul(gate, up)));
            continue;
        }
        int64_t left = l->n - col;
        bf16 *out = l->out + (row + r) * l->stride + col;
        if (l->epilogue == EPILOGUE_ADD) {
            I16 old = load32(out, left);
            v0 = f_add(rounded(v0), widen(i_low(old)));
            v1 = f_add(rounded(v1), widen(i_high(old)));
        }
        store32(out, left, i_joined(narrow(v0), narrow(v1)));
    }
}
