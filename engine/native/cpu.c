/* Which sets of compute kernels this CPU can run: bits by the names of engine/kernel_sets.py, in kernels.py's order. */
#include <stdint.h>

enum { AVX2 = 1, AVX512 = 2, AVX512BF16 = 4, AMX = 8, NEON = 16 };

#if defined(__x86_64__) && defined(__GNUC__)
#include <cpuid.h>

int baton_cpu_sets(void) {
    int sets = 0;
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) sets |= AVX2;
    if (sets && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq"))
        sets |= AVX512;
    if (sets & AVX512 && __builtin_cpu_supports("avx512bf16")) sets |= AVX512BF16;
    unsigned a, b, c, d;
    if (sets & AVX512BF16 && __get_cpuid_count(7, 0, &a, &b, &c, &d) && d >> 24 & 1 && d >> 22 & 1) sets |= AMX;
    return sets;
}

#else
int baton_cpu_sets(void) { return 0; }
#endif
