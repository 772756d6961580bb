/* Everything of a set, whose header has been included.
 *
 * All parts are headers of one translation unit, so that the compiler sees a product and its use together and keeps the
 * sums in registers, with one set of instructions for all. From the bottom up:
 *
 *   base.h       words                                   vectors.h      what a set provides, rounding, e^x
 *   team.h       threads, their work and their barrier   norm.h         normalisation
 *   linear.h     one product and its epilogue
 *   pairs.h, wide.h   rows times a panel: by pairs of bfloat16, or in float32; of pairs_products.h, wide_products.h,
 *                     pairs_few.h and so on one is included
 *   products.h   a product shared by a team              records.h      rotation, keys and values to their slots
 *   attention.h  what attention reads; attend_few.h, attend_many.h: decoding, prefill; attend.h: shared by a team
 *   step.h       layers: what a step calls               highest.h      the highest score
 *
 * Every sum over an inner dimension runs in one order, whatever the number of rows: a row's result does not depend on
 * what else is in the batch. No function checks what it is given, or allocates memory: both are its caller's.
 *
 * Words: "pair": two bfloat16 of neighbouring k in 32 bits. "panel": 32 columns of a packed matrix, which lie as
 * [K/2][32][2], so that one load is 16 columns of two neighbouring k. R: rows at once.
 */
#pragma once
#include "highest.h"
#include "norm.h"
#include "products.h"
#include "records.h"
#include "step.h"
