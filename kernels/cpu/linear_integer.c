/* Linear layers with weights that are integers of 4 to 8 bits, for rows that are quantized to 8 bits first: products and
 * their sums over a span are integers, exact in any order.
 *
 * A row is quantized in blocks of 32 inputs, x = scale * q + error: the scale is the largest magnitude / 127 in fp32, q
 * the nearest integer to x * (127 / largest), ties to even, as llama.cpp does (Q8_0). A block with a value that is not
 * finite has the scale NaN; one without a value above TINY counts as zeros.
 *
 * The dot product instructions multiply bytes without a sign by bytes with one. So weights with a sign are raised by
 * their zero point, and a span's sum of products begins at minus the zero point times the sum of its q. Without VNNI
 * weights of 8 bits keep their sign, which is moved to x.
 *
 * A span is 32 weights, or 16 if those share a scale. The sum of an output runs along K over the spans for any number of
 * rows: each span's integer times (scale of x * scale of the weights), followed by (scale of x * sum of q) times the
 * weights' offset, if there are any.
 */
#include "linear_integer.h"
#include "reduce.h"
#include "scales.h"
#include "widen.h"
#ifdef __ARM_FEATURE_DOTPROD
#include <arm_neon.h>
#endif

/* Most rows of a tile whose sums, integers and floats, fit the registers: for one vector of outputs, two and four. */
#if REGISTERS == 32
#define TILE_ROWS 12
#define PAIRED_ROWS 6
#define FEW_ROWS 2
#define EACH_SIZE(each, ...) \
    each(1, __VA_ARGS__) each(2, __VA_ARGS__) each(4, __VA_ARGS__) each(6, __VA_ARGS__) each(8, __VA_ARGS__) each(12, __VA_ARGS__)
#else
#define TILE_ROWS 6
#define PAIRED_ROWS 4
#define FEW_ROWS 1
#define EACH_SIZE(each, ...) each(1, __VA_ARGS__) each(2, __VA_ARGS__) each(4, __VA_ARGS__) each(6, __VA_ARGS__)
#endif
#define TOTALS_HELD (REGISTERS == 32) /* whether a tile's totals are in registers beside its integer sums */
#define AT_ONCE 4 /* most vectors of outputs that are computed at once */
#define ALIGNED __attribute__((aligned(64)))
#define QUANTIZED 32   /* inputs of a row that share a scale */
#define TINY 0x1p-100f /* below it 127 / largest or the scale might not be a normal number */

/* VNNI: products of unsigned weights and signed inputs, added to sums of 32 bits. Without it weights of 8 bits stay
 * signed. */
#if defined(__AVX512VNNI__)
#define VNNI 1
#define ADD_PRODUCTS(sums, w, x) _mm512_dpbusd_epi32((__m512i)(sums), (__m512i)(w), _mm512_set1_epi32((int32_t)(x)))
#elif defined(__AVXVNNI__) && LANES == 8
#define VNNI 1
#define ADD_PRODUCTS(sums, w, x) _mm256_dpbusd_avx_epi32((__m256i)(sums), (__m256i)(w), _mm256_set1_epi32((int32_t)(x)))
#else
#define VNNI 0
#endif

INLINE int zero_point(int format) {
    return format == INT4 ? 8 : format == INT5 ? 16 : format == INT6 ? 32 : format == INT8 && VNNI ? 128 : 0;
}

INLINE int span_of(int format) { return format == INT6 ? 16 : QUANTIZED; }

/* Return how many operands of four bytes the weights of a word fill. */
INLINE int parts_of(int format) { return held_by(format) / 4; }

/* Return operand `part` of every word: four weights, raised by the zero point, in the order in which `write_operands`
 * has the inputs. */
INLINE uvec operand(piece p, int part, int format) {
    if (format == INT8) return VNNI ? p.low ^ 0x80808080u : p.low;
    uvec bytes = (format == INT4 ? p.low ^ 0x88888888u : p.low) >> (4 * part) & 0x0f0f0f0fu;
    if (upper_bits(format) == 1)
        bytes |= (p.upper << (4 - part) & 0x00100010u) | (p.upper << (10 - part) & 0x10001000u);
    if (upper_bits(format) == 2)
        bytes |= (p.upper << (4 - 2 * part) & 0x00300030u) | (p.upper << (8 - 2 * part) & 0x30003000u);
    return bytes;
}

