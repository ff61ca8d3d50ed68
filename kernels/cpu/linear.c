/* y = x Wᵀ + b. Weights of 16 and 32 bits have the dtype of x. Those of 4 to 8 bits are read as stored and widened
 * (linear_narrow.c), or multiplied as integers with quantised rows (linear_integer.c). This is the vector implementation;
 * on a processor with matrix tiles, linear_tiles.c computes the layers that it supports. Outputs whose weights are stored
 * in different formats are computed one format after another.
 *
 * The sum of an output runs along K in one order for any number of rows: here from first to last.
 */
#include "linear_integer.h"
#include "linear_narrow.h"
#include "linear_tiles.h"
#include "panels.h"
#include "threads.h"
#include "widen.h"

typedef uint32_t quad __attribute__((vector_size(16)));
#ifdef __clang__
#define TAKE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define TAKE(a, b, ...) __builtin_shuffle(a, b, (quad){__VA_ARGS__})
#endif

#define WIDE_ROWS 12 /* of a tile: their sums fit the registers, and one pass over the weights is enough */

INLINE void answer_kind(
    const linear_args *a, int64_t row, int64_t panel, int64_t rows, const float *sums, int vectors, int kind
) {
    size_t element = kind == FLOAT32 ? sizeof(float) : sizeof(bf16);
    for (int64_t r = 0; r < rows; r++)
        for (int64_t v = 0; v < vectors; v++) {
            int64_t output = (panel * vectors + v) * LANES, to = (row + r) * a->stride + output, left = a->outputs - output;
            if (left <= 0) break;
            vec y = load_f32(sums + (r * vectors + v) * LANES);
            if (a->bias) y += load_f32(a->bias + output);
            if (left >= LANES) {
                if (a->residual) y = load(a->residual, to, kind) + rounded(y, kind);
                store(a->out, to, y, kind);
                continue;
            }
            float last[LANES] = {0};
            if (a->residual) {
                memcpy(last, (const char *)a->residual + to * element, left * element);
                y = load(last, 0, kind) + rounded(y, kind);
            }
            store(last, 0, y, kind);
            memcpy((char *)a->out + to * element, last, left * element);
        }
}

void linear_answer(const linear_args *a, int64_t row, int64_t panel, int64_t rows, const float *sums, int vectors) {
    if (vectors == VECTORS)
        if (a->out_kind == FLOAT32)
            answer_kind(a, row, panel, rows, sums, VECTORS, FLOAT32);
        else
            answer_kind(a, row, panel, rows, sums, VECTORS, BFLOAT16);
    else if (a->out_kind == FLOAT32)
        answer_kind(a, row, panel, rows, sums, WIDE_VECTORS, FLOAT32);
    else
        answer_kind(a, row, panel, rows, sums, WIDE_VECTORS, BFLOAT16);
}

/* Words that four rows have for four steps, row by row -> step by step. */
INLINE void transpose(quad *q) {
    quad a = TAKE(q[0], q[1], 0, 4, 1, 5), b = TAKE(q[2], q[3], 0, 4, 1, 5);
    quad c = TAKE(q[0], q[1], 2, 6, 3, 7), d = TAKE(q[2], q[3], 2, 6, 3, 7);
    q[0] = TAKE(a, b, 0, 1, 4, 5), q[1] = TAKE(a, b, 2, 3, 6, 7);
    q[2] = TAKE(c, d, 0, 1, 4, 5), q[3] = TAKE(c, d, 2, 3, 6, 7);
}

