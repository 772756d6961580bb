/* Products of rows with a packed matrix, shared by a team: out = x * W^T, and what becomes of it (the epilogue).
 *
 * The team packs the rows first, normed on the way where `norm` is set; then each thread takes panels from a counter.
 * Every place of `out` is written by one thread, after all rows have been packed; who reads it meets the team first.
 */
#pragma once
#ifdef TILES
#include "tile_products.h"
#elif defined PAIRS
#include "pairs_products.h"
#else
#include "wide_products.h"
#endif

/* A part of a region: when all threads have come, `l` is computed. Its first panels are read from memory meanwhile. */
static void multiply(Team *team, Linear *l) {
    int64_t task = take(&l->counter);
    int64_t wide = panels_of_task(l), panel = task % ((l->n_panels + wide - 1) / wide) * wide;
    const char *first = (const char *)l->panels + panel * l->panel_bytes;
    Soon soon = {first, first + (l->panel_bytes < SOON_BYTES_MAX ? l->panel_bytes : SOON_BYTES_MAX)};
    meet(team, &soon);
    for (int64_t each; (each = take(&l->pack_counter)) < pack_tasks(l);) pack_task(l, each);
    meet(team, &soon);
    linear_tasks(l, task);
}

INLINE int64_t pairs_of(int64_t k, int bits) {
    int64_t pairs = (k + 1) / 2;
    return bits == 16 ? pairs : (pairs + SCALED_PAIRS - 1) / SCALED_PAIRS * SCALED_PAIRS;
}

static Linear linear_of(const bf16 *x, int64_t x_stride, const uint8_t *panels, const float *scales, int bits,
                        const bf16 *bias, bf16 *out, int64_t stride, int64_t m, int64_t n, int64_t k, int epilogue,
                        uint32_t *scratch) {
    int64_t pairs = pairs_of(k, bits);
    Linear l = {.a = scratch, .a_writable = scratch, .panels = panels, .scales = scales, .bits = bits, .bias = bias,
                .out = out, .m = m, .pairs = pairs, .panel_bytes = pairs * PANEL * bits / 4,
                .n_panels = (n + PANEL - 1) / PANEL, .n = n, .stride = stride, .x = x, .x_stride = x_stride, .k = k,
                .epilogue = epilogue};
    shape_rows(&l);
    return l;
}

typedef struct {
    Team team;
    Linear linear;
} Product;

static void product_tasks(void *arg) {
    Product *p = arg;
    multiply(&p->team, &p->linear);
}

/* out[m][n] = x[m][k] * W^T (+ bias); EPILOGUE_ADD adds to what `out` holds; EPILOGUE_SWIGLU takes panels of 16 columns
 * of the gate and 16 of the other side and stores [m][n / 2]. `bits` of a weight are 16 (bfloat16), 8 or 4, the latter
 * two with scales. `scratch` holds baton_linear_scratch(m, k, bits) 32-bit words. */
API void baton_linear(const bf16 *x, int64_t x_stride, const uint8_t *panels, const float *scales, int bits,
                      const bf16 *bias, bf16 *out, int64_t stride, int64_t m, int64_t n, int64_t k, int epilogue,
                      uint32_t *scratch, int threads) {
    Product p = {.linear = linear_of(x, x_stride, panels, scales, bits, bias, out, stride, m, n, k, epilogue, scratch)};
    parallel(product_tasks, &p, threads);
}

API int64_t baton_linear_scratch(int64_t m, int64_t k, int bits) {
    return scratch_words(m, pairs_of(k, bits));
}