/* Products of the four bytes of each word of weights and four bytes of x are added to a register of sums, exactly: to
 * sums of 32 bits, or, on x86 without VNNI, to pairs of sums of 16 bits, which hold the products of a few words only and
 * are then added to those of 32 bits. */
#if VNNI || !defined(__SSSE3__)
#define SHORT_SUMS 0
#else
#define SHORT_SUMS 1
#if LANES == 16
typedef __m512i register_of_bytes;
#define MULTIPLY_BYTES _mm512_maddubs_epi16
#define ADD_SHORTS _mm512_add_epi16
#define ADD_PAIRS(shorts) _mm512_madd_epi16(shorts, _mm512_set1_epi16(1))
#define REPEAT _mm512_set1_epi32
#define MAGNITUDES _mm512_abs_epi8
#define SIGNED(x, w) _mm512_mask_sub_epi8(x, _mm512_movepi8_mask(w), _mm512_setzero_si512(), x)
#elif LANES == 8 && defined(__AVX2__)
typedef __m256i register_of_bytes;
#define MULTIPLY_BYTES _mm256_maddubs_epi16
#define ADD_SHORTS _mm256_add_epi16
#define ADD_PAIRS(shorts) _mm256_madd_epi16(shorts, _mm256_set1_epi16(1))
#define REPEAT _mm256_set1_epi32
#define MAGNITUDES _mm256_abs_epi8
#define SIGNED _mm256_sign_epi8
#elif LANES == 4
typedef __m128i register_of_bytes;
#define MULTIPLY_BYTES _mm_maddubs_epi16
#define ADD_SHORTS _mm_add_epi16
#define ADD_PAIRS(shorts) _mm_madd_epi16(shorts, _mm_set1_epi16(1))
#define REPEAT _mm_set1_epi32
#define MAGNITUDES _mm_abs_epi8
#define SIGNED _mm_sign_epi8
#else
#undef SHORT_SUMS
#define SHORT_SUMS 0
#endif
#endif

/* Return of how many words of weights sums of 16 bits hold the products: 2 * 127 times the largest weight each. */
INLINE int words_held(int format) {
    return upper_bits(format) == 2 ? 1 : upper_bits(format) == 1 ? 2 : format == INT8 ? 1 : 4;
}

/* Return sums + the products of the bytes of each word of weights and the bytes of x. */
INLINE ivec add_products(ivec sums, uvec weights, uint32_t x, int format) {
#if SHORT_SUMS
    register_of_bytes w = (register_of_bytes)weights, four = REPEAT((int32_t)x);
    if (format == INT8) four = SIGNED(four, w), w = MAGNITUDES(w); /* |w| <= 128, and 2 * 128 * 127 < 2^15 */
    register_of_bytes added = ADD_SHORTS((register_of_bytes)sums, MULTIPLY_BYTES(w, four));
#if REGISTERS == 16
    __asm__("" : "+x"(added)); /* else GCC adds two products before the sums, and spills these */
#endif
    return (ivec)added;
#elif VNNI
    return (ivec)ADD_PRODUCTS(sums, weights, x);
#elif defined(__ARM_FEATURE_DOTPROD)
    return (ivec)vdotq_s32((int32x4_t)sums, (int8x16_t)weights, vreinterpretq_s8_u32(vdupq_n_u32(x)));
#else
    for (int byte = 0; byte < 32; byte += 8) sums += ((ivec)(weights << (24 - byte)) >> 24) * (int8_t)(x >> byte);
    return sums;
#endif
}

/* Return sums of 32 bits + those of add_products. */
INLINE ivec add_sums(ivec sums, ivec products) {
#if SHORT_SUMS
    return sums + (ivec)ADD_PAIRS((register_of_bytes)products);
#else
    return products;
#endif
}

/* A tile of rows, quantized. */
typedef struct {
    uint32_t *x;      /* [inputs / 4, places] four inputs each */
    float *scales;    /* [inputs / 32, places] */
    int32_t *starts;  /* [spans, places] minus the zero point times the sum of q, if weights have a zero point */
    float *sums;      /* [spans, places] scale of x times the sum of q, if weights have offsets */
} row_tile;