void pack_tile(const uint32_t *x, int64_t rows, int64_t places, int64_t steps, uint32_t *to) {
    for (int64_t first = 0; first < steps; first += BLOCK) {
        int64_t end = first + BLOCK < steps ? first + BLOCK : steps;
        int64_t row = 0;
        for (; row + 4 <= places; row += 4)
            for (int64_t k = first; k < end; k += 4) {
                quad q[4] = {{0}};
                for (int r = 0; r < 4; r++)
                    if (row + r < rows) memcpy(&q[r], x + (row + r) * steps + k, sizeof *q);
                transpose(q);
                for (int i = 0; i < 4; i++) memcpy(to + (k + i) * places + row, &q[i], sizeof *q);
            }
        for (; row < places; row++)
            for (int64_t k = first; k < end; k++) to[k * places + row] = row < rows ? x[row * steps + k] : 0;
    }
}

/* sums[r][v] += the dot products of the pair x[r] and the pairs w[v]. */
INLINE void add_pairs(vec sums[][WIDE_VECTORS], const uint32_t *x, const vec *w, int rows) {
#ifdef __AVX512BF16__
#pragma GCC unroll 12
    for (int r = 0; r < rows; r++) {
        __m512bh pair = (__m512bh)_mm512_set1_epi32((int32_t)x[r]);
#pragma GCC unroll 2
        for (int v = 0; v < WIDE_VECTORS; v++)
            sums[r][v] = (vec)_mm512_dpbf16_ps((__m512)sums[r][v], pair, (__m512bh)w[v]);
    }
#else
    /* The low halves, then the high ones: with both widened at once the sums would be spilled from the registers. */
#pragma GCC unroll 2
    for (int half = 0; half < 2; half++) {
        vec wide[WIDE_VECTORS];
#pragma GCC unroll 2
        for (int v = 0; v < WIDE_VECTORS; v++) wide[v] = (vec)(half ? (uvec)w[v] & 0xffff0000u : (uvec)w[v] << 16);
#pragma GCC unroll 12
        for (int r = 0; r < rows; r++) {
            uint32_t word = half ? x[r] & 0xffff0000u : x[r] << 16;
            float one;
            memcpy(&one, &word, sizeof one);
#pragma GCC unroll 2
            for (int v = 0; v < WIDE_VECTORS; v++) sums[r][v] += one * wide[v];
        }
    }
#endif
}

/* sums[r][v] += the products of `steps` words per row of x and a panel's weights; x holds the first word of every row,
 * then the second, and so on. Every step prefetches `lines` cache lines from `fetch` on. */
INLINE void add_words(
    vec sums[][WIDE_VECTORS], const uint32_t *x, const uint32_t *words, int64_t steps, const uint32_t *fetch, int lines,
    int rows, int kind
) {
    for (int64_t k = 0; k < steps; k++, x += rows, words += WIDE_PANEL, fetch += lines * LANES) {
        vec w[WIDE_VECTORS];
#pragma GCC unroll 2
        for (int v = 0; v < WIDE_VECTORS; v++) memcpy(&w[v], words + v * LANES, sizeof w[v]);
#pragma GCC unroll 2
        for (int i = 0; i < lines; i++) __builtin_prefetch(fetch + i * LANES, 0, 2);
        if (kind == BFLOAT16) {
            add_pairs(sums, x, w, rows);
            continue;
        }
#pragma GCC unroll 12
        for (int r = 0; r < rows; r++) {
            float one;
            memcpy(&one, x + r, sizeof one);
#pragma GCC unroll 2
            for (int v = 0; v < WIDE_VECTORS; v++) sums[r][v] += one * w[v];
        }
    }
}

/* Arguments for a panel's sums over `steps` words along K from `first` on. x is laid out as for add_words. The sums are
 * loaded from `held` `[rows, 32]`, or start at zero if `first` is 0, and are stored in `held`. */
typedef struct {
    const uint32_t *x, *words, *fetch;
    float *held;
    int64_t first, steps, lines;
} wide_tile;

