/* Attention of training: a row sees a range of its sequence's keys, and a range of keys of its own (range_attention.py).
 *
 * One task is a sequence and a KV head: its keys and values are widened to fp32 once, also transposed, so that scores
 * of several queries are sums over vectors of keys. Then the queries that share the head run in order, a tile at a time.
 * The keys that a tile's rows do not see together are masked: they add exact zeros. Gradients of keys are sums over the
 * queries in that order, whatever the number of threads. All sums are in fp32.
 */
#include "reduce.h"
#include "threads.h"

#define TILE 12    /* queries */
#define AT_ONCE 4  /* queries whose sums are in registers */
#define COLUMNS (REGISTERS / 8) /* with so many vectors of each */

typedef struct {
    const void *q;            /* [batch, rows, heads, dim] */
    const void *k, *v;        /* [batch, length, kv_heads, dim] */
    const void *own_k, *own_v; /* [batch, own, kv_heads, dim] */
    const int32_t *begin, *end, *own_begin, *own_end; /* [batch, rows] the first key and the end of each row's ranges */
    void *out;                /* [batch, rows, heads, dim]; forward */
    float *peaks, *sums;      /* [batch, rows, heads] largest score, and sum of exp(score - largest) */
    const void *grad_out;     /* backward; null: forward */
    float *grad_q, *grad_k, *grad_v, *grad_own_k, *grad_own_v;
    float *scratch;           /* [threads, scratch_floats] */
    int64_t scratch_floats, batch, rows, length, own, heads, kv_heads, dim, kind, threads;
    float scale;
} range_args;

/* The keys of a task, in fp32: those of the sequence, then the rows' own. */
typedef struct {
    float *k, *v, *grad_k, *grad_v; /* [length + own, dim] */
    float *k_t, *v_t;               /* [dim, stride] */
    int64_t stride;
} task_keys;

/* out [queries, out_stride] = a [queries, dim] times columns of b [dim, stride]; `width` is a multiple of LANES. */
INLINE void product_block(
    const float *a, const float *b, int64_t stride, int64_t dim, float *out, int64_t out_stride, int vectors
) {
    vec sums[AT_ONCE * COLUMNS];
#pragma GCC unroll 16
    for (int i = 0; i < AT_ONCE * vectors; i++) sums[i] = splat(0.0f);
#pragma GCC unroll 2
    for (int64_t c = 0; c < dim; c++) {
        vec columns[COLUMNS];
#pragma GCC unroll 4
        for (int v = 0; v < vectors; v++) columns[v] = load_f32(b + c * stride + v * LANES);
#pragma GCC unroll 4
        for (int i = 0; i < AT_ONCE; i++)
#pragma GCC unroll 4
            for (int v = 0; v < vectors; v++) sums[i * vectors + v] += a[i * dim + c] * columns[v];
    }
#pragma GCC unroll 4
    for (int i = 0; i < AT_ONCE; i++)
#pragma GCC unroll 4
        for (int v = 0; v < vectors; v++) store_f32(out + i * out_stride + v * LANES, sums[i * vectors + v]);
}

static void products(
    const float *a, const float *b, int64_t stride, int64_t dim, int64_t width, float *out, int64_t out_stride, int64_t queries
) {
    for (int64_t i = 0; i < queries; i += AT_ONCE, a += AT_ONCE * dim, out += AT_ONCE * out_stride) {
        int64_t j = 0;
        for (; j + COLUMNS * LANES <= width; j += COLUMNS * LANES)
            product_block(a, b + j, stride, dim, out + j, out_stride, COLUMNS);
        for (; j < width; j += LANES) product_block(a, b + j, stride, dim, out + j, out_stride, 1);
    }
}

/* out [queries, dim] += weights [queries, stride] times rows [count, dim]. */
INLINE void weighted_block(
    const float *weights, int64_t stride, const float *rows, int64_t count, int64_t dim, float *out, int vectors
) {
    vec sums[AT_ONCE * COLUMNS];
#pragma GCC unroll 4
    for (int i = 0; i < AT_ONCE; i++)
#pragma GCC unroll 4
        for (int v = 0; v < vectors; v++) sums[i * vectors + v] = load_f32(out + i * dim + v * LANES);
    for (int64_t j = 0; j < count; j++) {
        vec row[COLUMNS];
#pragma GCC unroll 4
        for (int v = 0; v < vectors; v++) row[v] = load_f32(rows + j * dim + v * LANES);
#pragma GCC unroll 4
        for (int i = 0; i < AT_ONCE; i++)
#pragma GCC unroll 4
            for (int v = 0; v < vectors; v++) sums[i * vectors + v] += weights[i * stride + j] * row[v];
    }
#pragma GCC unroll 4
    for (int i = 0; i < AT_ONCE; i++)
#pragma GCC unroll 4
        for (int v = 0; v < vectors; v++) store_f32(out + i * dim + v * LANES, sums[i * vectors + v]);
}