/* q `[32]` = a block of x, as integers. Return its scale. Plain loops over whole blocks, which compilers vectorise. */
INLINE float quantize(const void *x, int64_t from, int kind, float *q) {
    const float magic = 12582912.0f; /* 1.5 * 2^23: adding it rounds to an integer */
    int32_t bits[QUANTIZED], most = 0;
    for (int i = 0; i < QUANTIZED; i += LANES) store_f32(q + i, load(x, from + i, kind));
    memcpy(bits, q, sizeof bits);
    for (int i = 0; i < QUANTIZED; i++) { /* magnitudes have the order of their bits, and NaN comes last */
        int32_t magnitude = bits[i] & 0x7fffffff;
        most = magnitude > most ? magnitude : most;
    }
    float largest;
    memcpy(&largest, &most, sizeof most);
    if (most >= 0x7f800000 || largest < TINY) {
        memset(q, 0, QUANTIZED * sizeof *q);
        return most >= 0x7f800000 ? __builtin_nanf("") : 0.0f;
    }
    float factor = 127.0f / largest;
    for (int i = 0; i < QUANTIZED; i++) q[i] *= factor;
    __asm__("" : "+m"(*(float(*)[QUANTIZED])q)); /* the product is rounded: no fused multiply-add */
    for (int i = 0; i < QUANTIZED; i++) q[i] = q[i] + magic - magic;
    return largest / 127.0f;
}

typedef int8_t bytes32 __attribute__((vector_size(32)));
#ifdef __clang__
#define REORDER(bytes, ...) __builtin_shufflevector(bytes, bytes, __VA_ARGS__)
#else
#define REORDER(bytes, ...) __builtin_shuffle(bytes, (bytes32){__VA_ARGS__})
#endif
#define EIGHT(i) i, i + 4, i + 1, i + 5, i + 2, i + 6, i + 3, i + 7
#define FOUR(i) i, i + 2, i + 1, i + 3

/* Write q `[32]` as operands, `places` words apart. */
INLINE void write_operands(const float *q, uint32_t *to, int64_t places, int format) {
    int32_t integers[QUANTIZED];
    bytes32 bytes;
    int8_t *each = (int8_t *)&bytes;
    for (int i = 0; i < QUANTIZED; i++) integers[i] = (int32_t)q[i];
    for (int i = 0; i < QUANTIZED; i++) each[i] = (int8_t)integers[i];
    if (held_by(format) == 8)
        bytes = REORDER(bytes, EIGHT(0), EIGHT(8), EIGHT(16), EIGHT(24));
    else
        bytes = REORDER(bytes, FOUR(0), FOUR(4), FOUR(8), FOUR(12), FOUR(16), FOUR(20), FOUR(24), FOUR(28));
    uint32_t operands[QUANTIZED / 4];
    memcpy(operands, &bytes, sizeof bytes);
    for (int i = 0; i < QUANTIZED / 4; i++) to[i * places] = operands[i];
}

INLINE void quantize_row(
    const linear_args *a, int64_t row, int64_t place, int64_t places, const row_tile *t, int format, int offsets, int kind
) {
    for (int64_t b = 0; b < a->inputs / QUANTIZED; b++) {
        float q[QUANTIZED] ALIGNED;
        float scale = quantize(a->x, row * a->inputs + b * QUANTIZED, kind, q);
        t->scales[b * places + place] = scale;
        write_operands(q, t->x + b * (QUANTIZED / 4) * places + place, places, format);
        for (int i = 0; i < QUANTIZED / span_of(format); i++) {
            vec sums = splat(0.0f);
            for (int k = 0; k < span_of(format); k += LANES) sums += load_f32(q + i * span_of(format) + k);
            float sum = sum_lanes(sums); /* of integers: exact in any order */
            int64_t to = (b * (QUANTIZED / span_of(format)) + i) * places + place;
            if (zero_point(format)) t->starts[to] = -zero_point(format) * (int32_t)sum;
            if (offsets) t->sums[to] = scale * sum;
        }
    }
}

/* Add the sums of spans `s` to `end`, of `vectors` vectors of outputs, to `totals` `[places, 64]`. All are of a batch of
 * groups, whose scales begin at `scale`, one every `step` floats. */
