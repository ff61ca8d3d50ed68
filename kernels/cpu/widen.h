/* Widening of weights of 4 to 8 bits, in words of 32 bits, a vector of outputs at a time. The weights of a word form pairs:
 * the first of each pair is in the low half of the word, the second in the high half. So one shift by the pair's place
 * yields both halves of an operand of the bf16 dot product.
 *
 * A unit is the fewest words that hold whole weights. Weights of 5 and 6 bits have their four low bits in words like
 * those of INT4; the last word of a unit holds the upper bits of all its weights, in pairs too.
 */
#ifndef HEADWAY_WIDEN_H
#define HEADWAY_WIDEN_H

#include "vec.h"

/* WIDE and WIDE_BF16: fp32 and bf16, which are not quantized. */
enum { INT4 = 0, INT8 = 1, FP8 = 2, WIDE = 3, UINT4 = 4, INT5 = 5, UINT5 = 6, INT6 = 7, WIDE_BF16 = 8 };

INLINE int is_wide(int64_t format) { return format == WIDE || format == WIDE_BF16; }

INLINE uvec load_words(const uint32_t *p) {
    uvec w;
    memcpy(&w, p, sizeof w);
    return w;
}

/* Return the number of weights in a word, their upper bits aside. */
INLINE int held_by(int format) { return format == INT8 || format == FP8 ? 4 : 8; }

/* Return how many bits of a weight are in the last word of its unit. */
INLINE int upper_bits(int format) { return format == INT5 || format == UINT5 ? 1 : format == INT6 ? 2 : 0; }

/* Return the number of words of a unit without its last one, if that holds upper bits. */
INLINE int low_words(int format) { return upper_bits(format) ? 4 / upper_bits(format) : 1; }

INLINE int unit_words(int format) { return low_words(format) + (upper_bits(format) > 0); }

INLINE int unit_weights(int format) { return low_words(format) * held_by(format); }

/* A word of each output of a vector and, from bit 0 of both halves on, the upper bits of its weights. */
typedef struct {
    uvec low, upper;
} piece;

/* Return the word of upper bits of a unit, whose words of one output are `stride` apart, or zeros if there is none. Those
 * of the next low word are 4 * upper_bits higher. */
INLINE uvec load_upper(const uint32_t *unit, int64_t stride, int format) {
    return upper_bits(format) ? load_words(unit + low_words(format) * stride) : (uvec){0};
}

/* Return the weight at `place` of every word. Format and place are constants after unrolling. */
INLINE vec widen(piece p, int place, int format) {
    int pair = place / 2, half = 16 * (place % 2);
    if (format == INT4) return __builtin_convertvector((ivec)(p.low << (28 - 4 * pair - half)) >> 28, vec);
    if (format == INT8) return __builtin_convertvector((ivec)(p.low << (24 - 8 * pair - half)) >> 24, vec);
    if (format == FP8) { /* e4m3: its fields in those of fp32, it is 2^120 times too small */
        ivec raised = (ivec)(p.low << (24 - 8 * pair - half)) >> 4;
        return (vec)((uvec)raised & 0x87f00000) * 0x1p120f;
    }
    uvec bits = p.low >> (4 * pair + half) & 15;
    if (format == UINT4) return __builtin_convertvector((ivec)bits, vec);
    bits |= (p.upper >> (upper_bits(format) * pair + half) & (upper_bits(format) == 1 ? 1 : 3)) << 4;
    return __builtin_convertvector((ivec)bits - (format == INT5 ? 16 : format == INT6 ? 32 : 0), vec);
}

/* Return by how much the result of `widen_pair` must be multiplied. */
INLINE float pair_unit(int format) { return format == INT8 ? 0x1p-24f : 1.0f; }

#ifdef __AVX512BF16__
/* bf16 of integers: 0 to 15, 16 to 31, -8 to -1, -16 to -1, and -32 to -17. */
#define FROM_0 0, 0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0, 0x4100, 0x4110, 0x4120, 0x4130, 0x4140, 0x4150, 0x4160, 0x4170
#define FROM_16 0x4180, 0x4188, 0x4190, 0x4198, 0x41a0, 0x41a8, 0x41b0, 0x41b8, 0x41c0, 0x41c8, 0x41d0, 0x41d8, 0x41e0, 0x41e8, 0x41f0, 0x41f8
#define TO_MINUS_1 0xc100, 0xc0e0, 0xc0c0, 0xc0a0, 0xc080, 0xc040, 0xc000, 0xbf80
#define FROM_MINUS_16 0xc180, 0xc170, 0xc160, 0xc150, 0xc140, 0xc130, 0xc120, 0xc110, TO_MINUS_1
#define FROM_MINUS_32 0xc200, 0xc1f8, 0xc1f0, 0xc1e8, 0xc1e0, 0xc1d8, 0xc1d0, 0xc1c8, 0xc1c0, 0xc1b8, 0xc1b0, 0xc1a8, 0xc1a0, 0xc198, 0xc190, 0xc188
#define NIBBLES 0, 0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0, TO_MINUS_1
/* bf16 of e4m3 by sign and exponent, with zero for the exponent of denormal numbers, and of those by their fraction. */
#define E4M3_POWERS(sign) \
    sign, sign | 0x3c80, sign | 0x3d00, sign | 0x3d80, sign | 0x3e00, sign | 0x3e80, sign | 0x3f00, sign | 0x3f80, \
        sign | 0x4000, sign | 0x4080, sign | 0x4100, sign | 0x4180, sign | 0x4200, sign | 0x4280, sign | 0x4300, sign | 0x4380
