/* The bfloat16 arithmetic of a decoder layer on a CPU with AVX512-BF16 (VDPBF16PS: pairs of products, sums in float32).
 *
 * Every sum over an inner dimension runs in one order, whatever the number of rows: a row's result does not depend on
 * what else is in the batch. Work is cut into tasks that the threads take from a counter. The threads are those of the
 * OpenMP library that PyTorch has loaded: a second pool beside it would spin against the first.
 *
 * R rows at once   P panel: 32 columns of a packed matrix, which lie as [K/2][32][2], so that one load is 16 columns of
 * two neighbouring k   "pair": two bfloat16 of neighbouring k in 32 bits
 */
#define _GNU_SOURCE /* CPU_COUNT */
#include <sched.h>
#include <stdint.h>
#include <string.h>

#define API __attribute__((visibility("default")))

#if defined(__x86_64__) && defined(__GNUC__)
#include <immintrin.h>
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,avx2,fma,bmi2,prfchw")

extern void GOMP_parallel(void (*)(void *), void *, unsigned, unsigned) __attribute__((weak));
extern int omp_get_num_threads(void) __attribute__((weak));

typedef uint16_t bf16;
#define INLINE static inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 16")
#define ROWS_MAX 12
#define PANEL 32

static void parallel(void (*fn)(void *), void *arg, int threads) {
    if (threads > 1 && GOMP_parallel && omp_get_num_threads) GOMP_parallel(fn, arg, (unsigned)threads, 0);
    else fn(arg);
}

INLINE int64_t take(int64_t *counter) { return __atomic_fetch_add(counter, 1, __ATOMIC_RELAXED); }

/* The threads of one parallel region, which meet between its parts: to begin a region costs several such meetings. */
typedef struct {
    int64_t arrived __attribute__((aligned(64))), round __attribute__((aligned(64)));
} Crew;

/* Memory that a thread is about to read. */
typedef struct {
    const char *at, *end;
} Soon;

#define SPINS_MAX 4096
#define SOON_BYTES_MAX (256 << 10) /* of a second cache of at least 512 KiB */

/* Looks that a thread takes before it gives its core away: none where there are more threads than cores, since whom it
 * waits for may be waiting for the core. */
static int spins_of(int threads) {
    static int cores;
    int known = __atomic_load_n(&cores, __ATOMIC_RELAXED);
    if (!known) {
        cpu_set_t set;
        known = sched_getaffinity(0, sizeof set, &set) ? INT16_MAX : CPU_COUNT(&set);
        __atomic_store_n(&cores, known, __ATOMIC_RELAXED);
    }
    return threads > known ? 0 : SPINS_MAX;
}

/* Returns when all threads of the region have come. Who waits for the others asks for what it reads next. */
static void meet(Crew *c, Soon *soon) {
    int threads = omp_get_num_threads ? omp_get_num_threads() : 1;
    if (threads == 1) return;
    int64_t round = __atomic_load_n(&c->round, __ATOMIC_RELAXED);
    if (__atomic_add_fetch(&c->arrived, 1, __ATOMIC_ACQ_REL) == threads) {
        __atomic_store_n(&c->arrived, 0, __ATOMIC_RELAXED);
        __atomic_store_n(&c->round, round + 1, __ATOMIC_RELEASE);
        return;
    }
    for (int spins = spins_of(threads); __atomic_load_n(&c->round, __ATOMIC_ACQUIRE) == round;) {
        if (soon->at < soon->end) {
            for (int i = 0; i < 256; i += 64) _mm_prefetch(soon->at + i, _MM_HINT_T1);
            soon->at += 256;
        } else if (spins > 0) {
            spins--;
            _mm_pause();
        } else {
            sched_yield();
        }
    }
}

INLINE float f32_of(bf16 x) {
    uint32_t bits = (uint32_t)x << 16;
    float f;
    memcpy(&f, &bits, 4);
    return f;
}

INLINE __m512 widen(__m256i x) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16)); }
INLINE __m256i narrow(__m512 x) { return (__m256i)_mm512_cvtneps_pbh(x); }
INLINE __m512 rounded(__m512 x) { return widen(narrow(x)); }

/* `left` elements, or all where there are more: masks only at an end. */
INLINE __m256i load16(const bf16 *x, int64_t left) {
    if (left >= 16) return _mm256_loadu_si256((const __m256i *)x);
    return _mm256_maskz_loadu_epi16((__mmask16)((1u << left) - 1), x);
}

INLINE void store16(bf16 *x, int64_t left, __m256i v) {
    if (left >= 16) _mm256_storeu_si256((__m256i *)x, v);
    else _mm256_mask_storeu_epi16(x, (__mmask16)((1u << left) - 1), v);
}

/* `left` may be 0 or less. */
INLINE __m512i load32(const bf16 *x, int64_t left) {
    if (left >= 32) return _mm512_loadu_si512(x);
    return left <= 0 ? _mm512_setzero_si512() : _mm512_maskz_loadu_epi16((1u << left) - 1, x);
}

INLINE void store32(bf16 *x, int64_t left, __m512i v) {
    if (left >= 32) _mm512_storeu_si512(x, v);
    else if (left > 0) _mm512_mask_storeu_epi16(x, (1u << left) - 1, v);
}

/* e^x for x <= 88, to a few units in the last place: 2^n times a polynomial on [-ln2/2, ln2/2] (Cephes, expf). */
INLINE __m512 exp512(__m512 x) {
    x = _mm512_max_ps(x, _mm512_set1_ps(-87.0f));
    __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(x, _mm512_set1_ps(1.44269504088896341f)), 8);
    x = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693359375f), x);
    x = _mm512_fnmadd_ps(n, _mm512_set1_ps(-2.12194440e-4f), x);
    __m512 y = _mm512_set1_ps(1.9875691500e-4f);
    y = _mm512_fmadd_ps(y, x, _mm512_set1_ps(1.3981999507e-3f));
    y = _mm512_fmadd_ps(y, x, _mm512_set1_ps(8.3334519073e-3f));
    y = _mm512_fmadd_ps(y, x, _mm512_set1_ps(4.1665795894e-2f));
    y = _mm512_fmadd_ps(y, x, _mm512_set1_ps(1.6666665459e-1f));
    y = _mm512_fmadd_ps(y, x, _mm512_set1_ps(5.0000001201e-1f));
    y = _mm512_fmadd_ps(_mm512_mul_ps(x, x), y, _mm512_add_ps(x, _mm512_set1_ps(1.0f)));
    return _mm512_scalef_ps(y, n);
}

/* ---------------------------------------------------------------- norm */

/* 1 / rms(x) */
INLINE float norm_scale(const bf16 *x, int64_t n, float eps) {
    __m512 sum = _mm512_setzero_ps();
    for (int64_t i = 0; i < n; i += 16) {
        __m512 v = widen(load16(x + i, n - i));
        sum = _mm512_fmadd_ps(v, v, sum);
    }
    return 1.0f / __builtin_sqrtf(_mm512_reduce_add_ps(sum) / (float)n + eps);
}

/* out = x / rms(x) * weight, `n` of each. */
INLINE void norm_row(const bf16 *x, const bf16 *weight, bf16 *out, int64_t n, float eps) {
    __m512 scale = _mm512_set1_ps(norm_scale(x, n, eps));
    for (int64_t i = 0; i < n; i += 16) {
        __m512 v = rounded(_mm512_mul_ps(widen(load16(x + i, n - i)), scale));
        store16(out + i, n - i, narrow(_mm512_mul_ps(v, widen(load16(weight + i, n - i)))));
    }
}

/* ---------------------------------------------------------------- products */

/* acc[R][2] += A[R] * panel, over `pairs` pairs of k. Pair kp of row r is a[kp * a_k + r * a_r]. Asks for `lines` cache
 * lines at `ahead` with each pair, `step` bytes on from those before. */
