/* Row-wise operations of a layer in training (row_gradients.py): those of rows.c that threads share, and gradients.
 * No row's bits depend on another row. All arithmetic is fp32; only outputs are rounded. Sizes are multiples of 16, a
 * head's of 32. */
#include "reduce.h"
#include "threads.h"

#define PART 64 /* rows whose gradients of a norm's weight are one sum */

typedef struct {
    const void *x;          /* [rows, size], rows `stride` apart; of a gate [rows, 2 * size], gate and up */
    const void *grad;       /* [rows, size] of the output; null: forward */
    const float *weight;    /* [size] */
    const float *cos, *sin; /* [rows, dim] */
    void *out;              /* the output, or the gradient of x */
    float *parts;           /* [rows / PART rounded up, size] sums that make up the weight's gradient */
    int64_t rows, size, stride, dim, kind, grad_kind, out_kind, gelu, threads;
    float eps, offset; /* a norm's scale is offset + weight */
} row_args;

INLINE void norm_row(const row_args *a, int64_t row, int kind, int grad_kind, int out_kind) {
    int64_t size = a->size, at = row * size;
    vec squares = splat(0.0f), dot = splat(0.0f);
    for (int64_t i = 0; i < size; i += LANES) {
        vec x = load(a->x, at + i, kind);
        squares += x * x;
        if (a->grad) dot += x * load(a->grad, at + i, grad_kind) * (a->offset + load_f32(a->weight + i));
    }
    float scale = 1.0f / __builtin_sqrtf(sum_lanes(squares) / (float)size + a->eps);
    vec back = splat(a->grad ? sum_lanes(dot) / (float)size * scale * scale : 0.0f);
    float *part = a->grad ? a->parts + row / PART * size : 0;
    for (int64_t i = 0; i < size; i += LANES) {
        vec x = load(a->x, at + i, kind), w = a->offset + load_f32(a->weight + i);
        if (a->grad) {
            vec grad = load(a->grad, at + i, grad_kind);
            store_f32(part + i, (row % PART ? load_f32(part + i) : splat(0.0f)) + grad * x * scale);
            store(a->out, at + i, (grad * w - x * back) * scale, out_kind);
        } else
            store(a->out, at + i, x * scale * w, out_kind);
    }
}

/* Heads of dim numbers whose halves form pairs, turned by an angle. */
INLINE void rotate_row(const row_args *a, int64_t row, int kind, int grad_kind, int out_kind) {
    int64_t half = a->dim / 2;
    const float *cos = a->cos + row * a->dim, *sin = a->sin + row * a->dim;
    for (int64_t head = 0; head < a->size; head += a->dim)
        for (int64_t i = 0; i < half; i += LANES) {
            int64_t from = row * a->stride + head + i, at = row * a->size + head;
            vec x = load(a->x, from, kind), y = load(a->x, from + half, kind);
            vec c = load_f32(cos + i), s = load_f32(sin + i), d = load_f32(cos + half + i), t = load_f32(sin + half + i);
            store(a->out, at + i, x * c - y * s, out_kind);
            store(a->out, at + half + i, y * d + x * t, out_kind);
        }
}

INLINE void gate_row(const row_args *a, int64_t row, int kind, int grad_kind, int out_kind) {
    for (int64_t i = 0, at = 2 * row * a->size; i < a->size; i += LANES) {
        vec gate = load(a->x, at + i, kind), up = load(a->x, at + a->size + i, kind), slope = splat(1.0f), inner = gate;
        if (a->gelu) {
            inner = 1.5957691216057308f * (gate + 0.044715f * (gate * gate * gate));
            slope = 1.5957691216057308f * (1.0f + 0.134145f * (gate * gate));
        }
        vec share = times_sigmoid(splat(1.0f), inner);
        if (a->grad) {
            vec grad = load(a->grad, row * a->size + i, grad_kind);
            store(a->out, at + i, grad * up * share * (1.0f + gate * slope * (1.0f - share)), out_kind);
            store(a->out, at + a->size + i, grad * gate * share, out_kind);
        } else
            store(a->out, row * a->size + i, gate * share * up, out_kind);
    }
}

#define SHARE(name) \
    INLINE void name##_part(const row_args *a, int64_t first, int64_t end, int kind, int grad_kind, int out_kind) { \
        for (int64_t row = first; row < end; row++) name##_row(a, row, kind, grad_kind, out_kind); \
    } \
    static void name##_share(void *data) { \
        const row_args *a = data; \
        int64_t self = this_thread(a->threads), parts = (a->rows + PART - 1) / PART; \
        int64_t first = parts * self / a->threads * PART, end = parts * (self + 1) / a->threads * PART; \
        if (end > a->rows) end = a->rows; \
        if (a->kind == FLOAT32 && a->out_kind == FLOAT32 && a->grad_kind == FLOAT32) \
            name##_part(a, first, end, FLOAT32, FLOAT32, FLOAT32); \
        else if (a->kind == FLOAT32 && a->out_kind == FLOAT32) \
            name##_part(a, first, end, FLOAT32, BFLOAT16, FLOAT32); \
        else if (a->kind == FLOAT32) \
            name##_part(a, first, end, FLOAT32, BFLOAT16, BFLOAT16); \
        else \
            name##_part(a, first, end, BFLOAT16, BFLOAT16, BFLOAT16); \
    }

SHARE(norm)
SHARE(rotate)
SHARE(gate)

void norm_rows(row_args *a) { run_threads(norm_share, a, &a->threads); }

void turn_rows(row_args *a) { run_threads(rotate_share, a, &a->threads); }

void gate_rows(row_args *a) { run_threads(gate_share, a, &a->threads); }
