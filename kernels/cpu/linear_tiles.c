/* Linear layers on a processor with matrix tiles (AMX): one instruction multiplies 16 rows by 32 inputs with 32 inputs
 * by 16 outputs, in bf16, and takes as long for one row as for sixteen. Its order of summation is its own, and a row's
 * sums do not depend on the other rows; so here any number of rows is computed with tiles.
 *
 * The words of a panel in bf16 have the layout that the instruction expects. Weights of 8 and 4 bits are widened one
 * piece of a panel at a time, once for all rows.
 */
#include "linear_tiles.h"
#include "scales.h"
#include "widen.h"
#if defined(__AMX_BF16__) && defined(__AVX512BF16__) && defined(__AVX512BW__)
#include <sys/syscall.h>
#include <unistd.h>

#define TILE 16
#define TILE_ROWS (2 * TILE)
#define WIDE_BLOCK (16 * TILE_ROWS)  /* rows per pass over all weights */
#define NARROW_BLOCK (6 * TILE_ROWS) /* likewise; their sums stay in cache while a panel is widened piece by piece */
#define PIECE 16                     /* most words along K that are widened at a time, all of one group */

static int tiles_allowed;

/* Compiler barrier: earlier stores stay before it. Compilers do not know all that tile instructions read and write. */
#define COMPILED_BEFORE() __asm__ volatile("" ::: "memory")

typedef struct {
    uint8_t palette, start, unused[14];
    uint16_t bytes[16]; /* per row of each tile */
    uint8_t rows[16];
} tile_shapes;

/* Set the number of rows of tiles 0 to 7, with 64 bytes per row; a tile with 0 rows is not configured. */
static void shape_tiles(const int64_t *rows) {
    tile_shapes shapes = {.palette = 1};
    for (int i = 0; i < 8; i++)
        if (rows[i]) shapes.bytes[i] = TILE * sizeof(uint32_t), shapes.rows[i] = (uint8_t)rows[i];
    COMPILED_BEFORE();
    _tile_loadconfig(&shapes);
}

/* Compute `sums` `[first + second, 32]` over a panel's `steps` words along K. With `fetches`, prefetch the weights one
 * BLOCK ahead. Tiles 0 and 1 hold `first` and `second` rows of x, 2 and 3 the weights for both, 4 to 7 the sums. */