INLINE void panel_rows(int R, int a_r, int64_t a_k, const uint32_t *a, const bf16 *panel, int64_t pairs, __m512 (*acc)[2],
                       const char *ahead, int lines, int64_t step) {
    _Pragma("GCC unroll 2") for (int64_t kp = 0; kp < pairs; kp++) {
        __m512bh w0 = (__m512bh)_mm512_loadu_si512(panel), w1 = (__m512bh)_mm512_loadu_si512(panel + 32);
        if (lines) {
            _mm_prefetch(ahead, _MM_HINT_T0);
            if (lines > 1) _mm_prefetch(ahead + 64, _MM_HINT_T0);
            ahead += step;
        }
        UNROLL for (int r = 0; r < R; r++) {
            __m512bh x = (__m512bh)_mm512_set1_epi32((int)a[kp * a_k + r * a_r]);
            acc[r][0] = _mm512_dpbf16_ps(acc[r][0], w0, x);
            acc[r][1] = _mm512_dpbf16_ps(acc[r][1], w1, x);
        }
        panel += 64;
    }
}

/* Quantised weights: whole numbers of 8 or 4 bits, exact in bfloat16, times a scale for each column and 64 k.
 *
 * 8 bits: [32][2] for each pair, as in bfloat16. 4 bits: [2][16][2] words of 16 bits for each 4 pairs, the nibble of the
 * first pair lowest; 0..15 stand for -8..7. */
#define SCALED_PAIRS 32

INLINE __m512bh whole8(const uint8_t *x) {
    __m512 low = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)x)));
    __m512 high = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)(x + 16))));
    return _mm512_cvtne2ps_pbh(high, low);
}

/* -8..7 in bfloat16, twice: the lookup's index has one bit more than a nibble, which is the next nibble's. */
static const bf16 NIBBLES[32] = {0xc100, 0xc0e0, 0xc0c0, 0xc0a0, 0xc080, 0xc040, 0xc000, 0xbf80, 0x0000, 0x3f80, 0x4000,
                                 0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0, 0xc100, 0xc0e0, 0xc0c0, 0xc0a0, 0xc080, 0xc040,
                                 0xc000, 0xbf80, 0x0000, 0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0};

/* As panel_rows, over `pairs` pairs of quantised weights; pairs is a multiple of SCALED_PAIRS. */
INLINE void quantised_rows(int R, int64_t wide, int bits, const uint32_t *a, const uint8_t *panel, const float *scales,
                           int64_t pairs, __m512 (*total)[2], const char *ahead) {
    __m512i table = _mm512_loadu_si512(NIBBLES);
    for (int64_t scaled = 0; scaled < pairs; scaled += SCALED_PAIRS) {
        __m512 acc[ROWS_MAX][2];
        UNROLL for (int r = 0; r < R; r++) acc[r][0] = acc[r][1] = _mm512_setzero_ps();
        for (int64_t four = 0; four < SCALED_PAIRS; four += 4) {
            __m512i x0, x1;
            if (bits == 4) {
                x0 = _mm512_loadu_si512(panel), x1 = _mm512_loadu_si512(panel + 64);
                panel += 128;
            }
            if (ahead) {
                for (int i = 0; i < (bits == 4 ? 128 : 256); i += 64) _mm_prefetch(ahead + i, _MM_HINT_T0);
                ahead += bits == 4 ? 128 : 256;
            }
            UNROLL for (int j = 0; j < 4; j++) {
                __m512bh w0, w1;
                if (bits == 4) {
                    w0 = (__m512bh)_mm512_permutexvar_epi16(_mm512_srli_epi16(x0, 4 * j), table);
                    w1 = (__m512bh)_mm512_permutexvar_epi16(_mm512_srli_epi16(x1, 4 * j), table);
                } else {
                    w0 = whole8(panel), w1 = whole8(panel + 32);
                    panel += 64;
                }
                UNROLL for (int r = 0; r < R; r++) {
                    __m512bh x = (__m512bh)_mm512_set1_epi32((int)a[j * wide + r]);
                    acc[r][0] = _mm512_dpbf16_ps(acc[r][0], w0, x);
                    acc[r][1] = _mm512_dpbf16_ps(acc[r][1], w1, x);
                }
            }
            a += 4 * wide;
        }
        __m512 s0 = _mm512_loadu_ps(scales), s1 = _mm512_loadu_ps(scales + 16);
        scales += PANEL;
        UNROLL for (int r = 0; r < R; r++) {
            total[r][0] = _mm512_fmadd_ps(acc[r][0], s0, total[r][0]);
            total[r][1] = _mm512_fmadd_ps(acc[r][1], s1, total[r][1]);
        }
    }
}

enum { EPILOGUE_STORE = 0, EPILOGUE_ADD = 1, EPILOGUE_SWIGLU = 2 };

typedef struct {
    const uint32_t *a;  /* [groups][pairs][rows_per_group] */
    const uint8_t *panels; /* [n / 32][pairs][32][2] of `bits` */
    const float *scales;   /* [n / 32][pairs / 32][32], where bits is not 16 */
    const bf16 *bias;   /* [n_panels * 32], or NULL */
    bf16 *out;          /* [m][stride] */
    int64_t m, pairs, panel_bytes, n_panels, n, stride, groups, rows_per_group, groups_per_block, counter, pack_counter;
    const bf16 *x;
    int64_t x_stride, k;
    uint32_t *a_writable;
    const bf16 *norm; /* [k], or NULL: what rows are normed by before */
    bf16 *normed;     /* [m][k], where norm is not NULL */
    float eps;
    int epilogue, bits;
} Linear;

INLINE void finish(const Linear *l, __m512 (*acc)[2], int R, int64_t row, int64_t panel) {
    int64_t col = panel * PANEL;
    for (int r = 0; r < R; r++) {
        __m512 v0 = acc[r][0], v1 = acc[r][1];
        if (l->bias) {
            v0 = _mm512_add_ps(v0, widen(_mm256_loadu_si256((const __m256i *)(l->bias + col))));
            v1 = _mm512_add_ps(v1, widen(_mm256_loadu_si256((const __m256i *)(l->bias + col + 16))));
        }
        if (l->epilogue == EPILOGUE_SWIGLU) {
            /* 16 columns of the gate, 16 of the product's other side; rounded where the plain way rounds. */
            int64_t left = l->n / 2 - col / 2;
            __m512 gate = rounded(v0), up = rounded(v1);
            __m512 e = exp512(_mm512_sub_ps(_mm512_setzero_ps(), gate));
            gate = rounded(_mm512_div_ps(gate, _mm512_add_ps(e, _mm512_set1_ps(1.0f))));
            store16(l->out + (row + r) * l->stride + col / 2, left, narrow(_mm512_mul_ps(gate, up)));
            continue;
        }
        int64_t left = l->n - col;
        bf16 *out = l->out + (row + r) * l->stride + col;
        if (l->epilogue == EPILOGUE_ADD) {
            __m512i old = load32(out, left);
            v0 = _mm512_add_ps(rounded(v0), widen(_mm512_castsi512_si256(old)));
            v1 = _mm512_add_ps(rounded(v1), widen(_mm512_extracti64x4_epi64(old, 1)));
        }
        __m512i both = _mm512_inserti64x4(_mm512_castsi256_si512(narrow(v0)), narrow(v1), 1);
        store32(out, left, both);
    }
}

