/* Linear layers with weights of 4 to 8 bits, which are read as stored and widened exactly, in registers: to fp32 or,
 * where x is bf16, to bf16. Their scales and offsets are those of scales.h.
 *
 * The sum of an output runs along K in the same order for any number of rows: within each group of weights that share a
 * scale, from first to last; then over the groups, each group's sum times its scale, followed by the group's sum of x
 * times its offset, if there are any.
 */
#include "linear_narrow.h"
#include "scales.h"
#include "widen.h"

/* Most rows of a tile. Their sums for two vectors of outputs fit the registers, those of FEW_ROWS for four. A weight is
 * widened once for each tile. */
#ifdef __AVX512F__
#define TILE_ROWS 12
#define FEW_ROWS 6
#else
#define TILE_ROWS 2
#define FEW_ROWS 1
#endif
#define ALIGNED __attribute__((aligned(64)))

/* Sums of x over each group, `[rows, groups]`, for layers with offsets. */
static void group_sums(const linear_args *a, int64_t row, int64_t rows, float *to) {
    int64_t groups = a->inputs / a->group;
    for (int64_t r = 0; r < rows; r++)
        for (int64_t g = 0; g < groups; g++) {
            vec sum = splat(0.0f);
            for (int64_t k = 0; k < a->group; k += LANES) {
                int64_t place = (row + r) * a->inputs + g * a->group + k;
                sum += a->x_kind == FLOAT32 ? load(a->x, place, FLOAT32) : load(a->x, place, BFLOAT16);
            }
            to[r * groups + g] = sum_lanes(sum);
        }
}

/* part[r][v] += the products of row r and the weights of a word per output; x has their inputs of all `places` rows, word
 * by word. */
INLINE void add_pieces(vec *part, const piece *words, const uint32_t *x, int places, int vectors, int format, int x_kind) {
#ifdef __AVX512BF16__
    if (x_kind == BFLOAT16) {
#pragma GCC unroll 4
        for (int place = 0; place < held_by(format); place += 2) {
            __m512bh w[VECTORS];
#pragma GCC unroll 4
            for (int v = 0; v < vectors; v++) w[v] = widen_pair(words[v], place, format);
#pragma GCC unroll 12
            for (int r = 0; r < places; r++) {
                __m512bh pair = (__m512bh)_mm512_set1_epi32((int32_t)x[place / 2 * places + r]);
#pragma GCC unroll 4
                for (int v = 0; v < vectors; v++)
                    part[r * vectors + v] = (vec)_mm512_dpbf16_ps((__m512)part[r * vectors + v], pair, w[v]);
            }
        }
        return;
    }
#endif
#pragma GCC unroll 8
    for (int place = 0; place < held_by(format); place++) {
        vec w[VECTORS];
#pragma GCC unroll 4
        for (int v = 0; v < vectors; v++) w[v] = widen(words[v], place, format);
#pragma GCC unroll 12
        for (int r = 0; r < places; r++) {
            float one;
            memcpy(&one, x + place * places + r, sizeof one);
#pragma GCC unroll 4
            for (int v = 0; v < vectors; v++) part[r * vectors + v] += one * w[v];
        }
    }
}

/* A tile of rows: x as pack_tile packs it, `x_sums` `[places, groups]` or null, and `totals` `[places, 64]`. */
typedef struct {
    const uint32_t *x;
    const float *x_sums;
    float *totals;
} row_tile;

/* Compute a panel's sums for a tile of `places` rows. */
INLINE void sum_tile(const linear_args *a, int64_t panel, const row_tile *t, int places, int format, int x_kind) {
    int vectors = places > FEW_ROWS ? VECTORS / 2 : VECTORS;
    int64_t groups = a->inputs / a->group, unit = unit_weights(format), step = scale_step(a->scales);
    int64_t piece_words = held_by(format) / (x_kind == BFLOAT16 ? 2 : 1) * places, units = a->group / unit;
    const uint32_t *words = a->words + panel * (a->inputs / unit) * unit_words(format) * PANEL, *x = t->x;
    float buffer[SCALE_BATCH * 2 * PANEL] ALIGNED;
    const float *scale = buffer;
    memset(t->totals, 0, places * PANEL * sizeof(float));
    for (int64_t g = 0; g < groups; g++, scale += step) {
        if (g % SCALE_BATCH == 0)
            scale = load_scales(a, panel, g, groups - g < SCALE_BATCH ? groups - g : SCALE_BATCH, buffer);
#pragma GCC unroll 1
        for (int first = 0; first < PANEL; first += vectors * LANES) {
            vec part[2 * TILE_ROWS];
#pragma GCC unroll 24
            for (int i = 0; i < places * vectors; i++) part[i] = splat(0.0f);
            const uint32_t *own = words + first, *x_own = x;
#pragma GCC unroll 1
            for (int64_t u = 0; u < units; u++, own += unit_words(format) * PANEL)
#pragma GCC unroll 1
                for (int index = 0; index < low_words(format); index++, x_own += piece_words) {
                    piece pieces[VECTORS];
#pragma GCC unroll 4
                    for (int v = 0; v < vectors; v++) pieces[v] = load_piece(own + v * LANES, PANEL, index, format);
                    add_pieces(part, pieces, x_own, places, vectors, format, x_kind);
                }
#pragma GCC unroll 12
            for (int r = 0; r < places; r++)
#pragma GCC unroll 4
                for (int v = 0; v < vectors; v++) {
                    float *to = t->totals + r * PANEL + first + v * LANES;
                    vec total = load_f32(to);
                    total += part[r * vectors + v] * load_f32(scale + first + v * LANES);
                    if (t->x_sums) total += t->x_sums[r * groups + g] * load_f32(scale + PANEL + first + v * LANES);
                    store_f32(to, total);
                }
        }
        words += units * unit_words(format) * PANEL;
        x += units * low_words(format) * piece_words;
    }
}

