/* Products of rows with panels by pairs of bfloat16: see products.h. Rows are packed in groups of at most ROWS_MAX,
 * [pairs][rows] each, whose sums stay in registers from the first k to the last. */
#pragma once
#include "linear.h"
#include "pairs.h"

#define ROW_CASE(R)                                                                                             \
    case R: {                                                                                                   \
        const int64_t wide = R == ROWS_MAX ? ROWS_MAX : l->rows_per_group;                                      \
        F16 acc[R][2];                                                                                       \
        UNROLL for (int r = 0; r < R; r++) acc[r][0] = acc[r][1] = f_zero();                         \
        if (l->bits == 8) quantised_rows(R, wide, 8, a, panel, scales, l->pairs, acc, ahead);                   \
        else if (l->bits == 4) quantised_rows(R, wide, 4, a, panel, scales, l->pairs, acc, ahead);              \
        else panel_rows(R, 1, wide, a, (const bf16 *)panel, l->pairs, acc, ahead, 1, step);                     \
        finish(l, acc, R, row, p);                                                                              \
        break;                                                                                                  \
    }

static void one_group(const Linear *l, int64_t group, int64_t p, int rows, const char *ahead, int64_t step) {
    const uint32_t *a = l->a + group * l->pairs * l->rows_per_group;
    const uint8_t *panel = l->panels + p * l->panel_bytes;
    const float *scales = l->scales ? l->scales + p * (l->pairs / SCALED_PAIRS) * PANEL : NULL;
    int64_t row = group * l->rows_per_group;
    if (l->epilogue != EPILOGUE_SWIGLU) /* as likely as not another thread, or nobody of late, wrote there */
        for (int r = 0; r < rows; r++) __builtin_prefetch(l->out + (row + r) * l->stride + p * PANEL, 1, 3);
    switch (rows) {
        ROW_CASE(1) ROW_CASE(2) ROW_CASE(3)
#if ROWS_MAX == 12
        ROW_CASE(4) ROW_CASE(5) ROW_CASE(6)
        ROW_CASE(7) ROW_CASE(8) ROW_CASE(9) ROW_CASE(10) ROW_CASE(11) ROW_CASE(12)
#endif
    }
}

/* Of a panel that one or two groups of rows go through: 8 KiB of weights, which are in the first cache for the second
 * group while the next 8 KiB are on their way to it. */
#define PART_PAIRS 64

#define PART_CASE(R)                                                                                            \
    case R: {                                                                                                   \
        F16 acc[R][2];                                                                                       \
        UNROLL for (int r = 0; r < R; r++) acc[r][0] = kept[r][0], acc[r][1] = kept[r][1];                      \
        if (lines == 2) panel_rows(R, 1, wide, a, panel, pairs, acc, ahead, 2, 128);                            \
        else panel_rows(R, 1, wide, a, panel, pairs, acc, ahead, 1, 64);                                        \
        UNROLL for (int r = 0; r < R; r++) kept[r][0] = acc[r][0], kept[r][1] = acc[r][1];                      \
        break;                                                                                                  \
    }

static void one_part(int rows, int64_t wide, const uint32_t *a, const bf16 *panel, int64_t pairs, F16 (*kept)[2],
                     const char *ahead, int lines) {
    switch (rows) {
        PART_CASE(1) PART_CASE(2) PART_CASE(3)
#if ROWS_MAX == 12
        PART_CASE(4) PART_CASE(5) PART_CASE(6)
        PART_CASE(7) PART_CASE(8) PART_CASE(9) PART_CASE(10) PART_CASE(11) PART_CASE(12)
#endif
    }
}

/* One or two groups through a panel of bfloat16, part by part; each sum runs in the same order as in one go. */
static void few_groups(const Linear *l, int64_t group, int count, int64_t p, const char *next) {
    int64_t wide = l->rows_per_group;
    const uint32_t *a = l->a + group * l->pairs * wide;
    const bf16 *panel = (const bf16 *)(l->panels + p * l->panel_bytes);
    F16 kept[2][ROWS_MAX][2];
    memset(kept, 0, sizeof kept);
    int rows[2];
    for (int g = 0; g < count; g++) {
        int64_t left = l->m - (group + g) * l->rows_per_group;
        rows[g] = (int)(left < l->rows_per_group ? left : l->rows_per_group);
    }
    for (int64_t at = 0; at < l->pairs; at += PART_PAIRS) {
        int64_t pairs = l->pairs - at < PART_PAIRS ? l->pairs - at : PART_PAIRS;
        /* Of one group's, three parts are on their way: there is little to compute meanwhile. */
        int64_t then = at + (count == 1 ? 3 : 1) * PART_PAIRS;
        const char *ahead = then < l->pairs ? (const char *)(panel + 64 * then) : next + 128 * (then - l->pairs);
        for (int g = 0; g < count; g++)
            one_part(rows[g], wide, a + (g * l->pairs + at) * wide, panel + 64 * at, pairs, kept[g],
                     ahead + 64 * g * pairs, 3 - count);
    }
    for (int g = 0; g < count; g++) finish(l, kept[g], rows[g], (group + g) * l->rows_per_group, p);
}