#define E4M3_SMALLEST 0, 0x3b00, 0x3b80, 0x3bc0, 0x3c00, 0x3c20, 0x3c40, 0x3c60
typedef uint16_t table __attribute__((vector_size(64)));

/* Return the indices of a byte shuffle: each word's four bytes become its bytes a, b, c and d; NONE becomes zero. */
#define NONE 0x80
INLINE __m512i from_bytes(uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
    __m128i words = _mm_set_epi32(0x0c0c0c0c, 0x08080808, 0x04040404, 0); /* indices count within four words */
    return _mm512_add_epi8(_mm512_set1_epi32((int)(a | b << 8 | c << 16 | d << 24)), _mm512_broadcast_i32x4(words));
}

/* Return 2^24 times a byte of every word: the byte above three of zeros. Shifts and conversions share two units of the
 * processor, so bytes are shuffled if that is as good. */
INLINE __m512i raised(__m512i words, int byte) {
    if (byte == 0) words = _mm512_slli_epi32(words, 24);
    else if (byte == 3) words = _mm512_and_si512(words, _mm512_set1_epi32((int)0xff000000));
    else words = _mm512_shuffle_epi8(words, from_bytes(NONE, NONE, NONE, (uint32_t)byte));
    return (__m512i)_mm512_cvtepi32_ps(words);
}

/* Return the weights at `place` and `place` + 1 of every word, over pair_unit, in bf16, which represents all 8-bit
 * weights exactly. The instruction that looks up 32 values reads five bits, so a table of 16 is doubled. */
INLINE __m512bh widen_pair(piece p, int place, int format) {
    if (format == INT8) {
        __m512i low = raised((__m512i)p.low, place / 2), high = raised((__m512i)p.low, place / 2 + 2);
        return (__m512bh)_mm512_mask_shuffle_epi8(high, 0x3333333333333333, low, from_bytes(2, 3, NONE, NONE));
    }
    if (format == FP8) {
        const table powers = {E4M3_POWERS(0), E4M3_POWERS(0x8000)}, smallest = {E4M3_SMALLEST};
        __m512i bytes = place ? _mm512_srli_epi16((__m512i)p.low, 8) : (__m512i)p.low;
        __m512i power = _mm512_permutexvar_epi16(_mm512_srli_epi16(bytes, 3), (__m512i)powers);
        __m512i fraction = _mm512_and_si512(_mm512_slli_epi16(bytes, 4), _mm512_set1_epi16(0x70));
        __mmask32 denormal = _mm512_testn_epi16_mask(bytes, _mm512_set1_epi16(0x78));
        fraction = _mm512_mask_permutexvar_epi16(fraction, denormal, bytes, (__m512i)smallest);
        return (__m512bh)_mm512_or_si512(power, fraction);
    }
    uvec index = p.low >> (2 * place);
    if (format == INT4) {
        const table nibbles = {NIBBLES, NIBBLES};
        return (__m512bh)_mm512_permutexvar_epi16((__m512i)index, (__m512i)nibbles);
    }
    if (format == UINT4) {
        const table nibbles = {FROM_0, FROM_0};
        return (__m512bh)_mm512_permutexvar_epi16((__m512i)index, (__m512i)nibbles);
    }
    int up = 4 - upper_bits(format) * (place / 2); /* from the bit pair's place to above the four low bits */
    uvec upper = up >= 0 ? p.upper << up : p.upper >> -up;
    enum { SELECT = 0xca }; /* bits of the second operand where the first has ones, else of the third */
    index = (uvec)_mm512_ternarylogic_epi32(_mm512_set1_epi32(0x000f000f), (__m512i)index, (__m512i)upper, SELECT);
    if (format == INT6) {
        const table lower = {FROM_MINUS_32, FROM_MINUS_16}, higher = {FROM_0, FROM_16};
        return (__m512bh)_mm512_permutex2var_epi16((__m512i)lower, (__m512i)index, (__m512i)higher);
    }
    const table offset = {FROM_0, FROM_16}, centered = {FROM_MINUS_16, FROM_0};
    return (__m512bh)_mm512_permutexvar_epi16((__m512i)index, (__m512i)(format == INT5 ? centered : offset));
}
#endif

#endif
