/* Paged attention; keys are always processed in order of position.
 *
 * A row sees the committed positions of its request and then its tail: this step's rows of the request up to the row
 * itself (a chain, a prompt), or those whose bits are set in its tree mask (a tree; ancestors come in order of depth
 * because parents precede children). Plain decoding would process the same keys in the same order, so the bits are the
 * same whatever the shape of the draft, the batch or the number of threads.
 *
 * Rows of one request, and query heads that share a KV head, are processed together: each key and value is loaded and
 * widened once for all of them. Every sum keeps the order in which it would be computed alone.
 */
#include "attention.h"
#include "reduce.h"
#include "threads.h"

#define LATENT 576 /* size of a key that is cached alone: its first numbers are the value (models/targets/latent.py) */
#define LATENT_VALUE 512
#define MAX_CHUNKS (LATENT / LANES) /* head sizes up to this */
#define VALUES(size, unit) ((size) == LATENT / (unit) ? LATENT_VALUE / (unit) : (size)) /* of a key's size, in units */
#define QUERIES 8     /* most queries that are processed together */
#define MAX_TAIL 64   /* bits of a tree mask */
#define SUMS (REGISTERS / 2) /* most vectors of sums that stay in registers, with the vectors added to them */

/* Rows first .. first + rows - 1, all of one request. Row r sees the first `shared[r]` of the keys that the rows share,
 * and then the `tail[r]` keys of its tail.
 */
typedef struct {
    int64_t first, rows, shared[QUERIES], tail[QUERIES];
    int32_t *slots, *tails; /* slots of the shared keys; [rows, MAX_TAIL] slots of the tails */
} block;

INLINE int64_t slot_of(const attention_args *a, int64_t request, int64_t place) {
    return a->table[request * a->pages + place / a->page_size] * a->page_size + place % a->page_size;
}

/* Return how many rows from `first` on can form a block: at most `most`. */
static int64_t extent(const attention_args *a, int64_t first, int64_t most) {
    int64_t rows = 1, left = a->rows - first;
    for (const int64_t *request = a->request + first, *committed = a->committed + first; rows < most && rows < left; rows++)
        if (request[rows] != *request || committed[rows] != *committed) break;
    return rows;
}

static void gather(const attention_args *a, int64_t first, int64_t rows, block *b) {
    int64_t request = a->request[first], committed = a->committed[first], longest = 0;
    b->first = first, b->rows = rows;
    for (int64_t r = 0, row = first; r < rows; r++, row++) {
        int64_t prefix = a->words ? committed : committed + a->offset[row] + 1;
        b->shared[r] = prefix > a->first ? prefix - a->first : 0;
        longest = b->shared[r] > longest ? b->shared[r] : longest;
        b->tail[r] = 0;
        if (a->words)
            for (uint64_t word = (uint64_t)a->words[row]; word; word &= word - 1)
                b->tails[r * MAX_TAIL + b->tail[r]++] = (int32_t)slot_of(a, request, committed + __builtin_ctzll(word));
    }
    int64_t count = 0, end = a->first + longest;
    for (int64_t place = a->first; place < end;) {
        int64_t next = (place / a->page_size + 1) * a->page_size, slot = slot_of(a, request, place);
        for (next = next < end ? next : end; place < next; place++) b->slots[count++] = (int32_t)slot++;
    }
}

void attention_write(const attention_args *a, int64_t first, int64_t end) {
    size_t element = a->kind == FLOAT32 ? sizeof(float) : sizeof(bf16);
    size_t bytes = a->dim * element, head = a->slots * bytes, values = a->dim == LATENT ? 0 : a->kv_heads * head;
    for (int64_t row = first; row < end; row++) {
        char *mine = (char *)a->cache + slot_of(a, a->request[row], a->committed[row] + a->offset[row]) * bytes;
        for (int64_t h = 0; h < a->kv_heads; h++) {
            char *to = mine + h * head;
            memcpy(to, (const char *)a->k + row * a->k_stride * element + h * bytes, bytes);
            if (values) memcpy(to + values, (const char *)a->v + row * a->v_stride * element + h * bytes, bytes);
        }
    }
}

