/* Losses over a vocabulary, one row at a time while it is in cache: the loss of a draft's logits against a teacher's,
 * and its gradient, which overwrites the logits. A row's bits depend on that row alone. The caller takes logarithms.
 *
 * A row whose largest logit is not finite, or that contains a NaN, yields NaN throughout, as in torch.
 */
#include "threads.h"
#include "reduce.h"

typedef struct {
    void *logits;           /* [rows, size]; with `factor`, on return their gradient */
    const void *taught;     /* [teachers, size], the teacher's logits; null: no KL (`dot`) and no `overlap` */
    const int64_t *teacher; /* [rows], the row of `taught` for each row */
    const int64_t *label;   /* [rows] cross-entropy with these columns (negative: none); null: KL to the teacher */
    const float *factor;    /* [rows] factor on the gradient; null: no gradient is computed */
    const float *log_z;     /* [teachers] log-sum-exp of the teacher's logits */
    const float *mass;      /* [teachers] factor on the teacher's distribution p in `overlap` */
    float *most, *sum;      /* [rows] largest logit z, and sum of exp(z - most) */
    float *dot;             /* [rows] sum of p z, or the label's z */
    float *overlap;         /* [rows] sum of min(softmax(z), mass p); null: not computed */
    int64_t *best;          /* [rows] first column of the largest logit */
    float *scratch;         /* [threads, 2, size rounded up to LANES] */
    int64_t rows, size, kind, taught_kind, threads;
} vocabulary_loss_args;

typedef struct {
    const void *logits; /* [rows, size] */
    const int64_t *ids; /* [drafts] columns of the draft vocabulary; null: all columns */
    void *drafted;      /* [rows, drafts] on return the logits of these columns */
    /* [2, rows], over all columns and over those of the draft vocabulary (without `ids` only over all): largest logit
     * z, sum of e = exp(z - most), sum of e (z - most), first column of the largest */
    float *most, *sum, *dot;
    int64_t *best;
    int64_t rows, size, drafts, kind, threads;
} vocabulary_teach_args;

#define MINUS_INFINITY splat(-__builtin_inff())

/* Load a vector of a row; past the end of the row it is minus infinity, which adds nothing to any sum. */
INLINE vec load_part(const void *base, int64_t i, int64_t size, int kind) {
    if (i + LANES <= size) return load(base, i, kind);
    size_t width = kind == FLOAT32 ? sizeof(float) : sizeof(bf16);
    float part[LANES];
    store(part, 0, MINUS_INFINITY, kind);
    memcpy(part, (const char *)base + i * width, (size - i) * width);
    return load(part, 0, kind);
}

INLINE void store_part(void *base, int64_t i, int64_t size, vec v, int kind) {
    if (i + LANES <= size) {
        store(base, i, v, kind);
        return;
    }
    size_t width = kind == FLOAT32 ? sizeof(float) : sizeof(bf16);
    float part[LANES];
    store(part, 0, v, kind);
    memcpy((char *)base + i * width, part, (size - i) * width);
}

INLINE const void *row_of(const void *base, int64_t row, int64_t size, int kind) {
    return (const char *)base + row * size * (kind == FLOAT32 ? sizeof(float) : sizeof(bf16));
}

/* Return the largest element of a row, NaN if it is not finite or any element is NaN; `column`: its first column. */
INLINE float largest(const void *z, int64_t size, int64_t *column, int kind) {
    vec most = MINUS_INFINITY, wrong = splat(0.0f);
    ivec place = {0}, now = lane_numbers();
    for (int64_t i = 0; i < size; i += LANES, now += LANES) {
        vec v = load_part(z, i, size, kind);
        ivec above = v > most;
        wrong = (vec)((ivec)wrong | (v != v));
        most = pick(above, v, most);
        place = (now & above) | (place & ~above);
    }
    float best = max_lanes(most);
    int64_t first = size;
    for (int i = 0; i < LANES; i++)
        if (most[i] == best && place[i] < first) first = place[i];
    ivec bad = (ivec)wrong;
    for (int i = 0; i < LANES; i++)
        if (bad[i]) best = __builtin_nanf("");
    *column = first < size ? first : 0;
    return best - best == 0.0f ? best : __builtin_nanf("");
}

INLINE void fill(void *z, int64_t size, float value, int kind) {
    for (int64_t i = 0; i < size; i += LANES) store_part(z, i, size, splat(value), kind);
}

