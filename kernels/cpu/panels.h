/* How weights of a linear lie: in panels of 64 outputs, or of 32 where nothing is to be widened. A panel's weights lie in
 * words of 32 bits, one beside another for its outputs: a word holds 8 (int4), 4, 2 (bf16) or 1 weights of one output in
 * order along K, two or more of them in pairs (widen.h).
 */
#ifndef HEADWAY_PANELS_H
#define HEADWAY_PANELS_H

#include "linear.h"

#define VECTORS 4 /* of a panel */
#define PANEL (VECTORS * LANES)
#define WIDE_VECTORS 2
#define WIDE_PANEL (WIDE_VECTORS * LANES)
#define BLOCK 128 /* words along K that are summed for all rows before the next: they stay in a cache */

INLINE int64_t part(int64_t total, int64_t index, int64_t parts) { return total * index / parts; }

/* Puts a panel's sums `[rows, vectors * 16]` where they belong; what lies beyond the last output is dropped. */
void linear_answer(const linear_args *a, int64_t row, int64_t panel, int64_t rows, const float *sums, int vectors);

#endif
