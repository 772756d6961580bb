/* Products of rows with panels in float32: see products.h. Rows are widened when they are packed, [K / K_BLOCK][rows]
 * [K_BLOCK]; each thread widens a block of a panel into the first cache, for all rows that go through it. Up to ROWS_MAX
 * rows widen weights in registers instead: they wait for memory, not for that. */
#pragma once
#include "linear.h"
#include "wide.h"

#define K_BLOCK 256      /* of k: 16 columns of so many weights are 16 KiB */
#define BLOCK_ROWS 240   /* rows of one task: their sums are a thread's own, 30 KiB */
#define PART_PAIRS 64    /* of a panel, for a few rows, which ask for what comes three parts later; for two groups of
                          * rows, whose widened weights then leave room in the first cache for those on their way */
#define PANEL_OF(BITS) ((int64_t)PANEL * (BITS) / 4) /* bytes for each pair */

INLINE const float *rows_at(const Linear *l, int64_t row, int64_t k) {
    return (const float *)l->a + (k / K_BLOCK * l->m + row) * K_BLOCK + k % K_BLOCK;
}

INLINE const float *scales_at(const Linear *l, int64_t p, int64_t pair) {
    return l->scales ? l->scales + (p * l->pairs + pair) / SCALED_PAIRS * PANEL : NULL;
}

/* All rows, R of them, through a panel; `next` is read after it. */
INLINE void few_through(const Linear *l, int R, int C, int bits, int64_t p, const char *next) {
    const uint8_t *panel = l->panels + p * l->panel_bytes;
    F16 sums[2][ROWS_MAX][2];
    UNROLL for (int h = 0; h < 2 / C; h++) UNROLL for (int r = 0; r < R; r++) UNROLL for (int c = 0; c < C; c++)
        sums[h][r][c] = f_zero();
    for (int64_t at = 0; at < l->pairs; at += PART_PAIRS) {
        int64_t pairs = l->pairs - at < PART_PAIRS ? l->pairs - at : PART_PAIRS, then = at + 3 * PART_PAIRS;
        const char *ahead = then < l->pairs ? (const char *)panel + PANEL_OF(bits) * then
                                            : next + PANEL_OF(bits) * (then - l->pairs);
        UNROLL for (int h = 0; h < 2 / C; h++)
            few_rows(R, C, bits, rows_at(l, 0, 2 * at), K_BLOCK, panel + PANEL_OF(bits) * at + h * half_of(bits),
                     scales_at(l, p, at) + 16 * h, pairs, sums[h], ahead + 64 * h);
    }
    F16 acc[ROWS_MAX][2];
    UNROLL for (int r = 0; r < R; r++) UNROLL for (int c = 0; c < 2; c++) acc[r][c] = sums[c / C][r][c % C];
    finish(l, acc, R, 0, p);
}

#define FEW_CASE(R)                                                                                             \
    case R: few_through(l, R, R <= FEW_ROWS ? 2 : 1, bits, p, next); break;

INLINE void few_of(const Linear *l, int bits, int64_t p, const char *next) {
    switch (l->m) {
        FEW_CASE(1) FEW_CASE(2) FEW_CASE(3) FEW_CASE(4) FEW_CASE(5) FEW_CASE(6)
#if ROWS_MAX == 12
        FEW_CASE(7) FEW_CASE(8) FEW_CASE(9) FEW_CASE(10) FEW_CASE(11) FEW_CASE(12)
#endif
    }
}

static void few_16(const Linear *l, int64_t p, const char *next) { few_of(l, 16, p, next); }
static void few_8(const Linear *l, int64_t p, const char *next) { few_of(l, 8, p, next); }
static void few_4(const Linear *l, int64_t p, const char *next) { few_of(l, 4, p, next); }

typedef float Sums[2][16];

#define BLOCK_CASE(R)                                                                                           \
    case R: {                                                                                                   \
        F16 acc[R][2];                                                                                          \
        UNROLL for (int r = 0; r < R; r++) UNROLL for (int c = 0; c < HALVES; c++)                              \
            acc[r][c] = fresh ? f_zero() : f_load(sums[r][h + c]);                                              \
        wide_rows(R, HALVES, a, K_BLOCK, w, 16 * K_BLOCK, n, acc, ahead, step);                                 \
        UNROLL for (int r = 0; r < R; r++) UNROLL for (int c = 0; c < HALVES; c++)                              \
            f_store(sums[r][h + c], acc[r][c]);                                                                 \
        break;                                                                                                  \
    }

static void block_rows(int rows, const float *a, const float *w, int64_t n, Sums *sums, int h, int fresh,
                       const char *ahead, int64_t step) {
    switch (rows) {
        BLOCK_CASE(1) BLOCK_CASE(2) BLOCK_CASE(3) BLOCK_CASE(4) BLOCK_CASE(5) BLOCK_CASE(6)
#if ROWS_MAX == 12
        BLOCK_CASE(7) BLOCK_CASE(8) BLOCK_CASE(9) BLOCK_CASE(10) BLOCK_CASE(11) BLOCK_CASE(12)
#endif
    }
}

