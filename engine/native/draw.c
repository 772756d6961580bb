/* Draws tokens: Gumbel-max over each row of scores, by the definition in engine/sampler.py, without making the noise of
 * tokens that cannot win.
 *
 * Three observations keep it short of an exponential or a logarithm for each token:
 * - the noise -ln(-ln u) is at most -ln(1 - u), and a float's exponent and fraction bound that logarithm from one side
 *   closely: whose score plus that bound is below the best so far needs no more;
 * - the tokens that top_p and min_p keep are a beginning of the ranking. If the winner among all is one of them it is
 *   the winner among them; if not, no token that ranks behind it is one either, so the draw is repeated before it;
 * - the k best are kept in a heap, which few tokens enter.
 *
 * Everything is computed in double. A row's result depends on no other row. The loops over a block are plain C, which
 * the compiler turns into the vector instructions of three generations of processors.
 */
#include <math.h>
#include <stdint.h>
#include <string.h>

#define API __attribute__((visibility("default")))
#define INLINE static inline __attribute__((always_inline))
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && defined(__GLIBC__)
#define VECTORS __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default"), noinline))
#else
#define VECTORS __attribute__((noinline))
#endif

extern void GOMP_parallel(void (*)(void *), void *, unsigned, unsigned) __attribute__((weak));

#define BLOCK 512
#define LANES 16
#define NOISE_MAX 36.75 /* of 52 bits: 53 ln 2 is 36.74 */
#define NO_TOKEN (-1)
#define NO_WEIGHT (-60.0) /* e^-60 of any vocabulary is lost beside the best token's 1 in a double */

/* Constants of splitmix64 (Steele, Lea & Flood 2014, "Fast splittable pseudorandom number generators"). */
#define GOLDEN 0x9E3779B97F4A7C15u
#define FIRST 0xBF58476D1CE4E5B9u
#define SECOND 0x94D049BB133111EBu

enum { BFLOAT16, FLOAT32, FLOAT64 };

typedef struct {
    int64_t row; /* of the scores */
    double temperature, top_p, min_p;
    int64_t top_k; /* 0: off */
    uint64_t seed, choice, index;
    int64_t changed_at, changed_end; /* of the changed scores */
} Draw;

typedef struct {
    const void *scores;
    int64_t type, stride, n;
    const Draw *draws;
    int64_t num_draws;
    const int64_t *changed_ids; /* ascending within a row */
    const double *changed_scores;
    int64_t *out;
    char *scratch; /* for each thread: highest score of each block, then a heap */
    int64_t scratch_bytes, counter, next_scratch;
} Batch;

typedef struct {
    const Batch *batch;
    const Draw *draw;
    double *highest; /* of each block */
    double top, inverse;
    double cut; /* scaled scores below it are not kept by min_p */
    uint64_t key;
} Row;

typedef struct {
    double score;
    int64_t id;
} Ranked;

INLINE uint64_t mix(uint64_t z) {
    z = (z ^ (z >> 30)) * FIRST;
    z = (z ^ (z >> 27)) * SECOND;
    return z ^ (z >> 31);
}

INLINE int better(Ranked a, Ranked b) { return a.score > b.score || (a.score == b.score && a.id < b.id); }
INLINE double scaled(const Row *r, double x) { return (x - r->top) / r->draw->temperature; }
INLINE int64_t length(const Row *r, int64_t first) {
    return r->batch->n - first < BLOCK ? r->batch->n - first : BLOCK;
}

/* The scores of a block, with the changed ones in place. */
VECTORS static void load(const Row *r, int64_t first, double *restrict x) {
    const Batch *b = r->batch;
    int64_t count = length(r, first), at = r->draw->row * b->stride + first;
    if (b->type == BFLOAT16) {
        const uint16_t *from = (const uint16_t *)b->scores + at;
        for (int64_t i = 0; i < count; i++) {
            uint32_t bits = (uint32_t)from[i] << 16;
            float value;
            memcpy(&value, &bits, 4);
            x[i] = value;
        }
    } else if (b->type == FLOAT32) {
        const float *from = (const float *)b->scores + at;
        for (int64_t i = 0; i < count; i++) x[i] = from[i];
    } else {
        memcpy(x, (const double *)b->scores + at, (size_t)count * 8);
    }
    if (r->draw->changed_at == r->draw->changed_end) return;
    int64_t low = r->draw->changed_at, high = r->draw->changed_end;
    while (low < high) {
        int64_t middle = (low + high) / 2;
        if (b->changed_ids[middle] < first) low = middle + 1;
        else high = middle;
    }
    for (; low < r->draw->changed_end && b->changed_ids[low] < first + count; low++)
        x[b->changed_ids[low] - first] = b->changed_scores[low];
}

