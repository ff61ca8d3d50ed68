/* The small row-wise operations of a decoder layer. No row's bits depend on another row. Sizes are multiples of 16 (the
 * caller checks). In bf16, intermediate results are rounded where torch would round them. */
#include "reduce.h"
#include "rows.h"

#define BY_KIND(kind, call_f32, call_bf16) \
    if ((kind) == FLOAT32) \
        call_f32; \
    else \
        call_bf16;

INLINE void rms_norm_rows(
    const void *x, const void *weight, void *out, int64_t rows, int64_t stride, int64_t size, float eps, int x_kind, int kind,
    int out_kind, int centered
) {
    for (int64_t row = 0; row < rows; row++) {
        ptrdiff_t from = row * stride, to = row * size;
        vec squares = splat(0.0f);
        for (int64_t i = 0; i < size; i += LANES) {
            vec v = load(x, from + i, x_kind);
            squares += v * v;
        }
        vec scale = splat(1.0f / __builtin_sqrtf(sum_lanes(squares) / (float)size + eps));
        for (int64_t i = 0; i < size; i += LANES) {
            vec normed = load(x, from + i, x_kind) * scale, w = load(weight, i, kind);
            store(out, to + i, centered ? normed * (1.0f + w) : rounded(normed, x_kind) * w, out_kind);
        }
    }
}

#define NORM(x_kind, kind, out_kind) \
    (centered ? rms_norm_rows(x, weight, out, rows, stride, size, eps, x_kind, kind, out_kind, 1) \
              : rms_norm_rows(x, weight, out, rows, stride, size, eps, x_kind, kind, out_kind, 0))

/* x [rows, size], rows `stride` elements apart; out [rows, size] contiguous; the weight is of `kind`, which is x's unless
 * x is fp32. centered: the scale is 1 + weight, and only the product is rounded. */
void rms_norm(
    const void *x, const void *weight, void *out, int64_t rows, int64_t stride, int64_t size, float eps, int64_t x_kind,
    int64_t kind, int64_t out_kind, int64_t centered
) {
    if (kind == FLOAT32) NORM(FLOAT32, FLOAT32, FLOAT32);
    else if (x_kind == BFLOAT16) NORM(BFLOAT16, BFLOAT16, BFLOAT16);
    else if (out_kind == BFLOAT16) NORM(FLOAT32, BFLOAT16, BFLOAT16);
    else NORM(FLOAT32, BFLOAT16, FLOAT32);
}

INLINE void add_elements(void *x, const void *delta, int64_t count, int kind) {
    for (int64_t i = 0; i < count; i += LANES) store(x, i, load(x, i, kind) + load(delta, i, kind), kind);
}

/* x += delta, count elements of each, a multiple of 16. */
void add_rows(void *x, const void *delta, int64_t count, int64_t kind) {
    BY_KIND(kind, add_elements(x, delta, count, FLOAT32), add_elements(x, delta, count, BFLOAT16))
}

/* Load the number of each channel's group, for the channels from i on. */
INLINE vec of_groups(const void *deltas, int64_t first, int64_t i, int64_t group, int kind) {
    vec v = splat(element(deltas, first + i / group, kind));
    if (group % LANES)
        for (int lane = 1; lane < LANES; lane++) v[lane] = element(deltas, first + (i + lane) / group, kind);
    return v;
}

INLINE void two_taps_rows(
    const void *z, const void *base, const void *deltas, void *out, int64_t first, int64_t end, int64_t block, int64_t size,
    int64_t group, int64_t side, int64_t add, int kind
) {
    int64_t groups = size / group;
    for (int64_t row = first; row < end; row++) {
        int64_t delta = (row * 4 + side * 2) * groups;
        for (int64_t i = 0; i < size; i += LANES) {
            vec tap = load(base, side * 2 * size + i, kind) + of_groups(deltas, delta, i, group, kind);
            vec sum = tap * load(z, row * size + i, kind);
            if (row % block) {
                tap = load(base, (side * 2 + 1) * size + i, kind) + of_groups(deltas, delta + groups, i, group, kind);
                sum += tap * load(z, (row - 1) * size + i, kind);
            }
            if (add) sum = load(out, row * size + i, kind) + rounded(sum, kind);
            store(out, row * size + i, sum, kind);
        }
    }
}

