/* Matrices in the blocks of GGUF files (ggml's formats): packed once for linear.c, bit for bit, and read row by row.
 *
 * A block is 32 weights of a row, or 256 in the formats with K in their name. Low nibbles of legacy blocks are weights 0
 * to 15, high ones 16 to 31; a K block has such halves per 64 weights (Q4_K, Q5_K) or quarters per 128 (Q6_K).
 */
#include "blocks.h"
#include "scales.h"
#include "threads.h"
#include "widen.h"

#define LARGEST_BLOCK 256
#define SMALL_BLOCK 32

enum { Q4_0 = 0, Q4_1 = 1, Q5_0 = 2, Q5_1 = 3, Q8_0 = 4, Q4_K = 5, Q5_K = 6, Q6_K = 7 };

typedef struct {
    const uint8_t *data;  /* [.., row_bytes], as in the file */
    const int64_t *order; /* [outputs] the row of `data` for each output; null: in order */
    uint32_t *words;      /* of a linear_args, whose panels begin `first` outputs before these */
    uint8_t *scale;
    int64_t *damaged;     /* [threads] on return row of `data` and block of it, as row * blocks + block; -1: none */
    int64_t kind, inputs, outputs, first, row_bytes, threads;
} blocks_args;

/* Where the parts of a block are, and what becomes of them. */
typedef struct {
    int bytes, weights, format, scales, group;
    int quants, upper; /* offsets of the low bits and of the upper ones */
} ggml_format;

static const ggml_format FORMATS[] = {
    [Q4_0] = {18, 32, INT4, HALF_SCALE, 32, 2, 0},     [Q4_1] = {20, 32, UINT4, HALF_OFFSET, 32, 4, 0},
    [Q5_0] = {22, 32, INT5, HALF_SCALE, 32, 6, 2},     [Q5_1] = {24, 32, UINT5, HALF_OFFSET, 32, 8, 4},
    [Q8_0] = {34, 32, INT8, HALF_SCALE, 32, 2, 0},     [Q4_K] = {144, 256, UINT4, SUPER_OFFSET, 32, 16, 0},
    [Q5_K] = {176, 256, UINT5, SUPER_OFFSET, 32, 48, 16}, [Q6_K] = {210, 256, INT6, SUPER_SCALE, 16, 0, 128},
};

/* q `[weights]` = the integers of a block as their format stores them, without sign: 4 bits of INT4 are modulo 16. */
static void read_integers(const uint8_t *block, int kind, uint8_t *q) {
    const ggml_format *f = FORMATS + kind;
    const uint8_t *low = block + f->quants, *upper = block + f->upper;
    uint32_t fifth;
    switch (kind) {
        case Q8_0: memcpy(q, low, SMALL_BLOCK); break;
        case Q4_0: case Q4_1:
            for (int i = 0; i < 16; i++) q[i] = low[i] & 15, q[i + 16] = low[i] >> 4;
            break;
        case Q5_0: case Q5_1:
            memcpy(&fifth, upper, sizeof fifth);
            for (int i = 0; i < 16; i++) {
                q[i] = (low[i] & 15) | (fifth >> i & 1) << 4;
                q[i + 16] = low[i] >> 4 | (fifth >> (i + 16) & 1) << 4;
            }
            break;
        case Q4_K: case Q5_K:
            for (int j = 0; j < LARGEST_BLOCK / 64; j++, low += 32)
                for (int i = 0; i < 32; i++) {
                    uint8_t bits = kind == Q5_K ? upper[i] >> (2 * j) : 0;
                    q[64 * j + i] = (low[i] & 15) | (bits & 1) << 4;
                    q[64 * j + 32 + i] = low[i] >> 4 | (bits >> 1 & 1) << 4;
                }
            break;
        case Q6_K:
            for (int j = 0; j < LARGEST_BLOCK / 128; j++, low += 64, upper += 32, q += 128)
                for (int i = 0; i < 32; i++) {
                    q[i] = (low[i] & 15) | (upper[i] & 3) << 4;
                    q[i + 32] = (low[i + 32] & 15) | (upper[i] >> 2 & 3) << 4;
                    q[i + 64] = low[i] >> 4 | (upper[i] >> 4 & 3) << 4;
                    q[i + 96] = low[i + 32] >> 4 | (upper[i] >> 6) << 4;
                }
            break;
    }
    if (kind == Q4_0)
        for (int i = 0; i < SMALL_BLOCK; i++) q[i] ^= 8; /* q - 8 modulo 16 */
}

/* Scale and minimum `j` of eight, of 6 bits each in 12 bytes (ggml's get_scale_min_k4). */
static void read_scale(const uint8_t *packed, int j, uint8_t *scale, uint8_t *least) {
    if (j < 4) {
        *scale = packed[j] & 63, *least = packed[j + 4] & 63;
        return;
    }
    *scale = (packed[j + 4] & 15) | (packed[j - 4] >> 6) << 4;
    *least = packed[j + 4] >> 4 | (packed[j] >> 6) << 4;
}