#define ROW_CASE(R)                                                                                             \
    case R: {                                                                                                   \
        const int64_t wide = R == ROWS_MAX ? ROWS_MAX : l->rows_per_group;                                      \
        __m512 acc[R][2];                                                                                       \
        UNROLL for (int r = 0; r < R; r++) acc[r][0] = acc[r][1] = _mm512_setzero_ps();                         \
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
        ROW_CASE(1) ROW_CASE(2) ROW_CASE(3) ROW_CASE(4) ROW_CASE(5) ROW_CASE(6)
        ROW_CASE(7) ROW_CASE(8) ROW_CASE(9) ROW_CASE(10) ROW_CASE(11) ROW_CASE(12)
    }
}

/* Of a panel that one or two groups of rows go through: 8 KiB of weights, which are in the first cache for the second group
 * while the next 8 KiB are on their way to it. */
#define PART_PAIRS 64

#define PART_CASE(R)                                                                                            \
    case R: {                                                                                                   \
        __m512 acc[R][2];                                                                                       \
        UNROLL for (int r = 0; r < R; r++) acc[r][0] = kept[r][0], acc[r][1] = kept[r][1];                      \
        if (lines == 2) panel_rows(R, 1, wide, a, panel, pairs, acc, ahead, 2, 128);                            \
        else panel_rows(R, 1, wide, a, panel, pairs, acc, ahead, 1, 64);                                        \
        UNROLL for (int r = 0; r < R; r++) kept[r][0] = acc[r][0], kept[r][1] = acc[r][1];                      \
        break;                                                                                                  \
    }

static void one_part(int rows, int64_t wide, const uint32_t *a, const bf16 *panel, int64_t pairs, __m512 (*kept)[2],
                     const char *ahead, int lines) {
    switch (rows) {
        PART_CASE(1) PART_CASE(2) PART_CASE(3) PART_CASE(4) PART_CASE(5) PART_CASE(6)
        PART_CASE(7) PART_CASE(8) PART_CASE(9) PART_CASE(10) PART_CASE(11) PART_CASE(12)
    }
}

/* One or two groups through a panel of bfloat16, part by part; each sum runs in the same order as in one go. */
static void few_groups(const Linear *l, int64_t group, int count, int64_t p, const char *next) {
    int64_t wide = l->rows_per_group;
    const uint32_t *a = l->a + group * l->pairs * wide;
    const bf16 *panel = (const bf16 *)(l->panels + p * l->panel_bytes);
    __m512 kept[2][ROWS_MAX][2];
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

/* A panel for the groups from `first` to `end`. Memory is read while there is arithmetic to do: `ahead` is asked for during
 * all of it, `bytes` for each pair, a share with each group. */
static void one_panel(const Linear *l, int64_t first, int64_t end, int64_t p, const char *ahead, int64_t bytes) {
    int64_t step = (bytes + end - first - 1) / (end - first);
    for (int64_t group = first; group < end; group++) {
        int64_t rows = l->m - group * l->rows_per_group;
        if (rows > l->rows_per_group) rows = l->rows_per_group;
        one_group(l, group, p, (int)rows, ahead, step);
        ahead = l->bits == 16 ? ahead + step * l->pairs : NULL;
    }
}

/* One task is one panel for a block of groups, whose rows stay in the cache meanwhile; or two, where each of them gives half
 * a cache line of the result, which two threads would write to in turn. */
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
                ahead = (const char *)(l->a + end * l->pairs * l->rows_per_group), bytes = 4 * l->rows_per_group * groups;
            }
            one_panel(l, first, end, p, ahead, bytes);
        }
        task = next;
    }
}

/* 16 rows of 16 words turned: row i of `v` becomes column i. */
INLINE void transpose16(__m512i *v) {
    __m512i t[16];
    UNROLL for (int i = 0; i < 16; i += 2) {
        t[i] = _mm512_unpacklo_epi32(v[i], v[i + 1]);
        t[i + 1] = _mm512_unpackhi_epi32(v[i], v[i + 1]);
    }
    UNROLL for (int i = 0; i < 16; i += 4) UNROLL for (int j = 0; j < 2; j++) {
        v[i + 2 * j] = _mm512_unpacklo_epi64(t[i + j], t[i + j + 2]);
        v[i + 2 * j + 1] = _mm512_unpackhi_epi64(t[i + j], t[i + j + 2]);
    }
    UNROLL for (int i = 0; i < 4; i++) {
        __m512i a = _mm512_shuffle_i32x4(v[i], v[i + 4], 0x88), b = _mm512_shuffle_i32x4(v[i], v[i + 4], 0xdd);
        __m512i c = _mm512_shuffle_i32x4(v[i + 8], v[i + 12], 0x88), d = _mm512_shuffle_i32x4(v[i + 8], v[i + 12], 0xdd);
        t[i] = _mm512_shuffle_i32x4(a, c, 0x88);
        t[i + 8] = _mm512_shuffle_i32x4(a, c, 0xdd);
        t[i + 4] = _mm512_shuffle_i32x4(b, d, 0x88);
        t[i + 12] = _mm512_shuffle_i32x4(b, d, 0xdd);
    }
    UNROLL for (int i = 0; i < 16; i++) v[i] = t[i];
}

/* Rows of words at `x + r * stride`, `rows` of them at most ROWS_MAX -> to[i * wide + r] for the first `words` words i;
 * what lies from `rows` to `wide` is read by nobody. */
