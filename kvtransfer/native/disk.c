/* Blocks between memory and a file: many of them by one call, which the caller makes without holding any lock.
 *
 * A block's slot in the file is a header and its data, both whole pages.
 *
 * Results are 0 or a negative errno; -EBADMSG: what was read is not what was written; -ECANCELED: not begun.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <stdint.h>
#include <string.h>
#include <sys/uio.h>
#include <unistd.h>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

/* In a header; disk.py has the same. */
#define HEADER_SUM_AT 8
#define DATA_SUM_AT 16

/* The sum is the long-input loop of XXH3 (64 bits) over whole KiB, with keys of its own: products of 32-bit halves, and
 * the words themselves, are added up in eight lanes, which are scrambled after each KiB. */
#define LANES 8
#define STRIPES 16
#define UNIT_BYTES (LANES * STRIPES * 8)
#define KEYS (STRIPES + LANES)
#define AHEAD_BYTES 1024
#define PRIME_SCRAMBLE 0x9E3779B1u
#define PRIME_LENGTH 0x9E3779B185EBCA87ull
#define PRIME_END 0x165667919E3779F9ull

struct sum {
    uint64_t keys[KEYS];
    uint64_t lanes[LANES];
    uint64_t nbytes;
};

static void sum_begin(struct sum *sum) {
    uint64_t seed = 0;
    for (int i = 0; i < KEYS; i++) { /* splitmix64 */
        seed += 0x9E3779B97F4A7C15ull;
        uint64_t z = seed;
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
        z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
        sum->keys[i] = z ^ (z >> 31);
    }
    memcpy(sum->lanes, sum->keys, sizeof sum->lanes);
    sum->nbytes = 0;
}

static inline __attribute__((always_inline)) void add_units(struct sum *sum, const uint8_t *data, int64_t nbytes) {
    uint64_t lanes[LANES];
    const uint64_t *keys = sum->keys;
    memcpy(lanes, sum->lanes, sizeof lanes);
    for (int64_t at = 0; at < nbytes; at += UNIT_BYTES) {
        for (int s = 0; s < STRIPES; s++) {
            uint64_t words[LANES];
            memcpy(words, data + at + s * LANES * 8, sizeof words);
            for (int j = 0; j < LANES; j++) {
                uint64_t mixed = words[j] ^ keys[s + j];
                lanes[j] += (mixed & 0xFFFFFFFFu) * (mixed >> 32) + words[j ^ 1];
            }
        }
        for (int j = 0; j < LANES; j++)
            lanes[j] = (lanes[j] ^ (lanes[j] >> 47) ^ keys[STRIPES + j]) * PRIME_SCRAMBLE;
    }
    memcpy(sum->lanes, lanes, sizeof lanes);
    sum->nbytes += (uint64_t)nbytes;
}

#if defined(__x86_64__)
static inline __attribute__((always_inline, target("avx2"))) __m256i add_four(__m256i lanes, __m256i words, __m256i keys) {
    __m256i mixed = _mm256_xor_si256(words, keys);
    __m256i product = _mm256_mul_epu32(mixed, _mm256_srli_epi64(mixed, 32));
    __m256i swapped = _mm256_shuffle_epi32(words, _MM_SHUFFLE(1, 0, 3, 2));
    return _mm256_add_epi64(lanes, _mm256_add_epi64(product, swapped));
}

static inline __attribute__((always_inline, target("avx2"))) __m256i scramble_four(__m256i lanes, __m256i keys) {
    __m256i prime = _mm256_set1_epi64x(PRIME_SCRAMBLE);
    __m256i mixed = _mm256_xor_si256(_mm256_xor_si256(lanes, _mm256_srli_epi64(lanes, 47)), keys);
    __m256i high = _mm256_mul_epu32(_mm256_srli_epi64(mixed, 32), prime);
    return _mm256_add_epi64(_mm256_mul_epu32(mixed, prime), _mm256_slli_epi64(high, 32));
}

