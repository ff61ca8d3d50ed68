/* Linear layers with weights of 4 to 8 bits, which are read as stored and widened exactly, in registers: to fp32 or,
 * where x is bf16, to bf16. Their scales and offsets are those of scales.h.
 *
 * The sum of an output runs along K in the same order for any number of rows: within each group of weights that share a
 * scale, from first to last; then over the groups, each group's sum times its scale, followed by the group's sum of x
 * times its offset, if there are any.
 *
 * Rows are computed in tiles. A batch of groups is read for all of the tiles before the next batch, so that its weights
 * and scales stay in cache. Where sums leave few registers for widening, tiles share a group's weights, widened to fp32
 * in cache. Else a tile's totals within a batch are in registers beside the sums of a group if they fit: a store takes
 * Zen 4 longer than two multiplications.
 */
#include "linear_narrow.h"
#include "reduce.h"
#include "scales.h"
#include "widen.h"

#if REGISTERS == 32
#define TILE_ROWS 12 /* most rows of a tile; a weight is widened once for each tile */
#define TILE_SUMS 24 /* most vectors of sums of a tile */
#else
#define TILE_ROWS 4 /* with six the compiler spills sums while it widens */
#define TILE_SUMS 8
#endif
#define SHARED_WEIGHTS 128 /* most weights of a group that tiles share, widened: 32 KB */
#define AT_ONCE 4 /* most vectors of outputs that are computed at once */
#define FETCHED 32 /* a panel's words along K are prefetched so far ahead, 8 KB, where it is read line by line */
#define ALIGNED __attribute__((aligned(64)))

/* Return for how many vectors of outputs the sums of a tile fit the registers; where its totals do not, the compiler keeps
 * them on the stack. */
INLINE int vectors_at_once(int places, int format) {
    if (REGISTERS == 16) return places == 1 ? 4 : 2;
    if (places > 4) return places == 12 || (places == 8 && format == INT8) ? 1 : 2; /* INT8 is widened by constants */
    return 4;
}

void group_sums(const linear_args *a, int64_t row, int64_t rows, int64_t places, float *to) {
    int64_t groups = a->inputs / a->group;
    for (int64_t r = 0; r < places; r++)
        for (int64_t first = 0; first < groups; first += LANES) {
            int64_t count = groups - first < LANES ? groups - first : LANES, k = (row + r) * a->inputs + first * a->group;
            vec sums[LANES] = {{0}};
            for (int64_t g = 0; r < rows && g < count; g++)
                for (int64_t end = k + a->group; k < end; k += LANES)
                    sums[g] += a->x_kind == FLOAT32 ? load(a->x, k, FLOAT32) : load(a->x, k, BFLOAT16);
            vec all = sum_lanes_of_each(sums);
            for (int64_t g = 0; g < count; g++) to[(first + g) * places + r] = all[g];
        }
}

/* part[r][v] += the products of row r and the weights of a word per output; x has their inputs of all `places` rows, word
 * by word. */
