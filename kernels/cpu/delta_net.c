/* What a gated delta net computes beside its recurrence: kernels/recurrence.py. */
#include "logarithm.h"
#include "recurrence.h"
#include "rows.h"

INLINE vec softplus(vec x) {
    vec e = vec_exp((vec)((ivec)x | (ivec)splat(-0.0f))), f, exponent; /* e^-|x| */
    split(1.0f + e, &f, &exponent);
    ivec near = e < 0.25f; /* 1 + e would be rounded */
    return pick(x < 0.0f, splat(0.0f), x) + log_of(pick(near, e, f), pick(near, splat(0.0f), exponent));
}

/* Load up to LANES numbers, and zeros. */
INLINE vec load_some(const float *p, int64_t count) {
    vec v = splat(0.0f);
    memcpy(&v, p, sizeof(float) * (size_t)(count < LANES ? count : LANES));
    return v;
}

INLINE void store_some(float *p, vec v, int64_t count) {
    memcpy(p, &v, sizeof(float) * (size_t)(count < LANES ? count : LANES));
}

/* ba [rows, 2 heads] -> gain = sigmoid(b) and decay = exp(-exp(a_log) softplus(a + dt_bias)), [rows, heads] each. */
void delta_gates(
    const float *ba, const float *a_log, const float *dt_bias, float *decay, float *gain, int64_t rows, int64_t heads
) {
    for (int64_t row = 0; row < rows; row++, ba += 2 * heads, decay += heads, gain += heads)
        for (int64_t i = 0; i < heads; i += LANES) {
            int64_t left = heads - i;
            vec step = softplus(load_some(ba + heads + i, left) + load_some(dt_bias + i, left));
            store_some(gain + i, times_sigmoid(splat(1.0f), load_some(ba + i, left)), left);
            store_some(decay + i, vec_exp(-(vec_exp(load_some(a_log + i, left)) * step)), left);
        }
}

INLINE void gated_norm_rows(const float *x, const void *z, const void *weight, void *out, int64_t rows, int64_t size, float eps, int kind) {
    for (int64_t i = 0; i < rows * size; i += LANES) store(out, i, load_f32(x + i), kind);
    rms_norm(out, weight, out, rows, size, size, eps, kind, kind, kind, 0);
    for (int64_t i = 0; i < rows * size; i += LANES) {
        vec gate = load(z, i, kind);
        store(out, i, times_sigmoid(gate, gate) * load(out, i, kind), kind);
    }
}

/* Norm rows x [rows, size], rounded to `kind`, and multiply them by SiLU(z); `size` is a multiple of 16. */
void gated_norm(
    const float *x, const void *z, const void *weight, void *out, int64_t rows, int64_t size, float eps, int64_t kind
) {
    if (kind == FLOAT32) gated_norm_rows(x, z, weight, out, rows, size, eps, FLOAT32);
    else gated_norm_rows(x, z, weight, out, rows, size, eps, BFLOAT16);
}
