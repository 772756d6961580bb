/* What every set's header provides, in vectors of 16, and what follows from it: rounding, e^x. Nothing here is shared
 * by threads.
 *
 *   F16, I16   16 float32, 16 int32; an I16 also holds 16 pairs of bfloat16, the lower k in the lower half
 *   B16, M16   16 bfloat16; a choice of lanes
 *   ROWS_MAX   rows whose sums fit into registers, with HALVES (1 or 2) vectors of columns each; FEW_ROWS: with two
 *              vectors of columns, and the weights' pairs being widened beside them
 *
 *   f_...      float32. f_load and f_store take any address. f_round: to the nearest whole number, ties to even.
 *              f_times_power(x, n): x * 2^n for whole n from -126 to 127, about 0 below, infinity above.
 *              f_of_whole: int32 -> float32; f_of_bits: the same bits. f_sum, f_highest: of all lanes, in one order
 *   i_...      int32. i_load_halves: 16 int16, sign-extended. i_shr: zeros come in, i_sar: the sign. i_of_b: zeros above
 *   m_first(n) the first n lanes, all where n >= 16; f_above, f_equal, f_nan compare; f_pick and i_pick choose by lane;
 *              f_keep: 0 in other lanes
 *   widen, narrow                 bfloat16 -> float32 and back, to the nearest, ties to even
 *   load16, store16(x, left)      `left` elements, or all where there are more; zeros past the end. left > 0
 *   load32, store32(x, left)      the same for 32; `left` may be 0 or less
 *   i_joined, i_low, i_high       two B16 in a row <-> 32 bfloat16
 *   sums16(v)                     16 vectors -> one vector of their 16 sums
 *   transpose16(v)                row i of 16 becomes column i
 *
 * A set that multiplies pairs of bfloat16 (VDPBF16PS, BFDOT) defines PAIRS and has products of its own (pairs.h); the
 * others widen weights to float32 (wide.h). One with PAIRS also provides:
 *
 *   f_pairs(a, b, sum)            sum + the two products of each pair of a and b
 *   f_highest_of(m, x)            of some lanes
 *   i_store_first(to, n, v)       the first n lanes
 *   pairs_low, pairs_high(x, y)   pairs of one number of x and one of y: those of the first 16, of the last 16
 *   pairs_of_bytes(at)            32 int8 -> 16 pairs
 *   pairs_of_nibbles(x, j, table) nibble j of 32 words -> 16 pairs of -8..7; `nibbles` is the table
 */
#pragma once

INLINE F16 rounded(F16 x) { return widen(narrow(x)); }
/* The two bfloat16 of each pair. */
INLINE F16 evens(I16 x) { return f_of_bits(i_shl(x, 16)); }
INLINE F16 odds(I16 x) { return f_of_bits(i_and(x, i_all((int)0xffff0000))); }

/* e^x, to a few units in the last place: 2^n times a polynomial on [-ln2/2, ln2/2] (Cephes, expf). */
INLINE F16 exp16(F16 x) {
    x = f_max(x, f_all(-87.0f));
    F16 n = f_round(f_mul(x, f_all(1.44269504088896341f)));
    x = f_fma(n, f_all(-0.693359375f), x);
    x = f_fma(n, f_all(2.12194440e-4f), x);
    F16 y = f_all(1.9875691500e-4f);
    y = f_fma(y, x, f_all(1.3981999507e-3f));
    y = f_fma(y, x, f_all(8.3334519073e-3f));
    y = f_fma(y, x, f_all(4.1665795894e-2f));
    y = f_fma(y, x, f_all(1.6666665459e-1f));
    y = f_fma(y, x, f_all(5.0000001201e-1f));
    y = f_fma(f_mul(x, x), y, f_add(x, f_all(1.0f)));
    return f_times_power(y, n);
}

/* 2^x for x <= 0, to 4e-6 of it: more than enough for what becomes bfloat16 (Taylor's series on [-1/2, 1/2]). */
INLINE F16 power16(F16 x) {
    F16 n = f_round(x);
    x = f_sub(x, n);
    F16 y = f_all(1.33335581e-3f);
    y = f_fma(y, x, f_all(9.61812911e-3f));
    y = f_fma(y, x, f_all(5.55041087e-2f));
    y = f_fma(y, x, f_all(2.40226507e-1f));
    y = f_fma(y, x, f_all(6.93147181e-1f));
    return f_times_power(f_fma(y, x, f_all(1.0f)), n);
}