INLINE void pack_words(const bf16 *x, int64_t stride, int64_t rows, int64_t words, uint32_t *to, int64_t wide) {
    __mmask16 lanes = (__mmask16)((1u << wide) - 1);
    int64_t i = 0;
    for (; i + 16 <= words; i += 16) {
        __m512i v[16];
        UNROLL for (int r = 0; r < 16; r++)
            v[r] = r < rows ? _mm512_loadu_si512(x + r * stride + 2 * i) : _mm512_setzero_si512();
        transpose16(v);
        UNROLL for (int j = 0; j < 16; j++) _mm512_mask_storeu_epi32(to + (i + j) * wide, lanes, v[j]);
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

/* A part of a region: when all threads have come, `l` is computed. Its first panels are read from memory meanwhile. */
static void multiply(Crew *crew, Linear *l) {
    int64_t task = take(&l->counter);
    int64_t wide = panels_of_task(l), panel = task % ((l->n_panels + wide - 1) / wide) * wide;
    const char *first = (const char *)l->panels + panel * l->panel_bytes;
    Soon soon = {first, first + (l->panel_bytes < SOON_BYTES_MAX ? l->panel_bytes : SOON_BYTES_MAX)};
    meet(crew, &soon);
    for (int64_t group; (group = take(&l->pack_counter)) < l->groups;) pack_group(l, group);
    meet(crew, &soon);
    linear_tasks(l, task);
}

INLINE int64_t pairs_of(int64_t k, int bits) {
    int64_t pairs = (k + 1) / 2;
    return bits == 16 ? pairs : (pairs + SCALED_PAIRS - 1) / SCALED_PAIRS * SCALED_PAIRS;
}

static Linear linear_of(const bf16 *x, int64_t x_stride, const uint8_t *panels, const float *scales, int bits,
                        const bf16 *bias, bf16 *out, int64_t stride, int64_t m, int64_t n, int64_t k, int epilogue,
                        uint32_t *scratch) {
    int64_t pairs = pairs_of(k, bits), groups = (m + ROWS_MAX - 1) / ROWS_MAX;
    int64_t per_group = (m + groups - 1) / groups;
    groups = (m + per_group - 1) / per_group;
    int64_t per_block = (384 << 10) / (per_group * pairs * 4);
    return (Linear){.a = scratch, .a_writable = scratch, .panels = panels, .scales = scales, .bits = bits, .bias = bias,
                    .out = out, .m = m, .pairs = pairs, .panel_bytes = pairs * PANEL * bits / 4,
                    .n_panels = (n + PANEL - 1) / PANEL, .n = n, .stride = stride, .groups = groups,
                    .rows_per_group = per_group, .groups_per_block = per_block < 1 ? 1 : per_block, .x = x,
                    .x_stride = x_stride, .k = k, .epilogue = epilogue};
}

typedef struct {
    Crew crew;
    Linear linear;
} Product;

static void product_tasks(void *arg) {
    Product *p = arg;
    multiply(&p->crew, &p->linear);
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
    int64_t groups = (m + ROWS_MAX - 1) / ROWS_MAX;
    return groups * pairs_of(k, bits) * ROWS_MAX;
}

/* ---------------------------------------------------------------- norm alone, rotation */

typedef struct {
    const bf16 *x, *weight;
    bf16 *out;
    int64_t rows, n, counter;
    float eps;
} Norm;

static void norm_tasks(void *arg) {
    Norm *a = arg;
    for (int64_t first; (first = 16 * take(&a->counter)) < a->rows;)
        for (int64_t r = first; r < a->rows && r < first + 16; r++)
            norm_row(a->x + r * a->n, a->weight, a->out + r * a->n, a->n, a->eps);
}

API void baton_rms_norm(const bf16 *x, const bf16 *weight, bf16 *out, int64_t rows, int64_t n, float eps, int threads) {
    Norm a = {.x = x, .weight = weight, .out = out, .rows = rows, .n = n, .eps = eps};
    parallel(norm_tasks, &a, rows > 32 ? threads : 1);
}

/* One head normed, where `norm` is not NULL, and turned: pairs (i, i + d/2). Rounded where the plain way rounds. */
INLINE void turn_head(const bf16 *x, const bf16 *norm, float scale, const bf16 *cosines, const bf16 *sines, bf16 *out,
                      int64_t d) {
    int64_t half = d / 2;
    __m512 factor = _mm512_set1_ps(scale);
    for (int64_t i = 0; i < half; i += 16) {
        int64_t left = half - i;
        __m512 a = widen(load16(x + i, left)), b = widen(load16(x + half + i, left));
        if (norm) {
            a = rounded(_mm512_mul_ps(rounded(_mm512_mul_ps(a, factor)), widen(load16(norm + i, left))));
            b = rounded(_mm512_mul_ps(rounded(_mm512_mul_ps(b, factor)), widen(load16(norm + half + i, left))));
        }
        __m512 c = widen(load16(cosines + i, left)), s = widen(load16(sines + i, left));
        __m512 first = _mm512_sub_ps(rounded(_mm512_mul_ps(a, c)), rounded(_mm512_mul_ps(b, s)));
        __m512 second = _mm512_add_ps(rounded(_mm512_mul_ps(b, c)), rounded(_mm512_mul_ps(a, s)));
        store16(out + i, left, narrow(first));
        store16(out + half + i, left, narrow(second));
    }
}

enum { QUERIES = 1, RECORDS = 2, WHOLE = 3 };

typedef struct {
    bf16 *qkv; /* [t][(heads + 2 * kv_heads) * d] */
    const bf16 *q_norm, *k_norm; /* [d] or NULL */
    const bf16 *cosines, *sines; /* [t][d / 2] */
    bf16 *layer;                 /* [blocks][2][kv_heads][block_size][d] */
    const int64_t *blocks, *slots; /* [t] */
    int64_t t, heads, kv_heads, block_size, d, counter;
    float eps;
    int opening;
} Store;

INLINE bf16 *record_of(const Store *s, int64_t t) {
    return s->layer + (s->blocks[t] * 2 * s->kv_heads * s->block_size + s->slots[t]) * s->d;
}

/* The lines that a token's keys and values will be written to, asked for with the right to write. */
INLINE void own_record(const Store *s, int64_t t, int64_t d) {
    if (!(s->opening & RECORDS)) return;
    const char *row = (const char *)record_of(s, t);
    for (int64_t h = 0; h < 2 * s->kv_heads; h++, row += s->block_size * d * 2)
        for (int64_t i = 0; i < 2 * d; i += 64) __builtin_prefetch(row + i, 1, 3);
}

INLINE void store_token(const Store *s, int64_t t, int64_t d) {
    bf16 *row = s->qkv + t * (s->heads + 2 * s->kv_heads) * d, *record = record_of(s, t);
    const bf16 *cosines = s->cosines + t * (d / 2), *sines = s->sines + t * (d / 2);
    int64_t run = s->block_size * d;
    for (int64_t h = 0; h < (s->opening & QUERIES ? s->heads : 0); h++) {
        float scale = s->q_norm ? norm_scale(row + h * d, d, s->eps) : 1.0f;
        turn_head(row + h * d, s->q_norm, scale, cosines, sines, row + h * d, d);
    }
    if (!(s->opening & RECORDS)) return;
    row += s->heads * d;
    for (int64_t h = 0; h < s->kv_heads; h++) {
        float scale = s->k_norm ? norm_scale(row + h * d, d, s->eps) : 1.0f;
        turn_head(row + h * d, s->k_norm, scale, cosines, sines, record + h * run, d);
    }
    for (int64_t h = s->kv_heads; h < 2 * s->kv_heads; h++) memcpy(record + h * run, row + h * d, (size_t)d * 2);
}

static void store_tasks(void *arg) {
    Store *s = arg;
    int64_t many = s->t > 64 ? 8 : 1;
    for (int64_t first; (first = many * take(&s->counter)) < s->t;) {
        for (int64_t t = first; t < s->t && t < first + many; t++) {
            if (t == first) own_record(s, t, s->d);
            if (t + 1 < s->t && t + 1 < first + many) own_record(s, t + 1, s->d);
            switch (s->d) { /* two sizes known to the compiler */
                case 64: store_token(s, t, 64); break;
                case 128: store_token(s, t, 128); break;
                default: store_token(s, t, s->d);
            }
        }
    }
}

/* Norms and turns q and k, q in place, and writes k and v of each token to its slot of the layer; `opening`: q alone, or
 * k and v alone, or both. */
API void baton_rotate_store(int opening, bf16 *qkv, const bf16 *q_norm, const bf16 *k_norm, const bf16 *cosines,
                            const bf16 *sines, bf16 *layer, const int64_t *blocks, const int64_t *slots, int64_t t,
                            int64_t heads, int64_t kv_heads, int64_t block_size, int64_t d, float eps, int threads) {
    Store s = {.qkv = qkv, .q_norm = q_norm, .k_norm = k_norm, .cosines = cosines, .sines = sines, .layer = layer,
               .blocks = blocks, .slots = slots, .t = t, .heads = heads, .kv_heads = kv_heads,
               .block_size = block_size, .d = d, .eps = eps, .opening = opening};
    parallel(store_tasks, &s, t > 3 ? threads : 1);
}

/* ---------------------------------------------------------------- attention */

#define D_MAX 256
#define AHEAD 48
#define CHUNK 256 /* keys between two updates of the running maximum, where many rows are computed */

typedef struct {
    const bf16 *q; /* [t][q_stride], heads of d */
    bf16 *out;     /* [t][heads * d] */
    const bf16 *layer;
    const int64_t *tables, *table_at; /* block ids of all sequences; where those of sequence b start */
    const int64_t *rows_at;           /* [b + 1] first row of each sequence */
    const int64_t *contexts;          /* [b] tokens up to and with the last row's */
    const int64_t *tasks;             /* [tasks][4] sequence, first row of it, number of rows, whether keys are packed */
    int64_t q_stride, heads, kv_heads, block_size, d, num_tasks, counter;
    char *scratch;
    int64_t scratch_bytes, next_scratch;
    float scale;
} Attention;

INLINE const bf16 *key_at(const Attention *a, const int64_t *table, int64_t head, int64_t position) {
    int64_t run = a->block_size * a->d;
    return a->layer + (table[position / a->block_size] * 2 * a->kv_heads + head) * run + position % a->block_size * a->d;
}

/* Sums of 16 vectors -> one vector of 16 sums. */
INLINE __m512 sums16(__m512 *v) {
    __m512 t[16];
    UNROLL for (int i = 0; i < 8; i++)
        t[i] = _mm512_add_ps(_mm512_unpacklo_ps(v[2 * i], v[2 * i + 1]), _mm512_unpackhi_ps(v[2 * i], v[2 * i + 1]));
    UNROLL for (int i = 0; i < 4; i++)
        t[i] = _mm512_add_ps(
            _mm512_castpd_ps(_mm512_unpacklo_pd(_mm512_castps_pd(t[2 * i]), _mm512_castps_pd(t[2 * i + 1]))),
            _mm512_castpd_ps(_mm512_unpackhi_pd(_mm512_castps_pd(t[2 * i]), _mm512_castps_pd(t[2 * i + 1]))));
    __m512 a = _mm512_add_ps(_mm512_shuffle_f32x4(t[0], t[1], 0x88), _mm512_shuffle_f32x4(t[0], t[1], 0xdd));
    __m512 b = _mm512_add_ps(_mm512_shuffle_f32x4(t[2], t[3], 0x88), _mm512_shuffle_f32x4(t[2], t[3], 0xdd));
    return _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xdd));
}