INLINE void add_spans(
    const linear_args *a, const row_tile *t, const uint32_t *words, const float *scale, int64_t s, int64_t end, float *totals,
    int places, int vectors, int format, int offsets
) {
    int64_t span = span_of(format), unit = unit_weights(format), step = scale_step(a->scales), next = s + a->group / span;
    const uint32_t *x = t->x + s * (span / 4) * places;
    int64_t ahead = (end - s) * (span / unit) * unit_words(format) * PANEL; /* to the groups or the panel after these */
    int held = SHORT_SUMS ? words_held(format) : span / held_by(format), many = span / held_by(format) > held;
    vec total[2 * TILE_ROWS];
#pragma GCC unroll 12
    for (int r = 0; r < places; r++)
#pragma GCC unroll 4
        for (int v = 0; v < vectors && TOTALS_HELD; v++) total[r * vectors + v] = load_f32(totals + r * PANEL + v * LANES);
#pragma GCC unroll 1
    for (; s < end; s++) {
        if (s == next) scale += step, next += a->group / span;
        ivec sum[2 * TILE_ROWS], part[2 * TILE_ROWS];
#pragma GCC unroll 12
        for (int r = 0; r < places; r++)
#pragma GCC unroll 4
            for (int v = 0; v < vectors; v++) {
                sum[r * vectors + v] = (ivec){0} + (zero_point(format) ? t->starts[s * places + r] : 0);
                part[r * vectors + v] = SHORT_SUMS ? (ivec){0} : sum[r * vectors + v];
            }
#pragma GCC unroll 1
        for (int64_t u = 0; u < span / unit; u++, words += unit_words(format) * PANEL)
#pragma GCC unroll 4
            for (int index = 0; index < low_words(format); index++) {
                piece pieces[AT_ONCE];
#pragma GCC unroll 4
                for (int v = 0; v < vectors; v++) {
                    pieces[v].low = load_words(words + index * PANEL + v * LANES);
                    pieces[v].upper = load_upper(words + v * LANES, PANEL, format) >> (4 * upper_bits(format) * index);
                    if (vectors == VECTORS || v * LANES % 16) continue; /* read in order: the processor prefetches */
                    __builtin_prefetch(words + index * PANEL + v * LANES + ahead, 0, 2);
                    if (upper_bits(format) && index == 0)
                        __builtin_prefetch(words + low_words(format) * PANEL + v * LANES + ahead, 0, 2);
                }
#pragma GCC unroll 2
                for (int half = 0; half < parts_of(format); half++, x += places) {
                    uvec w[AT_ONCE];
#pragma GCC unroll 4
                    for (int v = 0; v < vectors; v++) w[v] = operand(pieces[v], half, format);
#pragma GCC unroll 12
                    for (int r = 0; r < places; r++)
#pragma GCC unroll 4
                        for (int v = 0; v < vectors; v++)
                            part[r * vectors + v] = add_products(part[r * vectors + v], w[v], x[r], format);
                }
                if (!many || (index + 1) % held) continue;
#pragma GCC unroll 24
                for (int i = 0; i < places * vectors; i++) sum[i] = add_sums(sum[i], part[i]), part[i] = (ivec){0};
            }
#pragma GCC unroll 12
        for (int r = 0; r < places; r++)
#pragma GCC unroll 4
            for (int v = 0; v < vectors; v++) {
                int i = r * vectors + v;
                vec products = __builtin_convertvector(many ? sum[i] : add_sums(sum[i], part[i]), vec);
                float x_scale = t->scales[s * span / QUANTIZED * places + r];
                vec before = TOTALS_HELD ? total[i] : load_f32(totals + r * PANEL + v * LANES);
                vec after = before + products * (x_scale * load_f32(scale + v * LANES));
                if (offsets) after += t->sums[s * places + r] * load_f32(scale + PANEL + v * LANES);
                if (TOTALS_HELD)
                    total[i] = after;
                else
                    store_f32(totals + r * PANEL + v * LANES, after);
            }
    }
#pragma GCC unroll 12
    for (int r = 0; r < places; r++)
#pragma GCC unroll 4
        for (int v = 0; v < vectors && TOTALS_HELD; v++) store_f32(totals + r * PANEL + v * LANES, total[r * vectors + v]);
}

/* Add the sums of groups `g` to `g` + `count` of a panel, with their scales, to `totals` `[places, 64]` of a tile. */
INLINE void add_groups(
    const linear_args *a, int64_t panel, const row_tile *t, const float *scale, int64_t g, int64_t count, float *totals,
    int places, int format, int offsets
) {
    int vectors = places > PAIRED_ROWS ? 1 : places > FEW_ROWS ? 2 : AT_ONCE;
    int64_t span = span_of(format), spans = a->group / span;
    int64_t words_of_span = span / unit_weights(format) * unit_words(format) * PANEL;
    const uint32_t *words = a->words + (panel * (a->inputs / span) + g * spans) * words_of_span;
#pragma GCC unroll 1
    for (int v = 0; v < PANEL; v += vectors * LANES)
        add_spans(a, t, words + v, scale + v, g * spans, (g + count) * spans, totals + v, places, vectors, format, offsets);
}

