/* Fused decoder: a whole forward pass in one call and one parallel region. Per layer: RMSNorm, QKV projection, QK norm,
 * rotary embedding, paged attention, output projection, RMSNorm, gated MLP; then the final norm. A layer of a head may
 * read its input without a norm (EAGLE), or concatenated with a token embedding, each normed separately (EAGLE-3). The
 * outputs of attention and MLP may be normed before they are added to the residual stream (Gemma). The input and output of
 * both may be convolved along the rows of a block (DFlash2); then all rows are kept. In a layer of a hybrid a gated short
 * convolution (LFM2) or a gated delta net (Qwen3.5) takes the place of attention.
 *
 * In the last layer every row's keys and values are written, since other rows attend to them, but the outputs of only
 * some rows may be needed: after the keys and values are written, the other rows are dropped.
 *
 * The residual stream, `x`, is of the kind `stream`: fp32 in a target of bf16, to which the output projections add their sums
 * unrounded and which a norm rounds once, to the input of the next product. The inputs without a norm, the token norm and
 * convolutions are of heads, whose stream has the kind of the products.
 *
 * It calls the kernels that otherwise run separately (linear.c, attention.c, recurrence.c, delta_net.c, rows.c) and
 * rounds where they do, so its bits are the same. There is a barrier wherever a thread reads what other threads wrote.
 */
#include "decoder.h"
#include "rows.h"
#include "threads.h"

typedef struct {
    const decoder_args *a;
    int64_t self, rows, first, end; /* thread `self` computes rows `first` to `end`, exclusive, of `rows` */
} part;

static part part_of(const decoder_args *a, int64_t self, int64_t rows) {
    return (part){a, self, rows, rows * self / a->threads, rows * (self + 1) / a->threads};
}

static void *at(const part *p, void *base, int64_t elements) {
    return (char *)base + elements * (p->a->kind == FLOAT32 ? sizeof(float) : sizeof(bf16));
}

/* The same in tensors of the residual stream's kind. */
static void *in_stream(const part *p, void *base, int64_t elements) {
    return (char *)base + elements * (p->a->stream == FLOAT32 ? sizeof(float) : sizeof(bf16));
}

static void barrier(const part *p) {
    if (p->a->threads > 1) GOMP_barrier();
}

/* Norm contiguous rows of `size` numbers of `x_kind`. */
static void norm_rows(
    const part *p, const void *x, int64_t x_kind, const void *weight, void *out, int64_t out_kind, int64_t rows, int64_t size
) {
    const decoder_args *a = p->a;
    rms_norm(x, weight, out, rows, size, size, a->eps, x_kind, a->kind, out_kind, a->centered);
}

/* Norm the residual stream. */
static void norm(const part *p, const void *weight, void *out) {
    int64_t size = p->a->hidden_size, to = p->first * size;
    norm_rows(p, in_stream(p, p->a->x, to), p->a->stream, weight, at(p, out, to), p->a->kind, p->end - p->first, size);
    barrier(p);
}

/* Return the input of the layer's QKV projection. */
static const void *enter(const part *p, const decoder_layer *layer) {
    const decoder_args *a = p->a;
    int64_t size = a->hidden_size;
    if (!layer->input_norm) return a->x;
    if (!layer->token_norm) {
        norm(p, layer->input_norm, a->normed);
        return a->normed;
    }
    for (int64_t row = p->first; row < p->end; row++) {
        void *x = at(p, a->x, row * size), *left = at(p, a->normed, 2 * row * size), *right = at(p, left, size);
        norm_rows(p, at(p, (void *)a->tokens, row * size), a->kind, layer->token_norm, left, a->kind, 1, size);
        norm_rows(p, x, a->kind, layer->input_norm, right, a->kind, 1, size);
        if (layer->residual_normed) memcpy(x, right, (char *)right - (char *)left);
    }
    barrier(p);
    return a->normed;
}

static void apply(const part *p, const linear_args *weights, const void *x, const void *residual, void *out) {
    linear_args own = *weights;
    own.x = x, own.residual = residual, own.out = out;
    own.rows = p->rows, own.threads = p->a->threads, own.scratch = p->a->scratch;
    linear_share(&own, p->self);
    barrier(p);
}

