#ifndef HEADWAY_NOISE_H
#define HEADWAY_NOISE_H

#include "vec.h"

void choose(
    const void *logits, const float *temperature, const int64_t *low, const int64_t *high, const int64_t *positions,
    const int64_t *ids, int64_t *out, int64_t rows, int64_t stride, int64_t size, int64_t kind
);

void choose_best(
    const void *logits, const float *temperature, const int64_t *low, const int64_t *high, const int64_t *positions,
    const int64_t *ids, int64_t *columns, float *keys, float *masses, int64_t count, int64_t rows, int64_t stride,
    int64_t size, int64_t kind
);

#endif