/* What `add_units` does. */
__attribute__((target("avx2"))) static void add_avx2(struct sum *sum, const uint8_t *data, int64_t nbytes) {
    const uint64_t *keys = sum->keys;
    __m256i low = _mm256_loadu_si256((const __m256i *)sum->lanes);
    __m256i high = _mm256_loadu_si256((const __m256i *)(sum->lanes + 4));
    for (int64_t at = 0; at < nbytes; at += UNIT_BYTES) {
        for (int s = 0; s < STRIPES; s++) {
            const uint8_t *stripe = data + at + s * LANES * 8;
            _mm_prefetch((const char *)stripe + AHEAD_BYTES, _MM_HINT_T0);
            low = add_four(low, _mm256_loadu_si256((const __m256i *)stripe),
                           _mm256_loadu_si256((const __m256i *)(keys + s)));
            high = add_four(high, _mm256_loadu_si256((const __m256i *)(stripe + 32)),
                            _mm256_loadu_si256((const __m256i *)(keys + s + 4)));
        }
        low = scramble_four(low, _mm256_loadu_si256((const __m256i *)(keys + STRIPES)));
        high = scramble_four(high, _mm256_loadu_si256((const __m256i *)(keys + STRIPES + 4)));
    }
    _mm256_storeu_si256((__m256i *)sum->lanes, low);
    _mm256_storeu_si256((__m256i *)(sum->lanes + 4), high);
    sum->nbytes += (uint64_t)nbytes;
}

static int has_avx2(void) {
    __builtin_cpu_init();
    return __builtin_cpu_supports("avx2");
}
#else
static void add_avx2(struct sum *sum, const uint8_t *data, int64_t nbytes) { add_units(sum, data, nbytes); }
static int has_avx2(void) { return 0; }
#endif

static void add_plain(struct sum *sum, const uint8_t *data, int64_t nbytes) { add_units(sum, data, nbytes); }

static void sum_add(struct sum *sum, const uint8_t *data, int64_t nbytes) {
    if (has_avx2())
        add_avx2(sum, data, nbytes);
    else
        add_plain(sum, data, nbytes);
}

static uint64_t sum_end(const struct sum *sum) {
    uint64_t end = sum->nbytes * PRIME_LENGTH;
    for (int j = 0; j < LANES; j += 2) {
        unsigned __int128 product = sum->lanes[j] ^ sum->keys[STRIPES + j];
        product *= sum->lanes[j + 1] ^ sum->keys[STRIPES + j + 1];
        end += (uint64_t)product ^ (uint64_t)(product >> 64);
    }
    end = (end ^ (end >> 37)) * PRIME_END;
    return end ^ (end >> 32);
}

/* Of whole KiB; `plain`: without the instructions that only some machines have. */
uint64_t baton_disk_sum(const uint8_t *data, int64_t nbytes, int plain) {
    struct sum sum;
    sum_begin(&sum);
    if (plain)
        add_plain(&sum, data, nbytes);
    else
        sum_add(&sum, data, nbytes);
    return sum_end(&sum);
}

static uint64_t header_sum(const uint8_t *header, int64_t nbytes) {
    struct sum sum;
    uint8_t first[UNIT_BYTES];
    memcpy(first, header, sizeof first);
    memset(first + HEADER_SUM_AT, 0, 8);
    sum_begin(&sum);
    sum_add(&sum, first, sizeof first);
    sum_add(&sum, header + sizeof first, nbytes - (int64_t)sizeof first);
    return sum_end(&sum);
}

/* All of it, in as many system calls as it takes. Changes `iov`. */
static int move_all(int fd, int writing, struct iovec *iov, int segments, int64_t at) {
    while (segments) {
        ssize_t moved = writing ? pwritev(fd, iov, segments, at) : preadv(fd, iov, segments, at);
        if (moved < 0) {
            if (errno == EINTR) continue;
            return -errno;
        }
        if (moved == 0) return writing ? -EIO : -ENODATA; /* the file ends here */
        at += moved;
        while (segments && (size_t)moved >= iov->iov_len) {
            moved -= (ssize_t)iov->iov_len;
            iov++;
            segments--;
        }
        if (segments) {
            iov->iov_base = (uint8_t *)iov->iov_base + moved;
            iov->iov_len -= (size_t)moved;
        }
    }
    return 0;
}