/* Apply a linear layer to x and add its output to the residual stream, normed first if there is a norm `weight`. */
static void add(const part *p, const linear_args *weights, const void *x, const void *weight) {
    const decoder_args *a = p->a;
    if (!weight) {
        apply(p, weights, x, a->x, a->x);
        return;
    }
    apply(p, weights, x, 0, a->normed);
    int64_t size = a->hidden_size, rows = p->end - p->first;
    void *delta = in_stream(p, a->normed, p->first * size);
    norm_rows(p, delta, a->stream, weight, delta, a->stream, rows, size);
    add_rows(in_stream(p, a->x, p->first * size), delta, rows * size, a->stream);
    barrier(p);
}

/* Return the input of a sublayer: the normed rows, or with a convolution what it makes of them. */
static const void *convolved(const part *p, const convolution *conv, const void *normed) {
    const decoder_args *a = p->a;
    if (!conv) return normed;
    apply(p, conv->projection, normed, 0, a->deltas);
    two_taps(normed, conv->base, a->deltas, a->mixed, p->first, p->end, a->block, a->hidden_size, conv->group, 0, 0, a->kind);
    barrier(p);
    return a->mixed;
}

/* Apply a sublayer's last linear layer and add its output, convolved if there is a convolution, to the residual stream. */
static void add_convolved(
    const part *p, const convolution *conv, const linear_args *weights, const void *x, const void *weight
) {
    const decoder_args *a = p->a;
    if (!conv) {
        add(p, weights, x, weight);
        return;
    }
    apply(p, weights, x, 0, a->normed);
    two_taps(a->normed, conv->base, a->deltas, a->x, p->first, p->end, a->block, a->hidden_size, conv->group, 1, 1, a->kind);
    barrier(p);
}

/* Return attention's arguments for the rows that `rows` addresses; a row's queries, keys and values are contiguous. */
static attention_args addressed(const part *p, const attention_args *rows, const decoder_layer *layer, void *cache) {
    const decoder_args *a = p->a;
    attention_args own = *rows;
    int64_t dim = own.dim, rotated = own.heads + own.kv_heads;
    own.q = a->qkv, own.k = at(p, a->qkv, own.heads * dim), own.v = at(p, a->qkv, rotated * dim);
    own.q_stride = own.k_stride = own.v_stride = (rotated + own.kv_heads) * dim;
    own.cache = cache, own.out = a->attended, own.scratch = a->scores;
    own.slots = a->slots, own.kind = a->kind, own.threads = a->threads, own.scale = a->scale;
    own.window = layer->window ? layer->window + a->reach : 0;
    return own;
}

/* Divide a row of projections into queries, keys and values, and gates, which stay where they are. */
static void divide(const part *p, const attention_args *own, int64_t row) {
    int64_t dim = own->dim, heads = own->heads, others = 2 * own->kv_heads * dim, bytes = (char *)at(p, 0, dim) - (char *)0;
    void *raw = at(p, p->a->raw, row * (2 * heads * dim + others)), *qkv = at(p, p->a->qkv, row * own->q_stride);
    for (int64_t head = 0; head < heads; head++) memcpy(at(p, qkv, head * dim), at(p, raw, 2 * head * dim), bytes);
    memcpy(at(p, qkv, heads * dim), at(p, raw, 2 * heads * dim), others / dim * bytes);
}

/* Scale the outputs of heads by the sigmoids of their gates. */
static void gate_heads(const part *p, const attention_args *rows) {
    int64_t dim = rows->dim, heads = rows->heads, width = 2 * (heads + rows->kv_heads) * dim;
    for (int64_t row = p->first; row < p->end; row++)
        for (int64_t head = 0; head < heads; head++) {
            void *x = at(p, p->a->attended, (row * heads + head) * dim);
            sigmoid_mul(x, at(p, p->a->raw, row * width + (2 * head + 1) * dim), x, dim, p->a->kind);
        }
    barrier(p);
}

