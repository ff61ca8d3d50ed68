/* y = x Wᵀ + b. Weights of 4 and 8 bits are read as they are stored and widened in registers; those of 16 and 32 bits
 * have the rows' own dtype.
 *
 * A panel is 64 outputs, or 32 where nothing is to be widened. Its weights lie in words of 32 bits, one beside another for its outputs: a word holds 8
 * (int4), 4, 2 (bf16) or 1 weights of one output in order along K, first of each pair in the low half, second in the
 * high half. So shifting a word by the pair's place yields both halves of what the bf16 dot product takes.
 *
 * An output's sum runs along K in this order whatever the number of rows: within a group of weights that share a scale
 * from its first on, then the groups' sums, each times its scale. Without scales it is one sum from first to last.
 */
#include "linear.h"
#ifdef __AVX512BF16__
#include <immintrin.h>
#endif
#ifdef __AMX_BF16__
#include <sys/syscall.h>
#include <unistd.h>
#endif

#define VECTORS 4 /* of a panel */
#define PANEL (VECTORS * LANES)
#define MOST_ROWS 6 /* of a tile */
/* The same where nothing is widened. Twelve rows' sums fit the registers, and one pass over the weights is enough for them. */
#define WIDE_VECTORS 2
#define WIDE_PANEL (WIDE_VECTORS * LANES)
#define WIDE_ROWS 12
#define BLOCK 128  /* words along K that are summed for all rows before the next: they stay in a cache */

enum { INT4 = 0, INT8 = 1, FP8 = 2, WIDE = 3 };

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

/* Puts a panel's sums `[rows, vectors * 16]` where they belong; what lies beyond the last output is dropped. */
INLINE void answer_kind(
    const linear_args *a, int64_t row, int64_t panel, int64_t rows, const float *sums, int vectors, int kind
) {
    size_t element = kind == FLOAT32 ? sizeof(float) : sizeof(bf16);
    for (int64_t r = 0; r < rows; r++)
        for (int64_t v = 0; v < vectors; v++) {
            int64_t output = (panel * vectors + v) * LANES, to = (row + r) * a->outputs + output, left = a->outputs - output;
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

static void answer(const linear_args *a, int64_t row, int64_t panel, int64_t rows, const float *sums, int vectors) {
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
    float sums[MOST_ROWS * PANEL];
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < VECTORS; v++) store_f32(sums + r * PANEL + v * LANES, total[r][v]);
    answer(a, row, panel, rows, sums, VECTORS);
}

/* sums[r][v] += the pair x[r] times the pairs w[v]. */
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
    /* The low halves, then the high ones: with both widened at once the sums would leave the registers. */
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

/* sums[r][v] += the products of `steps` words of x, of every row the first, then the second, and of a panel's weights.
 * `lines` of what lies from `fetch` on are brought nearer at every step. */
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

/* A panel's sums over `steps` words along K from `first` on. x lies as add_words says; sums begin as `held`
 * `[rows, 32]` has them, or at `first` 0 as zero, and end there. */
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

/* Rows of a tile are compiled in, so that its sums stay in registers. */
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

INLINE int64_t part(int64_t total, int64_t index, int64_t parts) { return total * index / parts; }

/* `count` rows from `row` on into tiles, whose number it answers: of a tile's rows the words of one k lie beside each
 * other. */
static int64_t pack_rows(const linear_args *a, int64_t row, int64_t count, int64_t steps, uint32_t *to) {
    int64_t tiles = (count + WIDE_ROWS - 1) / WIDE_ROWS;
    const uint32_t *x = (const uint32_t *)a->x + row * steps;
    for (int64_t t = 0; t < tiles; t++) {
        int64_t first = part(count, t, tiles), rows = part(count, t + 1, tiles) - first;
        uint32_t *own = to + first * steps;
        for (int64_t k = 0; k < steps; k += LANES) {
            int64_t end = k + LANES < steps ? k + LANES : steps;
            for (int64_t r = 0; r < rows; r++)
                for (int64_t i = k; i < end; i++) own[i * rows + r] = x[(first + r) * steps + i];
        }
    }
    return tiles;
}

/* Rows in tiles; every BLOCK of a panel's weights is read for all of them before the next. */
static void wide_share(const linear_args *a, int64_t self, int64_t first_panel, int64_t end_panel) {
    int64_t steps = a->x_kind == FLOAT32 ? a->inputs : a->inputs / 2;
    int64_t blocks = (a->rows + PACKED_ROWS - 1) / PACKED_ROWS;
    uint32_t *scratch = a->scratch + self * PACKED_ROWS * steps;
    const uint32_t *packed = a->rows > 1 ? scratch : a->x; /* one row lies as a tile of it does */
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
                    own.lines = tiles == 1 ? 2 : t < 2; /* of the next block, which the first two share */
                    own.fetch = own.words + own.steps * (WIDE_PANEL + t * own.lines * LANES);
                    wide_rows(&own, rows, a->x_kind);
                }
            answer(a, row, panel, count, held, WIDE_VECTORS);
        }
    }
}

