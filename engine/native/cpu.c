/* Which sets of compute kernels this CPU can run: bits by the names of engine/kernel_sets.py, in kernels.py's order. */
#include <stdint.h>

enum { AVX2 = 1, AVX512 = 2, AVX512BF16 = 4, AMX = 8, NEON = 16, NEONBF16 = 32, SLOW_PAIRS = 64 };

#if defined(__x86_64__) && defined(__GNUC__)
#include <cpuid.h>

#ifdef __linux__
#include <sys/syscall.h>
#include <unistd.h>

#define REQUEST_PERMISSION 0x1023 /* of arch_prctl: tiles are state that the system keeps for those who have asked */
#define TILE_DATA 18

static int tiles_are_granted(void) { return !syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA); }
#else
static int tiles_are_granted(void) { return 0; }
#endif

/* VDPBF16PS takes two cycles and more of one multiplier on Intel's CPUs since Sapphire Rapids, less than the float32
 * products that it stands for; on Cooper Lake (model 85), which has no tiles, and on AMD's it does not. */
static int slow_pairs(void) {
    unsigned a, b, c, d;
    if (!__get_cpuid(0, &a, &b, &c, &d) || b != signature_INTEL_ebx) return 0;
    __get_cpuid(1, &a, &b, &c, &d);
    return ((a >> 4 & 15) | (a >> 12 & 0xf0)) != 85;
}

int baton_cpu_sets(void) {
    int sets = 0;
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) sets |= AVX2;
    if (sets && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq"))
        sets |= AVX512;
    if (sets & AVX512 && __builtin_cpu_supports("avx512bf16")) sets |= AVX512BF16 | (slow_pairs() ? SLOW_PAIRS : 0);
    unsigned a, b, c, d;
    if (sets & AVX512BF16 && __get_cpuid_count(7, 0, &a, &b, &c, &d) && d >> 24 & 1 && d >> 22 & 1 &&
        tiles_are_granted())
        sets |= AMX;
    return sets;
}

#elif defined(__aarch64__)
#ifdef __linux__
#include <sys/auxv.h>

int baton_cpu_sets(void) { return NEON | (getauxval(AT_HWCAP2) >> 14 & 1 ? NEONBF16 : 0); }
#else
int baton_cpu_sets(void) { return NEON; } /* every such CPU has it */
#endif

#else
int baton_cpu_sets(void) { return 0; }
#endif