INLINE void loss_row(const vocabulary_loss_args *a, int64_t row, float *e, float *p, int kind, int taught_kind) {
    int64_t size = a->size, teacher = a->taught ? a->teacher[row] : 0, label = a->label ? a->label[row] : -1;
    void *z = (void *)row_of(a->logits, row, size, kind);
    const void *t = a->taught ? row_of(a->taught, teacher, size, taught_kind) : 0;
    float most = largest(z, size, a->best + row, kind), factor = a->factor ? a->factor[row] : 0.0f;
    if (most != most) {
        a->most[row] = a->sum[row] = a->dot[row] = most;
        if (a->overlap) a->overlap[row] = most;
        if (a->factor) fill(z, size, most, kind);
        return;
    }
    vec log_z = splat(t ? a->log_z[teacher] : 0.0f), sum = splat(0.0f), dot = splat(0.0f);
    for (int64_t i = 0; i < size; i += LANES) {
        vec v = load_part(z, i, size, kind), x = vec_exp(v - most);
        store_f32(e + i, x);
        sum += x;
        if (!t) continue;
        vec y = vec_exp(load_part(t, i, size, taught_kind) - log_z);
        store_f32(p + i, y);
        dot += (vec)((ivec)(y * v) & (y > 0.0f));
    }
    float total = sum_lanes(sum), at_label = 0.0f;
    if (label >= 0) at_label = kind == FLOAT32 ? ((float *)z)[label] : load_part(z, label, size, kind)[0];
    a->most[row] = most, a->sum[row] = total, a->dot[row] = a->label ? at_label : sum_lanes(dot);
    if (!a->factor && !a->overlap) return;
    vec share = splat(1.0f / total), mass = splat(t ? a->mass[teacher] : 0.0f), both = splat(0.0f);
    vec scale = splat(factor), soft = splat(a->label ? 0.0f : factor);
    for (int64_t i = 0; i < size; i += LANES) {
        vec q = load_f32(e + i) * share;
        if (t) {
            vec y = load_f32(p + i), m = y * mass;
            both += pick(q < m, q, m);
            if (a->factor) store_part(z, i, size, scale * q - soft * y, kind);
        } else
            store_part(z, i, size, scale * q, kind);
    }
    if (a->overlap) a->overlap[row] = sum_lanes(both);
    if (a->factor && label >= 0) {
        vec at = splat(factor * (e[label] / total - 1.0f));
        float held[LANES];
        store(held, 0, at, kind);
        size_t width = kind == FLOAT32 ? sizeof(float) : sizeof(bf16);
        memcpy((char *)z + label * width, held, width);
    }
}

static void loss_share(void *given) {
    const vocabulary_loss_args *a = given;
    int64_t self = this_thread(a->threads), padded = (a->size + LANES - 1) / LANES * LANES;
    float *e = a->scratch + self * 2 * padded, *p = e + padded;
    for (int64_t row = a->rows * self / a->threads; row < a->rows * (self + 1) / a->threads; row++) {
        if (a->kind == FLOAT32 && a->taught_kind == FLOAT32) loss_row(a, row, e, p, FLOAT32, FLOAT32);
        if (a->kind == FLOAT32 && a->taught_kind == BFLOAT16) loss_row(a, row, e, p, FLOAT32, BFLOAT16);
        if (a->kind == BFLOAT16 && a->taught_kind == FLOAT32) loss_row(a, row, e, p, BFLOAT16, FLOAT32);
        if (a->kind == BFLOAT16 && a->taught_kind == BFLOAT16) loss_row(a, row, e, p, BFLOAT16, BFLOAT16);
    }
}

void vocabulary_loss(vocabulary_loss_args *a) {
    run_threads(loss_share, a, &a->threads);
}

INLINE void statistics(const void *z, int64_t size, float *most, float *sum, float *dot, int64_t *best, int kind) {
    *most = largest(z, size, best, kind);
    vec exps = splat(0.0f), products = splat(0.0f);
    for (int64_t i = 0; i < size; i += LANES) {
        vec v = load_part(z, i, size, kind) - *most, x = vec_exp(v);
        exps += x;
        products += (vec)((ivec)(x * v) & (x > 0.0f));
    }
    *sum = sum_lanes(exps), *dot = sum_lanes(products);
}

INLINE void teach_row(const vocabulary_teach_args *a, int64_t row, int kind) {
    const void *z = row_of(a->logits, row, a->size, kind);
    statistics(z, a->size, a->most + row, a->sum + row, a->dot + row, a->best + row, kind);
    if (!a->ids) return;
    void *drafted = (void *)row_of(a->drafted, row, a->drafts, kind);
    for (int64_t i = 0; i < a->drafts; i++) {
        if (kind == FLOAT32)
            ((float *)drafted)[i] = ((const float *)z)[a->ids[i]];
        else
            ((bf16 *)drafted)[i] = ((const bf16 *)z)[a->ids[i]];
    }
    int64_t to = a->rows + row;
    statistics(drafted, a->drafts, a->most + to, a->sum + to, a->dot + to, a->best + to, kind);
}

static void teach_share(void *given) {
    const vocabulary_teach_args *a = given;
    int64_t self = this_thread(a->threads);
    for (int64_t row = a->rows * self / a->threads; row < a->rows * (self + 1) / a->threads; row++) {
        if (a->kind == FLOAT32)
            teach_row(a, row, FLOAT32);
        else
            teach_row(a, row, BFLOAT16);
    }
}

void vocabulary_teach(vocabulary_teach_args *a) {
    run_threads(teach_share, a, &a->threads);
}
