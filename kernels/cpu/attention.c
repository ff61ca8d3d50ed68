/* Paged attention, one row and one head at a time, keys always in order of position.
 *
 * A row's keys are the committed positions of its request and then its own tail: the rows of this step up to its own
 * (a chain, a prompt), or those whose bits are set in its ancestor word (a tree; ancestors come in order of depth because
 * parents precede children). In plain decoding the same keys would be met in the same order, so the bits are the same
 * whatever the shape of the draft, the batch or the number of threads.
 */
#include "attention.h"

#define MAX_CHUNKS 16 /* head sizes up to 256 */

INLINE int64_t slot_of(const attention_args *a, int64_t request, int64_t place) {
    return a->table[request * a->pages + place / a->page_size] * a->page_size + place % a->page_size;
}

/* Slots of a row's keys in order; returns how many. */
static int64_t list_slots(const attention_args *a, int64_t row, int32_t *slots) {
    int64_t request = a->request[row], committed = a->committed[row], count = 0;
    int64_t prefix = a->words ? committed : committed + a->offset[row] + 1;
    for (int64_t place = a->first; place < prefix;) {
        int64_t next = (place / a->page_size + 1) * a->page_size, slot = slot_of(a, request, place);
        for (next = next < prefix ? next : prefix; place < next; place++) slots[count++] = (int32_t)slot++;
    }
    if (a->words)
        for (uint64_t word = (uint64_t)a->words[row]; word; word &= word - 1)
            slots[count++] = (int32_t)slot_of(a, request, committed + __builtin_ctzll(word));
    return count;
}

void attention_write(const attention_args *a, int64_t first, int64_t end) {
    size_t element = a->kind == FLOAT32 ? sizeof(float) : sizeof(bf16);
    size_t bytes = a->dim * element, head = a->slots * bytes, values = a->kv_heads * head;
    for (int64_t row = first; row < end; row++) {
        char *mine = (char *)a->cache + slot_of(a, a->request[row], a->committed[row] + a->offset[row]) * bytes;
        for (int64_t h = 0; h < a->kv_heads; h++) {
            char *to = mine + h * head;
            memcpy(to, (const char *)a->k + row * a->k_stride * element + h * bytes, bytes);
            memcpy(to + values, (const char *)a->v + row * a->v_stride * element + h * bytes, bytes);
        }
    }
}

INLINE void attend(
    const attention_args *a, int64_t row, int64_t head, float *scores, const int32_t *slots, int64_t count, int kind, int chunks
) {
    int64_t dim = chunks * LANES, kv = head / (a->heads / a->kv_heads);
    ptrdiff_t keys = kv * a->slots * dim, values = keys + a->kv_heads * a->slots * dim;
    ptrdiff_t query = row * a->q_stride + head * dim, mine = (row * a->heads + head) * dim;
    vec q[MAX_CHUNKS], out[MAX_CHUNKS];
    for (int c = 0; c < chunks; c++) {
        q[c] = load(a->q, query + c * LANES, kind) * a->scale;
        out[c] = splat(0.0f);
    }
    for (int64_t i = 0; i < count; i++) {
        ptrdiff_t key = keys + (ptrdiff_t)slots[i] * dim;
        vec dot = q[0] * load(a->cache, key, kind);
        for (int c = 1; c < chunks; c++) dot += q[c] * load(a->cache, key + c * LANES, kind);
        scores[i] = sum_lanes(dot);
    }
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
        vec w = vec_exp(load_f32(scores + i) - peak);
        store_f32(scores + i, w);
        sums += w;
    }
    for (int64_t i = 0; i < count; i++) {
        ptrdiff_t value = values + (ptrdiff_t)slots[i] * dim;
        vec w = splat(scores[i]);
        for (int c = 0; c < chunks; c++) out[c] += w * load(a->cache, value + c * LANES, kind);
    }
    vec norm = splat(1.0f / sum_lanes(sums));
    for (int c = 0; c < chunks; c++) store(a->out, mine + c * LANES, out[c] * norm, kind);
}

INLINE void share(const attention_args *a, int64_t self, int kind, int chunks) {
    int64_t items = a->rows * a->heads;
    int64_t first = items * self / a->threads, end = items * (self + 1) / a->threads, row = -1, count = 0;
    float *scores = a->scratch + self * 2 * a->longest;
    int32_t *slots = (int32_t *)(scores + a->longest);
    for (int64_t item = first; item < end; item++) {
        if (item / a->heads != row) count = list_slots(a, row = item / a->heads, slots);
        int64_t unseen = a->window && count > a->window ? count - a->window : 0;
        attend(a, row, item % a->heads, scores, slots + unseen, count - unseen, kind, chunks);
    }
}

/* Head sizes are compiled in: with a constant number of chunks the query and the output stay in registers. */
#define CASE(kind, chunks) \
    case kind * 32 + chunks: \
        share(a, self, kind, chunks); \
        break;
#define CASES(kind) CASE(kind, 1) CASE(kind, 2) CASE(kind, 4) CASE(kind, 5) CASE(kind, 6) CASE(kind, 8) CASE(kind, 16)

void attention_share(const attention_args *a, int64_t self) {
    switch (a->kind * 32 + a->dim / LANES) {
        CASES(FLOAT32)
        CASES(BFLOAT16)
    }
}

/* Whether a head size has a case above. */
int attention_takes(int64_t dim) {
    int64_t chunks = dim / LANES;
    return dim % LANES == 0 && (chunks == 1 || chunks == 2 || chunks == 4 || chunks == 5 || chunks == 6 || chunks == 8 || chunks == 16);
}

static void work(void *data) {
    const attention_args *a = data;
    attention_share(a, a->threads > 1 ? a->self() : 0);
}

/* Answers 0, or -1 for a head size that it does not take (nothing is written then). */
int paged_attention(attention_args *a) {
    if (!attention_takes(a->dim)) return -1;
    attention_write(a, 0, a->rows);
    if (a->threads > 1)
        a->parallel(work, a, (unsigned)a->threads, 0);
    else
        work(a);
    return 0;
}
