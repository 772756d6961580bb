/* Vectors of NEON on aarch64, four registers for each; see parts/vectors.h for what each function does. */
#pragma once
#include <arm_neon.h>
#include <stdint.h>
#include <string.h>

#ifdef PAIRS
#pragma GCC target("arch=armv8.2-a+bf16")
#endif
#include "../parts/base.h"

typedef struct {
    float32x4_t v[4];
} F16;
typedef struct {
    int32x4_t v[4];
} I16;
typedef struct {
    uint16x8_t a, b;
} B16;
typedef struct {
    uint32x4_t v[4];
} M16; /* a lane is all ones or zero */

#ifdef PAIRS
#define ROWS_MAX 3 /* times eight registers, four for half of the weights' pairs, and one for x: 29 of 32 */
#else
#define ROWS_MAX 6 /* times four registers, four for the weights' half, and one for x: 29 of 32 */
#endif
#define HALVES 1
#define FEW_ROWS 2

#define LANEWISE1(TYPE, NAME, FROM, CALL)                                                                       \
    INLINE TYPE NAME(FROM x) { return (TYPE){{CALL(x.v[0]), CALL(x.v[1]), CALL(x.v[2]), CALL(x.v[3])}}; }
#define LANEWISE2(TYPE, NAME, FROM, CALL)                                                                       \
    INLINE TYPE NAME(FROM x, FROM y) {                                                                          \
        return (TYPE){{CALL(x.v[0], y.v[0]), CALL(x.v[1], y.v[1]), CALL(x.v[2], y.v[2]), CALL(x.v[3], y.v[3])}}; \
    }

INLINE void pause_core(void) { __asm__ volatile("yield"); }
INLINE F16 f_all(float x) {
    float32x4_t v = vdupq_n_f32(x);
    return (F16){{v, v, v, v}};
}
INLINE F16 f_zero(void) { return f_all(0.0f); }
INLINE F16 f_load(const float *x) { return (F16){{vld1q_f32(x), vld1q_f32(x + 4), vld1q_f32(x + 8), vld1q_f32(x + 12)}}; }
INLINE void f_store(float *x, F16 v) { UNROLL for (int i = 0; i < 4; i++) vst1q_f32(x + 4 * i, v.v[i]); }
LANEWISE2(F16, f_add, F16, vaddq_f32)
LANEWISE2(F16, f_sub, F16, vsubq_f32)
LANEWISE2(F16, f_mul, F16, vmulq_f32)
LANEWISE2(F16, f_div, F16, vdivq_f32)
LANEWISE2(F16, f_max, F16, vmaxq_f32)
INLINE F16 f_fma(F16 x, F16 y, F16 z) {
    UNROLL for (int i = 0; i < 4; i++) z.v[i] = vfmaq_f32(z.v[i], x.v[i], y.v[i]);
    return z;
}
LANEWISE1(F16, f_round, F16, vrndnq_f32)
/* x * 2^n for whole n: 0 below -126, infinity from 128 on. */
INLINE float32x4_t times_power4(float32x4_t x, float32x4_t n) {
    int32x4_t whole = vcvtnq_s32_f32(vminq_f32(vmaxq_f32(n, vdupq_n_f32(-127.0f)), vdupq_n_f32(128.0f)));
    return vmulq_f32(x, vreinterpretq_f32_s32(vshlq_n_s32(vaddq_s32(whole, vdupq_n_s32(127)), 23)));
}
LANEWISE2(F16, f_times_power, F16, times_power4)
LANEWISE1(F16, f_of_whole, I16, vcvtq_f32_s32)
LANEWISE1(F16, f_of_bits, I16, vreinterpretq_f32_s32)
INLINE float f_first(F16 x) { return vgetq_lane_f32(x.v[0], 0); }
INLINE float f_sum(F16 x) {
    return vaddvq_f32(vaddq_f32(vaddq_f32(x.v[0], x.v[1]), vaddq_f32(x.v[2], x.v[3])));
}
INLINE float f_highest(F16 x) {
    return vmaxvq_f32(vmaxq_f32(vmaxq_f32(x.v[0], x.v[1]), vmaxq_f32(x.v[2], x.v[3])));
}

