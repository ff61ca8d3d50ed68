/* Layout of a linear layer's weights: panels of 64 outputs, or of 32 if nothing is widened. A panel consists of 32-bit
 * words, those of its outputs next to each other. A word holds 8 (int4), 4 (8 bits), 2 (bf16) or 1 (fp32) weights of
 * one output in order along K, in pairs (widen.h) if there are more than one. Weights of 5 and 6 bits are divided.
 */
#ifndef HEADWAY_PANELS_H
#define HEADWAY_PANELS_H

#include "linear.h"

#define PANEL 64
#define VECTORS (PANEL / LANES)
#define WIDE_PANEL 32
#define WIDE_VECTORS (WIDE_PANEL / LANES)
#define BLOCK 128 /* words along K that are summed for all rows before the next block: they stay in cache */

INLINE int64_t part(int64_t total, int64_t index, int64_t parts) { return total * index / parts; }

/* Pack `rows` rows `[rows, steps]` of words, steps being a multiple of 4, into a tile `[steps, places]`, with zeros for the
 * places beyond them. */
void pack_tile(const uint32_t *x, int64_t rows, int64_t places, int64_t steps, uint32_t *to);

/* Write the outputs for a panel's sums `[rows, vectors * 16]`; columns beyond the last output are dropped. */
void linear_answer(const linear_args *a, int64_t row, int64_t panel, int64_t rows, const float *sums, int vectors);

#endif
