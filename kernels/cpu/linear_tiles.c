/* Linear layers on a processor with matrix tiles (AMX): one instruction multiplies 16 rows by 32 inputs with 32 inputs
 * by 16 outputs, in bf16, and takes as long for one row as for sixteen. Its order of summation is its own, and a row's
 * sums do not depend on the other rows; so here any number of rows is computed with tiles.
 *
 * The words of a panel in bf16 have the layout that the instruction expects. Weights of 4 to 8 bits are widened one
 * piece of a panel at a time, once for all rows.
 */
#include "linear_tiles.h"
#include "linear_narrow.h"
#include "scales.h"
#include "widen.h"
#if defined(__AMX_BF16__) && defined(__AVX512BF16__) && defined(__AVX512BW__)
#include <sys/syscall.h>
#include <unistd.h>

#define TILE 16
#define TILE_ROWS (2 * TILE)
#define WIDE_BLOCK (16 * TILE_ROWS)  /* rows per pass over all weights */
#define NARROW_BLOCK (6 * TILE_ROWS) /* likewise; their sums stay in cache while a panel is widened piece by piece */
#define PIECE 128                    /* most weights along K that are widened at a time, all of one group */

static int tiles_allowed;

/* Compiler barrier: earlier stores stay before it. Compilers do not know all that tile instructions read and write. */
#define COMPILED_BEFORE() __asm__ volatile("" ::: "memory")

typedef struct {
    uint8_t palette, start, unused[14];
    uint16_t bytes[16]; /* per row of each tile */
    uint8_t rows[16];
} tile_shapes;

/* Set the number of rows of tiles 0 to 7, with 64 bytes per row, but `x_words` words in tile 0; a tile with 0 rows is not
 * configured. */
static void shape_tiles(const int64_t *rows, int64_t x_words) {
    tile_shapes shapes = {.palette = 1};
    for (int i = 0; i < 8; i++)
        if (rows[i]) shapes.bytes[i] = TILE * sizeof(uint32_t), shapes.rows[i] = (uint8_t)rows[i];
    shapes.bytes[0] = (uint16_t)(x_words * sizeof(uint32_t));
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
                    shape_tiles((int64_t[]){first, second, TILE, TILE, first, first, second, second}, TILE);
                shaped[0] = first, shaped[1] = second;
                if (second)
                    wide_sums(x, words, steps, first, sums, 1, p == 0);
                else
                    wide_sums(x, words, steps, first, sums, 0, p == 0);
                linear_answer(a, row, panel, count, sums, WIDE_VECTORS);
            }
    }
}

/* Widen `weights` along K of a panel -> `to` `[weights / 2, 64]`, words of two bf16 each. Prefetch as many after them. */
INLINE void widen_piece(const uint32_t *words, int64_t weights, int format, uint32_t *to) {
    const int64_t ahead = weights / unit_weights(format) * unit_words(format) * PANEL;
    for (int64_t unit = 0; unit < weights; unit += unit_weights(format), words += unit_words(format) * PANEL)
        for (int v = 0; v < VECTORS; v++) {
            piece p = {.upper = load_upper(words + v * LANES, PANEL, format)};
            if (upper_bits(format)) __builtin_prefetch(words + low_words(format) * PANEL + v * LANES + ahead, 0, 2);
            for (int index = 0; index < low_words(format); index++) {
                const uint32_t *own = words + index * PANEL + v * LANES;
                p.low = load_words(own);
                __builtin_prefetch(own + ahead, 0, 2);
                for (int place = 0; place < held_by(format); place += 2) {
                    __m512bh pair = widen_pair(p, place, format);
                    memcpy(to + (unit + index * held_by(format) + place) / 2 * PANEL + v * LANES, &pair, sizeof pair);
                }
                p.upper >>= 4 * upper_bits(format);
            }
        }
}

/* Compute `sums` `[rows of a tile, 64]` over a piece of `pairs` along K, `step` at a time, or add to them if `begun`. x has
 * `row` bytes per row. Tile 0 holds rows, 1 to 3 weights, 4 to 7 sums. */
