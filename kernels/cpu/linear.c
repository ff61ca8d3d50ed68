/* y = x Wᵀ + b from weights of 4 or 8 bits, which are read as they are stored and widened in registers.
 *
 * A panel is 64 outputs. Its weights lie in words of 32 bits, one beside another for the 64 outputs: a word holds 8
 * (int4) or 4 weights of one output in order along K, first of each pair in the low half, second in the high half. So
 * shifting a word by the pair's place yields both halves of what the bf16 dot product takes.
 *
 * An output's sum runs along K in this order whatever the number of rows: within a group of weights that share a scale
 * from its first on, then the groups' sums, each times its scale.
 */
#include "vec.h"
#ifdef __AVX512BF16__
#include <immintrin.h>
#endif

#define VECTORS 4 /* of a panel */
#define PANEL (VECTORS * LANES)
#define MOST_ROWS 6 /* of a tile */

enum { INT4 = 0, INT8 = 1, FP8 = 2 };

typedef struct {
    const void *x;         /* [rows, inputs], contiguous, of `x_kind` */
    const uint32_t *words; /* [panels, inputs / weights of a word, 64] */
    const float *scale;    /* [panels, inputs / group, 64] */
    const float *bias;     /* [panels, 64], or null */
    void *out;             /* [rows, outputs], of `out_kind` */
    int64_t rows, inputs, outputs, group, format, x_kind, out_kind, threads;
    parallel_fn parallel;
    self_fn self;
} linear_args;

INLINE uvec load_words(const uint32_t *p) {
    uvec w;
    memcpy(&w, p, sizeof w);
    return w;
}

/* The weight at `place` of every word. Constants after unrolling: format and place. */
INLINE vec widen(uvec words, int place, int format) {
    if (format == INT4) return __builtin_convertvector((ivec)(words << (28 - 4 * (place / 2) - 16 * (place % 2))) >> 28, vec);
    int shift = 8 * (place / 2) + 16 * (place % 2);
    if (format == INT8) return __builtin_convertvector((ivec)(words << (24 - shift)) >> 24, vec);
    uvec byte = words >> shift; /* e4m3: with the exponent of fp32 it is 2^120 too small */
    return (vec)((byte & 0x80) << 24 | (byte & 0x7f) << 20) * 0x1p120f;
}

#ifdef __AVX512BF16__
/* bf16 of -8 to 7 by nibble, twice: the instruction below looks at five bits. */
#define NIBBLES 0, 0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0, 0xc100, 0xc0e0, 0xc0c0, 0xc0a0, 0xc080, 0xc040, 0xc000, 0xbf80
typedef uint16_t table __attribute__((vector_size(64)));

/* The pair of weights at `place` and `place` + 1 of every word, in bf16, which holds any of 8 bits. */
INLINE __m512bh widen_pair(uvec words, int place, int format) {
    if (format == INT4) {
        const table nibbles = {NIBBLES, NIBBLES};
        return (__m512bh)_mm512_permutexvar_epi16((__m512i)(words >> (2 * place)), (__m512i)nibbles);
    }
    return (__m512bh)((uvec)widen(words, place, format) >> 16 | (uvec)widen(words, place + 1, format));
}
#endif

/* part[r][v] += x[r][k] and on, times the weights of one word of each output. */
INLINE void add_word(
    const linear_args *a, vec part[][VECTORS], const uint32_t *words, int64_t row, int64_t k, int rows, int format, int x_kind
) {
    int held = format == INT4 ? 8 : 4;
    for (int v = 0; v < VECTORS; v++) {
        uvec word = load_words(words + v * LANES);
#ifdef __AVX512BF16__
        if (x_kind == BFLOAT16) {
            for (int place = 0; place < held; place += 2) {
                __m512bh w = widen_pair(word, place, format);
                for (int r = 0; r < rows; r++) {
                    int32_t pair;
                    memcpy(&pair, (const bf16 *)a->x + (row + r) * a->inputs + k + place, sizeof pair);
                    part[r][v] = (vec)_mm512_dpbf16_ps((__m512)part[r][v], (__m512bh)_mm512_set1_epi32(pair), w);
                }
            }
            continue;
        }
#endif
        for (int place = 0; place < held; place++) {
            vec w = widen(word, place, format);
            for (int r = 0; r < rows; r++) part[r][v] += ((const float *)a->x)[(row + r) * a->inputs + k + place] * w;
        }
    }
}

INLINE void tile(const linear_args *a, int64_t panel, int64_t row, int rows, int format, int x_kind) {
    int held = format == INT4 ? 8 : 4;
    const uint32_t *words = a->words + panel * (a->inputs / held) * PANEL;
    const float *scale = a->scale + panel * (a->inputs / a->group) * PANEL;
    vec total[MOST_ROWS][VECTORS];
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < VECTORS; v++) total[r][v] = splat(0.0f);
    for (int64_t first = 0; first < a->inputs; first += a->group, scale += PANEL) {
        vec part[MOST_ROWS][VECTORS];
        for (int r = 0; r < rows; r++)
            for (int v = 0; v < VECTORS; v++) part[r][v] = splat(0.0f);
        for (int64_t k = first; k < first + a->group; k += held, words += PANEL)
            add_word(a, part, words, row, k, rows, format, x_kind);
        for (int r = 0; r < rows; r++)
            for (int v = 0; v < VECTORS; v++) total[r][v] += part[r][v] * load_f32(scale + v * LANES);
    }
    int64_t output = panel * PANEL;
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < VECTORS && output + v * LANES < a->outputs; v++) {
            int64_t to = (row + r) * a->outputs + output + v * LANES, left = a->outputs - output - v * LANES;
            vec y = a->bias ? total[r][v] + load_f32(a->bias + output + v * LANES) : total[r][v];
            if (left >= LANES) {
                store(a->out, to, y, a->out_kind);
                continue;
            }
            float last[LANES];
            size_t element = a->out_kind == FLOAT32 ? sizeof(float) : sizeof(bf16);
            store(last, 0, y, a->out_kind);
            memcpy((char *)a->out + to * element, last, left * element);
        }
}

/* Rows of a tile are compiled in, so that its sums stay in registers. */
#define ROWS(n, format, x_kind) \
    for (; row + n <= a->rows; row += n) tile(a, panel, row, n, format, x_kind);
#define CASE(format, x_kind) \
    case format * 2 + x_kind: \
        ROWS(6, format, x_kind) ROWS(4, format, x_kind) ROWS(2, format, x_kind) ROWS(1, format, x_kind) \
        break;

static void work(void *data) {
    const linear_args *a = data;
    int64_t self = a->threads > 1 ? a->self() : 0, panels = (a->outputs + PANEL - 1) / PANEL;
    int64_t first = panels * self / a->threads, end = panels * (self + 1) / a->threads;
    for (int64_t panel = first; panel < end; panel++) {
        int64_t row = 0;
        switch (a->format * 2 + a->x_kind) {
            CASE(INT4, FLOAT32) CASE(INT8, FLOAT32) CASE(FP8, FLOAT32)
#ifdef __AVX512BF16__
            CASE(INT4, BFLOAT16) CASE(INT8, BFLOAT16) CASE(FP8, BFLOAT16)
#endif
        }
    }
}

/* Whether x may be bf16; else the caller widens it. */
int linear_takes_bf16(void) {
#ifdef __AVX512BF16__
    return 1;
#else
    return 0;
#endif
}

void linear(linear_args *a) {
    if (a->threads > 1)
        a->parallel(work, a, (unsigned)a->threads, 0);
    else
        work(a);
}