static void add_weighted(
    const float *weights, int64_t stride, const float *rows, int64_t count, int64_t dim, float *out, int64_t queries
) {
    for (int64_t i = 0; i < queries; i += AT_ONCE, weights += AT_ONCE * stride, out += AT_ONCE * dim) {
        int64_t c = 0;
        for (; c + COLUMNS * LANES <= dim; c += COLUMNS * LANES)
            weighted_block(weights, stride, rows + c, count, dim, out + c, COLUMNS);
        for (; c < dim; c += LANES) weighted_block(weights, stride, rows + c, count, dim, out + c, 1);
    }
}

/* rows [count, dim] += the transposed weights [queries, stride] times x [queries, dim]. */
static void add_outer(
    const float *weights, int64_t stride, const float *x, int64_t count, int64_t dim, float *rows, int64_t queries
) {
    for (int64_t j = 0; j < count; j++, rows += dim)
        for (int64_t c = 0; c < dim; c += LANES) {
            vec sum = load_f32(rows + c);
            for (int64_t i = 0; i < queries; i++) sum += weights[i * stride + j] * load_f32(x + i * dim + c);
            store_f32(rows + c, sum);
        }
}

INLINE ivec sees(int64_t first, int64_t begin, int64_t end) {
    ivec number = lane_numbers() + (int32_t)first;
    return (number >= (int32_t)begin) & (number < (int32_t)end);
}

/* One of the two ranges that a tile's rows see together, the first rounded down to whole vectors. */
typedef struct {
    const int32_t *begin, *end; /* of all rows of the sequence */
    int64_t place, first, count, width, column; /* of keys in the task, of the first key, keys, columns of scores */
} span;

static span span_of(const int32_t *begin, const int32_t *end, int64_t row, int64_t last, int64_t place, int64_t column) {
    int64_t first = begin[row], stop = end[row];
    for (int64_t r = row; r <= last; r++) {
        first = begin[r] < first ? begin[r] : first;
        stop = end[r] > stop ? end[r] : stop;
    }
    first = stop > first ? first / LANES * LANES : stop;
    int64_t count = stop - first;
    return (span){begin, end, place, first, count, (count + LANES - 1) / LANES * LANES, column};
}

INLINE void widen(const void *from, int64_t at, float *to, int64_t dim, float factor, int kind) {
    for (int64_t c = 0; c < dim; c += LANES) store_f32(to + c, load(from, at + c, kind) * factor);
}

