/* Recurrent layers, as kernels/recurrence.py defines them. A row is updated by the same instructions in a prompt, in a
 * step of its own, in a chain and in a tree, so its bits depend on its ancestors alone.
 */
#include "recurrence.h"
#include "reduce.h"
#include "threads.h"

#define MOST_TAPS 8
#define CHANNELS 256 /* of the convolution that are computed together: their weights stay in the first cache */
#define TOGETHER 16  /* rows whose keys, queries and values are widened at a time */
#define COLUMNS 4    /* vectors of a state's columns that are updated together: their sums stay in registers */
#define FOLD 16      /* partial sums of a norm, on every processor */
#define L2_EPS 1e-6f

/* Order the rows of trees so that few states are kept at a time: a node's child with the most descendants comes last and
 * takes the node's place, the others use the next one. visits [3, rows]: rows, counted within the request, and the places
 * of the states before (-1: the request's) and after them; work [4, rows]. Returns the number of places, at most
 * 1 + log2 of a request's rows. */
int64_t order_trees(const int64_t *first, const int32_t *parents, int64_t requests, int64_t rows, int32_t *work, int32_t *visits) {
    int32_t places = 1;
    for (int64_t b = 0; b < requests; b++) {
        int64_t begin = first[b], count = first[b + 1] - begin;
        const int32_t *parent = parents + begin;
        int32_t *size = work + begin, *largest = size + rows, *next = largest + rows, *place = next + rows, roots = 0;
        int32_t *row = visits + begin, *before = row + rows, *after = before + rows;
        for (int64_t i = 0; i < count; i++) size[i] = 1, largest[i] = -1;
        for (int64_t i = count - 1; i >= 0; i--) {
            if (parent[i] < 0) continue;
            int32_t *child = largest + parent[i];
            if (*child < 0 || size[i] > size[*child]) *child = (int32_t)i;
            size[parent[i]] += size[i];
        }
        for (int64_t i = 0; i < count; i++) {
            int32_t above = parent[i], at;
            if (above < 0) at = roots, roots += size[i], place[i] = 0;
            else if (largest[above] == i) at = size[above] - size[i], place[i] = place[above];
            else at = next[above], next[above] += size[i], place[i] = place[above] + 1;
            row[at] = (int32_t)i, before[at] = above < 0 ? -1 : place[above], after[at] = place[i];
            next[i] = at + 1, size[i] += at; /* from here on: where its descendants end */
            places = place[i] < places ? places : place[i] + 1;
        }
    }
    return places;
}

/* Let this thread round denormal numbers to zero; return how it rounded before. */
static unsigned long flush_denormals(void) {
    unsigned long mode = 0;
#if defined(__SSE2__)
    mode = _mm_getcsr();
    _mm_setcsr((unsigned)mode | 0x8040);
#elif defined(__aarch64__)
    __asm__ volatile("mrs %0, fpcr" : "=r"(mode));
    __asm__ volatile("msr fpcr, %0" : : "r"(mode | 1ul << 24));
#endif
    return mode;
}

static void restore_rounding(unsigned long mode) {
#if defined(__SSE2__)
    _mm_setcsr((unsigned)mode);
#elif defined(__aarch64__)
    __asm__ volatile("msr fpcr, %0" : : "r"(mode));
#endif
}

static const float zeros[CHANNELS];

INLINE const void *advanced(const void *base, int64_t index, int kind) {
    return (const char *)base + index * (kind == FLOAT32 ? 4 : 2);
}

/* Convolve a request's channels `channel` to `channel` + `size`, and keep the last columns. */
INLINE void convolve_request(const convolve_args *a, int64_t b, int64_t channel, int64_t size, const float *taps, int kind, int silu) {
    int64_t begin = a->first[b], count = a->first[b + 1] - begin, old = a->taps - 1;
    const void *x = advanced(a->x, begin * a->stride + channel, kind), *from[MOST_TAPS];
    void *window = a->windows && a->slots ? (void *)advanced(a->windows, a->slots[b] * old * a->channels + channel, kind) : 0;
    for (int64_t row = 0; row < count; row++) {
        for (int64_t tap = old, node = row; tap >= 0; tap--) {
            if (node >= 0) from[tap] = advanced(x, node * a->stride, kind);
            else from[tap] = window ? advanced(window, (node + old) * a->channels, kind) : zeros;
            node = node < 0 || !a->parents ? node - 1 : a->parents[begin + node];
        }
        for (int64_t i = 0; i < size; i += LANES) {
            vec sum = load_f32(taps + a->taps * CHANNELS + i);
            for (int64_t tap = 0; tap < a->taps; tap++) sum += load_f32(taps + tap * CHANNELS + i) * load(from[tap], i, kind);
            store(a->out, (begin + row) * a->channels + channel + i, silu ? times_sigmoid(sum, sum) : sum, kind);
        }
    }
    if (!window || !a->advance[b] || !count) return;
    for (int64_t column = 0; column < old; column++) {
        int64_t row = column - old + count;
        const void *kept = row < 0 ? advanced(window, (row + old) * a->channels, kind) : advanced(x, row * a->stride, kind);
        memcpy((void *)advanced(window, column * a->channels, kind), kept, (size_t)size * (kind == FLOAT32 ? 4 : 2));
    }
}