VECTORS static double block_top(const double *x, int64_t count) {
    double lanes[LANES];
    for (int i = 0; i < LANES; i++) lanes[i] = -INFINITY;
    int64_t i = 0;
    for (; i + LANES <= count; i += LANES)
        for (int l = 0; l < LANES; l++) lanes[l] = x[i + l] > lanes[l] ? x[i + l] : lanes[l];
    for (; i < count; i++) lanes[0] = x[i] > lanes[0] ? x[i] : lanes[0];
    for (int l = 1; l < LANES; l++) lanes[0] = lanes[l] > lanes[0] ? lanes[l] : lanes[0];
    return lanes[0];
}

/* Not less than scaled score plus noise. Scores far below any that can win may lose precision. */
VECTORS static void bounds(const double *restrict x, int64_t count, double top, double inverse, uint64_t state,
                           float *restrict bound) {
    float doubled[BLOCK];
    for (int64_t i = 0; i < count; i++) {
        uint64_t bits = mix(state + (uint64_t)i * GOLDEN) >> 12;
        doubled[i] = (float)(int64_t)((((uint64_t)1 << 53) - 2 * bits) - 1);
    }
    for (int64_t i = 0; i < count; i++) {
        int32_t bits;
        memcpy(&bits, &doubled[i], 4);
        float below_log2 = (float)bits * 0x1p-23f - 127.0f;
        bound[i] = (float)((x[i] - top) * inverse) + (53.0f - below_log2) * 0.69314718f + 1e-3f;
    }
}

/* e^x for x of 0 or less, within two units of the last place; 0 below -700. Exact at 0. */
INLINE double exponential(double x) {
    double n = x * 1.4426950408889634 + 0x1.8p52; /* rounds to a whole number, in the low bits */
    uint64_t power;
    memcpy(&power, &n, 8);
    n -= 0x1.8p52;
    double r = x - n * 0x1.62e42fefa3800p-1 - n * 0x1.ef35793c76730p-45;
    double p = 1.0 / 479001600;
    p = p * r + 1.0 / 39916800;
    p = p * r + 1.0 / 3628800;
    p = p * r + 1.0 / 362880;
    p = p * r + 1.0 / 40320;
    p = p * r + 1.0 / 5040;
    p = p * r + 1.0 / 720;
    p = p * r + 1.0 / 120;
    p = p * r + 1.0 / 24;
    p = p * r + 1.0 / 6;
    p = p * r + 0.5;
    p = p * r + 1.0;
    p = p * r + 1.0;
    uint64_t scale = (power + 1023) << 52;
    double factor;
    memcpy(&factor, &scale, 8);
    return x < -700.0 ? 0.0 : p * factor;
}

/* Weights (probabilities as fractions of the best token's) of a block's tokens that rank before `end` and have at least
 * the weight `least`. */
VECTORS static double weigh(const double *x, int64_t count, double top, double temperature, double least, Ranked end) {
    double lanes[LANES] = {0}, total = 0.0;
    int64_t i = 0;
    for (; i + LANES <= count; i += LANES)
        for (int l = 0; l < LANES; l++) {
            double weight = exponential((x[i + l] - top) / temperature);
            int before = (x[i + l] > end.score) | ((x[i + l] == end.score) & (i + l < end.id));
            lanes[l] += before & (weight >= least) ? weight : 0.0;
        }
    for (; i < count; i++) {
        double weight = exponential((x[i] - top) / temperature);
        int before = (x[i] > end.score) | ((x[i] == end.score) & (i < end.id));
        lanes[0] += before & (weight >= least) ? weight : 0.0;
    }
    for (int l = 0; l < LANES; l++) total += lanes[l];
    return total;
}

VECTORS static int any_nan(const double *x, int64_t count) {
    int found = 0;
    for (int64_t i = 0; i < count; i++) found |= x[i] != x[i];
    return found;
}

static double mass_before(const Row *r, Ranked end) {
    double x[BLOCK], total = 0.0;
    for (int64_t first = 0; first < r->batch->n; first += BLOCK) {
        double highest = r->highest[first / BLOCK];
        if (highest < end.score || scaled(r, highest) < NO_WEIGHT) continue;
        load(r, first, x);
        Ranked here = {end.score, end.id - first};
        total += weigh(x, length(r, first), r->top, r->draw->temperature, r->draw->min_p, here);
    }
    return total;
}