INLINE I16 i_load(const void *x) {
    const int32_t *at = x;
    return (I16){{vld1q_s32(at), vld1q_s32(at + 4), vld1q_s32(at + 8), vld1q_s32(at + 12)}};
}
INLINE I16 i_load_halves(const void *x) {
    int16x8_t a = vld1q_s16(x), b = vld1q_s16((const int16_t *)x + 8);
    return (I16){{vmovl_s16(vget_low_s16(a)), vmovl_high_s16(a), vmovl_s16(vget_low_s16(b)), vmovl_high_s16(b)}};
}
INLINE void i_store(void *x, I16 v) { UNROLL for (int i = 0; i < 4; i++) vst1q_s32((int32_t *)x + 4 * i, v.v[i]); }
INLINE I16 i_all(int32_t x) {
    int32x4_t v = vdupq_n_s32(x);
    return (I16){{v, v, v, v}};
}
INLINE I16 i_zero(void) { return i_all(0); }
LANEWISE2(I16, i_add, I16, vaddq_s32)
LANEWISE2(I16, i_and, I16, vandq_s32)
LANEWISE2(I16, i_or, I16, vorrq_s32)
INLINE I16 i_shl(I16 x, int n) {
    UNROLL for (int i = 0; i < 4; i++) x.v[i] = vshlq_s32(x.v[i], vdupq_n_s32(n));
    return x;
}
INLINE I16 i_shr(I16 x, int n) {
    UNROLL for (int i = 0; i < 4; i++)
        x.v[i] = vreinterpretq_s32_u32(vshlq_u32(vreinterpretq_u32_s32(x.v[i]), vdupq_n_s32(-n)));
    return x;
}
INLINE I16 i_sar(I16 x, int n) {
    UNROLL for (int i = 0; i < 4; i++) x.v[i] = vshlq_s32(x.v[i], vdupq_n_s32(-n));
    return x;
}
INLINE int32_t i_least(I16 x) {
    return vminvq_s32(vminq_s32(vminq_s32(x.v[0], x.v[1]), vminq_s32(x.v[2], x.v[3])));
}
INLINE I16 i_of_b(B16 x) {
    return (I16){{vreinterpretq_s32_u32(vmovl_u16(vget_low_u16(x.a))), vreinterpretq_s32_u32(vmovl_high_u16(x.a)),
                  vreinterpretq_s32_u32(vmovl_u16(vget_low_u16(x.b))), vreinterpretq_s32_u32(vmovl_high_u16(x.b))}};
}

static const uint32_t FIRST[32] = {~0u, ~0u, ~0u, ~0u, ~0u, ~0u, ~0u, ~0u, ~0u, ~0u, ~0u, ~0u, ~0u, ~0u, ~0u, ~0u};
INLINE M16 m_first(int64_t n) {
    const uint32_t *at = FIRST + 16 - (n < 16 ? n : 16);
    return (M16){{vld1q_u32(at), vld1q_u32(at + 4), vld1q_u32(at + 8), vld1q_u32(at + 12)}};
}
INLINE M16 m_none(void) { return (M16){{vdupq_n_u32(0), vdupq_n_u32(0), vdupq_n_u32(0), vdupq_n_u32(0)}}; }
LANEWISE2(M16, m_or, M16, vorrq_u32)
LANEWISE2(M16, m_and, M16, vandq_u32)
INLINE int m_any(M16 m) {
    return vmaxvq_u32(vorrq_u32(vorrq_u32(m.v[0], m.v[1]), vorrq_u32(m.v[2], m.v[3]))) != 0;
}
LANEWISE2(M16, f_above, F16, vcgtq_f32)
LANEWISE2(M16, f_equal, F16, vceqq_f32)
INLINE M16 f_nan(F16 x) {
    M16 m = f_equal(x, x);
    UNROLL for (int i = 0; i < 4; i++) m.v[i] = vmvnq_u32(m.v[i]);
    return m;
}
INLINE I16 i_pick(M16 m, I16 x, I16 y) {
    UNROLL for (int i = 0; i < 4; i++) y.v[i] = vbslq_s32(m.v[i], x.v[i], y.v[i]);
    return y;
}
INLINE F16 f_pick(M16 m, F16 x, F16 y) {
    UNROLL for (int i = 0; i < 4; i++) y.v[i] = vbslq_f32(m.v[i], x.v[i], y.v[i]);
    return y;
}
INLINE F16 f_keep(M16 m, F16 x) { return f_pick(m, x, f_zero()); }

