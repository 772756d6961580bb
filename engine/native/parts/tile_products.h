/* Products of rows with panels by tiles (AMX): see products.h. A tile of weights is 16 pairs of 16 columns, as they lie
 * in a panel. Rows are packed in tiles, [rows / 16][k / 32][16][32]; two of them go through a panel at once, four tiles
 * of sums in registers from the first k to the last. Weights of 16 bits only.
 *
 * TDPBF16PS sums each row by itself, pair after pair: what the other rows of a tile are makes no difference. */
#pragma once
#include <sys/syscall.h>
#include <unistd.h>

#include "linear.h"

#define SCALED_PAIRS 32 /* of quantised weights, which this way does not multiply */
#define GROUP_ROWS 32
#define STEP_PAIRS 16                          /* of one tile */
#define STEP_BYTES (STEP_PAIRS * PANEL * 2 * 2) /* of a panel */
#define TILE 512                               /* numbers */
#define AHEAD_STEPS 12                         /* 24 KiB of a panel, for one or two groups */
#define BLOCK_BYTES (1 << 20)                  /* of rows, in a second cache of 2 MiB */

/* The system keeps tiles for a process that has asked for them, all its threads. */
__attribute__((constructor)) static void ask_for_tiles(void) { syscall(SYS_arch_prctl, 0x1023, 18); }

INLINE int64_t steps_of(const Linear *l) { return (l->pairs + STEP_PAIRS - 1) / STEP_PAIRS; }

INLINE const bf16 *tile_at(const Linear *l, int64_t sixteen, int64_t step) {
    return (const bf16 *)l->a + (sixteen * steps_of(l) + step) * TILE;
}

/* Tiles 0 to 3: sums; 4, 5: rows; 6, 7: weights. Up to 16 rows fill no whole tile. */
static void load_tiles(int64_t rows) {
    struct {
        uint8_t palette, start, zeros[14];
        uint16_t bytes[16];
        uint8_t rows[16];
    } __attribute__((aligned(64))) shape = {.palette = 1};
    for (int i = 0; i < 8; i++) shape.bytes[i] = 64, shape.rows[i] = (uint8_t)(i < 6 && rows < 16 ? rows : 16);
    __asm__ volatile("" : : "r"(&shape) : "memory"); /* the compiler believes that 8 bytes of it are read */
    _tile_loadconfig(&shape);
}

/* One step of 32 k: `both` rows' tiles, or the first only. */
#define MULTIPLY_STEP(BOTH, WEIGHTS)                                                                            \
    _tile_loadd(6, WEIGHTS, 128);                                                                               \
    _tile_loadd(4, a, 64);                                                                                      \
    _tile_loadd(7, WEIGHTS + 64, 128);                                                                          \
    _tile_dpbf16ps(0, 4, 6);                                                                                    \
    _tile_dpbf16ps(1, 4, 7);                                                                                    \
    if (BOTH) {                                                                                                 \
        _tile_loadd(5, a + a_next, 64);                                                                         \
        _tile_dpbf16ps(2, 5, 6);                                                                                \
        _tile_dpbf16ps(3, 5, 7);                                                                                \
    }

/* One group through a panel, whose last pairs are in `tail` where they fill no tile. Asks for `lines` cache lines with
 * each step: of the next panel at `next`, or, where `steps_ahead` is not 0, of the step so many later in this one. */
INLINE void through_panel(const Linear *l, int both, int64_t sixteen, const uint8_t *panel, const uint8_t *tail,
                          const char *next, int lines, int64_t steps_ahead, float (*sums)[PANEL]) {
    const int64_t steps = steps_of(l), whole = l->pairs / STEP_PAIRS, a_next = steps * TILE;
    const bf16 *a = tile_at(l, sixteen, 0);
    _tile_zero(0);
    _tile_zero(1);
    if (both) {
        _tile_zero(2);
        _tile_zero(3);
    }
    for (int64_t step = 0; step < whole; step++, a += TILE) {
        const char *ahead = next + step * lines * 64;
        if (steps_ahead) {
            int64_t then = step + steps_ahead;
            ahead = then < whole ? (const char *)panel + then * STEP_BYTES : next + (then - whole) * STEP_BYTES;
        }
        for (int i = 0; i < lines; i++) __builtin_prefetch(ahead + 64 * i, 0, 3);
        const uint8_t *weights = panel + step * STEP_BYTES;
        MULTIPLY_STEP(both, weights)
    }
    if (whole < steps) {
        MULTIPLY_STEP(both, tail)
    }
    _tile_stored(0, sums[0], 128);
    _tile_stored(1, sums[0] + 16, 128);
    if (both) {
        _tile_stored(2, sums[16], 128);
        _tile_stored(3, sums[16] + 16, 128);
    }
}