static void widen_part(const Linear *l, const uint8_t *panel, const float *scales, int64_t pairs, float *to) {
    if (l->bits == 16) widen_weights(16, panel, scales, pairs, to);
    else if (l->bits == 8) widen_weights(8, panel, scales, pairs, to);
    else widen_weights(4, panel, scales, pairs, to);
}

/* Rows of one block through a panel, a block of k after the other. */
static void many_through(const Linear *l, int64_t first, int64_t rows, int64_t p, const char *next) {
    float w[HALVES * 16 * K_BLOCK] __attribute__((aligned(64)));
    Sums sums[BLOCK_ROWS] __attribute__((aligned(64)));
    const uint8_t *panel = l->panels + p * l->panel_bytes;
    int64_t groups = (rows + ROWS_MAX - 1) / ROWS_MAX, per_group = (rows + groups - 1) / groups, line = PANEL_OF(l->bits);
    int64_t part = groups > 2 ? K_BLOCK / 2 : PART_PAIRS;
    for (int64_t at = 0; at < l->pairs; at += part) {
        int64_t pairs = l->pairs - at < part ? l->pairs - at : part, then = at + part;
        const char *ahead = then < l->pairs ? (const char *)panel + line * then : next;
        int64_t asks = groups * (2 / HALVES) * (pairs / 4), step = asks ? (line * pairs + asks - 1) / asks : 0;
        for (int h = 0; h < 2; h += HALVES) {
            for (int c = 0; c < HALVES; c++)
                widen_part(l, panel + line * at + (h + c) * half_of(l->bits), scales_at(l, p, at) + 16 * (h + c),
                           pairs, w + c * 16 * K_BLOCK);
            for (int64_t r = 0; r < rows; r += per_group) {
                int count = (int)(rows - r < per_group ? rows - r : per_group);
                block_rows(count, rows_at(l, first + r, 2 * at), w, 2 * pairs, sums + r, h, at == 0, ahead, step);
                ahead += step * (pairs / 4);
            }
        }
    }
    for (int64_t r = 0; r < rows; r++) {
        F16 acc[1][2] = {{f_load(sums[r][0]), f_load(sums[r][1])}};
        finish(l, acc, 1, first + r, p);
    }
}

/* One task is one panel for a block of rows; or two, where each of them gives half a cache line of the result, which
 * two threads would write to in turn. */
INLINE int64_t panels_of_task(const Linear *l) { return l->epilogue == EPILOGUE_SWIGLU && l->m > ROWS_MAX ? 2 : 1; }

/* Begins with `task`, taken before. */
static void linear_tasks(Linear *l, int64_t task) {
    int64_t wide = panels_of_task(l), per_block = (l->n_panels + wide - 1) / wide, tasks = l->groups * per_block;
    while (task < tasks) {
        int64_t after = take(&l->counter), first = task / per_block * l->rows_per_group;
        int64_t rows = l->m - first < l->rows_per_group ? l->m - first : l->rows_per_group;
        int64_t p = task % per_block * wide, p_end = p + wide < l->n_panels ? p + wide : l->n_panels;
        for (; p < p_end; p++) {
            int64_t then = p + 1 < p_end ? p + 1 : after < tasks ? after % per_block * wide : p;
            const char *next = (const char *)l->panels + then * l->panel_bytes;
            if (l->m > ROWS_MAX) many_through(l, first, rows, p, next);
            else if (l->bits == 16) few_16(l, p, next);
            else if (l->bits == 8) few_8(l, p, next);
            else few_4(l, p, next);
        }
        task = after;
    }
}

INLINE void pack_row(const Linear *l, int64_t row, const bf16 *x) {
    for (int64_t k = 0; k < l->k; k += 16) /* past k up to 15 zeros, as a block's end is a multiple of 16 */
        f_store((float *)rows_at(l, row, k), widen(load16(x + k, l->k - k)));
    for (int64_t k = (l->k + 15) / 16 * 16; k < 2 * l->pairs; k += 16) f_store((float *)rows_at(l, row, k), f_zero());
}

#include "row_packs.h"

INLINE int64_t scratch_words(int64_t m, int64_t pairs) {
    return (2 * pairs + K_BLOCK - 1) / K_BLOCK * K_BLOCK * m;
}

/* Few blocks, all of nearly the same number of rows. */
INLINE void shape_rows(Linear *l) {
    l->groups = (l->m + BLOCK_ROWS - 1) / BLOCK_ROWS;
    l->rows_per_group = ((l->m + l->groups - 1) / l->groups + ROWS_MAX - 1) / ROWS_MAX * ROWS_MAX;
    l->groups = (l->m + l->rows_per_group - 1) / l->rows_per_group;
}