INLINE F16 widen(B16 x) { return f_of_bits(i_shl(i_of_b(x), 16)); }
INLINE B16 b_load(const bf16 *x) { return (B16){vld1q_u16(x), vld1q_u16(x + 8)}; }
INLINE void b_store(bf16 *x, B16 v) { vst1q_u16(x, v.a), vst1q_u16(x + 8, v.b); }
#ifdef PAIRS
INLINE uint16x8_t narrow8(float32x4_t low, float32x4_t high) {
    return vreinterpretq_u16_bf16(vcvtq_high_bf16_f32(vcvtq_low_bf16_f32(low), high));
}
INLINE B16 narrow(F16 x) { return (B16){narrow8(x.v[0], x.v[1]), narrow8(x.v[2], x.v[3])}; }
#else
/* To the nearest, ties to even; a NaN stays one. */
INLINE uint16x4_t narrow4(float32x4_t x) {
    uint32x4_t bits = vreinterpretq_u32_f32(x), odd = vandq_u32(vshrq_n_u32(bits, 16), vdupq_n_u32(1));
    uint32x4_t up = vaddq_u32(vaddq_u32(bits, vdupq_n_u32(0x7fff)), odd);
    return vshrn_n_u32(vbslq_u32(vceqq_f32(x, x), up, vdupq_n_u32(0x7fc00000)), 16);
}
INLINE B16 narrow(F16 x) {
    return (B16){vcombine_u16(narrow4(x.v[0]), narrow4(x.v[1])), vcombine_u16(narrow4(x.v[2]), narrow4(x.v[3]))};
}
#endif

/* At an end, seldom enough for a call. */
static __attribute__((noinline)) B16 load_part(const bf16 *x, int64_t left) {
    bf16 part[16] = {0};
    for (int i = 0; i < 16; i++)
        if (i < left) part[i] = x[i];
    return b_load(part);
}

static __attribute__((noinline)) void store_part(bf16 *x, int64_t left, B16 v) {
    bf16 part[16];
    b_store(part, v);
    for (int i = 0; i < 16; i++)
        if (i < left) x[i] = part[i];
}

INLINE B16 load16(const bf16 *x, int64_t left) { return left >= 16 ? b_load(x) : load_part(x, left); }

INLINE void store16(bf16 *x, int64_t left, B16 v) {
    if (left >= 16) b_store(x, v);
    else store_part(x, left, v);
}

INLINE I16 i_joined(B16 low, B16 high) {
    return (I16){{vreinterpretq_s32_u16(low.a), vreinterpretq_s32_u16(low.b), vreinterpretq_s32_u16(high.a),
                  vreinterpretq_s32_u16(high.b)}};
}
INLINE B16 i_low(I16 x) { return (B16){vreinterpretq_u16_s32(x.v[0]), vreinterpretq_u16_s32(x.v[1])}; }
INLINE B16 i_high(I16 x) { return (B16){vreinterpretq_u16_s32(x.v[2]), vreinterpretq_u16_s32(x.v[3])}; }

INLINE I16 load32(const bf16 *x, int64_t left) {
    if (left >= 32) return i_load(x);
    return i_joined(load16(x, left), load16(x + 16, left - 16));
}

INLINE void store32(bf16 *x, int64_t left, I16 v) {
    store16(x, left, i_low(v));
    store16(x + 16, left - 16, i_high(v));
}

INLINE float32x4_t sums4(const F16 *v) {
    float32x4_t t[4];
    UNROLL for (int i = 0; i < 4; i++)
        t[i] = vaddq_f32(vaddq_f32(v[i].v[0], v[i].v[1]), vaddq_f32(v[i].v[2], v[i].v[3]));
    return vpaddq_f32(vpaddq_f32(t[0], t[1]), vpaddq_f32(t[2], t[3]));
}
INLINE F16 sums16(F16 *v) { return (F16){{sums4(v), sums4(v + 4), sums4(v + 8), sums4(v + 12)}}; }

INLINE void transpose4(int32x4_t *a, int32x4_t *b, int32x4_t *c, int32x4_t *d) {
    int64x2_t t0 = vreinterpretq_s64_s32(vtrn1q_s32(*a, *b)), t1 = vreinterpretq_s64_s32(vtrn2q_s32(*a, *b));
    int64x2_t t2 = vreinterpretq_s64_s32(vtrn1q_s32(*c, *d)), t3 = vreinterpretq_s64_s32(vtrn2q_s32(*c, *d));
    *a = vreinterpretq_s32_s64(vtrn1q_s64(t0, t2)), *b = vreinterpretq_s32_s64(vtrn1q_s64(t1, t3));
    *c = vreinterpretq_s32_s64(vtrn2q_s64(t0, t2)), *d = vreinterpretq_s32_s64(vtrn2q_s64(t1, t3));
}

