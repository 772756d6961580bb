/* The bfloat16 arithmetic of a decoder layer on a CPU with AVX512-BF16 (VDPBF16PS: pairs of products, sums in float32).
 *
 * Every sum over an inner dimension runs in one order, whatever the number of rows: a row's result does not depend on
 * what else is in the batch. No function checks what it is given, or allocates memory: both are its caller's.
 *
 * The parts are headers of this one translation unit, so that the compiler sees a product and its use together and
 * keeps the sums in registers, with one set of instructions for all. From the bottom up:
 *
 *   base.h       instructions, words                      vectors.h      bfloat16 in vectors
 *   team.h       threads, their work and their barrier    panels.h       rows times a panel, in registers
 *   norm.h       normalisation                            products.h     a product shared by a team, and its epilogue
 *   records.h    rotation, keys and values to their slots
 *   attention.h  what attention reads; attend_few.h, attend_many.h: decoding, prefill; attend.h: shared by a team
 *   step.h       layers: what a step calls                highest.h      the highest score
 *
 * Words: "pair": two bfloat16 of neighbouring k in 32 bits. "panel": 32 columns of a packed matrix, which lie as
 * [K/2][32][2], so that one load is 16 columns of two neighbouring k. R: rows at once.
 */

#if defined(__x86_64__) && defined(__GNUC__)
#include "parts/highest.h"
#include "parts/norm.h"
#include "parts/products.h"
#include "parts/records.h"
#include "parts/step.h"
#endif