INLINE void add_pieces(vec *part, const piece *words, const uint32_t *x, int places, int vectors, int format, int x_kind) {
#ifdef __AVX512BF16__
    if (x_kind == BFLOAT16) {
#pragma GCC unroll 4
        for (int place = 0; place < held_by(format); place += 2) {
            __m512bh w[AT_ONCE];
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
        vec w[AT_ONCE];
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

/* A tile of `places` rows, and the groups of a panel from `first` to `end`, exclusive, that are added to `totals`
 * `[places, 64]`; they start at zero if `first` is 0. x is as pack_tile packs it, `x_sums` `[groups, places]` is read only
 * if there are offsets, and `scale` is what load_scales returns. With `fetches`, the next groups' weights are prefetched. */
typedef struct {
    const uint32_t *x;
    const float *x_sums, *scale;
    float *totals;
    int64_t first, end, fetches;
} row_tile;

/* part[r][v] = the sums of a group over `units` of weights. While they are read, those `ahead` words on are prefetched. */
INLINE void sum_group(
    vec *part, const uint32_t *words, const uint32_t *x, int64_t units, int64_t ahead, int places, int vectors, int format,
    int x_kind
) {
    int64_t piece_words = held_by(format) / (x_kind == BFLOAT16 ? 2 : 1) * places;
#pragma GCC unroll 24
    for (int i = 0; i < places * vectors; i++) part[i] = splat(0.0f);
#pragma GCC unroll 1
    for (int64_t u = 0; u < units; u++, words += unit_words(format) * PANEL) {
        piece pieces[AT_ONCE];
#pragma GCC unroll 4
        for (int v = 0; v < vectors; v++) {
            pieces[v].upper = load_upper(words + v * LANES, PANEL, format);
            if (vectors == VECTORS && upper_bits(format)) /* each vector is a cache line then */
                __builtin_prefetch(words + v * LANES + (low_words(format) + FETCHED) * PANEL, 0, 3);
        }
#pragma GCC unroll 1
        for (int index = 0; index < low_words(format); index++, x += piece_words) {
#pragma GCC unroll 4
            for (int v = 0; v < vectors; v++) {
                const uint32_t *own = words + v * LANES + index * PANEL;
                pieces[v].low = load_words(own);
                if (v * LANES % 16) continue; /* in the same cache line as the last */
                if (vectors < VECTORS) /* else the panel is read line by line */
                    __builtin_prefetch(own + ahead, 0, 2);
                else
                    __builtin_prefetch(own + FETCHED * PANEL, 0, 3);
            }
            add_pieces(part, pieces, x, places, vectors, format, x_kind);
#pragma GCC unroll 4
            for (int v = 0; v < vectors; v++) pieces[v].upper >>= 4 * upper_bits(format);
        }
    }
}

/* total[r][v] += part[r][v] times `unit` and the scales, then, with `offsets`, the sums of x times those. */
INLINE void add_group(
    vec *total, const vec *part, const float *scale, const float *x_sums, float unit, int places, int vectors, int offsets
) {
#pragma GCC unroll 12
    for (int r = 0; r < places; r++)
#pragma GCC unroll 4
        for (int v = 0; v < vectors; v++) {
            vec sum = total[r * vectors + v] + part[r * vectors + v] * (load_f32(scale + v * LANES) * unit);
            if (offsets) sum += x_sums[r] * load_f32(scale + PANEL + v * LANES);
            total[r * vectors + v] = sum;
        }
}

INLINE void sum_tile(
    const linear_args *a, int64_t panel, const row_tile *t, int places, int format, int offsets, int x_kind
) {
    int vectors = vectors_at_once(places, format);
    int64_t units = a->group / unit_weights(format), group_words = units * unit_words(format) * PANEL;
    int64_t ahead = t->fetches ? (t->end - t->first) * group_words : 0;
    int64_t group_steps = a->group / (x_kind == BFLOAT16 ? 2 : 1);
    const uint32_t *panel_words = a->words + panel * (a->inputs / a->group) * group_words;
    float unit = x_kind == BFLOAT16 ? pair_unit(format) : 1.0f;
#pragma GCC unroll 1
    for (int first = 0; first < PANEL; first += vectors * LANES) {
        const uint32_t *words = panel_words + t->first * group_words + first, *x = t->x + t->first * group_steps * places;
        const float *scale = t->scale + first, *x_sums = t->x_sums + t->first * places;
        float *totals = t->totals + first;
        vec total[TILE_SUMS], part[TILE_SUMS];
#pragma GCC unroll 12
        for (int r = 0; r < places; r++)
#pragma GCC unroll 4
            for (int v = 0; v < vectors; v++)
                total[r * vectors + v] = t->first ? load_f32(totals + r * PANEL + v * LANES) : splat(0.0f);
#pragma GCC unroll 1
        for (int64_t g = t->first; g < t->end; g++) {
            sum_group(part, words, x, units, ahead, places, vectors, format, x_kind);
            add_group(total, part, scale, x_sums, unit, places, vectors, offsets);
            words += group_words, x += group_steps * places, x_sums += places;
            scale += offsets ? 2 * PANEL : PANEL;
        }
#pragma GCC unroll 12
        for (int r = 0; r < places; r++)
#pragma GCC unroll 4
            for (int v = 0; v < vectors; v++) store_f32(totals + r * PANEL + v * LANES, total[r * vectors + v]);
    }
}

/* Widen a group of all outputs of a panel to `to` `[group, 64]`. */
INLINE void widen_group(const uint32_t *words, int64_t units, float *to, int format) {
#pragma GCC unroll 1
    for (int v = 0; v < VECTORS; v++) {
        const uint32_t *own = words + v * LANES;
        float *place_to = to + v * LANES;
#pragma GCC unroll 1
        for (int64_t u = 0; u < units; u++, own += unit_words(format) * PANEL) {
            piece p = {.upper = load_upper(own, PANEL, format)};
#pragma GCC unroll 1
            for (int index = 0; index < low_words(format); index++) {
                p.low = load_words(own + index * PANEL);
#pragma GCC unroll 8
                for (int place = 0; place < held_by(format); place++, place_to += PANEL)
                    store_f32(place_to, widen(p, place, format));
                p.upper >>= 4 * upper_bits(format);
            }
        }
    }
}

/* Add a group's weights `[weights, 64]`, widened, to the totals of a tile, as sum_tile does with those as stored. */
INLINE void sum_widened(const float *wide, int64_t weights, const row_tile *t, int places, int offsets) {
    int vectors = places == 1 ? 4 : 2;
#pragma GCC unroll 1
    for (int first = 0; first < PANEL; first += vectors * LANES) {
        vec total[TILE_SUMS], part[TILE_SUMS];
#pragma GCC unroll 12
        for (int r = 0; r < places; r++)
#pragma GCC unroll 4
            for (int v = 0; v < vectors; v++) {
                part[r * vectors + v] = splat(0.0f);
                total[r * vectors + v] = t->first ? load_f32(t->totals + first + r * PANEL + v * LANES) : splat(0.0f);
            }
        const uint32_t *x = t->x + t->first * weights * places;
#pragma GCC unroll 4
        for (int64_t k = 0; k < weights; k++, x += places) {
            vec w[AT_ONCE];
#pragma GCC unroll 4
            for (int v = 0; v < vectors; v++) w[v] = load_f32(wide + k * PANEL + first + v * LANES);
#pragma GCC unroll 12
            for (int r = 0; r < places; r++) {
                float one;
                memcpy(&one, x + r, sizeof one);
#pragma GCC unroll 4
                for (int v = 0; v < vectors; v++) part[r * vectors + v] += one * w[v];
            }
        }
        add_group(total, part, t->scale + first, t->x_sums + t->first * places, 1.0f, places, vectors, offsets);
#pragma GCC unroll 12
        for (int r = 0; r < places; r++)
#pragma GCC unroll 4
            for (int v = 0; v < vectors; v++) store_f32(t->totals + first + r * PANEL + v * LANES, total[r * vectors + v]);
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
#define EACH_SINGLE(each, ...) each(1, __VA_ARGS__) each(2, __VA_ARGS__) each(4, __VA_ARGS__)
#endif
#define FITS(size, rows) if (rows <= size) return size;
#define SIZE_CASE(size, format, offsets, x_kind) case size: sum_tile(a, panel, t, size, format, offsets, x_kind); break;
#define CASE(format, offsets, x_kind, each_size) \
    case (format * 2 + offsets) * 2 + x_kind: \
        switch (places) { each_size(SIZE_CASE, format, offsets, x_kind) } \
        break;
#define CASES(x_kind, each_size) \
    CASE(INT4, 0, x_kind, each_size) CASE(INT4, 1, x_kind, each_size) CASE(UINT4, 1, x_kind, each_size) \
    CASE(INT5, 0, x_kind, each_size) CASE(UINT5, 1, x_kind, each_size) CASE(INT6, 0, x_kind, each_size) \
    CASE(INT8, 0, x_kind, each_size) CASE(INT8, 1, x_kind, each_size) CASE(FP8, 0, x_kind, each_size)

static int64_t places_for(int64_t rows, int64_t x_kind) {
#ifdef __AVX512BF16__
    if (x_kind == BFLOAT16) { EACH_PAIRED(FITS, rows) }
#endif
    EACH_SINGLE(FITS, rows)
    return TILE_ROWS;
}

static void panel_sums(const linear_args *a, int64_t panel, const row_tile *t, int64_t places) {
    switch ((a->format * 2 + has_offsets(a->scales)) * 2 + a->x_kind) { /* every pair of format and scales that is packed */
        CASES(FLOAT32, EACH_SINGLE)
#ifdef __AVX512BF16__
        CASES(BFLOAT16, EACH_PAIRED)
#endif
    }
}

#if REGISTERS == 16
#define WIDEN_CASE(format) case format: widen_group(words, units, to, format); break;
static void widened(const linear_args *a, int64_t panel, int64_t g, float *to) {
    int64_t units = a->group / unit_weights(a->format), group_words = units * unit_words(a->format) * PANEL;
    const uint32_t *words = a->words + (panel * (a->inputs / a->group) + g) * group_words;
    switch (a->format) {
        WIDEN_CASE(INT4) WIDEN_CASE(UINT4) WIDEN_CASE(INT5) WIDEN_CASE(UINT5) WIDEN_CASE(INT6) WIDEN_CASE(INT8) WIDEN_CASE(FP8)
    }
}

#define WIDENED_CASE(size, offsets) case size * 2 + offsets: sum_widened(wide, weights, t, size, offsets); break;
static void widened_sums(const float *wide, int64_t weights, const row_tile *t, int64_t places, int offsets) {
    switch (places * 2 + offsets) { EACH_SINGLE(WIDENED_CASE, 0) EACH_SINGLE(WIDENED_CASE, 1) }
}
#endif

void narrow_share(const linear_args *a, int64_t self, int64_t first, int64_t end) {
    int64_t steps = a->inputs / (a->x_kind == BFLOAT16 ? 2 : 1), groups = a->inputs / a->group;
    int64_t batch = groups_at_once(a);
    uint32_t *scratch = a->scratch + self * scratch_rows(a) * a->scratch_words;
    float *x_sums = (float *)(scratch + scratch_rows(a) * steps), totals[PACKED_ROWS * PANEL] ALIGNED;
    float buffer[SCALE_FLOATS] ALIGNED;
#if REGISTERS == 16
    float wide[SHARED_WEIGHTS * PANEL] ALIGNED;
    int64_t scale_floats = has_offsets(a->scales) ? 2 * PANEL : PANEL;
#endif
    for (int64_t row = 0, rows; row < a->rows; row += rows) {
        rows = a->rows - row < PACKED_ROWS ? a->rows - row : PACKED_ROWS;
        const uint32_t *x = (const uint32_t *)a->x + row * steps;
        for (int64_t r = 0; r < rows; r += TILE_ROWS) {
            int64_t count = rows - r < TILE_ROWS ? rows - r : TILE_ROWS, places = places_for(count, a->x_kind);
            if (rows > 1) pack_tile(x + r * steps, count, places, steps, scratch + r * steps);
            if (has_offsets(a->scales)) group_sums(a, row + r, count, places, x_sums + r * groups);
        }
        if (rows > 1) x = scratch;
        for (int64_t panel = first; panel < end; panel++) {
            for (int64_t g = 0, next; g < groups; g = next) {
                next = g + batch < groups ? g + batch : groups;
                const float *scale = load_scales(a, panel, g, next - g, buffer);
#if REGISTERS == 16
                if (rows > TILE_ROWS && a->group <= SHARED_WEIGHTS) {
                    for (; g < next; g++, scale += scale_floats) {
                        widened(a, panel, g, wide);
                        for (int64_t r = 0; r < rows; r += TILE_ROWS) {
                            row_tile t = {x + r * steps, x_sums + r * groups, scale, totals + r * PANEL, g, g + 1, 0};
                            widened_sums(wide, a->group, &t, places_for(rows - r, a->x_kind), has_offsets(a->scales));
                        }
                    }
                    continue;
                }
#endif
                for (int64_t r = 0; r < rows; r += TILE_ROWS) {
                    row_tile t = {x + r * steps, x_sums + r * groups, scale, totals + r * PANEL, g, next, r == 0};
                    panel_sums(a, panel, &t, places_for(rows - r, a->x_kind));
                }
            }
            linear_answer(a, row, panel, rows, totals, VECTORS);
        }
    }
}