#define FITS(size, rows) if (rows <= size) return size;
#define SIZE_CASE(size, format, offsets) \
    case size: add_groups(a, panel, t, scale, g, count, totals, size, format, offsets); break;
/* Every pair of integers and scales, without or with offsets, that is packed. */
#define EACH_FORMAT(each) \
    each(INT4, 0) each(INT4, 1) each(UINT4, 1) each(INT5, 0) each(UINT5, 1) each(INT6, 0) each(INT8, 0) each(INT8, 1)

/* The numbers of rows for which there is code: a tile of another number is filled up. */
static int64_t places_for(int64_t rows) {
    EACH_SIZE(FITS, rows)
    return TILE_ROWS;
}

#define SUM_CASE(format, offsets) \
    case format * 2 + offsets: \
        switch (places) { EACH_SIZE(SIZE_CASE, format, offsets) } \
        break;

static void add_scaled(
    const linear_args *a, int64_t panel, const row_tile *t, const float *scale, int64_t g, int64_t count, float *totals,
    int64_t places
) {
    switch (a->format * 2 + has_offsets(a->scales)) { EACH_FORMAT(SUM_CASE) }
}

#define ROW_CASE(format, offsets) \
    case format * 2 + offsets: \
        if (a->x_kind == FLOAT32) \
            quantize_row(a, row, place, places, t, format, offsets, FLOAT32); \
        else \
            quantize_row(a, row, place, places, t, format, offsets, BFLOAT16); \
        break;

static void fill_place(const linear_args *a, int64_t row, int64_t place, int64_t places, const row_tile *t) {
    switch (a->format * 2 + has_offsets(a->scales)) { EACH_FORMAT(ROW_CASE) }
}

void integer_share(const linear_args *a, int64_t self, int64_t first, int64_t end) {
    int64_t spans = a->inputs / span_of(a->format), blocks = a->inputs / QUANTIZED, groups = a->inputs / a->group;
    int64_t starts = zero_point(a->format) ? spans : 0;
    int64_t row_words = a->inputs / 4 + blocks + (has_offsets(a->scales) ? starts + spans : spans);
    int64_t batch = groups_at_once(a);
    uint32_t *scratch = a->scratch + self * scratch_rows(a) * a->scratch_words;
    row_tile tiles[PACKED_ROWS / TILE_ROWS];
    float totals[PACKED_ROWS * PANEL] ALIGNED, buffer[SCALE_FLOATS] ALIGNED;
    for (int64_t row = 0, rows; row < a->rows; row += rows) {
        rows = a->rows - row < PACKED_ROWS ? a->rows - row : PACKED_ROWS;
        for (int64_t r = 0; r < rows; r += TILE_ROWS) {
            int64_t count = rows - r < TILE_ROWS ? rows - r : TILE_ROWS, places = places_for(count);
            uint32_t *x = scratch + r * row_words, *scales = x + a->inputs / 4 * places, *sums = scales + blocks * places;
            row_tile *t = tiles + r / TILE_ROWS;
            *t = (row_tile){x, (float *)scales, (int32_t *)sums, (float *)sums + starts * places};
            if (count < places) memset(x, 0, places * row_words * sizeof *x);
            for (int64_t i = 0; i < count; i++) fill_place(a, row + r + i, i, places, t);
        }
        for (int64_t panel = first; panel < end; panel++) {
            memset(totals, 0, rows * PANEL * sizeof *totals); /* of places beyond the last row sums are not used */
            for (int64_t g = 0; g < groups; g += batch) {
                int64_t count = groups - g < batch ? groups - g : batch;
                const float *scale = load_scales(a, panel, g, count, buffer);
                for (int64_t r = 0; r < rows; r += TILE_ROWS)
                    add_scaled(a, panel, tiles + r / TILE_ROWS, scale, g, count, totals + r * PANEL, places_for(rows - r));
            }
            linear_answer(a, row, panel, rows, totals, VECTORS);
        }
    }
}