INLINE void transpose16(I16 *v) {
    UNROLL for (int i = 0; i < 16; i += 4) UNROLL for (int j = 0; j < 4; j++)
        transpose4(&v[i].v[j], &v[i + 1].v[j], &v[i + 2].v[j], &v[i + 3].v[j]);
    UNROLL for (int i = 0; i < 4; i++) UNROLL for (int j = i + 1; j < 4; j++) UNROLL for (int k = 0; k < 4; k++) {
        int32x4_t other = v[4 * i + k].v[j];
        v[4 * i + k].v[j] = v[4 * j + k].v[i];
        v[4 * j + k].v[i] = other;
    }
}

#ifdef PAIRS
INLINE F16 f_pairs(I16 a, I16 b, F16 sum) {
    UNROLL for (int i = 0; i < 4; i++)
        sum.v[i] = vbfdotq_f32(sum.v[i], vreinterpretq_bf16_s32(a.v[i]), vreinterpretq_bf16_s32(b.v[i]));
    return sum;
}
INLINE float f_highest_of(M16 m, F16 x) { return f_highest(f_pick(m, x, f_all(-__builtin_inff()))); }

INLINE void i_store_first(uint32_t *to, int64_t n, I16 v) {
    int32_t all[16];
    i_store(all, v);
    for (int64_t i = 0; i < n; i++) to[i] = (uint32_t)all[i];
}

INLINE int32x4_t zipped(int32x4_t x, int32x4_t y, int second) {
    int16x8_t a = vreinterpretq_s16_s32(x), b = vreinterpretq_s16_s32(y);
    return vreinterpretq_s32_s16(second ? vzip2q_s16(a, b) : vzip1q_s16(a, b));
}
INLINE I16 pairs_low(I16 x, I16 y) {
    return (I16){{zipped(x.v[0], y.v[0], 0), zipped(x.v[0], y.v[0], 1), zipped(x.v[1], y.v[1], 0),
                  zipped(x.v[1], y.v[1], 1)}};
}
INLINE I16 pairs_high(I16 x, I16 y) {
    return (I16){{zipped(x.v[2], y.v[2], 0), zipped(x.v[2], y.v[2], 1), zipped(x.v[3], y.v[3], 0),
                  zipped(x.v[3], y.v[3], 1)}};
}

INLINE B16 whole16(int8x16_t x) {
    int16x8_t a = vmovl_s8(vget_low_s8(x)), b = vmovl_high_s8(x);
    return narrow(f_of_whole((I16){{vmovl_s16(vget_low_s16(a)), vmovl_high_s16(a), vmovl_s16(vget_low_s16(b)),
                                    vmovl_high_s16(b)}}));
}
INLINE I16 pairs_of_bytes(const uint8_t *x) {
    return i_joined(whole16(vld1q_s8((const int8_t *)x)), whole16(vld1q_s8((const int8_t *)x + 16)));
}

/* -8..7 in bfloat16: their lower bytes, then their upper ones. */
static const uint8_t NIBBLES[32] = {0x00, 0xe0, 0xc0, 0xa0, 0x80, 0x40, 0x00, 0x80, 0x00, 0x80, 0x00,
                                    0x40, 0x80, 0xa0, 0xc0, 0xe0, 0xc1, 0xc0, 0xc0, 0xc0, 0xc0, 0xc0,
                                    0xc0, 0xbf, 0x00, 0x3f, 0x40, 0x40, 0x40, 0x40, 0x40, 0x40};
typedef uint8x16x2_t Nibbles;
INLINE Nibbles nibbles(void) { return (Nibbles){{vld1q_u8(NIBBLES), vld1q_u8(NIBBLES + 16)}}; }
INLINE I16 pairs_of_nibbles(I16 x, int j, Nibbles table) {
    UNROLL for (int i = 0; i < 4; i++) {
        uint16x8_t at = vshlq_u16(vreinterpretq_u16_s32(x.v[i]), vdupq_n_s16((int16_t)(-4 * j)));
        at = vandq_u16(at, vdupq_n_u16(15));
        at = vaddq_u16(vorrq_u16(at, vshlq_n_u16(at, 8)), vdupq_n_u16(0x1000)); /* upper bytes: the table's second half */
        x.v[i] = vreinterpretq_s32_u8(vqtbl2q_u8(table, vreinterpretq_u8_u16(at)));
    }
    return x;
}
#endif