#ifdef __AMX_BF16__
/* Weights of 16 bits on a processor that multiplies tiles (AMX): 16 rows by 32 inputs with 32 inputs by 16 outputs, in
 * one instruction that takes as long for one row as for sixteen. Within it sums are taken in an order of its own, and
 * of a row they do not depend on the others, so here all numbers of rows go this way. A word of a panel holds what the
 * instruction wants of an output; a block of rows is one tile of them or two, which share the weights.
 */
#define TILE 16
#define TILE_ROWS (2 * TILE)
#define TILE_BLOCK (6 * TILE_ROWS) /* rows that stay in a cache while all weights pass by */

static int tiles_allowed;

/* What is stored before stays before: compilers do not know all that these instructions read and write. */
#define COMPILED_BEFORE() __asm__ volatile("" ::: "memory")

typedef struct {
    uint8_t palette, start, unused[14];
    uint16_t bytes[16]; /* of a row of each tile */
    uint8_t rows[16];
} tile_shapes;

/* Tiles 0 and 1 hold rows, `first` and `second` of them, 2 and 3 weights, 4 to 7 their sums. */
static void shape_tiles(int64_t first, int64_t second) {
    tile_shapes shapes = {.palette = 1};
    int64_t rows[8] = {first, second, TILE, TILE, first, first, second, second};
    for (int i = 0; i < 8; i++)
        if (rows[i]) shapes.bytes[i] = TILE * sizeof(uint32_t), shapes.rows[i] = (uint8_t)rows[i];
    COMPILED_BEFORE();
    _tile_loadconfig(&shapes);
}

/* `sums` `[first + second, 32]` of a panel's `steps` words along K. What lies a block further on is brought nearer. */
INLINE void tile_sums(
    const uint32_t *x, const uint32_t *words, int64_t steps, int64_t first, float *sums, int second, int fetches
) {
    const uint32_t *below = x + first * steps;
    size_t row = steps * sizeof(uint32_t), line = WIDE_PANEL * sizeof(uint32_t);
    _tile_zero(4);
    _tile_zero(5);
    if (second) {
        _tile_zero(6);
        _tile_zero(7);
    }
    for (int64_t k = 0; k < steps; k += TILE, words += TILE * WIDE_PANEL) {
        if (fetches)
            for (int i = 0; i < TILE * WIDE_VECTORS; i++) __builtin_prefetch(words + BLOCK * WIDE_PANEL + i * LANES, 0, 2);
        _tile_loadd(0, x + k, row);
        _tile_loadd(2, words, line);
        _tile_loadd(3, words + LANES, line);
        _tile_dpbf16ps(4, 0, 2);
        _tile_dpbf16ps(5, 0, 3);
        if (second) {
            _tile_loadd(1, below + k, row);
            _tile_dpbf16ps(6, 1, 2);
            _tile_dpbf16ps(7, 1, 3);
        }
    }
    _tile_stored(4, sums, line);
    _tile_stored(5, sums + LANES, line);
    if (second) {
        _tile_stored(6, sums + first * WIDE_PANEL, line);
        _tile_stored(7, sums + first * WIDE_PANEL + LANES, line);
    }
    COMPILED_BEFORE();
}