static void write_words(const uint8_t *q, const ggml_format *f, uint32_t *words) {
    int bits = f->format == INT8 ? 8 : 4, held = held_by(f->format), upper = upper_bits(f->format);
    for (int k = 0; k < f->weights; k += unit_weights(f->format)) {
        uint32_t last = 0;
        for (int index = 0; index < low_words(f->format); index++, q += held, words += PANEL) {
            uint32_t word = 0;
            for (int i = 0; i < held; i++) {
                word |= (uint32_t)(q[i] & ((1 << bits) - 1)) << (bits * (i / 2) + 16 * (i % 2));
                if (upper) last |= (uint32_t)(q[i] >> 4) << (upper * ((index * held + i) / 2) + 16 * (i % 2));
            }
            *words = word;
        }
        if (upper) *words = last, words += PANEL;
    }
}

/* Write a block's scales where `load_scales` expects those of its lane. */
static void write_scales(const uint8_t *block, int kind, uint8_t *scale, int64_t index, int64_t lane) {
    uint16_t *half = (uint16_t *)scale;
    switch (FORMATS[kind].scales) {
        case HALF_SCALE: memcpy(half + index * PANEL + lane, block, 2); break;
        case HALF_OFFSET:
            memcpy(half + index * 2 * PANEL + lane, block, 2);
            memcpy(half + (index * 2 + 1) * PANEL + lane, block + 2, 2);
            break;
        case SUPER_OFFSET:
            scale += index * OFFSET_BYTES;
            memcpy(scale + 2 * lane, block, 2);
            memcpy(scale + 2 * (PANEL + lane), block + 2, 2);
            for (int j = 0; j < OFFSET_GROUPS; j++) {
                uint8_t *own = scale + 4 * PANEL + j * 2 * PANEL + lane;
                read_scale(block + 4, j, own, own + PANEL);
            }
            break;
        case SUPER_SCALE:
            scale += index * SCALE_BYTES;
            memcpy(scale + 2 * lane, block + 208, 2);
            for (int j = 0; j < SCALE_GROUPS; j++) scale[2 * PANEL + j * PANEL + lane] = block[192 + j];
            break;
    }
}

static int finite_half(const uint8_t *p) { return (p[1] & 0x7c) != 0x7c; }

static int sound(const uint8_t *block, int kind) {
    int scales = FORMATS[kind].scales;
    if (scales == SUPER_SCALE) return finite_half(block + 208);
    return finite_half(block) && (scales == HALF_SCALE || finite_half(block + 2));
}

static void pack_share(void *data) {
    const blocks_args *a = data;
    const ggml_format *f = FORMATS + a->kind;
    int64_t self = this_thread(a->threads), blocks = a->inputs / f->weights;
    int64_t block_words = f->weights / unit_weights(f->format) * unit_words(f->format);
    int64_t first = part(a->outputs, self, a->threads), end = part(a->outputs, self + 1, a->threads);
    uint8_t q[LARGEST_BLOCK];
    a->damaged[self] = -1;
    for (int64_t output = first; output < end; output++) {
        int64_t panel = (a->first + output) / PANEL, lane = (a->first + output) % PANEL;
        int64_t row = a->order ? a->order[output] : output;
        const uint8_t *block = a->data + row * a->row_bytes;
        uint32_t *words = a->words + panel * blocks * block_words * PANEL + lane;
        for (int64_t b = 0; b < blocks; b++, block += f->bytes, words += block_words * PANEL) {
            if (!sound(block, a->kind)) {
                a->damaged[self] = row * blocks + b;
                return;
            }
            read_integers(block, a->kind, q);
            write_words(q, f, words);
            write_scales(block, a->kind, a->scale, panel * blocks + b, lane);
        }
    }
}

/* Pack rows of a matrix. The caller checks `damaged`: a block whose scale is not finite. */
void blocks_pack(blocks_args *a) {
    run_threads(pack_share, a, &a->threads);
}

void blocks_gather(const linear_args *a, const int64_t *ids, int64_t count, void *out) {
    int format = a->format, held = held_by(format), unit = unit_weights(format);
    int64_t groups = a->inputs / a->group, units = a->group / unit;
    int64_t batch = scale_batch(a->scales);
    float buffer[SCALE_FLOATS], row[LARGEST_BLOCK];
    for (int64_t r = 0; r < count; r++) {
        int64_t panel = ids[r] / PANEL, lane = ids[r] % PANEL;
        const uint32_t *words = a->words + panel * groups * units * unit_words(format) * PANEL + lane;
        for (int64_t g = 0; g < groups; g++) {
            int64_t first = g - g % batch, count = groups - first < batch ? groups - first : batch;
            if (g == first) load_scales(a, panel, first, count, buffer);
            const float *scale = buffer + (g - first) * scale_step(a->scales) + lane;
            float offset = has_offsets(a->scales) ? scale[PANEL] : 0.0f;
            for (int64_t u = 0, k = 0; u < units; u++, words += unit_words(format) * PANEL) {
                uint32_t last = upper_bits(format) ? words[low_words(format) * PANEL] : 0;
                for (int index = 0; index < low_words(format); index++)
                    for (int i = 0; i < held; i++, k++) {
                        piece p = {words[index * PANEL] - (uvec){0}, (last >> (4 * upper_bits(format) * index)) - (uvec){0}};
                        row[k] = *scale * widen(p, i, format)[0] + offset;
                    }
            }
            for (int64_t k = 0; k < a->group; k += LANES) {
                int64_t to = r * a->inputs + g * a->group + k;
                if (a->x_kind == FLOAT32)
                    store(out, to, load_f32(row + k), FLOAT32);
                else
                    store(out, to, load_f32(row + k), BFLOAT16);
            }
        }
    }
}