/* Widen the weights of channels, tap by tap, and then their biases. */
INLINE void widen_taps(const convolve_args *a, int64_t channel, int64_t size, float *taps, int kind) {
    for (int64_t tap = 0; tap < a->taps; tap++, taps += CHANNELS)
        for (int64_t i = 0; i < size; i += LANES) store_f32(taps + i, load(a->weight, tap * a->channels + channel + i, kind));
    for (int64_t i = 0; i < size; i += LANES)
        store_f32(taps + i, a->bias ? load(a->bias, channel + i, kind) : splat(0.0f));
}

/* Multiply numbers of x by those of the part `of` b, c and x, each of `channels` channels a row. */
INLINE void multiply(const convolve_args *a, const void *x, int64_t stride, void *out, int of, int64_t channel, int64_t size, int kind) {
    for (int64_t row = 0, rows = a->first[a->requests]; row < rows; row++)
        for (int64_t i = channel; i < channel + size; i += LANES) {
            vec gate = load(a->gates, (3 * row + of) * a->channels + i, kind);
            store(out, row * a->channels + i, gate * load(x, row * stride + i, kind), kind);
        }
}

INLINE void convolve_channels(const convolve_args *a, int64_t channel, int64_t size, const float *taps, int kind, int silu) {
    int64_t stride = 3 * a->channels;
    if (a->gates) multiply(a, advanced(a->gates, 2 * a->channels, kind), stride, a->x, 0, channel, size, kind);
    for (int64_t b = 0; b < a->requests; b++) convolve_request(a, b, channel, size, taps, kind, silu);
    if (a->gates) multiply(a, a->out, a->channels, a->out, 1, channel, size, kind);
}

void convolve_share(const convolve_args *a, int64_t self) {
    float taps[(MOST_TAPS + 1) * CHANNELS]; /* [taps, CHANNELS], and the bias */
    int64_t blocks = a->channels / 16, end = blocks * (self + 1) / a->threads * 16;
    for (int64_t channel = blocks * self / a->threads * 16; channel < end; channel += CHANNELS) {
        int64_t size = end - channel < CHANNELS ? end - channel : CHANNELS;
        if (a->weight_kind == FLOAT32) widen_taps(a, channel, size, taps, FLOAT32);
        else widen_taps(a, channel, size, taps, BFLOAT16);
        if (a->kind == FLOAT32 && a->silu) convolve_channels(a, channel, size, taps, FLOAT32, 1);
        else if (a->kind == FLOAT32) convolve_channels(a, channel, size, taps, FLOAT32, 0);
        else if (a->silu) convolve_channels(a, channel, size, taps, BFLOAT16, 1);
        else convolve_channels(a, channel, size, taps, BFLOAT16, 0);
    }
}

static void convolve_part(void *data) {
    const convolve_args *a = data;
    convolve_share(a, this_thread(a->threads));
}

void convolve(convolve_args *a) {
    run_threads(convolve_part, a, &a->threads);
}

/* Rows of a head, widened, and the places of states before and after them, as in `visits`; -1 is `state`. */
typedef struct {
    float *k, *q, *v; /* [TOGETHER, keys], [TOGETHER, keys], [TOGETHER, values] */
    float *state;     /* [keys, values] in its slot */
    float *tiles;     /* [places + 1, keys * values] states by blocks of columns; the last one, if it is used, is zero */
    int64_t count, row[TOGETHER], before[TOGETHER], after[TOGETHER];
} head_rows;

/* Update `width` vectors of columns from `column` on of the states of the rows, one after another; sums over the keys run
 * in ascending order. There is one such function for each width and kind of recurrence, hence one order and rounding. */
INLINE void update(const scan_args *a, const head_rows *h, int64_t head, int64_t column, int delta, int width) {
    int64_t keys = a->keys, values = a->values;
    for (int64_t j = 0; j < h->count; j++) {
        const float *k = h->k + j * keys, *q = h->q + j * keys;
        int64_t from_step = h->before[j] < 0 ? values : width * LANES, to_step = h->after[j] < 0 ? values : width * LANES;
        const float *from = h->before[j] < 0 ? h->state + column : h->tiles + (h->before[j] * values + column) * keys;
        float *to = h->after[j] < 0 ? h->state + column : h->tiles + (h->after[j] * values + column) * keys;
        int64_t at = h->row[j] * a->heads + head;
        vec decay = splat(a->decay[at]), gain = splat(a->gain[at]), u[COLUMNS], sums[COLUMNS];
        for (int c = 0; c < width; c++) u[c] = load_f32(h->v + j * values + column + c * LANES);
        if (delta) {
            for (int c = 0; c < width; c++) sums[c] = splat(0.0f);
            for (int64_t i = 0; i < keys; i++)
                for (int c = 0; c < width; c++) sums[c] += k[i] * load_f32(from + i * from_step + c * LANES);
            for (int c = 0; c < width; c++) u[c] -= decay * sums[c];
        }
        for (int c = 0; c < width; c++) u[c] *= gain, sums[c] = splat(0.0f);
        for (int64_t i = 0; i < keys; i++)
            for (int c = 0; c < width; c++) {
                vec s = decay * load_f32(from + i * from_step + c * LANES) + k[i] * u[c];
                store_f32(to + i * to_step + c * LANES, s);
                sums[c] += q[i] * s;
            }
        for (int c = 0; c < width; c++) store_f32(a->out + at * values + column + c * LANES, sums[c]);
    }
}