INLINE double noisy(const Row *r, double x, int64_t id) {
    uint64_t bits = mix(r->key + (uint64_t)(id + 1) * GOLDEN) >> 12;
    return scaled(r, x) - log(-log(((double)bits + 0.5) * 0x1p-52));
}

/* The winner among the tokens that rank before `end` and that min_p keeps. */
static Ranked winner(const Row *r, Ranked end) {
    double x[BLOCK], best = -INFINITY;
    float bound[BLOCK];
    Ranked found = {r->top, -1};
    for (int64_t first = 0; first < r->batch->n; first += BLOCK) {
        double highest = r->highest[first / BLOCK], most = scaled(r, highest);
        if (highest == -INFINITY) continue; /* no noise makes up for it, and there is a finite score */
        if (most + NOISE_MAX < best || most < r->cut || highest < end.score) continue;
        int64_t count = length(r, first);
        load(r, first, x);
        bounds(x, count, r->top, r->inverse, r->key + (uint64_t)(first + 1) * GOLDEN, bound);
        for (int64_t i = 0; i < count; i++) {
            if (bound[i] < best || x[i] == -INFINITY) continue;
            Ranked token = {x[i], first + i};
            if (!better(token, end)) continue;
            double own = scaled(r, x[i]);
            if (own < r->cut || !(exponential(own) >= r->draw->min_p)) continue;
            double score = noisy(r, x[i], first + i);
            if (score > best) {
                best = score;
                found = token;
            }
        }
    }
    return found;
}

static int64_t draw_filtered(const Row *r) {
    const Ranked all = {-INFINITY, INT64_MAX};
    Ranked end = all;
    double allowed = r->draw->top_p < 1.0 ? r->draw->top_p * mass_before(r, all) : INFINITY;
    for (;;) {
        Ranked token = winner(r, end);
        if (token.id < 0) return -1;
        if (r->draw->top_p >= 1.0) return token.id;
        double before = mass_before(r, token);
        if (before < allowed || before == 0.0) return token.id;
        end = token;
    }
}

/* The first of `heap` ranks last. */
static void sink(Ranked *heap, int64_t size, Ranked token) {
    int64_t at = 0;
    for (int64_t child; (child = 2 * at + 1) < size; at = child) {
        if (child + 1 < size && better(heap[child], heap[child + 1])) child++;
        if (!better(token, heap[child])) break;
        heap[at] = heap[child];
    }
    heap[at] = token;
}

static void rise(Ranked *heap, int64_t at, Ranked token) {
    for (int64_t parent; at > 0; at = parent) {
        parent = (at - 1) / 2;
        if (!better(heap[parent], token)) break;
        heap[at] = heap[parent];
    }
    heap[at] = token;
}

/* The `k` best tokens of a row, best first. */
static void rank(const Row *r, Ranked *heap, int64_t k) {
    double x[BLOCK];
    int64_t size = 0;
    for (int64_t first = 0; first < r->batch->n; first += BLOCK) {
        if (size == k && !(r->highest[first / BLOCK] > heap[0].score)) continue;
        int64_t count = length(r, first);
        load(r, first, x);
        for (int64_t i = 0; i < count; i++) {
            Ranked token = {x[i], first + i};
            if (size < k) rise(heap, size++, token);
            else if (x[i] > heap[0].score) sink(heap, k, token);
        }
    }
    while (size-- > 1) {
        Ranked last = heap[0];
        sink(heap, size, heap[size]);
        heap[size] = last;
    }
}

/* top_k, with or without the others: over a list of its own. */
static int64_t draw_ranked(const Row *r, Ranked *list) {
    int64_t k = r->draw->top_k, found = -1;
    rank(r, list, k);
    double mass = 0.0, up_to = 0.0, best = -INFINITY;
    for (int64_t i = 0; i < k; i++) {
        double weight = exponential(scaled(r, list[i].score));
        mass += weight >= r->draw->min_p ? weight : 0.0;
    }
    for (int64_t i = 0; i < k; i++) {
        double weight = exponential(scaled(r, list[i].score));
        if (!(weight >= r->draw->min_p)) break;
        if (i > 0 && r->draw->top_p < 1.0 && !(up_to < r->draw->top_p * mass)) break;
        up_to += weight;
        double score = noisy(r, list[i].score, list[i].id);
        if (score > best || (score == best && list[i].id < found)) {
            best = score;
            found = list[i].id;
        }
    }
    return found;
}

static int64_t first_of(const Row *r, double score) {
    double x[BLOCK];
    for (int64_t first = 0; first < r->batch->n; first += BLOCK) {
        if (r->highest[first / BLOCK] != score) continue;
        load(r, first, x);
        for (int64_t i = 0; i < length(r, first); i++)
            if (x[i] == score) return first + i;
    }
    return 0;
}

