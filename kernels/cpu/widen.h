/* Widening of 4- and 8-bit weights, a 32-bit word of each of sixteen outputs at a time. The weights of a word form
 * pairs: the first of each pair is in the low half of the word, the second in the high half. So one shift by the pair's
 * place yields both halves of an operand of the bf16 dot product.
 */
#ifndef HEADWAY_WIDEN_H
#define HEADWAY_WIDEN_H

#include "vec.h"
#ifdef __AVX512BF16__
#include <immintrin.h>
#endif

enum { INT4 = 0, INT8 = 1, FP8 = 2, WIDE = 3 };

INLINE uvec load_words(const uint32_t *p) {
    uvec w;
    memcpy(&w, p, sizeof w);
    return w;
}

/* Return the number of weights in a word. */
INLINE int held_by(int format) { return format == INT4 ? 8 : 4; }

/* Return the weight at `place` of every word. Format and place are constants after unrolling. */
INLINE vec widen(uvec words, int place, int format) {
    if (format == INT4) return __builtin_convertvector((ivec)(words << (28 - 4 * (place / 2) - 16 * (place % 2))) >> 28, vec);
    int shift = 8 * (place / 2) + 16 * (place % 2);
    if (format == INT8) return __builtin_convertvector((ivec)(words << (24 - shift)) >> 24, vec);
    uvec byte = words >> shift; /* e4m3: read with the exponent of fp32, it is 2^120 times too small */
    return (vec)((byte & 0x80) << 24 | (byte & 0x7f) << 20) * 0x1p120f;
}

#ifdef __AVX512BF16__
/* bf16 of -8 to 7 by nibble; in the table twice, since the instruction below reads five bits. */
#define NIBBLES 0, 0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0, 0xc100, 0xc0e0, 0xc0c0, 0xc0a0, 0xc080, 0xc040, 0xc000, 0xbf80
typedef uint16_t table __attribute__((vector_size(64)));

/* Return the weights at `place` and `place` + 1 of every word, in bf16, which represents all 8-bit weights exactly. */
INLINE __m512bh widen_pair(uvec words, int place, int format) {
    if (format == INT4) {
        const table nibbles = {NIBBLES, NIBBLES};
        return (__m512bh)_mm512_permutexvar_epi16((__m512i)(words >> (2 * place)), (__m512i)nibbles);
    }
    return (__m512bh)((uvec)widen(words, place, format) >> 16 | (uvec)widen(words, place + 1, format));
}
#endif

#endif