#define UPDATE(name, delta, width) \
    static __attribute__((noinline)) void name(const scan_args *a, const head_rows *h, int64_t head, int64_t column) { \
        update(a, h, head, column, delta, width); \
    }
UPDATE(add_one, 0, 1)
UPDATE(add_four, 0, COLUMNS)
UPDATE(correct_one, 1, 1)
UPDATE(correct_four, 1, COLUMNS)

/* Widen `count` numbers; with `eps` divide them by their norm, and multiply by `scale`. */
INLINE void widen_row(const void *x, int64_t first, float *out, int64_t count, float eps, float scale, int kind) {
    if (eps) {
        vec squares[FOLD / LANES];
        for (int part = 0; part < FOLD / LANES; part++) squares[part] = splat(0.0f);
        for (int64_t i = 0; i < count; i += FOLD)
            for (int part = 0; part < FOLD / LANES; part++) {
                vec v = load(x, first + i + part * LANES, kind);
                squares[part] += v * v;
            }
        for (int left = FOLD / LANES / 2; left; left /= 2)
            for (int part = 0; part < left; part++) squares[part] += squares[part + left];
        scale *= 1.0f / __builtin_sqrtf(sum_lanes(squares[0]) + eps);
    }
    for (int64_t i = 0; i < count; i += LANES) store_f32(out + i, load(x, first + i, kind) * scale);
}

/* Run a head of a request over its rows. */
INLINE void scan_head(const scan_args *a, int64_t b, int64_t head, float *scratch, int kind) {
    int64_t keys = a->keys, values = a->values, begin = a->first[b], count = a->first[b + 1] - begin;
    int64_t group = head / (a->heads / a->groups), zero = a->places, kept = a->states && a->slots;
    head_rows h = {.k = scratch, .q = scratch + TOGETHER * keys, .v = scratch + 2 * TOGETHER * keys};
    h.tiles = h.v + TOGETHER * values;
    if (kept) h.state = a->states + (a->slots[b] * a->heads + head) * keys * values;
    else memset(h.tiles + zero * keys * values, 0, sizeof(float) * (size_t)(keys * values));
    float eps = a->delta ? L2_EPS : 0.0f, scale = a->delta ? 1.0f / __builtin_sqrtf((float)keys) : 1.0f;
    for (int64_t done = 0; done < count; done += h.count) {
        h.count = count - done < TOGETHER ? count - done : TOGETHER;
        for (int64_t j = 0, i = done; j < h.count; j++, i++) {
            const int32_t *visit = a->visits + begin + i;
            int64_t row = begin + (a->visits ? visit[0] : i);
            int64_t before = a->visits ? visit[a->rows] : i ? 0 : -1, after = a->visits ? visit[2 * a->rows] : 0;
            h.row[j] = row, h.before[j] = before < 0 && !kept ? zero : before;
            h.after[j] = i == count - 1 && kept && a->advance[b] ? -1 : after;
            widen_row(a->q, row * a->q_stride + group * keys, h.q + j * keys, keys, eps, scale, kind);
            widen_row(a->k, row * a->k_stride + group * keys, h.k + j * keys, keys, eps, 1.0f, kind);
            widen_row(a->v, row * a->v_stride + head * values, h.v + j * values, values, 0.0f, 1.0f, kind);
        }
        int64_t column = 0;
        for (; column + COLUMNS * LANES <= values; column += COLUMNS * LANES)
            (a->delta ? correct_four : add_four)(a, &h, head, column);
        for (; column < values; column += LANES) (a->delta ? correct_one : add_one)(a, &h, head, column);
    }
}

/* Return the floats of scratch that a thread needs. */
int64_t scan_scratch(int64_t keys, int64_t values, int64_t places) {
    return TOGETHER * (2 * keys + values) + (places + 1) * keys * values;
}

/* States that decay away would become denormal, which takes many times as long: every thread rounds them to zero. */
void scan_share(const scan_args *a, int64_t self) {
    unsigned long mode = flush_denormals();
    float *scratch = a->scratch + self * scan_scratch(a->keys, a->values, a->places);
    for (int64_t item = self; item < a->requests * a->heads; item += a->threads) {
        if (a->kind == FLOAT32) scan_head(a, item / a->heads, item % a->heads, scratch, FLOAT32);
        else scan_head(a, item / a->heads, item % a->heads, scratch, BFLOAT16);
    }
    restore_rounding(mode);
}

static void scan_part(void *data) {
    const scan_args *a = data;
    scan_share(a, this_thread(a->threads));
}

void scan(scan_args *a) {
    run_threads(scan_part, a, &a->threads);
}