static int64_t draw_row(const Batch *b, const Draw *draw, char *scratch) {
    int64_t blocks = (b->n + BLOCK - 1) / BLOCK;
    Row r = {.batch = b, .draw = draw, .highest = (double *)scratch};
    double x[BLOCK];
    r.top = -INFINITY;
    for (int64_t block = 0; block < blocks; block++) {
        load(&r, block * BLOCK, x);
        if (any_nan(x, length(&r, block * BLOCK))) return NO_TOKEN;
        r.highest[block] = block_top(x, length(&r, block * BLOCK));
        if (r.highest[block] > r.top) r.top = r.highest[block];
    }
    if (isinf(r.top)) return NO_TOKEN;
    if (draw->temperature == 0.0) return first_of(&r, r.top);
    r.inverse = 1.0 / draw->temperature;
    r.cut = log(draw->min_p) - 1e-6;
    r.key = mix(draw->seed + GOLDEN);
    r.key = mix((r.key ^ draw->choice) + GOLDEN);
    r.key = mix((r.key ^ draw->index) + GOLDEN);
    int64_t found;
    if (draw->top_k > 0 && draw->top_k < b->n) found = draw_ranked(&r, (Ranked *)(r.highest + blocks));
    else found = draw_filtered(&r);
    return found < 0 ? 0 : found;
}

static void tasks(void *arg) {
    Batch *b = arg;
    char *scratch = b->scratch + __atomic_fetch_add(&b->next_scratch, 1, __ATOMIC_RELAXED) * b->scratch_bytes;
    for (int64_t i; (i = __atomic_fetch_add(&b->counter, 1, __ATOMIC_RELAXED)) < b->num_draws;)
        b->out[i] = draw_row(b, b->draws + i, scratch);
}

/* Bytes for each thread. `k`: the largest top_k that is less than `n`. */
API int64_t baton_draw_scratch(int64_t n, int64_t k) {
    return (((n + BLOCK - 1) / BLOCK * 8 + k * (int64_t)sizeof(Ranked)) + 63) / 64 * 64;
}

/* out[i] = the token of draws[i]; NO_TOKEN where a score is NaN or the highest one infinite. `scratch` is aligned to 8 bytes. */
API void baton_draw(const void *scores, int64_t type, int64_t stride, int64_t n, const Draw *draws, int64_t num_draws,
                    const int64_t *changed_ids, const double *changed_scores, int64_t *out, char *scratch,
                    int64_t scratch_bytes, int threads) {
    Batch b = {.scores = scores, .type = type, .stride = stride, .n = n, .draws = draws, .num_draws = num_draws,
               .changed_ids = changed_ids, .changed_scores = changed_scores, .out = out, .scratch = scratch,
               .scratch_bytes = scratch_bytes};
    if (threads > 1 && num_draws > 1 && GOMP_parallel) GOMP_parallel(tasks, &b, (unsigned)threads, 0);
    else tasks(&b);
}

#define FORBID(NAME, TYPE, VALUE)                                                        \
    VECTORS static void NAME(TYPE *x, int64_t n, const uint32_t *allowed) {              \
        for (int64_t at = 0; at < n; at += 32, x += 32) {                                \
            uint32_t bits = *allowed++;                                                  \
            int64_t count = n - at < 32 ? n - at : 32;                                   \
            if (bits == 0xFFFFFFFFu) continue;                                           \
            for (int64_t j = 0; j < count; j++) x[j] = bits >> j & 1 ? x[j] : (VALUE);   \
        }                                                                                \
    }
FORBID(forbid_bfloat16, uint16_t, 0xFF80)
FORBID(forbid_float32, float, -INFINITY)
FORBID(forbid_float64, double, -INFINITY)

/* Minus infinity in these rows of scores for the tokens whose bits are not set; `words` of 32 for each row. On one
 * thread: it is over before others are awake. */
API void baton_allow_only(void *scores, int64_t type, int64_t stride, int64_t n, const int64_t *rows, int64_t num_rows,
                          const uint32_t *allowed, int64_t words) {
    for (int64_t i = 0; i < num_rows; i++, allowed += words) {
        int64_t at = rows[i] * stride;
        if (type == BFLOAT16) forbid_bfloat16((uint16_t *)scores + at, n, allowed);
        else if (type == FLOAT32) forbid_float32((float *)scores + at, n, allowed);
        else forbid_float64((double *)scores + at, n, allowed);
    }
}
