/* Reductions over the lanes of a vector: it is halved until four lanes are left. */
#ifndef HEADWAY_REDUCE_H
#define HEADWAY_REDUCE_H

#include "vec.h"

/* Whether any lane of a comparison is true. */
INLINE int any_lane(ivec mask) {
    uint64_t words[LANES / 2], all = 0;
    memcpy(words, &mask, sizeof mask);
    for (int i = 0; i < LANES / 2; i++) all |= words[i];
    return all != 0;
}

typedef float vec4 __attribute__((vector_size(16)));
typedef int32_t ivec4 __attribute__((vector_size(16)));
#if LANES == 16
typedef float vec8 __attribute__((vector_size(32)));
typedef int32_t ivec8 __attribute__((vector_size(32)));
#endif

#define SUM(type, a, b) ((a) + (b))
/* The larger of two; of a NaN and a number the second. */
#define LARGER(type, a, b) ((type)(((a > b) & (i##type)a) | (~(a > b) & (i##type)b)))

/* Declare `to`: four lanes of v, its halves combined by `both` until no more are left. */
#if LANES == 16
#define TO_FOUR(to, v, both) \
    vec8 a[2]; \
    memcpy(a, &v, sizeof v); \
    vec8 b = both(vec8, a[0], a[1]); \
    vec4 c[2]; \
    memcpy(c, &b, sizeof b); \
    vec4 to = both(vec4, c[0], c[1])
#elif LANES == 8
#define TO_FOUR(to, v, both) \
    vec4 c[2]; \
    memcpy(c, &v, sizeof v); \
    vec4 to = both(vec4, c[0], c[1])
#else
#define TO_FOUR(to, v, both) vec4 to = v
#endif

INLINE float sum_lanes(vec v) {
    TO_FOUR(d, v, SUM);
    return (d[0] + d[2]) + (d[1] + d[3]);
}

INLINE float max_lanes(vec v) {
    TO_FOUR(d, v, LARGER);
    float m = d[0];
    for (int i = 1; i < 4; i++) m = d[i] > m ? d[i] : m;
    return m;
}

#ifdef __clang__
#define PICK(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define PICK(a, b, ...) __builtin_shuffle(a, b, (ivec){__VA_ARGS__})
#endif

/* sum_lanes of each of LANES vectors, which are overwritten: the same additions, several vectors at a time. */
INLINE vec sum_lanes_of_each(vec *v) {
#if LANES == 16
    for (int i = 0; i < 8; i++) {
        vec a = v[2 * i], b = v[2 * i + 1];
        v[i] = PICK(a, b, 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23) +
               PICK(a, b, 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31);
    }
    for (int i = 0; i < 4; i++) {
        vec a = v[2 * i], b = v[2 * i + 1];
        v[i] = PICK(a, b, 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27) +
               PICK(a, b, 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31);
    }
    for (int i = 0; i < 2; i++) {
        vec a = v[2 * i], b = v[2 * i + 1];
        v[i] = PICK(a, b, 0, 1, 4, 5, 8, 9, 12, 13, 16, 17, 20, 21, 24, 25, 28, 29) +
               PICK(a, b, 2, 3, 6, 7, 10, 11, 14, 15, 18, 19, 22, 23, 26, 27, 30, 31);
    }
    return PICK(v[0], v[1], 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30) +
           PICK(v[0], v[1], 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31);
#elif LANES == 8
    /* AVX2 shuffles within halves of a vector: the last line brings the sums into order. */
    for (int i = 0; i < 4; i++) {
        vec a = v[2 * i], b = v[2 * i + 1];
        v[i] = PICK(a, b, 0, 1, 2, 3, 8, 9, 10, 11) + PICK(a, b, 4, 5, 6, 7, 12, 13, 14, 15);
    }
    for (int i = 0; i < 2; i++) {
        vec a = v[2 * i], b = v[2 * i + 1];
        v[i] = PICK(a, b, 0, 1, 8, 9, 4, 5, 12, 13) + PICK(a, b, 2, 3, 10, 11, 6, 7, 14, 15);
    }
    vec sums = PICK(v[0], v[1], 0, 2, 8, 10, 4, 6, 12, 14) + PICK(v[0], v[1], 1, 3, 9, 11, 5, 7, 13, 15);
    return PICK(sums, sums, 0, 4, 1, 5, 2, 6, 3, 7);
#else
    for (int i = 0; i < 2; i++) {
        vec a = v[2 * i], b = v[2 * i + 1];
        v[i] = PICK(a, b, 0, 1, 4, 5) + PICK(a, b, 2, 3, 6, 7);
    }
    return PICK(v[0], v[1], 0, 2, 4, 6) + PICK(v[0], v[1], 1, 3, 5, 7);
#endif
}

#endif