/* Return the slot of the `i`-th key that row `r` of the block sees. */
INLINE ptrdiff_t slot_at(const block *b, int64_t r, int64_t i) {
    return i < b->shared[r] ? b->slots[i] : b->tails[r * MAX_TAIL + i - b->shared[r]];
}

/* Prefetch what is read LANES keys after `i`, if before `end`: the hardware prefetcher stops at the end of a page. */
INLINE void fetch(const attention_args *a, ptrdiff_t base, const int32_t *slots, int64_t i, int64_t end, int kind, int chunks) {
    if (i + LANES >= end) return;
    ptrdiff_t element = kind == FLOAT32 ? sizeof(float) : sizeof(bf16), bytes = chunks * LANES * element;
    const char *at = (const char *)a->cache + base * element + slots[i + LANES] * bytes;
    for (ptrdiff_t line = 0; line < bytes; line += 64) __builtin_prefetch(at + line);
}

INLINE vec times(const vec *q, const vec *key, int chunks) {
    vec dot = q[0] * key[0];
    for (int c = 1; c < chunks; c++) dot += q[c] * key[c];
    return dot;
}

/* Replace `count` scores with the numerators of their softmax, and return the sum, NaN if one of them is. There is room
 * for whole vectors. */
INLINE float exponentials(float *scores, int64_t count) {
    int64_t padded = (count + LANES - 1) / LANES * LANES;
    for (int64_t i = count; i < padded; i++) scores[i] = -1e30f;
    vec most = load_f32(scores);
    for (int64_t i = LANES; i < padded; i += LANES) {
        vec s = load_f32(scores + i);
        ivec more = s > most;
        most = (vec)(((ivec)s & more) | ((ivec)most & ~more));
    }
    vec peak = splat(max_lanes(most)), sums = splat(0.0f);
    for (int64_t i = 0; i < padded; i += LANES) {
        vec s = load_f32(scores + i) - peak, w = exp_where(~(s <= -87.0f), s);
        store_f32(scores + i, w);
        sums += w;
    }
    return sum_lanes(sums);
}

/* Add `count` vectors, from `first` on, of the values of keys `begin` to `end`, exclusive, to the sums of `n` queries,
 * weighted by scores `stride` apart. */
INLINE void add_values(
    const attention_args *a, ptrdiff_t values, const int32_t *slots, int64_t begin, int64_t end, const float *scores,
    int64_t stride, vec (*out)[MAX_CHUNKS], int n, int kind, int chunks, int first, int count
) {
    vec sums[MAX_CHUNKS], value[MAX_CHUNKS]; /* sums: n * count are used */
    for (int j = 0; j < n; j++)
        for (int c = 0; c < count; c++) sums[j * count + c] = out[j][first + c];
    for (int64_t i = begin; i < end; i++) {
        ptrdiff_t at = values + (ptrdiff_t)slots[i] * chunks * LANES + first * LANES;
        if (first == 0) fetch(a, values, slots, i, end, kind, chunks);
        for (int c = 0; c < count; c++) value[c] = load(a->cache, at + c * LANES, kind);
        for (int j = 0; j < n; j++) {
            vec w = splat(scores[j * stride + i - begin]);
            for (int c = 0; c < count; c++) sums[j * count + c] += w * value[c];
        }
    }
    for (int j = 0; j < n; j++)
        for (int c = 0; c < count; c++) out[j][first + c] = sums[j * count + c];
}