/* The numbers of rows for which there is code: a tile of another number is filled up. Where x is bf16 as a rule, there is
 * less code for fp32. */
#ifdef __AVX512BF16__
#define EACH_PAIRED(each, ...) \
    each(1, __VA_ARGS__) each(2, __VA_ARGS__) each(4, __VA_ARGS__) each(6, __VA_ARGS__) each(8, __VA_ARGS__) each(12, __VA_ARGS__)
#define EACH_SINGLE(each, ...) each(1, __VA_ARGS__) each(4, __VA_ARGS__) each(12, __VA_ARGS__)
#elif TILE_ROWS == 12
#define EACH_SINGLE(each, ...) \
    each(1, __VA_ARGS__) each(2, __VA_ARGS__) each(4, __VA_ARGS__) each(6, __VA_ARGS__) each(8, __VA_ARGS__) each(12, __VA_ARGS__)
#else
#define EACH_SINGLE(each, ...) each(1, __VA_ARGS__) each(2, __VA_ARGS__)
#endif
#define FITS(size, rows) if (rows <= size) return size;
#define SIZE_CASE(size, format, x_kind) case size: sum_tile(a, panel, t, size, format, x_kind); break;
#define CASE(format, x_kind, each_size) \
    case format * 2 + x_kind: \
        switch (places) { each_size(SIZE_CASE, format, x_kind) } \
        break;
#define CASES(x_kind, each_size) \
    CASE(INT4, x_kind, each_size) CASE(UINT4, x_kind, each_size) CASE(INT5, x_kind, each_size) \
    CASE(UINT5, x_kind, each_size) CASE(INT6, x_kind, each_size) CASE(INT8, x_kind, each_size) CASE(FP8, x_kind, each_size)

static int64_t places_for(int64_t rows, int64_t x_kind) {
#ifdef __AVX512BF16__
    if (x_kind == BFLOAT16) { EACH_PAIRED(FITS, rows) }
#endif
    EACH_SINGLE(FITS, rows)
    return TILE_ROWS;
}

static void panel_sums(const linear_args *a, int64_t panel, const row_tile *t, int64_t places) {
    switch (a->format * 2 + a->x_kind) {
        CASES(FLOAT32, EACH_SINGLE)
#ifdef __AVX512BF16__
        CASES(BFLOAT16, EACH_PAIRED)
#endif
    }
}

void narrow_share(const linear_args *a, int64_t self, int64_t first, int64_t end) {
    int64_t steps = a->inputs / (a->x_kind == BFLOAT16 ? 2 : 1), groups = a->inputs / a->group;
    uint32_t *scratch = a->scratch + self * scratch_rows(a) * a->scratch_words;
    float *x_sums = (float *)(scratch + scratch_rows(a) * steps), totals[PACKED_ROWS * PANEL] ALIGNED;
    for (int64_t row = 0, rows; row < a->rows; row += rows) {
        rows = a->rows - row < PACKED_ROWS ? a->rows - row : PACKED_ROWS;
        const uint32_t *x = (const uint32_t *)a->x + row * steps;
        if (rows > 1) {
            for (int64_t r = 0; r < rows; r += TILE_ROWS) {
                int64_t count = rows - r < TILE_ROWS ? rows - r : TILE_ROWS;
                pack_tile(x + r * steps, count, places_for(count, a->x_kind), steps, scratch + r * steps);
            }
            x = scratch;
        }
        if (has_offsets(a->scales)) group_sums(a, row, rows, x_sums);
        for (int64_t panel = first; panel < end; panel++) {
            for (int64_t r = 0; r < rows; r += TILE_ROWS) {
                row_tile t = {x + r * steps, has_offsets(a->scales) ? x_sums + r * groups : 0, totals + r * PANEL};
                panel_sums(a, panel, &t, places_for(rows - r, a->x_kind));
            }
            linear_answer(a, row, panel, rows, totals, VECTORS);
        }
    }
}

/* Return whether x may be bf16 with weights of 4 to 8 bits; if not, the caller widens it. */
int linear_takes_bf16(void) {
#ifdef __AVX512BF16__
    return 1;
#else
    return 0;
#endif
}
