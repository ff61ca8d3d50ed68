/* Attention of training: a row sees a range of its sequence's keys, and then a range of keys of its tail
 * (range_attention.py).
 *
 * One task is a sequence and a KV head: its keys and values are widened to fp32 once, also transposed, so that scores
 * of several queries are sums over vectors of keys. Then the queries that share the head run in order, a tile at a time.
 * The keys that a tile's rows do not see together are masked: they add exact zeros. Gradients of keys are sums over the
 * queries in that order, whatever the number of threads. All sums are in fp32.
 */
#include "reduce.h"
#include "threads.h"

#define TILE 12                 /* queries */
#define AT_ONCE 4               /* queries whose sums are in registers, */
#define COLUMNS (REGISTERS / 8) /* with so many vectors of each */

typedef struct {
    const void *q;               /* [batch, rows, heads, dim] */
    const void *k, *v;           /* [batch, length, kv_heads, dim] */
    const void *tail_k, *tail_v; /* [batch, tail, kv_heads, dim] */
    const int32_t *begin, *end, *tail_begin, *tail_end; /* [batch, rows] the first key and the end of each row's ranges */
    void *out;                   /* [batch, rows, heads, dim]; forward */
    float *peaks, *sums;         /* [batch, rows, heads] largest score, and sum of exp(score - largest) */
    const void *grad_out;        /* backward; null: forward */
    float *grad_q, *grad_k, *grad_v, *grad_tail_k, *grad_tail_v;
    float *scratch;              /* [threads, scratch_floats] */
    int64_t scratch_floats, batch, rows, length, tail, heads, kv_heads, dim, kind, threads;
    float scale;
} range_args;

/* What a task holds, in fp32. Its keys are those of the sequence, then those of the tails. */
typedef struct {
    float *k, *v, *grad_k, *grad_v; /* [keys, dim] */
    float *k_t, *v_t;               /* [dim, stride] */
    float *weights, *slopes;        /* [TILE, columns] scores, then weights; gradients of weights, then of scores */
    float *x, *y, *z; /* [TILE, dim] queries times scale; gradients of outputs; outputs, or gradients of queries */
    int64_t stride, columns;
} workspace;

/* Lay a workspace out from `at` on, if it is not null; return how many floats it takes. */
static int64_t lay_out(workspace *w, float *at, int64_t keys, int64_t dim) {
    int64_t stride = (keys + 2 * LANES - 1) / LANES * LANES, columns = stride + 2 * LANES, size = 0;
    float **arrays[] = {&w->k, &w->v, &w->grad_k, &w->grad_v, &w->k_t, &w->v_t, &w->weights, &w->slopes, &w->x, &w->y, &w->z};
    w->stride = stride, w->columns = columns;
    for (int i = 0; i < 11; i++) {
        *arrays[i] = at ? at + size : 0;
        size += i < 4 ? keys * dim : i < 6 ? dim * stride : i < 8 ? TILE * columns : TILE * dim;
    }
    return size;
}

/* out[i][..] = (+= if `added`) the sum over j < depth of a[i * a_stride + j] * b[j * b_stride ..], for AT_ONCE rows. */
INLINE void multiply_block(
    const float *a, int64_t a_stride, const float *b, int64_t b_stride, int64_t depth, float *out, int64_t out_stride,
    int added, int vectors
) {
    vec sums[AT_ONCE * COLUMNS];
#pragma GCC unroll 4
    for (int i = 0; i < AT_ONCE; i++)
#pragma GCC unroll 4
        for (int v = 0; v < vectors; v++)
            sums[i * vectors + v] = added ? load_f32(out + i * out_stride + v * LANES) : splat(0.0f);
#pragma GCC unroll 2
    for (int64_t j = 0; j < depth; j++) {
        vec row[COLUMNS];
#pragma GCC unroll 4
        for (int v = 0; v < vectors; v++) row[v] = load_f32(b + j * b_stride + v * LANES);
#pragma GCC unroll 4
        for (int i = 0; i < AT_ONCE; i++)
#pragma GCC unroll 4
            for (int v = 0; v < vectors; v++) sums[i * vectors + v] += a[i * a_stride + j] * row[v];
    }
#pragma GCC unroll 4
    for (int i = 0; i < AT_ONCE; i++)
#pragma GCC unroll 4
        for (int v = 0; v < vectors; v++) store_f32(out + i * out_stride + v * LANES, sums[i * vectors + v]);
}

/* out [queries, width] = (+= if `added`) a [queries, depth] times b [depth, width]; width is a multiple of LANES. There is
 * room for a multiple of AT_ONCE queries. */
