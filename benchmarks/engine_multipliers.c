/* How fast a core multiplies and adds where nothing is read: each function runs `rounds` rounds of independent sums in
 * registers and returns how many operations that were (two for each product). See benchmarks/engine_own.py. */
#include <stdint.h>
#define API __attribute__((visibility("default")))

#if defined(__x86_64__) && defined(__GNUC__)
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

#define SUMS 12 /* enough for two multipliers of five cycles each, and for AVX2's sixteen registers */
/* By names, not in an array: a sum that went through memory would wait for it. */
#define EACH(DO) DO(0) DO(1) DO(2) DO(3) DO(4) DO(5) DO(6) DO(7) DO(8) DO(9) DO(10) DO(11)
#define HELD(I) __asm__ volatile("" : "+v"(sum##I)); /* or sums of the same numbers would be one */

API __attribute__((target("avx2,fma"))) int64_t multiply_avx2(int64_t rounds) {
    __m256 x = _mm256_setzero_ps();
    __asm__ volatile("" : "+v"(x));
#define BEGIN(I) __m256 sum##I = _mm256_setzero_ps();
#define ADD(I) sum##I = _mm256_fmadd_ps(x, x, sum##I); HELD(I)
    EACH(BEGIN)
    for (int64_t round = 0; round < rounds; round++) { EACH(ADD) }
#undef BEGIN
#undef ADD
    return rounds * SUMS * 8 * 2;
}

API __attribute__((target("avx512f"))) int64_t multiply_avx512(int64_t rounds) {
    __m512 x = _mm512_setzero_ps();
    __asm__ volatile("" : "+v"(x));
#define BEGIN(I) __m512 sum##I = _mm512_setzero_ps();
#define ADD(I) sum##I = _mm512_fmadd_ps(x, x, sum##I); HELD(I)
    EACH(BEGIN)
    for (int64_t round = 0; round < rounds; round++) { EACH(ADD) }
#undef ADD
    return rounds * SUMS * 16 * 2;
}

API __attribute__((target("avx512f,avx512bf16"))) int64_t multiply_avx512bf16(int64_t rounds) {
    __m512i x = _mm512_setzero_si512();
    __asm__ volatile("" : "+v"(x));
#define ADD(I) sum##I = _mm512_dpbf16_ps(sum##I, (__m512bh)x, (__m512bh)x); HELD(I)
    EACH(BEGIN)
    for (int64_t round = 0; round < rounds; round++) { EACH(ADD) }
    return rounds * SUMS * 32 * 2;
}

API __attribute__((target("amx-tile,amx-bf16"))) int64_t multiply_amx(int64_t rounds) {
    struct {
        uint8_t palette, start, zeros[14];
        uint16_t bytes[16];
        uint8_t rows[16];
    } __attribute__((aligned(64))) tiles = {.palette = 1};
    for (int i = 0; i < 8; i++) tiles.bytes[i] = 64, tiles.rows[i] = 16;
    syscall(SYS_arch_prctl, 0x1023, 18); /* tiles of this process are kept for it */
    _tile_loadconfig(&tiles);
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    _tile_zero(4);
    _tile_zero(5);
    _tile_zero(6);
    _tile_zero(7);
    for (int64_t round = 0; round < rounds; round++) {
        _tile_dpbf16ps(0, 6, 7);
        _tile_dpbf16ps(1, 6, 7);
        _tile_dpbf16ps(2, 6, 7);
        _tile_dpbf16ps(3, 6, 7);
        _tile_dpbf16ps(4, 6, 7);
        _tile_dpbf16ps(5, 6, 7);
    }
    _tile_release();
    return rounds * 6 * 16 * 16 * 32 * 2;
}
#endif
