#ifndef HEADWAY_LINEAR_H
#define HEADWAY_LINEAR_H

#include "vec.h"

#define PACKED_ROWS 96 /* most rows that a thread processes at once */
#define FILLED_ROWS 24 /* a multiple of every tile's rows, a divisor of those */

typedef struct {
    const void *x;         /* [rows, inputs], contiguous, of `x_kind` */
    const uint32_t *words; /* [panels, words of a row, 64 or 32], as in panels.h */
    const void *scale;     /* as in scales.h; null: weights without scales */
    const float *bias;     /* [panels, 64], or null */
    const void *residual;  /* [rows, stride] of `out_kind`, added to the rounded output; null: none. May be `out` */
    void *out;             /* [rows, stride], of `out_kind` */
    uint32_t *scratch;     /* [threads, scratch_rows, scratch_words] */
    const int32_t *order;  /* [inputs] the column of x of each input of `words`; null: in order */
    const void *next;      /* linear_args of further outputs, from `column` on; null: none */
    int64_t rows, inputs, outputs, group /* `inputs` without scales */, format, scales, x_kind, out_kind, threads;
    int64_t stride, column; /* outputs of all formats; the first of these */
    int64_t scratch_words;  /* of a row: the most of all formats */
    int64_t integer;        /* whether rows are quantized to 8 bits (linear_integer.c) */
} linear_args;

/* Return for how many rows a thread has scratch: tiles are filled up. */
INLINE int64_t scratch_rows(const linear_args *a) {
    int64_t filled = (a->rows + FILLED_ROWS - 1) / FILLED_ROWS * FILLED_ROWS;
    return filled < PACKED_ROWS ? filled : PACKED_ROWS;
}

void linear(linear_args *a);

/* Compute the part of thread `self` of `threads`: its panels, for all rows. */
void linear_share(const linear_args *a, int64_t self);

#endif
