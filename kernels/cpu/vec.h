/* Sixteen floats at a time, in GNU vector types: no intrinsics, so any compiler and processor will do.
 *
 * Nothing here may be compiled with -ffast-math: the order of every sum is part of the contract (a row's bits depend on
 * that row alone), and the rounding trick in vec_exp needs IEEE addition.
 */
#ifndef HEADWAY_VEC_H
#define HEADWAY_VEC_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define LANES 16
typedef float vec __attribute__((vector_size(64)));
typedef int32_t ivec __attribute__((vector_size(64)));
typedef uint32_t uvec __attribute__((vector_size(64)));
typedef uint16_t hvec __attribute__((vector_size(32)));
typedef float vec8 __attribute__((vector_size(32)));
typedef float vec4 __attribute__((vector_size(16)));
typedef uint16_t bf16;

#define INLINE static inline __attribute__((always_inline))

enum { FLOAT32 = 0, BFLOAT16 = 1 };

INLINE vec load_f32(const float *p) {
    vec v;
    memcpy(&v, p, sizeof v);
    return v;
}

INLINE vec load_bf16(const bf16 *p) {
    hvec h;
    memcpy(&h, p, sizeof h);
    uvec u = __builtin_convertvector(h, uvec) << 16;
    vec v;
    memcpy(&v, &u, sizeof v);
    return v;
}

INLINE void store_f32(float *p, vec v) { memcpy(p, &v, sizeof v); }

/* Round to nearest, ties to even, as torch does; a NaN stays one. */
INLINE void store_bf16(bf16 *p, vec v) {
    uvec u;
    memcpy(&u, &v, sizeof u);
    uvec rounded = (u + 0x7fff + ((u >> 16) & 1)) >> 16;
    uvec nan = (uvec)(v != v);
    hvec h = __builtin_convertvector((rounded & ~nan) | (nan & 0x7fc0), hvec);
    memcpy(p, &h, sizeof h);
}

/* `kind` is a constant wherever these are called, so no branch is left. */
INLINE vec load(const void *base, ptrdiff_t index, int kind) {
    return kind == FLOAT32 ? load_f32((const float *)base + index) : load_bf16((const bf16 *)base + index);
}

INLINE void store(void *base, ptrdiff_t index, vec v, int kind) {
    if (kind == FLOAT32)
        store_f32((float *)base + index, v);
    else
        store_bf16((bf16 *)base + index, v);
}

/* Round to what a tensor of `kind` holds: for intermediate results that torch rounds. */
INLINE vec rounded(vec v, int kind) {
    if (kind == FLOAT32) return v;
    bf16 h[LANES];
    store_bf16(h, v);
    return load_bf16(h);
}

INLINE vec splat(float x) { return x - (vec){0}; }

INLINE float sum_lanes(vec v) {
    vec8 a[2];
    memcpy(a, &v, sizeof v);
    vec8 b = a[0] + a[1];
    vec4 c[2];
    memcpy(c, &b, sizeof b);
    vec4 d = c[0] + c[1];
    return (d[0] + d[2]) + (d[1] + d[3]);
}

#ifdef __clang__
#define PICK(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define PICK(a, b, ...) __builtin_shuffle(a, b, (ivec){__VA_ARGS__})
#endif

/* sum_lanes of each of sixteen vectors, which are overwritten: the same additions, several vectors at a time. */
INLINE vec sum_lanes_of_each(vec *v) {
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
}

INLINE float max_lanes(vec v) {
    float m = v[0];
    for (int i = 1; i < LANES; i++) m = v[i] > m ? v[i] : m;
    return m;
}

/* e^x for x <= 88, to about one unit in the last place (Cephes' polynomial); zero for x <= -87. */
INLINE vec vec_exp(vec x) {
    const vec magic = splat(12582912.0f); /* 1.5 * 2^23: adding it rounds to an integer */
    ivec keep = x > -87.0f;
    vec safe = (vec)((ivec)x & keep);
    vec shifted = safe * 1.44269504088896341f + magic;
    vec n = shifted - magic;
    vec r = safe - n * 0.693359375f - n * -2.12194440e-4f;
    vec p = splat(1.9875691500e-4f);
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    ivec power = (__builtin_convertvector(n, ivec) + 127) << 23;
    return (vec)((ivec)(p * (vec)power) & keep);
}

#endif