INLINE void piece_sums(
    const uint32_t *x, size_t row, const uint32_t *wide, int64_t pairs, int64_t step, float *sums, int begun
) {
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
    for (int64_t k = 0; k < pairs; k += step, wide += step * PANEL) {
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

/* totals `[rows, 64]` = sums times the scales and `unit`, then plus the sums of x times the offsets, if `x_sums` is not
 * null; += if `begun`, after the first group. */
INLINE void add_group(
    const float *sums, const float *scale, const float *x_sums, float unit, int64_t rows, float *totals, int begun
) {
    for (int64_t r = 0; r < rows; r++, sums += PANEL, totals += PANEL)
        for (int v = 0; v < PANEL; v += LANES) {
            vec total = begun ? load_f32(totals + v) : splat(0.0f);
            total += load_f32(sums + v) * (load_f32(scale + v) * unit);
            if (x_sums) total += x_sums[r] * load_f32(scale + PANEL + v);
            store_f32(totals + v, total);
        }
}

/* Weights of 4 to 8 bits. All tiles of rows but the last have the same shape, since configuring tiles takes time. A tile
 * has 32 inputs, or 16 where groups are no multiple of that. */
INLINE void narrow_panels(const linear_args *a, int64_t self, int64_t first_panel, int64_t end_panel, int format) {
    int64_t blocks = (a->rows + NARROW_BLOCK - 1) / NARROW_BLOCK, shaped = 0, step = a->group % (2 * TILE) ? TILE / 2 : TILE;
    int64_t groups = a->inputs / a->group, group_words = a->group / unit_weights(format) * unit_words(format) * PANEL;
    size_t row_bytes = a->inputs * sizeof(bf16);
    /* Room for the rows themselves is not needed, so the sums of NARROW_BLOCK rows fit. */
    float *x_sums = has_offsets(a->scales) ? (float *)(a->scratch + self * scratch_rows(a) * a->scratch_words) : 0;
    uint32_t wide[PIECE / 2 * PANEL];
    float sums[NARROW_BLOCK * PANEL], totals[NARROW_BLOCK * PANEL], buffer[SCALE_FLOATS];
    for (int64_t b = 0; b < blocks; b++) {
        int64_t begin = part(a->rows, b, blocks), rows = part(a->rows, b + 1, blocks) - begin;
        int64_t tiles = (rows + TILE - 1) / TILE, most = (rows + tiles - 1) / tiles;
        if (x_sums) group_sums(a, begin, rows, rows, x_sums);
        for (int64_t panel = first_panel; panel < end_panel; panel++) {
            const uint32_t *words = a->words + panel * groups * group_words;
            const float *scale = 0;
            for (int64_t g = 0, next = 0; g < groups; g++, scale += scale_step(a->scales)) {
                if (g == next) {
                    int64_t count = groups - g < groups_at_once(a) ? groups - g : groups_at_once(a);
                    scale = load_scales(a, panel, g, count, buffer), next = g + count;
                }
                for (int64_t k = 0, count; k < a->group; k += count) {
                    count = a->group - k < PIECE ? a->group - k : PIECE;
                    widen_piece(words, count, format, wide);
                    words += count / unit_weights(format) * unit_words(format) * PANEL;
                    COMPILED_BEFORE();
                    for (int64_t row = 0; row < rows; row += most) {
                        int64_t own = rows - row < most ? rows - row : most;
                        if (own != shaped) shape_tiles((int64_t[]){own, step, step, step, own, own, own, own}, step);
                        shaped = own;
                        const bf16 *x = (const bf16 *)a->x + (begin + row) * a->inputs + g * a->group + k;
                        piece_sums((const uint32_t *)x, row_bytes, wide, count / 2, step, sums + row * PANEL, k > 0);
                    }
                    COMPILED_BEFORE();
                }
                add_group(sums, scale, x_sums ? x_sums + g * rows : 0, pair_unit(format), rows, totals, g > 0);
            }
            linear_answer(a, begin, panel, rows, totals, VECTORS);
        }
    }
}

void tile_share(const linear_args *a, int64_t self, int64_t first, int64_t end) {
    switch (a->format) {
        case INT4: narrow_panels(a, self, first, end, INT4); break;
        case UINT4: narrow_panels(a, self, first, end, UINT4); break;
        case INT5: narrow_panels(a, self, first, end, INT5); break;
        case UINT5: narrow_panels(a, self, first, end, UINT5); break;
        case INT6: narrow_panels(a, self, first, end, INT6); break;
        case INT8: narrow_panels(a, self, first, end, INT8); break;
        case FP8: narrow_panels(a, self, first, end, FP8); break;
        default: wide_share(a, first, end);
    }
    _tile_release();
}

int takes_tiles(const linear_args *a) {
    return tiles_allowed && a->x_kind == BFLOAT16 && a->group % (is_wide(a->format) ? 2 * TILE : TILE) == 0;
}

int linear_tiles(int wanted) {
    const long request = 0x1023, tile_data = 18; /* ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA */
    return tiles_allowed = wanted && syscall(SYS_arch_prctl, request, tile_data) == 0;
}
#else
int takes_tiles(const linear_args *a) { return 0; }
void tile_share(const linear_args *a, int64_t self, int64_t first, int64_t end) {}
int linear_tiles(int wanted) { return 0; }
#endif
