/* y = x Wᵀ + b. Weights of 16 and 32 bits have the dtype of x. Those of 4 to 8 bits are read as stored and widened
 * (linear_narrow.c), or multiplied as integers with quantized rows (linear_integer.c). This is the vector implementation;
 * on a processor with matrix tiles, linear_tiles.c computes the layers that it supports. Outputs whose weights are stored
 * in different formats are computed one format after another.
 *
 * Where the processor multiplies no bf16, rows in bf16 are widened first, each thread its own copy, and weights in bf16
 * while they are read.
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

#if REGISTERS == 32
#define WIDE_ROWS 12 /* most rows of a tile: their sums fit the registers, and few passes over the weights are enough */
#define WIDE_SUMS 24 /* vectors of sums that fit the registers beside weights and a row's input */
#define EACH_ROWS(each) each(1) each(2) each(3) each(4) each(5) each(6) each(7) each(8) each(9) each(10) each(11) each(12)
#else
#define WIDE_ROWS 5 /* with six the compiler spills sums of bf16 */
#define WIDE_SUMS 12
#define EACH_ROWS(each) each(1) each(2) each(3) each(4) each(5)
#endif
#define MOST_AT_ONCE 4 /* vectors of outputs */
#ifdef __AVX512BF16__
#define PAIRED 1 /* products of bf16 pairs */
#else
#define PAIRED 0
#endif

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

/* Return how many vectors of outputs of a panel are summed at once. */
INLINE int wide_vectors(int rows) {
    for (int vectors = MOST_AT_ONCE < WIDE_VECTORS ? MOST_AT_ONCE : WIDE_VECTORS; vectors > 1; vectors /= 2)
        if (rows * vectors <= WIDE_SUMS) return vectors;
    return 1;
}

/* sums[r][v] += one[r] * w[v] */
INLINE void add_singles(vec *sums, const uint32_t *x, const vec *w, int rows, int vectors) {
#pragma GCC unroll 12
    for (int r = 0; r < rows; r++) {
        float one;
        memcpy(&one, x + r, sizeof one);
#pragma GCC unroll 4
        for (int v = 0; v < vectors; v++) sums[r * vectors + v] += one * w[v];
    }
}

/* sums[r][v] += the dot products of a pair of inputs per row and the pairs w[v], both in bf16; or, if x is fp32, the
 * products of two inputs of every row and the pairs' halves. */
INLINE void add_pairs(vec *sums, const uint32_t *x, const vec *w, int rows, int vectors) {
#if PAIRED
#pragma GCC unroll 12
    for (int r = 0; r < rows; r++) {
        __m512bh pair = (__m512bh)_mm512_set1_epi32((int32_t)x[r]);
#pragma GCC unroll 4
        for (int v = 0; v < vectors; v++)
            sums[r * vectors + v] = (vec)_mm512_dpbf16_ps((__m512)sums[r * vectors + v], pair, (__m512bh)w[v]);
    }
#else
    /* The low halves, then the high ones: with both widened at once the sums would be spilled from the registers. */
#pragma GCC unroll 2
    for (int half = 0; half < 2; half++) {
        vec wide[MOST_AT_ONCE];
#pragma GCC unroll 4
        for (int v = 0; v < vectors; v++) wide[v] = (vec)(half ? (uvec)w[v] & 0xffff0000u : (uvec)w[v] << 16);
        add_singles(sums, x + half * rows, wide, rows, vectors);
    }
#endif
}

/* Return how many words a row of x has for each word of the weights. */
INLINE int words_per_word(int format) { return format == WIDE_BF16 && !PAIRED ? 2 : 1; }

/* sums[r][v] += the products of x and `vectors` vectors of a panel's weights over `steps` words; x holds the first word of
 * every row, then the second, and so on. Every step prefetches `lines` cache lines from `fetch` on. */
