#ifndef HEADWAY_NOISE_H
#define HEADWAY_NOISE_H

#include "vec.h"

/* Insert a key into the `held` keys, at most `count`, descending, after those equal to it. Return the new `held`. */
INLINE int64_t insert(float key, int64_t column, float *keys, int64_t *columns, int64_t held, int64_t count) {
    if (held == count && !(key > keys[count - 1])) return held;
    int64_t place = held < count ? held++ : count - 1;
    for (; place > 0 && key > keys[place - 1]; place--) keys[place] = keys[place - 1], columns[place] = columns[place - 1];
    keys[place] = key, columns[place] = column;
    return held;
}

void add_noise(
    float temperature, int64_t low, int64_t high, int64_t position, const int64_t *ids, float *keys, int64_t size
);

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
