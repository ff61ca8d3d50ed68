#ifndef HEADWAY_ROWS_H
#define HEADWAY_ROWS_H

#include "vec.h"

/* `out` may be `x` if the rows of x are contiguous too. */
void rms_norm(
    const void *x, const void *weight, void *out, int64_t rows, int64_t stride, int64_t size, float eps, int64_t x_kind,
    int64_t kind, int64_t out_kind, int64_t centered
);
void add_rows(void *x, const void *delta, int64_t count, int64_t kind);
void two_taps(
    const void *z, const void *base, const void *deltas, void *out, int64_t first, int64_t end, int64_t block, int64_t size,
    int64_t group, int64_t side, int64_t add, int64_t kind
);
void silu_mul(const void *gate_up, void *out, int64_t rows, int64_t size, int64_t kind);
void gelu_mul(const void *gate_up, void *out, int64_t rows, int64_t size, int64_t kind);
void sigmoid_mul(const void *x, const void *gate, void *out, int64_t count, int64_t kind);
void rotate(
    const void *x, const void *cos, const void *sin, void *out, int64_t rows, int64_t stride, int64_t heads, int64_t dim, int64_t kind
);

#endif