static void write_rows(const part *p, const decoder_layer *layer, void *cache) {
    const decoder_args *a = p->a;
    attention_args own = addressed(p, a->attention, layer, cache);
    int64_t dim = own.dim, rotated = own.heads + own.kv_heads;
    for (int64_t row = p->first; row < p->end; row++) {
        void *q = at(p, a->qkv, row * own.q_stride), *k = at(p, q, own.heads * dim);
        if (layer->gated) divide(p, &own, row);
        if (layer->q_norm) {
            norm_rows(p, q, a->kind, layer->q_norm, q, a->kind, own.heads, dim);
            norm_rows(p, k, a->kind, layer->k_norm, k, a->kind, own.kv_heads, dim);
        }
        int64_t angle = (layer->rotary * a->rows + row) * a->rotated;
        void *cos = at(p, (void *)a->cos, angle), *sin = at(p, (void *)a->sin, angle);
        if (a->rotated == dim) rotate(q, cos, sin, q, 1, own.q_stride, rotated, dim, a->kind);
        else
            for (int64_t head = 0; head < rotated; head++, q = at(p, q, dim)) rotate(q, cos, sin, q, 1, dim, 1, a->rotated, a->kind);
    }
    attention_write(&own, p->first, p->end);
    barrier(p);
}

static void attend(const part *p, const attention_args *rows, const decoder_layer *layer, void *cache) {
    attention_args own = addressed(p, rows, layer, cache);
    attention_share(&own, p->self);
    barrier(p);
}

/* Return layer i's convolution, without what it is gated by. */
static convolve_args convolution_of(const decoder_args *a, int64_t i, void *out) {
    convolve_args own = *a->layers[i].causal_conv;
    own.first = a->recurrent->first, own.slots = a->recurrent->slots, own.requests = a->recurrent->requests;
    own.advance = a->recurrent->advance, own.parents = a->recurrent->parents;
    own.x = a->inputs[i], own.windows = a->windows[i], own.out = out, own.stride = own.channels;
    own.kind = a->kind, own.threads = a->threads;
    return own;
}

/* Return the recurrence of layer i, which is a gated delta net. */
static scan_args recurrence_of(const decoder_args *a, int64_t i) {
    const delta_net *delta = a->layers[i].delta;
    int64_t keys = delta->groups * delta->keys, width = a->kind == FLOAT32 ? sizeof(float) : sizeof(bf16);
    scan_args own = *a->scan;
    own.q = a->outputs[i], own.k = (const char *)own.q + keys * width, own.v = (const char *)own.k + keys * width;
    own.q_stride = own.k_stride = own.v_stride = 2 * keys + delta->heads * delta->values;
    own.decay = a->gates[i], own.gain = own.decay + a->rows * delta->heads;
    own.states = a->states[i], own.out = a->scanned, own.delta = 1;
    own.heads = delta->heads, own.groups = delta->groups, own.keys = delta->keys, own.values = delta->values;
    own.kind = a->kind, own.threads = a->threads;
    return own;
}

/* Apply layer i's gated short convolution to its projected input. */
static void convolve_gated(const part *p, int64_t i) {
    convolve_args own = convolution_of(p->a, i, p->a->attended);
    own.gates = p->a->qkv;
    convolve_share(&own, p->self);
    barrier(p);
}

/* Apply layer i's gated delta net to its input x, of which queries, keys and values have been projected. */
static void apply_delta(const part *p, int64_t i, const void *x) {
    const decoder_args *a = p->a;
    const delta_net *delta = a->layers[i].delta;
    int64_t heads = delta->heads, rows = p->end - p->first, from = p->first * heads, size = delta->values;
    apply(p, delta->z, x, 0, a->z);
    apply(p, delta->ba, x, 0, a->ba);
    float *decay = (float *)a->gates[i] + from, *gain = decay + a->rows * heads;
    delta_gates(a->ba + 2 * from, delta->a_log, delta->dt_bias, decay, gain, rows, heads);
    convolve_args convolution = convolution_of(a, i, a->outputs[i]);
    convolve_share(&convolution, p->self);
    barrier(p);
    scan_args recurrence = recurrence_of(a, i);
    scan_share(&recurrence, p->self);
    barrier(p);
    from *= size;
    gated_norm(a->scanned + from, at(p, a->z, from), delta->norm, at(p, a->attended, from), rows * heads, size, delta->eps, a->kind);
    barrier(p);
}