/* The same for all vectors of the values, as many at a time as fit the registers for n queries. */
INLINE void add_all_values(
    const attention_args *a, ptrdiff_t values, const int32_t *slots, int64_t begin, int64_t end, const float *scores,
    int64_t stride, vec (*out)[MAX_CHUNKS], int n, int kind, int chunks
) {
    int size = VALUES(chunks, LANES), most = SUMS / n, count = most < size ? most : size, whole = size / count * count;
#pragma GCC unroll 1
    for (int first = 0; first < whole; first += count)
        add_values(a, values, slots, begin, end, scores, stride, out, n, kind, chunks, first, count);
    if (whole < size)
        add_values(a, values, slots, begin, end, scores, stride, out, n, kind, chunks, whole, size - whole);
}

/* Compute the block's rows for query heads `head` .. `head` + `heads` - 1, which share a KV head. */
INLINE void attend(const attention_args *a, const block *b, int64_t head, int64_t heads, float *scores, int kind, int chunks) {
    int64_t dim = chunks * LANES, kv = head / (a->heads / a->kv_heads), stride = a->longest + LANES;
    int outs = VALUES(chunks, LANES);
    ptrdiff_t keys = kv * a->slots * dim, values = outs < chunks ? keys : keys + a->kv_heads * a->slots * dim;
    int64_t queries = b->rows * heads, together = b->shared[0], begin = 0;
    for (int64_t r = 1; r < b->rows; r++) together = b->shared[r] < together ? b->shared[r] : together;
    if (a->window && b->rows == 1) {
        int64_t unseen = b->shared[0] + b->tail[0] - a->window;
        begin = unseen > 0 ? unseen : 0;
        together = together > begin ? together : begin;
    }
    vec q[QUERIES][MAX_CHUNKS], out[QUERIES][MAX_CHUNKS], dots[QUERIES][LANES], key[MAX_CHUNKS];
    for (int64_t j = 0; j < queries; j++) {
        ptrdiff_t query = (b->first + j / heads) * a->q_stride + (head + j % heads) * dim;
        for (int c = 0; c < chunks; c++) {
            q[j][c] = load(a->q, query + c * LANES, kind) * a->scale;
            out[j][c] = splat(0.0f);
        }
    }
    for (int64_t i = begin; i < together; i += LANES) {
        int64_t n = together - i < LANES ? together - i : LANES;
        for (int64_t t = 0; t < n; t++) {
            ptrdiff_t at = keys + (ptrdiff_t)b->slots[i + t] * dim;
            fetch(a, keys, b->slots, i + t, together, kind, chunks);
            for (int c = 0; c < chunks; c++) key[c] = load(a->cache, at + c * LANES, kind);
            for (int64_t j = 0; j < queries; j++) dots[j][t] = times(q[j], key, chunks);
        }
        for (int64_t j = 0; j < queries; j++) {
            for (int64_t t = n; t < LANES; t++) dots[j][t] = splat(0.0f);
            store_f32(scores + j * stride + i - begin, sum_lanes_of_each(dots[j]));
        }
    }
    float sums[QUERIES];
    for (int64_t j = 0; j < queries; j++) {
        int64_t r = j / heads, end = b->shared[r] + b->tail[r];
        float *own = scores + j * stride;
        for (int64_t i = together; i < end; i++) {
            ptrdiff_t at = keys + slot_at(b, r, i) * dim;
            for (int c = 0; c < chunks; c++) key[c] = load(a->cache, at + c * LANES, kind);
            own[i - begin] = sum_lanes(times(q[j], key, chunks));
        }
        int64_t count = end - begin;
        if (a->sinks) own[count++] = a->sinks[head + j % heads];
        sums[j] = exponentials(own, count);
    }
    for (int64_t j = 0; j < queries;) {
        int64_t left = queries - j;
        int n = left >= 4 ? 4 : left >= 2 ? 2 : 1;
        const float *own = scores + j * stride;
        if (n == 4)
            add_all_values(a, values, b->slots, begin, together, own, stride, out + j, 4, kind, chunks);
        else if (n == 2)
            add_all_values(a, values, b->slots, begin, together, own, stride, out + j, 2, kind, chunks);
        else
            add_all_values(a, values, b->slots, begin, together, own, stride, out + j, 1, kind, chunks);
        j += n;
    }
    for (int64_t j = 0; j < queries; j++) {
        int64_t r = j / heads, end = b->shared[r] + b->tail[r];
        for (int64_t i = together; i < end; i++) {
            ptrdiff_t at = values + slot_at(b, r, i) * dim;
            vec w = splat(scores[j * stride + i - begin]);
            for (int c = 0; c < outs; c++) out[j][c] += w * load(a->cache, at + c * LANES, kind);
        }
        vec norm = splat(1.0f / sums[j]);
        ptrdiff_t mine = ((b->first + r) * a->heads + head + j % heads) * outs * LANES;
        for (int c = 0; c < outs; c++) store(a->out, mine + c * LANES, out[j][c] * norm, kind);
    }
}

