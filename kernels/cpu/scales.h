/* Scales of groups of weights: w = scale * q, or scale * q + offset, q being the integer that the words hold. Each kind
 * is stored with as many bits as in the files that have it.
 *
 * FLOAT_SCALE   `[panels, groups, 64]` fp32
 * HALF_SCALE    `[panels, groups, 64]` fp16                            (Q4_0, Q5_0, Q8_0)
 * HALF_OFFSET   `[panels, groups, 2, 64]` fp16: scales, then offsets   (Q4_1, Q5_1)
 * SUPER_OFFSET  `[panels, groups / 8]` superblocks                     (Q4_K, Q5_K)
 * SUPER_SCALE   `[panels, groups / 16]` superblocks                    (Q6_K)
 * BF16_SCALE    `[panels, groups, 64]` bf16
 * FLOAT_ZERO, HALF_ZERO, BF16_ZERO `[panels, groups]`: 64 scales in fp32, fp16 or bf16, then 64 zero points of 8 bits,
 *               signed; the offset is -scale * zero, which fp32 holds exactly if the scale has 16 bits
 *
 * A superblock begins with fp16 factors of its scales and, in SUPER_OFFSET, of its offsets, whose sign is reversed. It
 * goes on with 8-bit integers for each of its groups: the scales of the 64 outputs and, in SUPER_OFFSET, their offsets.
 */
#ifndef HEADWAY_SCALES_H
#define HEADWAY_SCALES_H

#include "panels.h"

enum {
    FLOAT_SCALE = 0, HALF_SCALE = 1, HALF_OFFSET = 2, SUPER_OFFSET = 3, SUPER_SCALE = 4,
    BF16_SCALE = 5, FLOAT_ZERO = 6, HALF_ZERO = 7, BF16_ZERO = 8
};

#define OFFSET_GROUPS 8 /* of a superblock */
#define OFFSET_BYTES (4 * PANEL + 2 * OFFSET_GROUPS * PANEL)
#define SCALE_GROUPS 16
#define SCALE_BYTES (2 * PANEL + SCALE_GROUPS * PANEL)
#define SCALE_FLOATS (16 * PANEL) /* of a batch */
#define BATCH_WEIGHTS 256 /* most weights of an output in a batch, unless a group is larger */

INLINE int has_zeros(int64_t scales) { return scales == FLOAT_ZERO || scales == HALF_ZERO || scales == BF16_ZERO; }

INLINE int has_offsets(int64_t scales) { return scales == HALF_OFFSET || scales == SUPER_OFFSET || has_zeros(scales); }

/* Return the number of groups whose scales are loaded at a time: no more than a superblock has. */
INLINE int64_t scale_batch(int64_t scales) { return has_offsets(scales) ? OFFSET_GROUPS : SCALE_GROUPS; }

/* Return how many groups of a panel are computed before the next ones, all of one superblock: their weights and scales
 * stay in cache. */
INLINE int64_t groups_at_once(const linear_args *a) {
    int64_t fitting = a->group < BATCH_WEIGHTS ? BATCH_WEIGHTS / a->group : 1, most = scale_batch(a->scales);
    return fitting < most ? fitting : most;
}

/* Return the number of floats that `load_scales` returns for a group. */
INLINE int64_t scale_step(int64_t scales) { return has_offsets(scales) ? 2 * PANEL : PANEL; }

/* Return the scales of `count` groups of a panel from `first` on, up to scale_batch and all of one superblock: the scales
 * `[64]` of each group and, if there are any, its offsets `[64]`. They are in `to` `[SCALE_FLOATS]`, or where they
 * are stored. */
const float *load_scales(const linear_args *a, int64_t panel, int64_t first, int64_t count, float *to);

#endif