/* Blocks of `nbytes` that begin at `memory + at[i]`. disk.py has the same. */
struct blocks {
    uint8_t *memory;
    const int64_t *at;
    int64_t count;
    int64_t nbytes;
    int64_t data_nbytes; /* with what fills the last page */
    uint8_t *bounce;     /* `data_nbytes`, zero behind `nbytes`; NULL: moved in place, which must be whole pages */
    const int32_t *stop; /* another thread's: not 0, the rest is not begun */
};

static int stopped(const struct blocks *blocks) { return __atomic_load_n(blocks->stop, __ATOMIC_RELAXED); }

static uint8_t *data_of(const struct blocks *blocks, int64_t i) {
    return blocks->bounce ? blocks->bounce : blocks->memory + blocks->at[i];
}

/* Write blocks: to `slot_at[i]` the header at `headers + i * header_nbytes`, which gets both sums, and the data. */
void baton_disk_write(int fd, const struct blocks *blocks, const int64_t *slot_at, uint8_t *headers,
                      int64_t header_nbytes, uint64_t *sums, int32_t *results) {
    for (int64_t i = 0; i < blocks->count; i++) {
        if (stopped(blocks)) {
            results[i] = -ECANCELED;
            continue;
        }
        uint8_t *header = headers + i * header_nbytes, *data = data_of(blocks, i);
        if (blocks->bounce) memcpy(data, blocks->memory + blocks->at[i], (size_t)blocks->nbytes);
        sums[i] = baton_disk_sum(data, blocks->data_nbytes, 0);
        memcpy(header + DATA_SUM_AT, &sums[i], 8);
        uint64_t of_header = header_sum(header, header_nbytes);
        memcpy(header + HEADER_SUM_AT, &of_header, 8);
        struct iovec iov[] = {{header, (size_t)header_nbytes}, {data, (size_t)blocks->data_nbytes}};
        results[i] = move_all(fd, 1, iov, 2, slot_at[i]);
    }
}

/* Read the data of blocks from `data_at[i]`, and compare its sum with `sums[i]`. With a bounce buffer, memory is touched
 * only if that is the same. */
void baton_disk_read(int fd, const struct blocks *blocks, const int64_t *data_at, const uint64_t *sums,
                     int32_t *results) {
    for (int64_t i = 0; i < blocks->count; i++) {
        if (stopped(blocks)) {
            results[i] = -ECANCELED;
            continue;
        }
        uint8_t *data = data_of(blocks, i);
        struct iovec iov = {data, (size_t)blocks->data_nbytes};
        results[i] = move_all(fd, 0, &iov, 1, data_at[i]);
        if (results[i]) continue;
        if (baton_disk_sum(data, blocks->data_nbytes, 0) != sums[i])
            results[i] = -EBADMSG;
        else if (blocks->bounce)
            memcpy(blocks->memory + blocks->at[i], data, (size_t)blocks->nbytes);
    }
}

/* Read `count` headers that lie `stride` apart from `at` on, one after the other into `headers`. */
void baton_disk_headers(int fd, int64_t at, int64_t stride, int64_t count, uint8_t *headers, int64_t header_nbytes,
                        int32_t *results) {
    for (int64_t i = 0; i < count; i++) {
        uint8_t *header = headers + i * header_nbytes;
        struct iovec iov = {header, (size_t)header_nbytes};
        results[i] = move_all(fd, 0, &iov, 1, at + i * stride);
        uint64_t written;
        memcpy(&written, header + HEADER_SUM_AT, 8);
        if (!results[i] && header_sum(header, header_nbytes) != written) results[i] = -EBADMSG;
    }
}