INLINE void sum_tile(const wide_tile *t, int rows, int kind) {
    vec sums[WIDE_ROWS][WIDE_VECTORS];
#pragma GCC unroll 12
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 2
        for (int v = 0; v < WIDE_VECTORS; v++) sums[r][v] = t->first ? load_f32(t->held + r * WIDE_PANEL + v * LANES) : splat(0.0f);
    if (t->lines == 2)
        add_words(sums, t->x, t->words, t->steps, t->fetch, 2, rows, kind);
    else if (t->lines == 1)
        add_words(sums, t->x, t->words, t->steps, t->fetch, 1, rows, kind);
    else
        add_words(sums, t->x, t->words, t->steps, t->fetch, 0, rows, kind);
#pragma GCC unroll 12
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 2
        for (int v = 0; v < WIDE_VECTORS; v++) store_f32(t->held + r * WIDE_PANEL + v * LANES, sums[r][v]);
}

/* The number of rows of a tile is a compile-time constant, so that its sums stay in registers. */
#define WIDE_CASE(rows) \
    case rows: \
        if (kind == FLOAT32) \
            sum_tile(t, rows, FLOAT32); \
        else \
            sum_tile(t, rows, BFLOAT16); \
        break;

static void wide_rows(const wide_tile *t, int64_t rows, int64_t kind) {
    switch (rows) {
        WIDE_CASE(1) WIDE_CASE(2) WIDE_CASE(3) WIDE_CASE(4) WIDE_CASE(5) WIDE_CASE(6)
        WIDE_CASE(7) WIDE_CASE(8) WIDE_CASE(9) WIDE_CASE(10) WIDE_CASE(11) WIDE_CASE(12)
    }
}

/* Pack `count` rows from `row` on into tiles, and return the number of tiles. In a tile the words of all its rows for
 * one k are contiguous. */
static int64_t pack_rows(const linear_args *a, int64_t row, int64_t count, int64_t steps, uint32_t *to) {
    int64_t tiles = (count + WIDE_ROWS - 1) / WIDE_ROWS;
    const uint32_t *x = (const uint32_t *)a->x + row * steps;
    for (int64_t t = 0; t < tiles; t++) {
        int64_t first = part(count, t, tiles), rows = part(count, t + 1, tiles) - first;
        pack_tile(x + first * steps, rows, rows, steps, to + first * steps);
    }
    return tiles;
}

/* Compute rows in tiles; every BLOCK of a panel's weights is read for all of the tiles before the next BLOCK. */
static void wide_share(const linear_args *a, int64_t self, int64_t first_panel, int64_t end_panel) {
    int64_t steps = a->x_kind == FLOAT32 ? a->inputs : a->inputs / 2;
    int64_t blocks = (a->rows + PACKED_ROWS - 1) / PACKED_ROWS;
    uint32_t *scratch = a->scratch + self * scratch_rows(a) * steps;
    const uint32_t *packed = a->rows > 1 ? scratch : a->x; /* a single row already has the layout of a tile */
    float held[PACKED_ROWS * WIDE_PANEL];
    for (int64_t b = 0; b < blocks; b++) {
        int64_t row = part(a->rows, b, blocks), count = part(a->rows, b + 1, blocks) - row;
        int64_t tiles = a->rows > 1 ? pack_rows(a, row, count, steps, scratch) : 1;
        for (int64_t panel = first_panel; panel < end_panel; panel++) {
            const uint32_t *words = a->words + panel * steps * WIDE_PANEL;
            for (int64_t k = 0; k < steps; k += BLOCK)
                for (int64_t t = 0; t < tiles; t++) {
                    int64_t from = part(count, t, tiles), rows = part(count, t + 1, tiles) - from;
                    wide_tile own = {.x = packed + from * steps + k * rows, .words = words + k * WIDE_PANEL,
                                     .held = held + from * WIDE_PANEL, .first = k,
                                     .steps = steps - k < BLOCK ? steps - k : BLOCK};
                    own.lines = tiles == 1 ? 2 : t < 2; /* of the next block, shared by the first two tiles */
                    own.fetch = own.words + own.steps * (WIDE_PANEL + t * own.lines * LANES);
                    wide_rows(&own, rows, a->x_kind);
                }
            linear_answer(a, row, panel, count, held, WIDE_VECTORS);
        }
    }
}