/* Move the kept rows to the front of the residual stream and the queries, and return this thread's part of them. */
static part keep_rows(const part *p, int gated) {
    const decoder_args *a = p->a;
    const attention_args *kept = a->kept;
    int64_t row = (char *)in_stream(p, a->x, a->hidden_size) - (char *)a->x, queries = kept->heads * kept->dim;
    int64_t stride = queries + 2 * kept->kv_heads * kept->dim, bytes = (char *)at(p, a->x, queries) - (char *)a->x;
    int64_t raw = gated ? 2 * (kept->heads + kept->kv_heads) * kept->dim : 0;
    if (p->self == 0)
        for (int64_t i = 0; i < kept->rows; i++) {
            if (raw) memmove(at(p, a->raw, i * raw), at(p, a->raw, a->keep[i] * raw), (char *)at(p, 0, raw) - (char *)0);
            memmove((char *)a->x + i * row, (char *)a->x + a->keep[i] * row, row);
            memmove(at(p, a->qkv, i * stride), at(p, a->qkv, a->keep[i] * stride), bytes);
        }
    barrier(p);
    return part_of(a, p->self, kept->rows);
}

static void gate(const part *p) {
    int64_t size = p->a->inner_size;
    void *from = at(p, p->a->inner, p->first * 2 * size), *to = at(p, p->a->gated, p->first * size);
    (p->a->gelu ? gelu_mul : silu_mul)(from, to, p->end - p->first, size, p->a->kind);
    barrier(p);
}

static void work(void *data) {
    const decoder_args *a = data;
    part own = part_of(a, this_thread(a->threads), a->rows), *p = &own;
    const attention_args *rows = a->attention;
    int64_t from = p->first * a->hidden_size, row = (char *)in_stream(p, a->x, a->hidden_size) - (char *)a->x;
    for (int64_t i = 0; i < a->count; i++) {
        const decoder_layer *layer = a->layers + i;
        if (a->entering[i]) memcpy(in_stream(p, a->entering[i], from), in_stream(p, a->x, from), (p->end - p->first) * row);
        const void *x = convolved(p, layer->attention_conv, enter(p, layer));
        apply(p, layer->qkv, x, 0, layer->delta ? a->inputs[i] : layer->gated ? a->raw : a->qkv);
        if (layer->delta) {
            apply_delta(p, i, x);
        } else if (layer->causal_conv) {
            convolve_gated(p, i);
        } else {
            write_rows(p, layer, a->caches[i]);
            if (a->kept && i == a->count - 1) {
                if (!a->kept->rows) return;
                own = keep_rows(p, layer->gated != 0), rows = a->kept;
            }
            attend(p, rows, layer, a->caches[i]);
            if (layer->gated) gate_heads(p, rows);
        }
        add_convolved(p, layer->attention_conv, layer->output, a->attended, layer->attended_norm);
        norm(p, layer->post_norm, a->normed);
        apply(p, layer->gate_up, convolved(p, layer->mlp_conv, a->normed), 0, a->inner);
        gate(p);
        add_convolved(p, layer->mlp_conv, layer->down, a->gated, layer->mlp_norm);
    }
    if (a->final_norm) norm(p, a->final_norm, a->hidden);
}

void decoder(decoder_args *a) {
    run_threads(work, a, &a->threads);
}

/* Threads need not wait for each other: each has its channels and heads, whose inputs were kept. */
static void replay_part(void *data) {
    const decoder_args *a = data;
    int64_t self = this_thread(a->threads);
    for (int64_t i = 0; i < a->count; i++) {
        if (!a->layers[i].causal_conv) continue;
        convolve_args convolution = convolution_of(a, i, a->attended);
        convolve_share(&convolution, self);
        if (!a->layers[i].delta) continue;
        scan_args recurrence = recurrence_of(a, i);
        scan_share(&recurrence, self);
    }
}

/* Bring the states of recurrent layers up to date with rows whose inputs were kept. */
void replay(decoder_args *a) {
    run_threads(replay_part, a, &a->threads);
}
