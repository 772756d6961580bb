/* Copies of many records between two mapped regions, by one call that the caller makes without holding any lock.
 *
 * Stores are non-temporal: a record of another process's region is not read again by this core, so it need not be
 * read into its cache before it is overwritten, nor push anything out of there (Intel 64 and IA-32 Architectures
 * Optimization Reference Manual, "non-temporal stores"). Such stores are weakly ordered, hence the fence at the end.
 */
#include <stdint.h>
#include <string.h>

#if defined(__x86_64__)
#include <immintrin.h>

/* Below this a record's ends, which are copied by plain stores, are too much of it. */
#define STREAM_BYTES_MIN 512
/* The hardware's own prefetch needs some lines to get going, and stops at the end of each 4 KiB page. So the first
 * lines of a record are asked for while the one before it is copied, and in records too short for that to be made good
 * the source is asked for all the way. */
#define AHEAD_BYTES 1024
#define AHEAD_RECORD_BYTES_MAX (128 << 10)

typedef void (*stream_fn)(uint8_t *, const uint8_t *, size_t, size_t);

/* Each copies `n` bytes, a multiple of 256; `dst` is aligned to 64, `src` is not. `ahead` is a distance, or 0. */

__attribute__((target("avx512f"))) static void stream_avx512(uint8_t *dst, const uint8_t *src, size_t n, size_t ahead) {
    for (size_t i = 0; i < n; i += 256) {
        if (ahead)
            for (size_t j = 0; j < 256; j += 64) _mm_prefetch((const char *)src + i + j + ahead, _MM_HINT_T0);
        __m512i a = _mm512_loadu_si512(src + i), b = _mm512_loadu_si512(src + i + 64);
        __m512i c = _mm512_loadu_si512(src + i + 128), d = _mm512_loadu_si512(src + i + 192);
        _mm512_stream_si512((__m512i *)(dst + i), a);
        _mm512_stream_si512((__m512i *)(dst + i + 64), b);
        _mm512_stream_si512((__m512i *)(dst + i + 128), c);
        _mm512_stream_si512((__m512i *)(dst + i + 192), d);
    }
}

__attribute__((target("avx2"))) static void stream_avx2(uint8_t *dst, const uint8_t *src, size_t n, size_t ahead) {
    for (size_t i = 0; i < n; i += 128) {
        if (ahead)
            for (size_t j = 0; j < 128; j += 64) _mm_prefetch((const char *)src + i + j + ahead, _MM_HINT_T0);
        __m256i a = _mm256_loadu_si256((const __m256i *)(src + i));
        __m256i b = _mm256_loadu_si256((const __m256i *)(src + i + 32));
        __m256i c = _mm256_loadu_si256((const __m256i *)(src + i + 64));
        __m256i d = _mm256_loadu_si256((const __m256i *)(src + i + 96));
        _mm256_stream_si256((__m256i *)(dst + i), a);
        _mm256_stream_si256((__m256i *)(dst + i + 32), b);
        _mm256_stream_si256((__m256i *)(dst + i + 64), c);
        _mm256_stream_si256((__m256i *)(dst + i + 96), d);
    }
}

static void stream_sse2(uint8_t *dst, const uint8_t *src, size_t n, size_t ahead) {
    for (size_t i = 0; i < n; i += 64) {
        if (ahead) _mm_prefetch((const char *)src + i + ahead, _MM_HINT_T0);
        for (size_t j = 0; j < 64; j += 16)
            _mm_stream_si128((__m128i *)(dst + i + j), _mm_loadu_si128((const __m128i *)(src + i + j)));
    }
}

static stream_fn stream_of(int level) {
    switch (level) {
        case 3: return stream_avx512;
        case 2: return stream_avx2;
        case 1: return stream_sse2;
        default: return 0;
    }
}

int baton_copy_level(void) {
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512f")) return 3;
    return __builtin_cpu_supports("avx2") ? 2 : 1;
}

static void copy_one(uint8_t *dst, const uint8_t *src, size_t n, stream_fn stream) {
    if (!stream || n < STREAM_BYTES_MIN) {
        memcpy(dst, src, n);
        return;
    }
    size_t head = -(uintptr_t)dst & 63;
    memcpy(dst, src, head);
    size_t body = (n - head) & ~(size_t)255;
    stream(dst + head, src + head, body, n <= AHEAD_RECORD_BYTES_MAX ? AHEAD_BYTES : 0);
    memcpy(dst + head + body, src + head + body, n - head - body);
}

static void first_lines(const uint8_t *src) {
    for (size_t j = 0; j < AHEAD_BYTES; j += 64) _mm_prefetch((const char *)src + j, _MM_HINT_T0);
}

static void fence(void) { _mm_sfence(); }

#else

typedef int stream_fn;
static stream_fn stream_of(int level) { return level; }
int baton_copy_level(void) { return 0; }
static void copy_one(uint8_t *dst, const uint8_t *src, size_t n, stream_fn stream) {
    (void)stream;
    memcpy(dst, src, n);
}
static void first_lines(const uint8_t *src) { (void)src; }
static void fence(void) { __atomic_thread_fence(__ATOMIC_RELEASE); }

#endif

/* Copy `count` records: `nbytes[i]` bytes from `src + src_at[i]` to `dst + dst_at[i]`. The caller has checked that all
 * of them lie inside both regions, and that these do not overlap. `level` is at most that of baton_copy_level: 3
 * AVX-512, 2 AVX2, 1 SSE2, 0 plain. All stores are visible to whoever sees a later store of this thread. */
void baton_copy(uint8_t *dst, const uint8_t *src, const int64_t *dst_at, const int64_t *src_at, const int64_t *nbytes,
                int64_t count, int level) {
    stream_fn stream = stream_of(level);
    for (int64_t i = 0; i < count; i++) {
        if (i + 1 < count) first_lines(src + src_at[i + 1]);
        copy_one(dst + dst_at[i], src + src_at[i], (size_t)nbytes[i], stream);
    }
    fence();
}
