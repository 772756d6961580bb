/* A set of compute kernels against plain loops in float64, without Python: for processors that only an emulator has.
 *
 * Built with -DKERNELS='"kernels_neon.c"' and engine/native among the folders of headers. Prints a line for each part,
 * and ends with 1 if one of them is wrong. */
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include KERNELS

static uint32_t state = 7;
static float drawn(void) { /* roughly normal */
    float sum = 0;
    for (int i = 0; i < 4; i++) sum += (float)((state = state * 1664525u + 1013904223u) >> 8) / (1 << 24) - 0.5f;
    return sum * 1.7f;
}
static float wide(bf16 x) {
    uint32_t bits = (uint32_t)x << 16;
    float f;
    memcpy(&f, &bits, 4);
    return f;
}
static bf16 narrowed(float f) {
    uint32_t bits;
    memcpy(&bits, &f, 4);
    return (bf16)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
static bf16 *numbers(int64_t n) {
    bf16 *x = aligned_alloc(64, (size_t)(n * 2 + 63) / 64 * 64);
    for (int64_t i = 0; i < n; i++) x[i] = narrowed(drawn());
    return x;
}
static void *room(int64_t bytes) {
    void *at = aligned_alloc(4096, (size_t)(bytes + 4095) / 4096 * 4096);
    memset(at, 0xff, (size_t)(bytes + 4095) / 4096 * 4096); /* NaN */
    return at;
}

static int failures;
static void report(const char *what, int64_t a, int64_t b, double error, double bound) {
    int bad = !(error <= bound);
    failures += bad;
    if (bad) printf("WRONG: ");
    printf("%s %lld %lld: %.3g of %.3g\n", what, (long long)a, (long long)b, error, bound);
}

#define N 70
/* Whole numbers in place of weights where `bits` is 8 or 4: the scale of column c is 2^-(c % 3). */
static float weight_at(const bf16 *w, int bits, int64_t k, int64_t c, int64_t i) {
    if (c >= N || i >= k) return 0;
    float x = wide(w[c * k + i]);
    return bits == 16 ? x : rintf(x * (bits == 8 ? 30 : 2)) * ldexpf(1, -(int)(c % 3));
}

static uint8_t *packed(const bf16 *w, int bits, int64_t k, float **scales) {
    int64_t pairs = bits == 16 ? (k + 1) / 2 : (k + 63) / 64 * 32, panels = (N + 31) / 32;
    uint8_t *to = room(panels * pairs * 32 * bits / 4);
    memset(to, 0, (size_t)(panels * pairs * 32 * bits / 4));
    *scales = bits == 16 ? NULL : room(panels * pairs / 32 * 32 * 4);
    for (int64_t c = 0; c < panels * 32; c++) {
        if (*scales)
            for (int64_t s = 0; s < pairs / 32; s++) (*scales)[(c / 32 * (pairs / 32) + s) * 32 + c % 32] = ldexpf(1, -(int)(c % 3));
        for (int64_t i = 0; i < 2 * pairs; i++) {
            float x = weight_at(w, bits, k, c, i);
            int64_t pair = c / 32 * pairs + i / 2;
            int whole = (int)(x * ldexpf(1, (int)(c % 3)));
            if (bits == 16) ((bf16 *)to)[(pair * 32 + c % 32) * 2 + i % 2] = narrowed(x);
            else if (bits == 8) ((int8_t *)to)[(pair * 32 + c % 32) * 2 + i % 2] = (int8_t)whole;
            else ((uint16_t *)to)[((pair / 4 * 2 + c % 32 / 16) * 16 + c % 16) * 2 + i % 2] |= (uint16_t)((whole + 8) << 4 * (pair % 4));
        }
    }
    return to;
}

/* Products of each number of rows: close to float64, and each row as by itself. */
static void check_products(int bits, int64_t k) {
    bf16 *w = numbers(N * k), *bias = numbers(96), *x = numbers(61 * k), *alone = room(61 * N * 2), *out = room(61 * N * 2);
    float *scales;
    uint8_t *panels = packed(w, bits, k, &scales);
    static const int64_t ROWS[] = {1, 2, 5, 6, 7, 12, 13, 24, 61};
    for (int at = 0; at < 9; at++) {
        int64_t rows = ROWS[at];
        void *scratch = room(baton_linear_scratch(rows, k, bits) * 4);
        baton_linear(x, k, panels, scales, bits, bias, out, N, rows, N, k, 0, scratch, 1);
        double error = 0;
        for (int64_t r = 0; r < rows; r++)
            for (int64_t c = 0; c < N; c++) {
                double sum = wide(bias[c]), most = 1;
                for (int64_t i = 0; i < k; i++) {
                    double product = (double)wide(x[r * k + i]) * weight_at(w, bits, k, c, i);
                    sum += product, most += fabs(product);
                }
                error = fmax(error, fabs(sum - wide(out[r * N + c])) / (fabs(sum) / 256 + most * 1e-6));
            }
        report("products", bits, rows, error, 1);
        for (int64_t r = 0; r < rows; r++)
            baton_linear(x + r * k, k, panels, scales, bits, bias, alone + r * N, N, 1, N, k, 0, scratch, 1);
        report("rows as by themselves", bits, rows, memcmp(alone, out, (size_t)(rows * N * 2)), 0);
        free(scratch);
    }
}

#define HEADS 4
#define KV 2
#define BLOCK 16
/* The last `rows` tokens of a sequence of `context`, a key and value for each, in scattered blocks. */
static void check_attention(int64_t context, int64_t rows, int64_t d, int packed_keys) {
    int64_t blocks = (context + BLOCK - 1) / BLOCK, run = BLOCK * d;
    bf16 *layer = room((2 * blocks + 1) * 2 * KV * run * 2), *q = numbers(rows * HEADS * d), *out = room(rows * HEADS * d * 2);
    int64_t table[64], table_at[2] = {0, blocks}, rows_at[2] = {0, rows}, contexts[1] = {context};
    int64_t tasks[4] = {0, 0, rows, packed_keys};
    for (int64_t b = 0; b < blocks; b++) table[b] = 2 * blocks - 2 * b;
    for (int64_t t = 0; t < context; t++)
        for (int64_t h = 0; h < 2 * KV; h++)
            for (int64_t i = 0; i < d; i++)
                layer[(table[t / BLOCK] * 2 * KV + h) * run + t % BLOCK * d + i] = narrowed(drawn());
    int64_t bytes = baton_attention_scratch(context, d);
    void *scratch = room(bytes);
    baton_attention(q, HEADS * d, out, layer, table, table_at, rows_at, contexts, tasks, 1, HEADS, KV, BLOCK, d,
                    1 / sqrtf((float)d), scratch, bytes, 1);
    double error = 0;
    for (int64_t r = 0; r < rows; r++)
        for (int64_t h = 0; h < HEADS; h++) {
            int64_t sees = context - rows + r + 1;
            double score[1024], top = -1e30, all = 0;
            for (int64_t t = 0; t < sees; t++) {
                const bf16 *key = layer + (table[t / BLOCK] * 2 * KV + h / (HEADS / KV)) * run + t % BLOCK * d;
                score[t] = 0;
                for (int64_t i = 0; i < d; i++) score[t] += (double)wide(key[i]) * wide(q[(r * HEADS + h) * d + i]);
                top = fmax(top, score[t] /= sqrt((double)d));
            }
            for (int64_t t = 0; t < sees; t++) all += score[t] = exp(score[t] - top);
            for (int64_t i = 0; i < d; i++) {
                double value = 0;
                for (int64_t t = 0; t < sees; t++)
                    value += score[t] / all * wide(layer[(table[t / BLOCK] * 2 * KV + KV + h / (HEADS / KV)) * run + t % BLOCK * d + i]);
                error = fmax(error, fabs(value - wide(out[(r * HEADS + h) * d + i])));
            }
        }
    report(packed_keys ? "attention of many rows" : "attention of few rows", context, rows, error, 0.02);
}

static void check_rest(void) {
    bf16 *x = numbers(3 * 75), *w = numbers(75), *out = room(3 * 75 * 2);
    baton_rms_norm(x, w, out, 3, 75, 1e-6f, 1);
    double error = 0;
    for (int r = 0; r < 3; r++) {
        double sum = 0;
        for (int i = 0; i < 75; i++) sum += (double)wide(x[r * 75 + i]) * wide(x[r * 75 + i]);
        for (int i = 0; i < 75; i++) {
            double exact = wide(x[r * 75 + i]) / sqrt(sum / 75 + 1e-6) * wide(w[i]);
            error = fmax(error, fabs(exact - wide(out[r * 75 + i])) / (fabs(exact) + 1e-3));
        }
    }
    report("norm", 3, 75, error, 1.0 / 100);
    int64_t found[3];
    x[75 + 40] = narrowed(9), x[75 + 60] = narrowed(9), x[2 * 75 + 74] = narrowed(NAN) | 0x7fc0;
    x[33] = narrowed(8);
    baton_highest(x, found, 3, 75, 1);
    report("highest", found[0], found[1], found[0] != 33 || found[1] != 40 || found[2] != -1, 0);
}

int main(void) {
    static const int BITS[] = {16, 8, 4};
    int ways = 3;
#ifdef TILES
    ways = 1; /* rounded weights are the other sets' */
#endif
    for (int i = 0; i < ways; i++) check_products(BITS[i], 51), check_products(BITS[i], 600);
    static const int64_t D[] = {64, 128, 40};
    for (int i = 0; i < 3; i++) {
        check_attention(37, 1, D[i], 0);
        check_attention(300, 2, D[i], 0);
        check_attention(300, 19, D[i], 1);
    }
    check_rest();
    printf("%d wrong\n", failures);
    return failures != 0;
}