INLINE void run_task(const range_args *a, int64_t b, int64_t h, float *scratch, int kind) {
    int64_t dim = a->dim, keys = a->length + a->own, group = a->heads / a->kv_heads, step = a->kv_heads * dim;
    int64_t stride = (keys + 2 * LANES - 1) / LANES * LANES, columns = stride + 2 * LANES;
    int backward = a->grad_out != 0;
    float *k = scratch, *v = k + keys * dim, *grad_k = v + keys * dim, *grad_v = grad_k + keys * dim;
    float *k_t = grad_v + keys * dim, *v_t = k_t + dim * stride, *scores = v_t + dim * stride;
    float *slopes = scores + TILE * columns, *x = slopes + TILE * columns, *y = x + TILE * dim, *z = y + TILE * dim;
    memset(k_t, 0, 2 * dim * stride * sizeof *k_t);
    if (backward) memset(grad_k, 0, 2 * keys * dim * sizeof *grad_k);
    for (int64_t j = 0; j < keys; j++) {
        int64_t own = j >= a->length, at = own ? (b * a->own + j - a->length) * step : (b * a->length + j) * step;
        widen(own ? a->own_k : a->k, at + h * dim, k + j * dim, dim, 1.0f, kind);
        widen(own ? a->own_v : a->v, at + h * dim, v + j * dim, dim, 1.0f, kind);
        for (int64_t c = 0; c < dim; c++) k_t[c * stride + j] = k[j * dim + c];
        for (int64_t c = 0; c < dim && backward; c++) v_t[c * stride + j] = v[j * dim + c];
    }
    int64_t all = a->rows * group, base = b * a->rows;
    for (int64_t q = 0, count; q < all; q += count) {
        count = all - q < TILE ? all - q : TILE;
        int64_t row = q / group, last = (q + count - 1) / group;
        span spans[2];
        spans[0] = span_of(a->begin + base, a->end + base, row, last, 0, 0);
        spans[1] = span_of(a->own_begin + base, a->own_end + base, row, last, a->length, spans[0].width);
        memset(x, 0, 3 * TILE * dim * sizeof *x);
        for (int64_t i = 0; i < count; i++) {
            int64_t at = ((base + (q + i) / group) * a->heads + h * group + (q + i) % group) * dim;
            widen(a->q, at, x + i * dim, dim, a->scale, kind);
            if (backward) widen(a->grad_out, at, y + i * dim, dim, 1.0f, kind);
        }
        for (span *s = spans; s < spans + 2; s++) {
            int64_t from = s->place + s->first;
            products(x, k_t + from, stride, dim, s->width, scores + s->column, columns, count);
            if (backward) products(y, v_t + from, stride, dim, s->width, slopes + s->column, columns, count);
        }
        for (int64_t i = 0; i < count; i++) {
            int64_t r = (q + i) / group, place = (base + r) * a->heads + h * group + (q + i) % group;
            float *score = scores + i * columns, *slope = slopes + i * columns;
            vec most = splat(-__builtin_inff()), total = splat(0.0f);
            for (span *s = spans; s < spans + 2; s++)
                for (int64_t j = 0; j < s->width && !backward; j += LANES) {
                    vec value = load_f32(score + s->column + j);
                    ivec more = sees(s->first + j, s->begin[r], s->end[r]) & (value > most);
                    most = pick(more, value, most);
                }
            float peak = backward ? a->peaks[place] : max_lanes(most);
            for (span *s = spans; s < spans + 2; s++)
                for (int64_t j = 0; j < s->width; j += LANES) {
                    float *at = score + s->column + j;
                    ivec mask = sees(s->first + j, s->begin[r], s->end[r]);
                    vec value = load_f32(at) - peak, weight = exp_where(mask & ~(value <= -87.0f), value);
                    if (backward) weight = weight / a->sums[place];
                    total += backward ? (vec)((ivec)(weight * load_f32(slope + s->column + j)) & mask) : weight;
                    store_f32(at, weight);
                }
            float sum = sum_lanes(total);
            if (!backward) {
                a->peaks[place] = peak, a->sums[place] = sum;
                continue;
            }
            for (int64_t j = 0; j < spans[1].column + spans[1].width; j += LANES) {
                vec weight = load_f32(score + j), by = load_f32(slope + j) - sum;
                store_f32(slope + j, (vec)((ivec)(weight * by) & (weight != 0.0f)));
            }
        }
        for (span *s = spans; s < spans + 2; s++) {
            int64_t from = (s->place + s->first) * dim;
            float *weight = scores + s->column, *slope = slopes + s->column;
            if (!backward) {
                add_weighted(weight, columns, v + from, s->count, dim, z, count);
                continue;
            }
            add_weighted(slope, columns, k + from, s->count, dim, z, count);
            add_outer(slope, columns, x, s->count, dim, grad_k + from, count);
            add_outer(weight, columns, y, s->count, dim, grad_v + from, count);
        }
        for (int64_t i = 0; i < count; i++) {
            int64_t place = (base + (q + i) / group) * a->heads + h * group + (q + i) % group;
            float factor = backward ? a->scale : 1.0f / a->sums[place];
            for (int64_t c = 0; c < dim; c += LANES) {
                vec value = load_f32(z + i * dim + c) * factor;
                if (backward)
                    store_f32(a->grad_q + place * dim + c, value);
                else
                    store(a->out, place * dim + c, value, kind);
            }
        }
    }
    for (int64_t j = 0; j < keys && backward; j++) {
        int64_t own = j >= a->length, at = own ? (b * a->own + j - a->length) * step : (b * a->length + j) * step;
        memcpy((own ? a->grad_own_k : a->grad_k) + at + h * dim, grad_k + j * dim, dim * sizeof *grad_k);
        memcpy((own ? a->grad_own_v : a->grad_v) + at + h * dim, grad_v + j * dim, dim * sizeof *grad_v);
    }
}

static void range_share(void *data) {
    const range_args *a = data;
    int64_t self = this_thread(a->threads);
    for (int64_t task = self; task < a->batch * a->kv_heads; task += a->threads) {
        float *scratch = a->scratch + self * a->scratch_floats;
        if (a->kind == FLOAT32)
            run_task(a, task / a->kv_heads, task % a->kv_heads, scratch, FLOAT32);
        else
            run_task(a, task / a->kv_heads, task % a->kv_heads, scratch, BFLOAT16);
    }
}

void range_attention(range_args *a) { run_threads(range_share, a, &a->threads); }

/* Return how many floats of scratch a thread needs for so many keys. */
int64_t range_scratch(int64_t keys, int64_t dim) {
    int64_t stride = (keys + 2 * LANES - 1) / LANES * LANES;
    return 4 * keys * dim + 2 * dim * stride + 2 * TILE * (stride + 2 * LANES) + 3 * TILE * dim;
}