/* Rows `first` to `end`, exclusive, of kernels/convolution.py's two_taps: z and out [rows, size], base [2, 2, size], deltas
 * [rows, 2, 2, size / group]. add: out += it, else out is no z. */
void two_taps(
    const void *z, const void *base, const void *deltas, void *out, int64_t first, int64_t end, int64_t block, int64_t size,
    int64_t group, int64_t side, int64_t add, int64_t kind
) {
    BY_KIND(kind, two_taps_rows(z, base, deltas, out, first, end, block, size, group, side, add, FLOAT32),
            two_taps_rows(z, base, deltas, out, first, end, block, size, group, side, add, BFLOAT16))
}

/* Both activations are x times a sigmoid: of x, or, for GELU's approximation by tanh, of 2 sqrt(2 / pi) (x + 0.044715 x^3). */
INLINE void gate_mul_rows(const void *gate_up, void *out, int64_t rows, int64_t size, int kind, int gelu) {
    for (int64_t row = 0; row < rows; row++)
        for (int64_t i = 0; i < size; i += LANES) {
            vec gate = load(gate_up, row * 2 * size + i, kind), up = load(gate_up, row * 2 * size + size + i, kind);
            vec inner = gelu ? 1.5957691216057308f * (gate + 0.044715f * (gate * gate * gate)) : gate;
            store(out, row * size + i, rounded(times_sigmoid(gate, inner), kind) * up, kind);
        }
}

/* gate_up [rows, 2 * size] -> out [rows, size] = silu(gate) * up. */
void silu_mul(const void *gate_up, void *out, int64_t rows, int64_t size, int64_t kind) {
    BY_KIND(kind, gate_mul_rows(gate_up, out, rows, size, FLOAT32, 0), gate_mul_rows(gate_up, out, rows, size, BFLOAT16, 0))
}

/* The same with GELU, approximated by tanh. */
void gelu_mul(const void *gate_up, void *out, int64_t rows, int64_t size, int64_t kind) {
    BY_KIND(kind, gate_mul_rows(gate_up, out, rows, size, FLOAT32, 1), gate_mul_rows(gate_up, out, rows, size, BFLOAT16, 1))
}

INLINE void sigmoid_mul_elements(const void *x, const void *gate, void *out, int64_t count, int kind) {
    for (int64_t i = 0; i < count; i += LANES) store(out, i, times_sigmoid(load(x, i, kind), load(gate, i, kind)), kind);
}

/* out = x sigmoid(gate), count elements of each, a multiple of 16; `out` may be `x`. */
void sigmoid_mul(const void *x, const void *gate, void *out, int64_t count, int64_t kind) {
    BY_KIND(kind, sigmoid_mul_elements(x, gate, out, count, FLOAT32), sigmoid_mul_elements(x, gate, out, count, BFLOAT16))
}

INLINE void rotate_rows(
    const void *x, const void *cos, const void *sin, void *out, int64_t rows, int64_t stride, int64_t heads, int64_t dim, int kind
) {
    int64_t half = dim / 2;
    for (int64_t row = 0; row < rows; row++)
        for (int64_t head = 0; head < heads; head++) {
            ptrdiff_t from = row * stride + head * dim, to = (row * heads + head) * dim, angle = row * dim;
            for (int64_t i = 0; i < half; i += LANES) {
                vec a = load(x, from + i, kind), b = load(x, from + half + i, kind);
                vec c1 = load(cos, angle + i, kind), s1 = load(sin, angle + i, kind);
                vec c2 = load(cos, angle + half + i, kind), s2 = load(sin, angle + half + i, kind);
                store(out, to + i, rounded(a * c1, kind) - rounded(b * s1, kind), kind);
                store(out, to + half + i, rounded(b * c2, kind) + rounded(a * s2, kind), kind);
            }
        }
}

/* x [rows, heads, dim], rows `stride` apart, cos and sin [rows, dim]; dim a multiple of 32. */
void rotate(
    const void *x, const void *cos, const void *sin, void *out, int64_t rows, int64_t stride, int64_t heads, int64_t dim, int64_t kind
) {
    BY_KIND(kind, rotate_rows(x, cos, sin, out, rows, stride, heads, dim, FLOAT32),
            rotate_rows(x, cos, sin, out, rows, stride, heads, dim, BFLOAT16))
}