INLINE void multiply(
    const float *a, int64_t a_stride, const float *b, int64_t b_stride, int64_t depth, int64_t width, float *out,
    int64_t out_stride, int64_t queries, int added
) {
    for (int64_t i = 0; i < queries; i += AT_ONCE, a += AT_ONCE * a_stride, out += AT_ONCE * out_stride) {
        int64_t c = 0;
        for (; c + COLUMNS * LANES <= width; c += COLUMNS * LANES)
            multiply_block(a, a_stride, b + c, b_stride, depth, out + c, out_stride, added, COLUMNS);
        for (; c < width; c += LANES) multiply_block(a, a_stride, b + c, b_stride, depth, out + c, out_stride, added, 1);
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

/* One of the two ranges that a tile's rows see together, the first rounded down to whole vectors. */
typedef struct {
    const int32_t *begin, *end; /* of all rows of the sequence */
    int64_t first, count, width, place, column; /* first key; keys, and whole vectors of them; where both begin in the task */
} span;

static span span_of(const int32_t *begin, const int32_t *end, int64_t row, int64_t last, int64_t place, int64_t column) {
    int64_t first = begin[row], stop = end[row];
    for (int64_t r = row; r <= last; r++) {
        first = begin[r] < first ? begin[r] : first;
        stop = end[r] > stop ? end[r] : stop;
    }
    first = stop > first ? first / LANES * LANES : stop;
    int64_t count = stop - first;
    return (span){begin, end, first, count, (count + LANES - 1) / LANES * LANES, place + first, column};
}

/* Which of the keys from column `j` of a span on a row sees. */
INLINE ivec sees(const span *s, int64_t row, int64_t j) {
    ivec number = lane_numbers() + (int32_t)(s->first + j);
    return (number >= s->begin[row]) & (number < s->end[row]);
}

INLINE void widen(const void *from, int64_t at, float *to, int64_t dim, float factor, int kind) {
    for (int64_t c = 0; c < dim; c += LANES) store_f32(to + c, load(from, at + c, kind) * factor);
}

/* Where key j of sequence b and KV head h lies in its array. */
INLINE int64_t key_place(const range_args *a, int64_t b, int64_t h, int64_t j) {
    int64_t slot = j < a->length ? b * a->length + j : b * a->tail + j - a->length;
    return (slot * a->kv_heads + h) * a->dim;
}

INLINE void load_keys(const range_args *a, int64_t b, int64_t h, workspace *w, int kind) {
    int64_t dim = a->dim, keys = a->length + a->tail;
    memset(w->k_t, 0, 2 * dim * w->stride * sizeof *w->k_t);
    if (a->grad_out) memset(w->grad_k, 0, 2 * keys * dim * sizeof *w->grad_k);
    for (int64_t j = 0; j < keys; j++) {
        float *k = w->k + j * dim, *v = w->v + j * dim;
        widen(j < a->length ? a->k : a->tail_k, key_place(a, b, h, j), k, dim, 1.0f, kind);
        widen(j < a->length ? a->v : a->tail_v, key_place(a, b, h, j), v, dim, 1.0f, kind);
        for (int64_t c = 0; c < dim; c++) w->k_t[c * w->stride + j] = k[c];
        for (int64_t c = 0; c < dim && a->grad_out; c++) w->v_t[c * w->stride + j] = v[c];
    }
}

static void store_key_gradients(const range_args *a, int64_t b, int64_t h, const workspace *w) {
    for (int64_t j = 0; j < a->length + a->tail; j++) {
        int64_t place = key_place(a, b, h, j), size = a->dim * sizeof *w->k;
        memcpy((j < a->length ? a->grad_k : a->grad_tail_k) + place, w->grad_k + j * a->dim, size);
        memcpy((j < a->length ? a->grad_v : a->grad_tail_v) + place, w->grad_v + j * a->dim, size);
    }
}

/* Replace the scores of a row's query by exp(score - peak), 0 where it does not see the key; return their sum. */
INLINE float exponentials(const span *spans, int64_t row, float *scores, float peak) {
    vec total = splat(0.0f);
    for (const span *s = spans; s < spans + 2; s++)
        for (int64_t j = 0; j < s->width; j += LANES) {
            vec value = load_f32(scores + s->column + j) - peak;
            vec weight = exp_where(sees(s, row, j) & ~(value <= -87.0f), value);
            store_f32(scores + s->column + j, weight);
            total += weight;
        }
    return sum_lanes(total);
}

static float largest_seen(const span *spans, int64_t row, const float *scores) {
    vec most = splat(-__builtin_inff());
    for (const span *s = spans; s < spans + 2; s++)
        for (int64_t j = 0; j < s->width; j += LANES) {
            vec value = load_f32(scores + s->column + j);
            most = pick(sees(s, row, j) & (value > most), value, most);
        }
    return max_lanes(most);
}

/* Replace the numerators of a query's softmax by its weights, and their gradients by those of the scores. */
static void score_gradients(float *weights, float *slopes, int64_t width, float sum) {
    vec total = splat(0.0f);
    for (int64_t j = 0; j < width; j += LANES) {
        vec weight = load_f32(weights + j) / sum, product = weight * load_f32(slopes + j);
        store_f32(weights + j, weight);
        total += (vec)((ivec)product & (weight != 0.0f)); /* of a key that is not seen, the gradient may be NaN */
    }
    float mean = sum_lanes(total);
    for (int64_t j = 0; j < width; j += LANES) {
        vec weight = load_f32(weights + j), slope = weight * (load_f32(slopes + j) - mean);
        store_f32(slopes + j, (vec)((ivec)slope & (weight != 0.0f)));
    }
}

/* Queries `first` to `first` + `count` of a task, numbered through the rows and the query heads of its KV head. */
INLINE void run_tile(const range_args *a, int64_t b, int64_t h, int64_t first, int64_t count, workspace *w, int kind) {
    int64_t dim = a->dim, group = a->heads / a->kv_heads, base = b * a->rows, places[TILE];
    int64_t row = first / group, last = (first + count - 1) / group;
    span spans[2];
    spans[0] = span_of(a->begin + base, a->end + base, row, last, 0, 0);
    spans[1] = span_of(a->tail_begin + base, a->tail_end + base, row, last, a->length, spans[0].width);
    memset(w->x, 0, 3 * TILE * dim * sizeof *w->x);
    for (int64_t i = 0; i < count; i++) {
        places[i] = (base + (first + i) / group) * a->heads + h * group + (first + i) % group;
        widen(a->q, places[i] * dim, w->x + i * dim, dim, a->scale, kind);
        if (a->grad_out) widen(a->grad_out, places[i] * dim, w->y + i * dim, dim, 1.0f, kind);
    }
    for (const span *s = spans; s < spans + 2; s++) {
        float *scores = w->weights + s->column, *slopes = w->slopes + s->column;
        multiply(w->x, dim, w->k_t + s->place, w->stride, dim, s->width, scores, w->columns, count, 0);
        if (a->grad_out) multiply(w->y, dim, w->v_t + s->place, w->stride, dim, s->width, slopes, w->columns, count, 0);
    }
    for (int64_t i = 0; i < count; i++) {
        float *weights = w->weights + i * w->columns, *slopes = w->slopes + i * w->columns;
        int64_t r = (first + i) / group, place = places[i];
        if (!a->grad_out) a->peaks[place] = largest_seen(spans, r, weights);
        float sum = exponentials(spans, r, weights, a->peaks[place]);
        if (!a->grad_out)
            a->sums[place] = sum;
        else
            score_gradients(weights, slopes, spans[1].column + spans[1].width, a->sums[place]);
    }
    for (const span *s = spans; s < spans + 2; s++) {
        float *weights = w->weights + s->column, *slopes = w->slopes + s->column;
        int64_t at = s->place * dim;
        float *factors = a->grad_out ? slopes : weights, *rows = (a->grad_out ? w->k : w->v) + at;
        multiply(factors, w->columns, rows, dim, s->count, dim, w->z, dim, count, 1);
        if (!a->grad_out) continue;
        add_outer(slopes, w->columns, w->x, s->count, dim, w->grad_k + at, count);
        add_outer(weights, w->columns, w->y, s->count, dim, w->grad_v + at, count);
    }
    for (int64_t i = 0; i < count; i++)
        for (int64_t c = 0; c < dim; c += LANES) {
            vec value = load_f32(w->z + i * dim + c);
            if (a->grad_out)
                store_f32(a->grad_q + places[i] * dim + c, value * a->scale);
            else
                store(a->out, places[i] * dim + c, value * (1.0f / a->sums[places[i]]), kind);
        }
}

INLINE void run_task(const range_args *a, int64_t task, float *scratch, int kind) {
    int64_t b = task / a->kv_heads, h = task % a->kv_heads, queries = a->rows * (a->heads / a->kv_heads);
    workspace w;
    lay_out(&w, scratch, a->length + a->tail, a->dim);
    load_keys(a, b, h, &w, kind);
    for (int64_t first = 0; first < queries; first += TILE)
        run_tile(a, b, h, first, queries - first < TILE ? queries - first : TILE, &w, kind);
    if (a->grad_out) store_key_gradients(a, b, h, &w);
}

static void range_share(void *data) {
    const range_args *a = data;
    int64_t self = this_thread(a->threads);
    for (int64_t task = self; task < a->batch * a->kv_heads; task += a->threads) {
        float *scratch = a->scratch + self * a->scratch_floats;
        if (a->kind == FLOAT32)
            run_task(a, task, scratch, FLOAT32);
        else
            run_task(a, task, scratch, BFLOAT16);
    }
}

void range_attention(range_args *a) { run_threads(range_share, a, &a->threads); }

/* Return how many floats of scratch a thread needs for so many keys. */
int64_t range_scratch(int64_t keys, int64_t dim) {
    workspace w;
    return lay_out(&w, 0, keys, dim);
}