/* What a thread reads next: asked for from memory while it still computes on what is here. */
typedef struct {
    const int64_t *table;
    int64_t head, context;
} Reading;

/* Keys from `first` on that lie together, at most 16 and not past the context. */
INLINE int64_t tile_keys(const Attention *a, int64_t first, int64_t context) {
    int64_t n = a->block_size - first % a->block_size;
    if (n > 16) n = 16;
    return n > context - first ? context - first : n;
}

/* One token of one sequence against all its keys, for `G` query heads from `h` on, which share a KV head. Keys
 * and values are asked for AHEAD keys before their turn, at the end those of `next`. */
INLINE void attend_heads(const Attention *a, const Reading *now, const Reading *next, int64_t row, int64_t h, int64_t d,
                         int parts, int G) {
    int64_t context = now->context, value_off = a->kv_heads * a->block_size * d;
    __m512i query[G][parts];
    __m512 even[G][parts], odd[G][parts];
    float top[G], sum[G], weights[G][16];
    UNROLL for (int g = 0; g < G; g++) {
        top[g] = -__builtin_inff(), sum[g] = 0.0f;
        UNROLL for (int i = 0; i < parts; i++) {
            query[g][i] = load32(a->q + row * a->q_stride + (h + g) * d + 32 * i, d - 32 * i);
            even[g][i] = odd[g][i] = _mm512_setzero_ps();
        }
    }
    for (int64_t first = 0, n; first < context; first += n) {
        n = tile_keys(a, first, context);
        const bf16 *keys = key_at(a, now->table, now->head, first), *values = keys + value_off, *ahead = NULL;
        int64_t at = first + AHEAD;
        if (at < context) ahead = key_at(a, now->table, now->head, at);
        else if (next && (at = (at - context) / 16 * 16) < next->context) ahead = key_at(a, next->table, next->head, at);
        __mmask16 mask = (__mmask16)((1u << n) - 1);
        UNROLL for (int g = 0; g < G; g++) {
            __m512 dots[16];
            UNROLL for (int j = 0; j < 16; j++) {
                const bf16 *key = keys + (j < n ? j : 0) * d;
                __m512 dot = _mm512_setzero_ps();
                UNROLL for (int i = 0; i < parts; i++)
                    dot = _mm512_dpbf16_ps(dot, (__m512bh)query[g][i], (__m512bh)load32(key + 32 * i, d - 32 * i));
                dots[j] = dot;
                if (ahead && g < parts) _mm_prefetch(ahead + j * d + 32 * g, _MM_HINT_T0);
            }
            __m512 scores = _mm512_mul_ps(sums16(dots), _mm512_set1_ps(a->scale));
            float best = _mm512_mask_reduce_max_ps(mask, scores);
            if (best > top[g]) {
                __m512 shrink = exp512(_mm512_set1_ps(top[g] - best));
                if (first == 0) shrink = _mm512_setzero_ps();
                sum[g] *= _mm512_cvtss_f32(shrink);
                UNROLL for (int i = 0; i < parts; i++) {
                    even[g][i] = _mm512_mul_ps(even[g][i], shrink);
                    odd[g][i] = _mm512_mul_ps(odd[g][i], shrink);
                }
                top[g] = best;
            }
            __m512 p = _mm512_maskz_mov_ps(mask, exp512(_mm512_sub_ps(scores, _mm512_set1_ps(top[g]))));
            sum[g] += _mm512_reduce_add_ps(p);
            _mm512_storeu_ps(weights[g], p);
        }
        for (int64_t j = 0; j < n; j++) {
            if (ahead) {
                UNROLL for (int i = G; i < parts; i++) _mm_prefetch(ahead + j * d + 32 * i, _MM_HINT_T0);
                UNROLL for (int i = 0; i < parts; i++) _mm_prefetch(ahead + value_off + j * d + 32 * i, _MM_HINT_T0);
            }
            UNROLL for (int i = 0; i < parts; i++) {
                __m512i v = load32(values + j * d + 32 * i, d - 32 * i);
                __m512 v0 = _mm512_castsi512_ps(_mm512_slli_epi32(v, 16));
                __m512 v1 = _mm512_castsi512_ps(_mm512_and_si512(v, _mm512_set1_epi32((int)0xffff0000)));
                UNROLL for (int g = 0; g < G; g++) {
                    __m512 w = _mm512_set1_ps(weights[g][j]);
                    even[g][i] = _mm512_fmadd_ps(w, v0, even[g][i]);
                    odd[g][i] = _mm512_fmadd_ps(w, v1, odd[g][i]);
                }
            }
        }
    }
    UNROLL for (int g = 0; g < G; g++) {
        __m512 share = _mm512_set1_ps(1.0f / sum[g]);
        bf16 *out = a->out + (row * a->heads + h + g) * d;
        UNROLL for (int i = 0; i < parts; i++) {
            __m512i low = _mm512_cvtepu16_epi32(narrow(_mm512_mul_ps(even[g][i], share)));
            __m512i high = _mm512_cvtepu16_epi32(narrow(_mm512_mul_ps(odd[g][i], share)));
            store32(out + 32 * i, d - 32 * i, _mm512_or_si512(low, _mm512_slli_epi32(high, 16)));
        }
    }
}

/* Two heads at once where their sums fit into registers: keys and values are widened for both. */
INLINE void attend_one(const Attention *a, const Reading *now, const Reading *next, int64_t row, int64_t d, int parts) {
    int64_t group = a->heads / a->kv_heads, h = now->head * group, end = h + group;
    if (parts <= 4)
        for (; h + 2 <= end; h += 2) attend_heads(a, now, h + 2 == end ? next : NULL, row, h, d, parts, 2);
    for (; h < end; h++) attend_heads(a, now, h + 1 == end ? next : NULL, row, h, d, parts, 1);
}

static void attend_few(const Attention *a, int64_t b, int64_t first, int64_t count, int64_t head, const Reading *next) {
    Reading now = {.table = a->tables + a->table_at[b], .head = head};
    int64_t rows = a->rows_at[b + 1] - a->rows_at[b];
    for (int64_t i = first; i < first + count; i++) {
        int64_t row = a->rows_at[b] + i;
        const Reading *after = i + 1 == first + count ? next : &now;
        now.context = a->contexts[b] - (rows - 1 - i);
        switch (a->d) { /* two sizes known to the compiler, which leaves the masks out then */
            case 64: attend_one(a, &now, after, row, 64, 2); continue;
            case 128: attend_one(a, &now, after, row, 128, 4); continue;
        }
        switch ((a->d + 31) / 32) {
            case 1: attend_one(a, &now, after, row, a->d, 1); break;
            case 2: attend_one(a, &now, after, row, a->d, 2); break;
            case 3: attend_one(a, &now, after, row, a->d, 3); break;
            case 4: attend_one(a, &now, after, row, a->d, 4); break;
            default: attend_one(a, &now, after, row, a->d, 8); break;
        }
    }
}