/* A panel for the groups from `first` to `end`. Memory is read while there is arithmetic to do: `ahead` is asked for
 * during all of it, `bytes` for each pair, a share with each group. */
static void one_panel(const Linear *l, int64_t first, int64_t end, int64_t p, const char *ahead, int64_t bytes) {
    int64_t step = (bytes + end - first - 1) / (end - first);
    for (int64_t group = first; group < end; group++) {
        int64_t rows = l->m - group * l->rows_per_group;
        if (rows > l->rows_per_group) rows = l->rows_per_group;
        one_group(l, group, p, (int)rows, ahead, step);
        ahead = l->bits == 16 ? ahead + step * l->pairs : NULL;
    }
}

/* One task is one panel for a block of groups, whose rows stay in the cache meanwhile; or two, where each of them gives
 * half a cache line of the result, which two threads would write to in turn. */
INLINE int64_t panels_of_task(const Linear *l) { return l->epilogue == EPILOGUE_SWIGLU && l->groups > 2 ? 2 : 1; }

/* Begins with `task`, taken before. */
static void linear_tasks(Linear *l, int64_t task) {
    int64_t wide = panels_of_task(l), per_block = (l->n_panels + wide - 1) / wide;
    int64_t blocks = (l->groups + l->groups_per_block - 1) / l->groups_per_block, tasks = blocks * per_block;
    while (task < tasks) {
        int64_t next = take(&l->counter), block = task / per_block;
        int64_t first = block * l->groups_per_block, end = first + l->groups_per_block;
        if (end > l->groups) end = l->groups;
        int64_t p = task % per_block * wide, p_end = p + wide < l->n_panels ? p + wide : l->n_panels;
        for (; p < p_end; p++) {
            int64_t then = p + 1 < p_end ? p + 1 : next < tasks ? next % per_block * wide : p, bytes = 4 * PANEL;
            const char *ahead = (const char *)l->panels + then * l->panel_bytes;
            if (end - first <= 2 && l->bits == 16) {
                few_groups(l, first, (int)(end - first), p, ahead);
                continue;
            }
            if (l->bits == 16 && p + 1 == p_end && next < tasks && next / per_block > block) {
                /* Another block's rows, which are many more than a panel. */
                int64_t groups = l->groups - end < l->groups_per_block ? l->groups - end : l->groups_per_block;
                ahead = (const char *)(l->a + end * l->pairs * l->rows_per_group);
                bytes = 4 * l->rows_per_group * groups;
            }
            one_panel(l, first, end, p, ahead, bytes);
        }
        task = next;
    }
}

/* Rows of words at `x + r * stride`, `rows` of them at most ROWS_MAX -> to[i * wide + r] for the first `words` words i;
 * what lies from `rows` to `wide` is read by nobody. */
INLINE void pack_words(const bf16 *x, int64_t stride, int64_t rows, int64_t words, uint32_t *to, int64_t wide) {
    int64_t i = 0;
    for (; i + 16 <= words; i += 16) {
        I16 v[16];
        UNROLL for (int r = 0; r < 16; r++)
            v[r] = r < rows ? i_load(x + r * stride + 2 * i) : i_zero();
        transpose16(v);
        UNROLL for (int j = 0; j < 16; j++) i_store_first(to + (i + j) * wide, wide, v[j]);
    }
    for (; i < words; i++)
        for (int64_t r = 0; r < rows; r++) memcpy(to + i * wide + r, x + r * stride + 2 * i, 4);
}

static void pack_group(const Linear *l, int64_t group) {
    int64_t wide = l->rows_per_group, row = group * wide, rows = l->m - row, stride = l->x_stride;
    uint32_t *to = l->a_writable + group * l->pairs * wide;
    const bf16 *x = l->x + row * stride;
    if (rows > wide) rows = wide;
    if (l->norm) {
        bf16 *normed = l->normed + row * l->k;
        for (int64_t r = 0; r < rows; r++) norm_row(x + r * stride, l->norm, normed + r * l->k, l->k, l->eps);
        x = normed, stride = l->k;
    }
    if (wide == 1) memcpy(to, x, (size_t)l->k / 2 * 4);
    else pack_words(x, stride, rows, l->k / 2, to, wide);
    if (l->k & 1)
        for (int64_t r = 0; r < rows; r++) to[l->k / 2 * wide + r] = x[r * stride + l->k - 1];
    int64_t words = (l->k + 1) / 2;
    memset(to + words * wide, 0, (size_t)(l->pairs - words) * wide * 4);
}

static void pack_task(const Linear *l, int64_t group) { pack_group(l, group); }

INLINE int64_t pack_tasks(const Linear *l) { return l->groups; }

INLINE int64_t scratch_words(int64_t m, int64_t pairs) { return (m + ROWS_MAX - 1) / ROWS_MAX * pairs * ROWS_MAX; }

INLINE void shape_rows(Linear *l) {
    int64_t groups = (l->m + ROWS_MAX - 1) / ROWS_MAX, per_group = (l->m + groups - 1) / groups;
    int64_t per_block = (384 << 10) / (per_group * l->pairs * 4);
    l->rows_per_group = per_group;
    l->groups = (l->m + per_group - 1) / per_group;
    l->groups_per_block = per_block < 1 ? 1 : per_block;
}