INLINE void wide_sums(
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

/* Weights of 16 bits. */
static void wide_share(const linear_args *a, int64_t first_panel, int64_t end_panel) {
    int64_t steps = a->inputs / 2, blocks = (a->rows + WIDE_BLOCK - 1) / WIDE_BLOCK, shaped[2] = {0, 0};
    float sums[TILE_ROWS * WIDE_PANEL];
    for (int64_t b = 0; b < blocks; b++) {
        int64_t begin = part(a->rows, b, blocks), rows = part(a->rows, b + 1, blocks) - begin;
        int64_t pairs = (rows + TILE_ROWS - 1) / TILE_ROWS;
        for (int64_t panel = first_panel; panel < end_panel; panel++)
            for (int64_t p = 0; p < pairs; p++) {
                int64_t row = begin + part(rows, p, pairs), count = begin + part(rows, p + 1, pairs) - row;
                int64_t first = count > TILE ? (count + 1) / 2 : count, second = count - first;
                const uint32_t *x = (const uint32_t *)a->x + row * steps, *words = a->words + panel * steps * WIDE_PANEL;
                if (first != shaped[0] || second != shaped[1])
                    shape_tiles((int64_t[]){first, second, TILE, TILE, first, first, second, second});
                shaped[0] = first, shaped[1] = second;
                if (second)
                    wide_sums(x, words, steps, first, sums, 1, p == 0);
                else
                    wide_sums(x, words, steps, first, sums, 0, p == 0);
                linear_answer(a, row, panel, count, sums, WIDE_VECTORS);
            }
    }
}

/* Widen `count` words along K of a panel -> `to` `[count * weights per word / 2, 64]`, words of two bf16 each. Prefetch
 * the `count` words after them. */
INLINE void widen_piece(const uint32_t *words, int64_t count, int format, uint32_t *to) {
    for (int64_t i = 0; i < count; i++, words += PANEL)
        for (int v = 0; v < VECTORS; v++) {
            uvec word = load_words(words + v * LANES);
            __builtin_prefetch(words + count * PANEL + v * LANES, 0, 2);
            for (int place = 0; place < held_by(format); place += 2) {
                __m512bh pair = widen_pair((piece){word}, place, format);
                memcpy(to + (i * held_by(format) + place) / 2 * PANEL + v * LANES, &pair, sizeof pair);
            }
        }
}

/* Compute `sums` `[rows of a tile, 64]` over a piece of `pairs` along K, or add to them if `begun`. x has `row` bytes
 * per row. Tile 0 holds rows, 1 to 3 weights, 4 to 7 sums. */
INLINE void piece_sums(const uint32_t *x, size_t row, const uint32_t *wide, int64_t pairs, float *sums, int begun) {
    const size_t line = PANEL * sizeof(uint32_t);
    if (begun) {
        _tile_loadd(4, sums, line);
        _tile_loadd(5, sums + LANES, line);
        _tile_loadd(6, sums + 2 * LANES, line);
        _tile_loadd(7, sums + 3 * LANES, line);
    } else {
        _tile_zero(4);
        _tile_zero(5);
        _tile_zero(6);
        _tile_zero(7);
    }
    for (int64_t k = 0; k < pairs; k += TILE, wide += TILE * PANEL) {
        _tile_loadd(0, x + k, row);
        _tile_loadd(1, wide, line);
        _tile_dpbf16ps(4, 0, 1);
        _tile_loadd(2, wide + LANES, line);
        _tile_dpbf16ps(5, 0, 2);
        _tile_loadd(3, wide + 2 * LANES, line);
        _tile_dpbf16ps(6, 0, 3);
        _tile_loadd(1, wide + 3 * LANES, line);
        _tile_dpbf16ps(7, 0, 1);
    }
    _tile_stored(4, sums, line);
    _tile_stored(5, sums + LANES, line);
    _tile_stored(6, sums + 2 * LANES, line);
    _tile_stored(7, sums + 3 * LANES, line);
}

/* totals `[rows, 64]` = sums times the scales and `unit`; += if `begun`, after the first group. */
INLINE void add_group(const float *sums, const float *scale, float unit, int64_t rows, float *totals, int begun) {
    for (int64_t r = 0; r < rows; r++, sums += PANEL, totals += PANEL)
        for (int v = 0; v < PANEL; v += LANES) {
            vec total = begun ? load_f32(totals + v) : splat(0.0f);
            store_f32(totals + v, total + load_f32(sums + v) * (load_f32(scale + v) * unit));
        }
}

/* Weights of 8 and 4 bits. All tiles of rows but the last have the same shape, since configuring tiles takes time. */
INLINE void narrow_share(const linear_args *a, int64_t first_panel, int64_t end_panel, int format) {
    int64_t blocks = (a->rows + NARROW_BLOCK - 1) / NARROW_BLOCK, held = held_by(format), shaped = 0;
    size_t row_bytes = a->inputs * sizeof(bf16);
    uint32_t wide[PIECE * 4 * PANEL];
    float sums[NARROW_BLOCK * PANEL], totals[NARROW_BLOCK * PANEL];
    for (int64_t b = 0; b < blocks; b++) {
        int64_t begin = part(a->rows, b, blocks), rows = part(a->rows, b + 1, blocks) - begin;
        int64_t tiles = (rows + TILE - 1) / TILE, most = (rows + tiles - 1) / tiles;
        for (int64_t panel = first_panel; panel < end_panel; panel++) {
            const uint32_t *words = a->words + panel * (a->inputs / held) * PANEL;
            const float *scale = (const float *)a->scale + panel * (a->inputs / a->group) * PANEL;
            for (int64_t group = 0; group < a->inputs; group += a->group, scale += PANEL) {
                for (int64_t k = 0; k < a->group; k += PIECE * held) {
                    int64_t count = a->group - k < PIECE * held ? (a->group - k) / held : PIECE;
                    widen_piece(words, count, format, wide);
                    words += count * PANEL;
                    COMPILED_BEFORE();
                    for (int64_t row = 0; row < rows; row += most) {
                        int64_t own = rows - row < most ? rows - row : most;
                        if (own != shaped) shape_tiles((int64_t[]){own, TILE, TILE, TILE, own, own, own, own});
                        shaped = own;
                        const bf16 *x = (const bf16 *)a->x + (begin + row) * a->inputs + group + k;
                        piece_sums((const uint32_t *)x, row_bytes, wide, count * held / 2, sums + row * PANEL, k > 0);
                    }
                    COMPILED_BEFORE();
                }
                add_group(sums, scale, pair_unit(format), rows, totals, group > 0);
            }
            linear_answer(a, begin, panel, rows, totals, VECTORS);
        }
    }
}

void tile_share(const linear_args *a, int64_t first, int64_t end) {
    switch (a->format) {
        case INT4: narrow_share(a, first, end, INT4); break;
        case INT8: narrow_share(a, first, end, INT8); break;
        case FP8: narrow_share(a, first, end, FP8); break;
        default: wide_share(a, first, end);
    }
    _tile_release();
}

int takes_tiles(const linear_args *a) {
    return tiles_allowed && a->x_kind == BFLOAT16 && a->group % (2 * TILE) == 0 && a->scales == FLOAT_SCALE;
}

int linear_tiles(int wanted) {
    const long request = 0x1023, tile_data = 18; /* ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA */
    return tiles_allowed = wanted && syscall(SYS_arch_prctl, request, tile_data) == 0;
}
#else
int takes_tiles(const linear_args *a) { return 0; }
void tile_share(const linear_args *a, int64_t first, int64_t end) {}
int linear_tiles(int wanted) { return 0; }
#endif