#define P_STRIDE (CHUNK / 2 + 16)

static const bf16 ZEROS[D_MAX] = {0};

/* 16 rows of `d` -> pair i of row r at to[i * wide + r], for the first `columns` rows. */
INLINE void pack_rows(const bf16 *const *rows, int64_t d, uint32_t *to, int64_t wide, int columns) {
    for (int64_t i = 0; i < d / 2; i += 16) {
        __m512i v[16];
        UNROLL for (int r = 0; r < 16; r++) v[r] = load32(rows[r] + 2 * i, d - 2 * i);
        transpose16(v);
        UNROLL for (int j = 0; j < 16; j++)
            if (i + j < d / 2) _mm512_mask_storeu_epi32(to + (i + j) * wide, (__mmask16)((1u << columns) - 1), v[j]);
    }
}

/* Keys packed as panels of 32 keys over pairs of d; values as panels of 32 d over pairs of keys. Keys past the context
 * are zero, so that unused memory is never multiplied, not even by zero. */
INLINE void pack_keys(const Attention *a, const int64_t *table, int64_t head, int64_t context, bf16 *keys, bf16 *values,
                      int64_t d) {
    int64_t d_panels = (d + 31) / 32, value_off = a->kv_heads * a->block_size * d;
    int64_t padded = (context + 31) / 32 * 32;
    const __m512i low = _mm512_set_epi16(47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40, 8, 39, 7, 38, 6, 37, 5,
                                         36, 4, 35, 3, 34, 2, 33, 1, 32, 0);
    const __m512i high = _mm512_add_epi16(low, _mm512_set1_epi16(16));
    for (int64_t j = 0; j < padded; j += 16) {
        const bf16 *rows[16];
        for (int r = 0; r < 16; r++) rows[r] = j + r < context ? key_at(a, table, head, j + r) : ZEROS;
        pack_rows(rows, d, (uint32_t *)keys + j / 32 * (d / 2) * 32 + j % 32, 32, 16);
        for (int r = 0; r < 16; r++)
            if (j + r < context) rows[r] += value_off;
        for (int r = 0; r < 16; r += 2) {
            for (int64_t p = 0; p < d_panels; p++) {
                __m512i x = load32(rows[r] + 32 * p, d - 32 * p), y = load32(rows[r + 1] + 32 * p, d - 32 * p);
                bf16 *panel = values + (p * (padded / 2) + (j + r) / 2) * 64;
                _mm512_storeu_si512(panel, _mm512_permutex2var_epi16(x, low, y));
                _mm512_storeu_si512(panel + 32, _mm512_permutex2var_epi16(x, high, y));
            }
        }
    }
}

typedef struct {
    uint32_t q[D_MAX / 2 * ROWS_MAX];
    float s[ROWS_MAX][CHUNK];
    uint32_t p[ROWS_MAX * P_STRIDE];
    float o[ROWS_MAX][D_MAX];
    float top[ROWS_MAX], sum[ROWS_MAX];
    int64_t sees[ROWS_MAX]; /* keys that row r may look at */
} Tile;

/* Scores of the tile's rows for the keys [first, first + n); n is a multiple of 32. */
INLINE void tile_scores(Tile *t, const bf16 *keys, int64_t first, int64_t n, int64_t pairs) {
    for (int64_t c = 0; c < n; c += 32) {
        __m512 acc[ROWS_MAX][2];
        UNROLL for (int r = 0; r < ROWS_MAX; r++) acc[r][0] = acc[r][1] = _mm512_setzero_ps();
        panel_rows(ROWS_MAX, 1, ROWS_MAX, t->q, keys + (first + c) * pairs * 2, pairs, acc, NULL, 0, 0);
        UNROLL for (int r = 0; r < ROWS_MAX; r++) {
            _mm512_storeu_ps(t->s[r] + c, acc[r][0]);
            _mm512_storeu_ps(t->s[r] + c + 16, acc[r][1]);
        }
    }
}

/* 2^x for x <= 0, to 4e-6 of it: more than enough for what becomes bfloat16 (Taylor's series on [-1/2, 1/2]). */
INLINE __m512 exp2_512(__m512 x) {
    __m512 n = _mm512_roundscale_ps(x, 8);
    x = _mm512_sub_ps(x, n);
    __m512 y = _mm512_set1_ps(1.33335581e-3f);
    y = _mm512_fmadd_ps(y, x, _mm512_set1_ps(9.61812911e-3f));
    y = _mm512_fmadd_ps(y, x, _mm512_set1_ps(5.55041087e-2f));
    y = _mm512_fmadd_ps(y, x, _mm512_set1_ps(2.40226507e-1f));
    y = _mm512_fmadd_ps(y, x, _mm512_set1_ps(6.93147181e-1f));
    return _mm512_scalef_ps(_mm512_fmadd_ps(y, x, _mm512_set1_ps(1.0f)), n);
}

/* Scores -> weights in bfloat16, with what was summed so far scaled to the new maximum (Milakov & Gimelshein 2018).
 * `scale` is that of the scores times log2(e): powers are of two. */
INLINE void tile_softmax(Tile *t, int rows, int64_t first, int64_t n, float scale, int64_t d) {
    for (int r = 0; r < rows; r++) {
        int64_t seen = t->sees[r] - first;
        if (seen > n) seen = n;
        const float *s = t->s[r];
        uint32_t *p = t->p + r * P_STRIDE;
        if (seen <= 0) {
            memset(p, 0, (size_t)n * 2);
            continue;
        }
        int64_t whole = seen / 16 * 16;
        __mmask16 rest = (__mmask16)((1u << (seen - whole)) - 1);
        __m512 best = _mm512_set1_ps(-__builtin_inff());
        for (int64_t c = 0; c < whole; c += 16) best = _mm512_max_ps(best, _mm512_loadu_ps(s + c));
        if (rest) best = _mm512_mask_max_ps(best, rest, best, _mm512_loadu_ps(s + whole));
        float top = _mm512_reduce_max_ps(best) * scale;
        if (top < t->top[r]) top = t->top[r];
        __m512 sum = _mm512_setzero_ps(), factor = _mm512_set1_ps(scale), shift = _mm512_set1_ps(-top);
        for (int64_t c = 0; c < whole; c += 16) {
            __m512 e = exp2_512(_mm512_fmadd_ps(_mm512_loadu_ps(s + c), factor, shift));
            sum = _mm512_add_ps(sum, e);
            _mm256_storeu_si256((__m256i *)(p + c / 2), narrow(e));
        }
        for (int64_t c = whole; c < n; c += 16, rest = 0) {
            __m512 e = exp2_512(_mm512_fmadd_ps(_mm512_loadu_ps(s + c), factor, shift));
            e = _mm512_maskz_mov_ps(rest, e);
            sum = _mm512_add_ps(sum, e);
            _mm256_storeu_si256((__m256i *)(p + c / 2), narrow(e));
        }
        if (top > t->top[r] && first > 0) {
            __m512 shrink = exp2_512(_mm512_set1_ps(t->top[r] - top));
            t->sum[r] *= _mm512_cvtss_f32(shrink);
            for (int64_t i = 0; i < d; i += 16)
                _mm512_storeu_ps(t->o[r] + i, _mm512_mul_ps(_mm512_loadu_ps(t->o[r] + i), shrink));
        }
        t->sum[r] += _mm512_reduce_add_ps(sum);
        t->top[r] = top;
    }
}

