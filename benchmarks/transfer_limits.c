/* The limit that the shm transport is compared with: nothing but non-temporal stores, by one call for all blocks. */
#include <immintrin.h>
#include <pthread.h>
#include <stddef.h>
#include <stdint.h>

struct part {
    char *dst;
    const char *src;
    const int64_t *dst_at, *src_at;
    int64_t count, size;
};

__attribute__((target("avx2"))) static void *copy_part(void *argument) {
    struct part *p = argument;
    for (int64_t i = 0; i < p->count; i++) {
        __m256i *d = (__m256i *)(p->dst + p->dst_at[i]);
        const __m256i *s = (const __m256i *)(p->src + p->src_at[i]);
        for (int64_t j = 0; j < p->size / 32; j += 4) {
            __m256i a = _mm256_load_si256(s + j), b = _mm256_load_si256(s + j + 1);
            __m256i c = _mm256_load_si256(s + j + 2), e = _mm256_load_si256(s + j + 3);
            _mm256_stream_si256(d + j, a);
            _mm256_stream_si256(d + j + 1, b);
            _mm256_stream_si256(d + j + 2, c);
            _mm256_stream_si256(d + j + 3, e);
        }
    }
    _mm_sfence();
    return NULL;
}

/* Blocks of `size` bytes, a multiple of 128, at multiples of 32, in equal parts by 1 or 2 threads. */
int limit_copy(char *dst, const char *src, const int64_t *dst_at, const int64_t *src_at, int64_t count, int64_t size,
               int threads) {
    int64_t half = threads == 2 ? count / 2 : count;
    struct part first = {dst, src, dst_at, src_at, half, size};
    struct part second = {dst, src, dst_at + half, src_at + half, count - half, size};
    pthread_t other;
    if (threads == 2 && pthread_create(&other, NULL, copy_part, &second)) return -1;
    copy_part(&first);
    return threads == 2 ? pthread_join(other, NULL) : 0;
}