static void tile_share(const linear_args *a, int64_t first_panel, int64_t end_panel) {
    int64_t steps = a->inputs / 2, blocks = (a->rows + TILE_BLOCK - 1) / TILE_BLOCK, shaped[2] = {0, 0};
    float sums[TILE_ROWS * WIDE_PANEL];
    for (int64_t b = 0; b < blocks; b++) {
        int64_t begin = part(a->rows, b, blocks), rows = part(a->rows, b + 1, blocks) - begin;
        int64_t pairs = (rows + TILE_ROWS - 1) / TILE_ROWS;
        for (int64_t panel = first_panel; panel < end_panel; panel++)
            for (int64_t p = 0; p < pairs; p++) {
                int64_t row = begin + part(rows, p, pairs), count = begin + part(rows, p + 1, pairs) - row;
                int64_t first = count > TILE ? (count + 1) / 2 : count, second = count - first;
                const uint32_t *x = (const uint32_t *)a->x + row * steps, *words = a->words + panel * steps * WIDE_PANEL;
                if (first != shaped[0] || second != shaped[1]) shape_tiles(shaped[0] = first, shaped[1] = second);
                if (second)
                    tile_sums(x, words, steps, first, sums, 1, p == 0);
                else
                    tile_sums(x, words, steps, first, sums, 0, p == 0);
                answer(a, row, panel, count, sums, WIDE_VECTORS);
            }
    }
    _tile_release();
}

static int takes_tiles(const linear_args *a) { return tiles_allowed && a->x_kind == BFLOAT16 && a->inputs % (2 * TILE) == 0; }

/* Asks the kernel for tiles, for this process, or gives them up. Answers whether they are in use. */
int linear_tiles(int wanted) {
    const long request = 0x1023, tile_data = 18; /* ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA */
    return tiles_allowed = wanted && syscall(SYS_arch_prctl, request, tile_data) == 0;
}
#else
static int takes_tiles(const linear_args *a) { return 0; }
static void tile_share(const linear_args *a, int64_t first_panel, int64_t end_panel) {}
int linear_tiles(int wanted) { return 0; }
#endif

#define ROWS(n, format, x_kind) \
    for (; row + n <= a->rows; row += n) tile(a, panel, row, n, format, x_kind);
#define CASE(format, x_kind) \
    case format * 2 + x_kind: \
        ROWS(6, format, x_kind) ROWS(4, format, x_kind) ROWS(2, format, x_kind) ROWS(1, format, x_kind) \
        break;

void linear_share(const linear_args *a, int64_t self) {
    int64_t outputs = a->format == WIDE ? WIDE_PANEL : PANEL, panels = (a->outputs + outputs - 1) / outputs;
    int64_t first = part(panels, self, a->threads), end = part(panels, self + 1, a->threads);
    if (a->format == WIDE) {
        if (takes_tiles(a))
            tile_share(a, first, end);
        else
            wide_share(a, self, first, end);
        return;
    }
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

static void work(void *data) {
    const linear_args *a = data;
    linear_share(a, a->threads > 1 ? a->self() : 0);
}

/* Whether x may be bf16 where weights are narrow; else the caller widens it. */
int linear_takes_bf16(void) {
#ifdef __AVX512BF16__
    return 1;
#else
    return 0;
#endif
}

/* Whether weights of x's own dtype are read here: where a tile's sums fit the registers. */
int linear_takes_wide(void) {
#ifdef __AVX512F__
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
