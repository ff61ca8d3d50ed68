#ifndef HEADWAY_LINEAR_H
#define HEADWAY_LINEAR_H

#include "vec.h"

#define PACKED_ROWS 96 /* most rows that a thread processes at once with weights without scales */

typedef struct {
    const void *x;         /* [rows, inputs], contiguous, of `x_kind` */
    const uint32_t *words; /* [panels, inputs / weights per word, 64 or 32] */
    const float *scale;    /* [panels, inputs / group, 64]; null: weights without scales */
    const float *bias;     /* [panels, 64], or null */
    const void *residual;  /* [rows, outputs] of `out_kind`, added to the rounded output; null: none. May be `out` */
    void *out;             /* [rows, outputs], of `out_kind` */
    uint32_t *scratch;     /* [threads, PACKED_ROWS, inputs / weights per word], for weights without scales */
    int64_t rows, inputs, outputs, group /* `inputs` without scales */, format, x_kind, out_kind, threads;
} linear_args;

void linear(linear_args *a);

/* Compute the part of thread `self` of `threads`: its panels, for all rows. */
void linear_share(const linear_args *a, int64_t self);

#endif
