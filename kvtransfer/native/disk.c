/* Blocks between memory and a file: many of them by one call, which the caller makes without holding any lock.
 *
 * A block's slot in the file is a header (whole pages) and its data. In memory its records lie scattered. They are written
 * and read in place, which must be whole pages, or through a bounce buffer that the caller lends.
 *
 * Results are 0 or a negative errno; -EBADMSG: what was read is not what was written.
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

/* Of one system call: IOV_MAX of Linux. */
#define CALL_SEGMENTS_MAX 1024
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

struct shape {
    const int64_t *record_nbytes;
    int64_t records; /* of a block; without a bounce buffer at most CALL_SEGMENTS_MAX - 1 */
    int64_t data_nbytes; /* with what fills the last page */
};

static void copy_records(uint8_t *memory, const int64_t *record_at, const struct shape *shape, uint8_t *bounce, int out) {
    for (int64_t r = 0; r < shape->records; r++) {
        size_t nbytes = (size_t)shape->record_nbytes[r];
        if (out)
            memcpy(bounce, memory + record_at[r], nbytes);
        else
            memcpy(memory + record_at[r], bounce, nbytes);
        bounce += nbytes;
    }
}

static int data_segments(struct iovec *iov, uint8_t *memory, const int64_t *record_at, const struct shape *shape,
                         uint8_t *bounce) {
    if (bounce) {
        iov[0] = (struct iovec){bounce, (size_t)shape->data_nbytes};
        return 1;
    }
    for (int64_t r = 0; r < shape->records; r++)
        iov[r] = (struct iovec){memory + record_at[r], (size_t)shape->record_nbytes[r]};
    return (int)shape->records;
}

static uint64_t data_sum(const struct iovec *iov, int segments) {
    struct sum sum;
    sum_begin(&sum);
    for (int i = 0; i < segments; i++) sum_add(&sum, iov[i].iov_base, (int64_t)iov[i].iov_len);
    return sum_end(&sum);
}

/* Write `count` blocks: to `slot_at[i]` the header at `headers + i * header_nbytes`, which gets both sums, and the
 * records at `memory + record_at[i * records + r]`. A bounce buffer is `data_nbytes`, zero from the records' end on. */
void baton_disk_write(int fd, const int64_t *slot_at, int64_t count, uint8_t *headers, int64_t header_nbytes,
                      uint8_t *memory, const int64_t *record_at, const int64_t *record_nbytes, int64_t records,
                      int64_t data_nbytes, uint8_t *bounce, uint64_t *sums, int32_t *results) {
    struct shape shape = {record_nbytes, records, data_nbytes};
    struct iovec iov[CALL_SEGMENTS_MAX];
    for (int64_t i = 0; i < count; i++) {
        uint8_t *header = headers + i * header_nbytes;
        if (bounce) copy_records(memory, record_at + i * records, &shape, bounce, 1);
        iov[0] = (struct iovec){header, (size_t)header_nbytes};
        int segments = data_segments(iov + 1, memory, record_at + i * records, &shape, bounce);
        sums[i] = data_sum(iov + 1, segments);
        memcpy(header + DATA_SUM_AT, &sums[i], 8);
        uint64_t of_header = header_sum(header, header_nbytes);
        memcpy(header + HEADER_SUM_AT, &of_header, 8);
        results[i] = move_all(fd, 1, iov, segments + 1, slot_at[i]);
    }
}

/* Read the data of `count` blocks from `data_at[i]` to their records, and compare its sum with `sums[i]`. With a bounce
 * buffer, records are touched only if that is the same. */
void baton_disk_read(int fd, const int64_t *data_at, int64_t count, uint8_t *memory, const int64_t *record_at,
                     const int64_t *record_nbytes, int64_t records, int64_t data_nbytes, uint8_t *bounce,
                     const uint64_t *sums, int32_t *results) {
    struct shape shape = {record_nbytes, records, data_nbytes};
    struct iovec iov[CALL_SEGMENTS_MAX];
    for (int64_t i = 0; i < count; i++) {
        int segments = data_segments(iov, memory, record_at + i * records, &shape, bounce);
        results[i] = move_all(fd, 0, iov, segments, data_at[i]);
        if (results[i]) continue;
        segments = data_segments(iov, memory, record_at + i * records, &shape, bounce);
        if (data_sum(iov, segments) != sums[i])
            results[i] = -EBADMSG;
        else if (bounce)
            copy_records(memory, record_at + i * records, &shape, bounce, 0);
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
