#include "scales.h"

/* Widen finite fp16, denormal numbers included. */
INLINE vec load_half(const uint16_t *p) {
#if defined(__AVX512F__)
    return (vec)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p));
#elif defined(__F16C__)
    return (vec)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p));
#else
    hvec h;
    memcpy(&h, p, sizeof h);
    uvec u = __builtin_convertvector(h, uvec);
    return (vec)((u & 0x7fff) << 13 | (u & 0x8000) << 16) * 0x1p112f; /* read with the exponent of fp32 */
#endif
}

typedef uint8_t byte_vec __attribute__((vector_size(LANES)));
typedef int8_t signed_vec __attribute__((vector_size(LANES)));
typedef int16_t short_vec __attribute__((vector_size(2 * LANES)));

/* Prefetch the superblock after this one, which is read next. */
INLINE void fetch_next(const void *super, int64_t bytes) {
    for (int64_t i = bytes; i < 2 * bytes; i += 64) __builtin_prefetch((const char *)super + i, 0, 3);
}

/* Widened step by step: GCC converts bytes to floats one by one. */
INLINE vec from_shorts(short_vec w) { return __builtin_convertvector(__builtin_convertvector(w, ivec), vec); }

INLINE vec load_bytes(const uint8_t *p) {
    byte_vec b;
    memcpy(&b, p, sizeof b);
    return from_shorts(__builtin_convertvector(b, short_vec));
}

INLINE vec load_signed(const int8_t *p) {
    signed_vec b;
    memcpy(&b, p, sizeof b);
    return from_shorts(__builtin_convertvector(b, short_vec));
}

/* Scales of one type and zero points of `count` groups -> scales and offsets. */
INLINE void load_zeros(const char *stored, int64_t count, int64_t scale_bytes, int64_t scales, float *to) {
    for (int64_t g = 0; g < count; g++, stored += (scale_bytes + 1) * PANEL, to += 2 * PANEL)
        for (int v = 0; v < PANEL; v += LANES) {
            const char *own = stored + scale_bytes * v;
            vec scale = scales == FLOAT_ZERO  ? load_f32((const float *)own)
                        : scales == HALF_ZERO ? load_half((const uint16_t *)own)
                                              : load_bf16((const bf16 *)own);
            store_f32(to + v, scale);
            store_f32(to + PANEL + v, -scale * load_signed((const int8_t *)stored + scale_bytes * PANEL + v));
        }
}

const float *load_scales(const linear_args *a, int64_t panel, int64_t first, int64_t count, float *to) {
    int64_t index = panel * (a->inputs / a->group) + first, step = scale_step(a->scales);
    const char *stored = a->scale;
    switch (a->scales) {
        case FLOAT_SCALE: return (const float *)a->scale + index * PANEL;
        case HALF_SCALE:
        case HALF_OFFSET:
            for (int64_t i = 0; i < count * step; i += LANES)
                store_f32(to + i, load_half((const uint16_t *)stored + index * step + i));
            return to;
        case BF16_SCALE:
            for (int64_t i = 0; i < count * step; i += LANES)
                store_f32(to + i, load_bf16((const bf16 *)stored + index * step + i));
            return to;
        case FLOAT_ZERO: load_zeros(stored + index * 5 * PANEL, count, 4, FLOAT_ZERO, to); return to;
        case HALF_ZERO: load_zeros(stored + index * 3 * PANEL, count, 2, HALF_ZERO, to); return to;
        case BF16_ZERO: load_zeros(stored + index * 3 * PANEL, count, 2, BF16_ZERO, to); return to;
        case SUPER_OFFSET: {
            const uint8_t *super = (const uint8_t *)stored + index / OFFSET_GROUPS * OFFSET_BYTES;
            const uint8_t *own = super + 4 * PANEL + index % OFFSET_GROUPS * step;
            const uint16_t *factors = (const uint16_t *)super;
            fetch_next(super, OFFSET_BYTES);
            for (int v = 0; v < 2 * PANEL; v += LANES) {
                vec factor = v < PANEL ? load_half(factors + v) : -load_half(factors + v);
                for (int64_t g = 0; g < count; g++)
                    store_f32(to + g * step + v, factor * load_bytes(own + g * step + v));
            }
            return to;
        }
        default: {
            const char *super = stored + index / SCALE_GROUPS * SCALE_BYTES;
            const int8_t *own = (const int8_t *)super + 2 * PANEL + index % SCALE_GROUPS * PANEL;
            fetch_next(super, SCALE_BYTES);
            for (int v = 0; v < PANEL; v += LANES) {
                vec factor = load_half((const uint16_t *)super + v);
                for (int64_t g = 0; g < count; g++)
                    store_f32(to + g * step + v, factor * load_signed(own + g * step + v));
            }
            return to;
        }
    }
}