INLINE void tile_values(Tile *t, const bf16 *values, int64_t first, int64_t n, int64_t padded, int64_t d) {
    for (int64_t c = 0; c < d; c += 32) {
        __m512 acc[ROWS_MAX][2];
        UNROLL for (int r = 0; r < ROWS_MAX; r++) {
            acc[r][0] = first ? _mm512_loadu_ps(t->o[r] + c) : _mm512_setzero_ps();
            acc[r][1] = first ? _mm512_loadu_ps(t->o[r] + c + 16) : _mm512_setzero_ps();
        }
        panel_rows(ROWS_MAX, P_STRIDE, 1, t->p, values + (c / 32 * (padded / 2) + first / 2) * 64, n / 2, acc, NULL, 0, 0);
        UNROLL for (int r = 0; r < ROWS_MAX; r++) {
            _mm512_storeu_ps(t->o[r] + c, acc[r][0]);
            _mm512_storeu_ps(t->o[r] + c + 16, acc[r][1]);
        }
    }
}

/* Many rows of one sequence for one KV head, 12 (token, query head) at a time, by the products that weights go through. */
INLINE void attend_many(const Attention *a, int64_t b, int64_t first, int64_t count, int64_t head, char *scratch,
                        int64_t d) {
    int64_t group = a->heads / a->kv_heads, rows = a->rows_at[b + 1] - a->rows_at[b];
    int64_t start = a->contexts[b] - rows, context = start + first + count, padded = (context + 31) / 32 * 32;
    Tile *t = (Tile *)scratch;
    bf16 *keys = (bf16 *)(scratch + (sizeof(Tile) + 63) / 64 * 64), *values = keys + padded * d;
    pack_keys(a, a->tables + a->table_at[b], head, context, keys, values, d);
    memset(t->p, 0, sizeof t->p);
    for (int64_t at = 0; at < count * group; at += ROWS_MAX) {
        int n_rows = count * group - at < ROWS_MAX ? (int)(count * group - at) : ROWS_MAX;
        int64_t most = 0;
        const bf16 *queries[16];
        for (int r = 0; r < 16; r++) queries[r] = ZEROS;
        for (int r = 0; r < n_rows; r++) {
            int64_t token = first + (at + r) / group, h = head * group + (at + r) % group;
            queries[r] = a->q + (a->rows_at[b] + token) * a->q_stride + h * d;
            t->sees[r] = most = start + token + 1;
            t->top[r] = -__builtin_inff();
            t->sum[r] = 0.0f;
        }
        pack_rows(queries, d, t->q, ROWS_MAX, ROWS_MAX);
        for (int64_t key = 0; key < most; key += CHUNK) {
            int64_t n = (most - key + 31) / 32 * 32;
            if (n > CHUNK) n = CHUNK;
            tile_scores(t, keys, key, n, d / 2);
            tile_softmax(t, n_rows, key, n, a->scale * 1.44269504f, d);
            tile_values(t, values, key, n, padded, d);
        }
        for (int r = 0; r < n_rows; r++) {
            int64_t token = first + (at + r) / group, h = head * group + (at + r) % group;
            bf16 *out = a->out + ((a->rows_at[b] + token) * a->heads + h) * d;
            __m512 share = _mm512_set1_ps(1.0f / t->sum[r]);
            for (int64_t i = 0; i < d; i += 16) {
                store16(out + i, d - i, narrow(_mm512_mul_ps(_mm512_loadu_ps(t->o[r] + i), share)));
            }
        }
    }
}

#define MANY(NAME, D)                                                                                           \
    static __attribute__((noinline)) void NAME(const Attention *a, const int64_t *task, int64_t head, char *scratch) { \
        attend_many(a, task[0], task[1], task[2], head, scratch, D);                                            \
    }
MANY(many_of_64, 64)
MANY(many_of_128, 128)
MANY(many_of_any, a->d)

static void attention_tasks(void *arg) {
    Attention *a = arg;
    char *scratch = a->scratch + take(&a->next_scratch) * a->scratch_bytes;
    int64_t tasks = a->num_tasks * a->kv_heads;
    for (int64_t task = take(&a->counter), after; task < tasks; task = after) {
        after = take(&a->counter);
        const int64_t *t = a->tasks + task / a->kv_heads * 4, *n = a->tasks + after / a->kv_heads * 4;
        int64_t head = task % a->kv_heads;
        if (t[3]) {
            switch (a->d) { /* two sizes known to the compiler */
                case 64: many_of_64(a, t, head, scratch); break;
                case 128: many_of_128(a, t, head, scratch); break;
                default: many_of_any(a, t, head, scratch);
            }
            continue;
        }
        Reading next;
        if (after < tasks)
            next = (Reading){a->tables + a->table_at[n[0]], after % a->kv_heads, a->contexts[n[0]]};
        attend_few(a, t[0], t[1], t[2], head, after < tasks ? &next : NULL);
    }
}

/* Bytes that each thread needs for contexts of up to `context` tokens. */
API int64_t baton_attention_scratch(int64_t context, int64_t d) {
    int64_t padded = (context + 31) / 32 * 32, wide = (d + 31) / 32 * 32;
    return ((int64_t)sizeof(Tile) + 64 + padded * (d + wide) * 2 + 4095) / 4096 * 4096;
}

API void baton_attention(const bf16 *q, int64_t q_stride, bf16 *out, const bf16 *layer, const int64_t *tables,
                         const int64_t *table_at, const int64_t *rows_at, const int64_t *contexts, const int64_t *tasks,
                         int64_t num_tasks, int64_t heads, int64_t kv_heads, int64_t block_size, int64_t d, float scale,
                         char *scratch, int64_t scratch_bytes, int threads) {
    Attention a = {.q = q, .q_stride = q_stride, .out = out, .layer = layer, .tables = tables, .table_at = table_at,
                   .rows_at = rows_at, .contexts = contexts, .tasks = tasks, .num_tasks = num_tasks, .heads = heads,
                   .kv_heads = kv_heads, .block_size = block_size, .d = d, .scale = scale, .scratch = scratch,
                   .scratch_bytes = scratch_bytes};
    parallel(attention_tasks, &a, threads);
}

/* ---------------------------------------------------------------- a layer in two calls, or all layers in one */

/* The structs are those of layer.py. */
typedef struct {
    const uint8_t *panels;
    const float *scales;
    const bf16 *bias;
    int64_t bits, columns, inputs;
} Operand;

typedef struct {
    const bf16 *input_norm, *q_norm, *k_norm, *attended_norm;
    Operand qkv, o, gate_up, down;
} Layer;

typedef struct {
    bf16 *x, *normed, *qkv, *attended, *gated;
    const bf16 *cosines, *sines;
    const int64_t *tables, *table_at, *rows_at, *contexts, *tasks, *blocks, *slots;
    uint32_t *product_scratch;
    char *attention_scratch;
    int64_t rows, hidden, num_tasks, heads, kv_heads, block_size, d, attention_scratch_bytes, threads;
    double eps, scale;
} Step;

/* One layer of a step, shared by the threads of a region. */
typedef struct {
    Linear qkv, o, gate_up, down;
    Store store;
    Attention attention;
} Parts;

static Linear part_of(const Operand *o, const bf16 *x, const bf16 *norm, bf16 *out, int64_t stride, int epilogue,
                      const Step *s) {
    Linear l = linear_of(x, o->inputs, o->panels, o->scales, (int)o->bits, o->bias, out, stride, s->rows, o->columns,
                         o->inputs, epilogue, s->product_scratch);
    l.norm = norm, l.normed = s->normed, l.eps = (float)s->eps;
    return l;
}