static void groups_through(const Linear *l, int64_t first, int64_t end, int64_t p, const char *next) {
    uint8_t tail[STEP_BYTES] __attribute__((aligned(64)));
    float sums[GROUP_ROWS][PANEL] __attribute__((aligned(64)));
    const uint8_t *panel = l->panels + p * l->panel_bytes;
    int64_t left = l->pairs % STEP_PAIRS;
    if (left) {
        memset(tail, 0, sizeof tail);
        memcpy(tail, panel + (l->pairs - left) * PANEL * 4, (size_t)left * PANEL * 4);
        __asm__ volatile("" : : "r"(tail) : "memory"); /* tiles are loaded behind the compiler's back */
    }
    int64_t steps_ahead = end - first == 1 ? AHEAD_STEPS : 0;
    int lines = (int)((STEP_BYTES / 64 + end - first - 1) / (end - first));
    for (int64_t group = first; group < end; group++) {
        int64_t row = group * GROUP_ROWS, rows = l->m - row < GROUP_ROWS ? l->m - row : GROUP_ROWS;
        if (rows > 16) through_panel(l, 1, 2 * group, panel, tail, next, lines, steps_ahead, sums);
        else through_panel(l, 0, 2 * group, panel, tail, next, lines, steps_ahead, sums);
        next += steps_ahead ? 0 : l->pairs / STEP_PAIRS * lines * 64;
        for (int r = 0; r < rows; r++) {
            F16 acc[1][2] = {{f_load(sums[r]), f_load(sums[r] + 16)}};
            finish(l, acc, 1, row + r, p);
        }
    }
}

/* One task is one panel for a block of groups, whose rows stay in the second cache meanwhile; or two, where each of them
 * gives half a cache line of the result, which two threads would write to in turn. */
INLINE int64_t panels_of_task(const Linear *l) { return l->epilogue == EPILOGUE_SWIGLU && l->groups > 1 ? 2 : 1; }

/* Begins with `task`, taken before. */
static void linear_tasks(Linear *l, int64_t task) {
    int64_t wide = panels_of_task(l), per_block = (l->n_panels + wide - 1) / wide;
    int64_t blocks = (l->groups + l->groups_per_block - 1) / l->groups_per_block, tasks = blocks * per_block;
    if (task < tasks) load_tiles(l->m);
    else return;
    while (task < tasks) {
        int64_t after = take(&l->counter), first = task / per_block * l->groups_per_block;
        int64_t end = first + l->groups_per_block < l->groups ? first + l->groups_per_block : l->groups;
        int64_t p = task % per_block * wide, p_end = p + wide < l->n_panels ? p + wide : l->n_panels;
        for (; p < p_end; p++) {
            int64_t then = p + 1 < p_end ? p + 1 : after < tasks ? after % per_block * wide : p;
            groups_through(l, first, end, p, (const char *)l->panels + then * l->panel_bytes);
        }
        task = after;
    }
    _tile_release();
}

INLINE void pack_row(const Linear *l, int64_t row, const bf16 *x) {
    bf16 *to = (bf16 *)tile_at(l, row / 16, 0) + row % 16 * 32;
    for (int64_t k = 0; k < l->k; k += 32, to += TILE) i_store(to, load32(x + k, l->k - k)); /* zeros past the end */
}

#include "row_packs.h"

INLINE int64_t scratch_words(int64_t m, int64_t pairs) {
    return (m + 15) / 16 * ((pairs + STEP_PAIRS - 1) / STEP_PAIRS) * TILE / 2;
}

INLINE void shape_rows(Linear *l) {
    int64_t per_block = BLOCK_BYTES / (GROUP_ROWS * l->pairs * 4);
    l->rows_per_group = GROUP_ROWS;
    l->groups = (l->m + GROUP_ROWS - 1) / GROUP_ROWS;
    l->groups_per_block = per_block < 1 ? 1 : per_block;
}