INLINE void add_words(
    vec *sums, const uint32_t *x, const uint32_t *words, int64_t steps, const uint32_t *fetch, int lines, int rows,
    int vectors, int format
) {
    for (int64_t k = 0; k < steps; k++, words += WIDE_PANEL, fetch += lines * 16) {
        vec w[MOST_AT_ONCE];
#pragma GCC unroll 4
        for (int v = 0; v < vectors; v++) memcpy(&w[v], words + v * LANES, sizeof w[v]);
#pragma GCC unroll 2
        for (int i = 0; i < lines; i++) __builtin_prefetch(fetch + i * 16, 0, 2);
        if (format == WIDE_BF16)
            add_pairs(sums, x, w, rows, vectors);
        else
            add_singles(sums, x, w, rows, vectors);
        x += words_per_word(format) * rows;
    }
}

/* Arguments for a panel's sums over `steps` words along K from `first` on. x is laid out as for add_words. The sums are
 * loaded from `held` `[rows, 32]`, or start at zero if `first` is 0, and are stored in `held`. */
typedef struct {
    const uint32_t *x, *words, *fetch;
    float *held;
    int64_t first, steps, lines;
} wide_tile;

INLINE void sum_tile(const wide_tile *t, int rows, int format) {
    int vectors = wide_vectors(rows);
#pragma GCC unroll 1
    for (int from = 0; from < WIDE_PANEL; from += vectors * LANES) {
        vec sums[WIDE_SUMS];
        float *held = t->held + from;
#pragma GCC unroll 12
        for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
            for (int v = 0; v < vectors; v++)
                sums[r * vectors + v] = t->first ? load_f32(held + r * WIDE_PANEL + v * LANES) : splat(0.0f);
        int64_t lines = from ? 0 : t->lines;
        if (lines == 2)
            add_words(sums, t->x, t->words + from, t->steps, t->fetch, 2, rows, vectors, format);
        else if (lines == 1)
            add_words(sums, t->x, t->words + from, t->steps, t->fetch, 1, rows, vectors, format);
        else
            add_words(sums, t->x, t->words + from, t->steps, t->fetch, 0, rows, vectors, format);
#pragma GCC unroll 12
        for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
            for (int v = 0; v < vectors; v++) store_f32(held + r * WIDE_PANEL + v * LANES, sums[r * vectors + v]);
    }
}

/* The number of rows of a tile is a compile-time constant, so that its sums stay in registers. */
#define WIDE_CASE(rows) \
    case rows: \
        if (format == WIDE) \
            sum_tile(t, rows, WIDE); \
        else \
            sum_tile(t, rows, WIDE_BF16); \
        break;