/* Return the floats of scratch that a thread needs: scores of its queries, and slots of their keys. */
int64_t attention_scratch(int64_t longest) { return QUERIES * (longest + LANES + MAX_TAIL) + longest; }

/* Compute thread `self`'s part of the pairs of a block and a KV head; threads get about equally many rows. */
INLINE void share(const attention_args *a, int64_t self, int kind, int chunks) {
    int64_t group = a->heads / a->kv_heads, heads = group < QUERIES ? group : QUERIES, most = QUERIES / heads;
    int64_t all = a->rows * a->kv_heads, each = a->threads > 1 ? all / (2 * a->threads) : all; /* some per thread */
    most = a->window && a->window < a->longest ? 1 : most < each ? most : each > 1 ? each : 1;
    int64_t first = all * self / a->threads, end = all * (self + 1) / a->threads, at = 0;
    float *scores = a->scratch + self * attention_scratch(a->longest);
    block b = {.tails = (int32_t *)(scores + QUERIES * (a->longest + LANES))};
    b.slots = b.tails + QUERIES * MAX_TAIL;
    for (int64_t row = 0, rows; row < a->rows && at < end; row += rows) {
        rows = extent(a, row, most);
        if (at + rows * a->kv_heads > first) gather(a, row, rows, &b);
        for (int64_t kv = 0; kv < a->kv_heads; kv++, at += rows)
            for (int64_t h = 0; at >= first && at < end && h < group; h += heads)
                attend(a, &b, kv * group + h, group - h < heads ? group - h : heads, scores, kind, chunks);
    }
}

/* Head sizes are compile-time constants: with a constant number of chunks, query and output stay in registers. */
#define EACH_DIM(each, ...) \
    each(16, __VA_ARGS__) each(32, __VA_ARGS__) each(64, __VA_ARGS__) each(80, __VA_ARGS__) each(96, __VA_ARGS__) \
        each(128, __VA_ARGS__) each(256, __VA_ARGS__) each(LATENT, __VA_ARGS__)
#define SHARE_CASE(dim, kind) \
    case dim: \
        share(a, self, kind, dim / LANES); \
        break;

void attention_share(const attention_args *a, int64_t self) {
    if (a->kind == FLOAT32) {
        switch (a->dim) { EACH_DIM(SHARE_CASE, FLOAT32) }
    } else {
        switch (a->dim) { EACH_DIM(SHARE_CASE, BFLOAT16) }
    }
}

#define SAME_DIM(dim, wanted) || wanted == dim

/* Return whether sizes of keys and values have a case above. */
int attention_takes(int64_t dim, int64_t value_dim) { return value_dim == VALUES(dim, 1) && (0 EACH_DIM(SAME_DIM, dim)); }

static void work(void *data) {
    const attention_args *a = data;
    attention_share(a, this_thread(a->threads));
}

/* The sizes must be ones that attention_takes. */
void paged_attention(attention_args *a) {
    attention_write(a, 0, a->rows);
    run_threads(work, a, &a->threads);
}
