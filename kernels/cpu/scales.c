#include "scales.h"
#ifdef __F16C__
#include <immintrin.h>
#endif

/* Widen finite fp16, denormal numbers included. */
INLINE vec load_half(const uint16_t *p) {
#if defined(__AVX512F__)
    return (vec)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p));
#elif defined(__F16C__)
    __m256 halves[2] = {
        _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p)), _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p + 1))
    };
    vec v;
    memcpy(&v, halves, sizeof v);
    return v;
#else
    hvec h;
    memcpy(&h, p, sizeof h);
    uvec u = __builtin_convertvector(h, uvec);
    return (vec)((u & 0x7fff) << 13 | (u & 0x8000) << 16) * 0x1p112f; /* read with the exponent of fp32 */
#endif
}

/* Plain loops, which compilers vectorise; the bytes of a vector they convert one by one. */
static void multiply(const float *restrict a, const uint8_t *restrict b, int count, float *restrict to) {
    for (int i = 0; i < count; i++) to[i] = a[i] * b[i];
}

static void multiply_signed(const float *restrict a, const int8_t *restrict b, int count, float *restrict to) {
    for (int i = 0; i < count; i++) to[i] = a[i] * b[i];
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
        case SUPER_OFFSET: {
            const uint8_t *super = (const uint8_t *)stored + index / OFFSET_GROUPS * OFFSET_BYTES;
            const uint8_t *own = super + 4 * PANEL + index % OFFSET_GROUPS * step;
            float factors[2 * PANEL];
            for (int v = 0; v < 2 * PANEL; v += LANES) {
                vec factor = load_half((const uint16_t *)super + v);
                store_f32(factors + v, v < PANEL ? factor : -factor);
            }
            for (int64_t g = 0; g < count; g++) multiply(factors, own + g * step, 2 * PANEL, to + g * step);
            return to;
        }
        default: {
            const char *super = stored + index / SCALE_GROUPS * SCALE_BYTES;
            const int8_t *own = (const int8_t *)super + 2 * PANEL + index % SCALE_GROUPS * PANEL;
            float factors[PANEL];
            for (int v = 0; v < PANEL; v += LANES) store_f32(factors + v, load_half((const uint16_t *)super + v));
            for (int64_t g = 0; g < count; g++) multiply_signed(factors, own + g * step, PANEL, to + g * step);
            return to;
        }
    }
}