static void panels_share(const linear_args *a, int64_t self, int64_t first, int64_t end) {
    if (a->integer)
        integer_share(a, self, first, end);
    else if (takes_tiles(a))
        tile_share(a, self, first, end);
    else if (a->format == WIDE)
        wide_share(a, self, first, end);
    else
        narrow_share(a, self, first, end);
}

/* to `[rows, inputs]` = the rows of x from `row` on, their inputs in the order of the weights. */
INLINE void reorder(const linear_args *a, int64_t row, int64_t rows, void *to, int kind) {
    for (int64_t r = 0; r < rows; r++)
        for (int64_t k = 0, from = (row + r) * a->inputs; k < a->inputs; k++)
            if (kind == FLOAT32)
                ((float *)to)[r * a->inputs + k] = ((const float *)a->x)[from + a->order[k]];
            else
                ((bf16 *)to)[r * a->inputs + k] = ((const bf16 *)a->x)[from + a->order[k]];
}

/* Compute panels of a layer whose inputs are reordered first, for as many rows at a time as scratch has room for. */
static void ordered_share(const linear_args *a, int64_t self, int64_t first, int64_t end) {
    int64_t steps = a->x_kind == FLOAT32 ? a->inputs : a->inputs / 2, room = scratch_rows(a);
    int64_t line = a->stride * (a->out_kind == FLOAT32 ? sizeof(float) : sizeof(bf16));
    linear_args own = *a;
    own.order = 0, own.scratch = a->scratch + self * room * a->scratch_words;
    uint32_t *x = own.scratch + room * (a->scratch_words - steps);
    own.x = x;
    for (int64_t row = 0; row < a->rows; row += own.rows) {
        own.rows = a->rows - row < PACKED_ROWS ? a->rows - row : PACKED_ROWS;
        if (a->x_kind == FLOAT32)
            reorder(a, row, own.rows, x, FLOAT32);
        else
            reorder(a, row, own.rows, x, BFLOAT16);
        own.out = (char *)a->out + row * line;
        own.residual = a->residual ? (const char *)a->residual + row * line : 0;
        panels_share(&own, 0, first, end);
    }
}

/* Compute part `index` of a thread for each, without the outputs of `next`, as thread `self`. */
static void own_share(const linear_args *a, int64_t self, int64_t index) {
    int64_t outputs = a->format == WIDE ? WIDE_PANEL : PANEL, panels = (a->outputs + outputs - 1) / outputs;
    int64_t first = part(panels, index, a->threads), end = part(panels, index + 1, a->threads);
    if (a->order)
        ordered_share(a, self, first, end);
    else
        panels_share(a, self, first, end);
}

void linear_share(const linear_args *a, int64_t self) {
    own_share(a, self, self);
    size_t size = a->out_kind == FLOAT32 ? sizeof(float) : sizeof(bf16);
    int64_t turn = 1; /* threads take turns at the larger part */
    for (const linear_args *other = a->next; other; other = other->next, turn++) {
        linear_args own = *other;
        own.x = a->x, own.out = (char *)a->out + own.column * size;
        own.residual = a->residual ? (const char *)a->residual + own.column * size : 0;
        own.rows = a->rows, own.threads = a->threads, own.scratch = a->scratch;
        own_share(&own, self, (self + turn) % a->threads);
    }
}

static void work(void *data) {
    const linear_args *a = data;
    linear_share(a, this_thread(a->threads));
}

/* Return whether weights in the dtype of x are supported: only where the sums of a tile fit the registers. */
int linear_takes_wide(void) {
#ifdef __AVX512F__
    return 1;
#else
    return 0;
#endif
}

void linear(linear_args *a) {
    run_threads(work, a, &a->threads);
}