static Parts parts_of(const Layer *l, const Step *s, bf16 *region) {
    return (Parts){
        .qkv = part_of(&l->qkv, s->x, l->input_norm, s->qkv, l->qkv.columns, EPILOGUE_STORE, s),
        .o = part_of(&l->o, s->attended, NULL, s->x, s->hidden, EPILOGUE_ADD, s),
        .gate_up = part_of(&l->gate_up, s->x, l->attended_norm, s->gated, l->gate_up.columns / 2, EPILOGUE_SWIGLU, s),
        .down = part_of(&l->down, s->gated, NULL, s->x, s->hidden, EPILOGUE_ADD, s),
        .store = {.qkv = s->qkv, .q_norm = l->q_norm, .k_norm = l->k_norm, .cosines = s->cosines, .sines = s->sines,
                  .layer = region, .blocks = s->blocks, .slots = s->slots, .t = s->rows, .heads = s->heads,
                  .kv_heads = s->kv_heads, .block_size = s->block_size, .d = s->d, .eps = (float)s->eps, .opening = QUERIES | RECORDS},
        .attention = {.q = s->qkv, .q_stride = l->qkv.columns, .out = s->attended, .layer = region,
                      .tables = s->tables, .table_at = s->table_at, .rows_at = s->rows_at, .contexts = s->contexts,
                      .tasks = s->tasks, .num_tasks = s->num_tasks, .heads = s->heads, .kv_heads = s->kv_heads,
                      .block_size = s->block_size, .d = s->d, .scale = (float)s->scale,
                      .scratch = s->attention_scratch, .scratch_bytes = s->attention_scratch_bytes}};
}

/* Layers in one region, or a half of one. */
typedef struct {
    Crew crew;
    Parts *parts;
    int64_t count;
} Run;

static void open_tasks(void *arg) {
    Run *run = arg;
    multiply(&run->crew, &run->parts->qkv);
    meet(&run->crew, &(Soon){NULL, NULL});
    store_tasks(&run->parts->store);
}

static void close_tasks(void *arg) {
    Run *run = arg;
    attention_tasks(&run->parts->attention);
    multiply(&run->crew, &run->parts->o);
    multiply(&run->crew, &run->parts->gate_up);
    multiply(&run->crew, &run->parts->down);
}

static void layers_tasks(void *arg) {
    Run *run = arg;
    for (Parts *p = run->parts; p < run->parts + run->count; p++) {
        multiply(&run->crew, &p->qkv);
        meet(&run->crew, &(Soon){NULL, NULL});
        store_tasks(&p->store);
        meet(&run->crew, &(Soon){NULL, NULL});
        attention_tasks(&p->attention);
        multiply(&run->crew, &p->o);
        multiply(&run->crew, &p->gate_up);
        multiply(&run->crew, &p->down);
    }
}

/* Some columns of o: those from a panel's first one on. */
static Operand columns_of(const Operand *o, int64_t first, int64_t end) {
    int64_t panel = first / PANEL, pairs = pairs_of(o->inputs, (int)o->bits);
    return (Operand){.panels = o->panels + panel * pairs * PANEL * o->bits / 4,
                     .scales = o->scales ? o->scales + panel * (pairs / SCALED_PAIRS) * PANEL : NULL,
                     .bias = o->bias ? o->bias + first : NULL, .bits = o->bits, .columns = end - first, .inputs = o->inputs};
}

/* Up to the new keys and values in their slots of `region`, the layer's, and the queries; or one of the two. */
API void baton_layer_open(int opening, const Layer *l, const Step *s, bf16 *region) {
    Parts parts = parts_of(l, s, region);
    int64_t queries = s->heads * s->d, first = opening & QUERIES ? 0 : queries / PANEL * PANEL;
    Operand wanted = columns_of(&l->qkv, first, opening & RECORDS ? l->qkv.columns : queries);
    parts.qkv = part_of(&wanted, s->x, l->input_norm, s->qkv + first, l->qkv.columns, EPILOGUE_STORE, s);
    parts.store.opening = opening;
    Run run = {.parts = &parts, .count = 1};
    parallel(open_tasks, &run, (int)s->threads);
}

/* The rest: `x` becomes the layer's output. */
API void baton_layer_close(const Layer *l, const Step *s, bf16 *region) {
    Parts parts = parts_of(l, s, region);
    Run run = {.parts = &parts, .count = 1};
    parallel(close_tasks, &run, (int)s->threads);
}

#define LAYERS_AT_ONCE 32

/* All layers: `x` becomes the last one's output. `region` is the first one's, the next lies `stride` elements on. */
API void baton_layers(const Layer *layers, int64_t count, const Step *s, bf16 *region, int64_t stride) {
    Parts parts[LAYERS_AT_ONCE];
    for (int64_t first = 0; first < count; first += LAYERS_AT_ONCE) {
        Run run = {.parts = parts, .count = count - first < LAYERS_AT_ONCE ? count - first : LAYERS_AT_ONCE};
        for (int64_t i = 0; i < run.count; i++)
            parts[i] = parts_of(layers + first + i, s, region + (first + i) * stride);
        parallel(layers_tasks, &run, (int)s->threads);
    }
}

/* ---------------------------------------------------------------- sampling */

typedef struct {
    const bf16 *x;
    int64_t *out;
    int64_t rows, n, counter;
} Highest;

static void highest_tasks(void *arg) {
    Highest *a = arg;
    const __m512i lanes = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
    for (int64_t row; (row = take(&a->counter)) < a->rows;) {
        const bf16 *x = a->x + row * a->n;
        __m512 best = _mm512_set1_ps(-__builtin_inff());
        __m512i where = _mm512_set1_epi32(INT32_MAX);
        for (int64_t i = 0; i < a->n; i += 16) {
            __mmask16 mask = a->n - i >= 16 ? 0xffff : (__mmask16)((1u << (a->n - i)) - 1);
            __m512 v = widen(load16(x + i, a->n - i));
            __mmask16 higher = _mm512_mask_cmp_ps_mask(mask, v, best, _CMP_GT_OQ);
            best = _mm512_mask_mov_ps(best, higher, v);
            where = _mm512_mask_mov_epi32(where, higher, _mm512_add_epi32(lanes, _mm512_set1_epi32((int)i)));
        }
        __mmask16 top = _mm512_cmp_ps_mask(best, _mm512_set1_ps(_mm512_reduce_max_ps(best)), _CMP_EQ_OQ);
        int64_t found = _mm512_mask_reduce_min_epi32(top, where);
        a->out[row] = found < a->n ? found : 0;
    }
}

/* out[r] = the first column of row r whose value is the row's highest; 0 where none is above minus infinity. */
API void baton_highest(const bf16 *x, int64_t *out, int64_t rows, int64_t n, int threads) {
    Highest a = {.x = x, .out = out, .rows = rows, .n = n};
    parallel(highest_tasks, &a, rows > 1 ? threads : 1);
}

/* 1: this CPU has the instructions. 2: it has AMX too, which other libraries use better for many rows. */
#pragma GCC reset_options
#include <cpuid.h>

API int baton_kernels_level(void) {
    __builtin_cpu_init();
    if (!__builtin_cpu_supports("avx512f") || !__builtin_cpu_supports("avx512bw") ||
        !__builtin_cpu_supports("avx512vl") || !__builtin_cpu_supports("avx512dq") ||
        !__builtin_cpu_supports("avx512bf16"))
        return 0;
    unsigned a, b, c, d;
    return __get_cpuid_count(7, 0, &a, &b, &c, &d) && (d >> 24 & 1) && (d >> 22 & 1) ? 2 : 1;
}

#else
API int baton_kernels_level(void) { return 0; }
#endif