static void wide_rows(const wide_tile *t, int64_t rows, int64_t format) {
    switch (rows) { EACH_ROWS(WIDE_CASE) }
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
    int64_t steps = a->format == WIDE ? a->inputs : a->inputs / 2, each = words_per_word((int)a->format);
    int64_t blocks = (a->rows + PACKED_ROWS - 1) / PACKED_ROWS;
    uint32_t *scratch = a->scratch + self * scratch_rows(a) * a->scratch_words;
    const uint32_t *packed = a->rows > 1 ? scratch : a->x; /* a single row already has the layout of a tile */
    float held[PACKED_ROWS * WIDE_PANEL];
    for (int64_t b = 0; b < blocks; b++) {
        int64_t row = part(a->rows, b, blocks), count = part(a->rows, b + 1, blocks) - row;
        int64_t tiles = a->rows > 1 ? pack_rows(a, row, count, steps * each, scratch) : 1;
        for (int64_t panel = first_panel; panel < end_panel; panel++) {
            const uint32_t *words = a->words + panel * steps * WIDE_PANEL;
            for (int64_t k = 0; k < steps; k += BLOCK)
                for (int64_t t = 0; t < tiles; t++) {
                    int64_t from = part(count, t, tiles), rows = part(count, t + 1, tiles) - from;
                    wide_tile own = {.x = packed + (from * steps + k * rows) * each, .words = words + k * WIDE_PANEL,
                                     .held = held + from * WIDE_PANEL, .first = k,
                                     .steps = steps - k < BLOCK ? steps - k : BLOCK};
                    own.lines = tiles == 1 ? 2 : t < 2; /* of the next block, shared by the first two tiles */
                    own.fetch = own.words + own.steps * WIDE_PANEL + t * own.lines * own.steps * 16;
                    wide_rows(&own, rows, a->format);
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
    else if (is_wide(a->format))
        wide_share(a, self, first, end);
    else
        narrow_share(a, self, first, end);
}

/* Return whether rows are copied before they are multiplied: in the order of the weights, or widened to fp32. */
INLINE int widens_rows(const linear_args *a) { return !PAIRED && a->x_kind == BFLOAT16 && !a->integer; }

INLINE int copies_rows(const linear_args *a) { return a->order || widens_rows(a); }

/* to `[rows, inputs]` = the rows of x from `row` on, their inputs in the order of the weights, of `to_kind`. */
INLINE void copy_rows(const linear_args *a, int64_t row, int64_t rows, void *to, int kind, int to_kind) {
    int64_t first = row * a->inputs;
    if (!a->order) { /* inputs are a multiple of eight, which whole vectors may not divide */
        int64_t count = rows * a->inputs, whole = count - count % LANES;
        for (int64_t k = 0; k < whole; k += LANES) store(to, k, load(a->x, first + k, kind), to_kind);
        for (int64_t k = whole; k < count; k++) ((float *)to)[k] = element(a->x, first + k, kind);
        return;
    }
    for (int64_t r = 0; r < rows; r++, first += a->inputs)
        for (int64_t k = 0; k < a->inputs; k++)
            if (to_kind == FLOAT32)
                ((float *)to)[r * a->inputs + k] = element(a->x, first + a->order[k], kind);
            else
                ((bf16 *)to)[r * a->inputs + k] = ((const bf16 *)a->x)[first + a->order[k]];
}

/* Compute panels of a layer whose rows are copied first, for as many rows at a time as scratch has room for. */
static void copied_share(const linear_args *a, int64_t self, int64_t first, int64_t end) {
    int64_t to_kind = widens_rows(a) ? FLOAT32 : a->x_kind, room = scratch_rows(a);
    int64_t words = to_kind == FLOAT32 ? a->inputs : a->inputs / 2;
    int64_t line = a->stride * (a->out_kind == FLOAT32 ? sizeof(float) : sizeof(bf16));
    linear_args own = *a;
    own.order = 0, own.x_kind = to_kind, own.scratch = a->scratch + self * room * a->scratch_words;
    uint32_t *x = own.scratch + room * (a->scratch_words - words);
    own.x = x;
    for (int64_t row = 0; row < a->rows; row += own.rows) {
        own.rows = a->rows - row < PACKED_ROWS ? a->rows - row : PACKED_ROWS;
        if (a->x_kind == FLOAT32)
            copy_rows(a, row, own.rows, x, FLOAT32, FLOAT32);
        else if (to_kind == FLOAT32)
            copy_rows(a, row, own.rows, x, BFLOAT16, FLOAT32);
        else
            copy_rows(a, row, own.rows, x, BFLOAT16, BFLOAT16);
        own.out = (char *)a->out + row * line;
        own.residual = a->residual ? (const char *)a->residual + row * line : 0;
        panels_share(&own, 0, first, end);
    }
}

/* Compute part `index` of a thread for each, without the outputs of `next`, as thread `self`. */
static void own_share(const linear_args *a, int64_t self, int64_t index) {
    int64_t outputs = is_wide(a->format) ? WIDE_PANEL : PANEL, panels = (a->outputs + outputs - 1) / outputs;
    int64_t first = part(panels, index, a->threads), end = part(panels, index + 1, a->threads);
    if (copies_rows(a))
        copied_share(a, self, first, end);
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

/* Return whether rows in bf16 are multiplied as they are; if not, they are widened in scratch. */
int linear_takes_bf16(void) { return PAIRED; }

void linear(linear_args *a) {
    run_threads(work, a, &a->threads);
}
