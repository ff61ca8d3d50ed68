/* As many floats at a time as a register of the processor holds, in GNU vector types: any compiler and processor will do.
 * What is stored in vectors is laid out for sixteen (panels.h), so it is the same for all.
 *
 * Nothing here may be compiled with -ffast-math: the order of every sum is part of the contract (a row's bits depend on
 * that row alone), and the rounding trick in vec_exp needs IEEE addition.
 */
#ifndef HEADWAY_VEC_H
#define HEADWAY_VEC_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>
#if defined(__SSE2__)
#include <immintrin.h>
#endif

#if defined(__AVX512F__)
#define LANES 16
#define REGISTERS 32
#elif defined(__AVX__)
#define LANES 8
#define REGISTERS 16
#else
#define LANES 4
#ifdef __aarch64__
#define REGISTERS 32
#else
#define REGISTERS 16
#endif
#endif

typedef float vec __attribute__((vector_size(4 * LANES)));
typedef int32_t ivec __attribute__((vector_size(4 * LANES)));
typedef uint32_t uvec __attribute__((vector_size(4 * LANES)));
typedef uint16_t hvec __attribute__((vector_size(2 * LANES)));
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

INLINE float element(const void *base, int64_t index, int kind) {
    if (kind == FLOAT32) return ((const float *)base)[index];
    uint32_t bits = (uint32_t)((const bf16 *)base)[index] << 16;
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

/* Round to what a tensor of `kind` holds: for intermediate results that torch rounds. */
INLINE vec rounded(vec v, int kind) {
    if (kind == FLOAT32) return v;
    bf16 h[LANES];
    store_bf16(h, v);
    return load_bf16(h);
}

INLINE vec splat(float x) { return x - (vec){0}; }

INLINE vec pick(ivec mask, vec yes, vec no) { return (vec)(((ivec)yes & mask) | ((ivec)no & ~mask)); }

/* Return 0, 1, 2 and so on. */
INLINE ivec lane_numbers(void) {
    ivec n = {0};
    for (int i = 0; i < LANES; i++) n[i] = i;
    return n;
}

/* e^x for x <= 88 where `keep` is set, to about one unit in the last place (Cephes' polynomial); zero elsewhere. */
INLINE vec exp_where(ivec keep, vec x) {
    const vec magic = splat(12582912.0f); /* 1.5 * 2^23: adding it rounds to an integer */
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

/* e^x for x <= 88; zero for x <= -87 and for NaN. */
INLINE vec vec_exp(vec x) { return exp_where(x > -87.0f, x); }

/* x times the sigmoid of y. */
INLINE vec times_sigmoid(vec x, vec y) {
    vec e = vec_exp((vec)((ivec)y | (ivec)splat(-0.0f))); /* e^-|y|: never overflows */
    return x * pick(y < 0.0f, e, splat(1.0f)) / (1.0f + e);
}

#endif
