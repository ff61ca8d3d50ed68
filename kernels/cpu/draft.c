/* One level of a batch of drafts with a recurrent head, in one call: embeddings of the tokens drafted last, the head's
 * layers, its LM head, and the choice.
 *
 * The first level has the rows that wait to be read, several of a request, of which the last goes on. Further ones have a
 * row of each chain, or the nodes of each tree that it is grown from. It calls the kernels that run one by one otherwise,
 * so it drafts the same tokens as they do.
 */
#include "decoder.h"
#include "noise.h"
#include "rows.h"

typedef struct {
    decoder_args *decoder;     /* the layers; x: [rows, hidden] the rows' states, then those that drafts go on from;
                                * kept: [chains] each one's last row */
    const linear_args *joined; /* makes a layer's input of embedding and state; null: a layer has both beside each other */
    const linear_args *lm_head;
    const void *embedding;     /* [V, hidden] */
    const void *cos, *sin;     /* [P, dim], by position */
    const void *norm;          /* [hidden], before the LM head; null: there is none */
    const int64_t *draft_ids;  /* [lm_head->outputs] target ids */
    int64_t *ids, *positions, *committed, *offset, *request; /* [rows]; committed to request as in attention.h */
    const int64_t *low, *high; /* [chains] of the seeds, as in noise.h */
    const float *temperature;  /* [chains] */
    void *tokens;              /* [rows, hidden]; with `joined` [rows, 2 * hidden] */
    void *turned;              /* [2, rows, dim] */
    void *normed, *logits;     /* [chains, hidden | outputs] */
    int64_t *columns;          /* [chains, count] the best of each, as choose_best has them, and likewise */
    float *keys, *masses;
    uint32_t *scratch;         /* as linear.h has it, for `joined` and the LM head */
    int64_t rows, chains, dim, joined_threads, threads;
    int64_t count;             /* 0: the choice alone, [chains] */
} draft_args;

/* The nodes that trees are grown from next: `width` of each root's, children of the `before` that were run last. Of a
 * node's keys lie, from its root's place on, those of all nodes that were run earlier, `used` of a root. */
typedef struct {
    const draft_args *draft;
    const int64_t *parent, *tokens; /* [roots, width] places among those run last; target ids */
    const void *states;             /* [roots, before, hidden] of those run last */
    const int64_t *words;           /* [roots, before] their ancestors, as in attention.h */
    int64_t *own_words;             /* [roots, width] */
    const int64_t *positions, *committed, *request; /* [roots] */
    int64_t roots, before, width, used, level;
} branch_args;

static void apply(const draft_args *a, const linear_args *weights, const void *x, void *out, int64_t rows, int64_t threads) {
    linear_args own = *weights;
    own.x = x, own.residual = 0, own.out = out, own.rows = rows, own.threads = threads, own.scratch = a->scratch;
    linear(&own);
}

static void enter(const draft_args *a) {
    decoder_args *d = a->decoder;
    int64_t width = d->kind == FLOAT32 ? sizeof(float) : sizeof(bf16), row = d->hidden_size * width, turn = a->dim * width;
    int64_t stride = a->joined ? 2 * row : row;
    char *cos = a->turned, *sin = cos + a->rows * turn;
    for (int64_t r = 0; r < a->rows; r++) {
        char *token = (char *)a->tokens + r * stride;
        memcpy(cos + r * turn, (const char *)a->cos + a->positions[r] * turn, turn);
        memcpy(sin + r * turn, (const char *)a->sin + a->positions[r] * turn, turn);
        memcpy(token, (const char *)a->embedding + a->ids[r] * row, row);
        if (a->joined) memcpy(token + row, (const char *)d->x + r * row, row);
    }
    d->cos = cos, d->sin = sin, d->rows = a->rows;
    if (a->joined)
        apply(a, a->joined, a->tokens, d->x, a->rows, a->joined_threads);
    else
        d->tokens = a->tokens;
}

/* The last row of each chain becomes its first, and the place after it the next. */
static void go_on(const draft_args *a) {
    const decoder_args *d = a->decoder;
    if (d->hidden != d->x)
        memcpy(d->x, d->hidden, a->chains * d->hidden_size * (d->kind == FLOAT32 ? sizeof(float) : sizeof(bf16)));
    for (int64_t c = 0; c < a->chains; c++) {
        int64_t from = d->kept ? d->keep[c] : c;
        a->positions[c] = a->positions[from] + 1;
        a->committed[c] = a->committed[from] + a->offset[from] + 1;
        a->offset[c] = 0;
        a->request[c] = a->request[from];
    }
}

/* Rows are read, and nothing is drafted: only what others will see of them is made. */
void draft_read(const draft_args *a) {
    enter(a);
    decoder(a->decoder);
}

/* What the states that drafts go on from are followed by. */
static void choices(const draft_args *a) {
    const decoder_args *d = a->decoder;
    int64_t size = d->hidden_size, outputs = a->lm_head->outputs;
    if (a->norm) rms_norm(d->x, a->norm, a->normed, a->chains, size, size, d->eps, d->kind, 0);
    apply(a, a->lm_head, a->norm ? a->normed : d->x, a->logits, a->chains, a->threads);
    if (a->count)
        choose_best(
            a->logits, a->temperature, a->low, a->high, a->positions, a->draft_ids, a->columns, a->keys, a->masses, a->count,
            a->chains, outputs, outputs, d->kind
        );
    else
        choose(
            a->logits, a->temperature, a->low, a->high, a->positions, a->draft_ids, a->columns, a->chains, outputs, outputs,
            d->kind
        );
}

/* Every chain's next token, after which it is ready for the one after that; or what trees are to be grown from. */
void draft(const draft_args *a) {
    enter(a);
    decoder(a->decoder);
    go_on(a);
    choices(a);
    for (int64_t c = 0; c < a->chains; c++)
        a->ids[c] = a->draft_ids[a->columns[c * (a->count ? a->count : 1)]];
}

void draft_branch(const branch_args *b) {
    const draft_args *a = b->draft;
    decoder_args *d = a->decoder;
    int64_t row = d->hidden_size * (d->kind == FLOAT32 ? sizeof(float) : sizeof(bf16));
    for (int64_t r = 0; r < b->roots * b->width; r++) {
        int64_t root = r / b->width, offset = b->used + r % b->width, from = root * b->before + b->parent[r];
        memcpy((char *)d->x + r * row, (const char *)b->states + from * row, row);
        b->own_words[r] = (b->words ? b->words[from] : 0) | (int64_t)((uint64_t)1 << offset);
        a->ids[r] = b->tokens[r], a->positions[r] = b->positions[root] + b->level;
        a->request[r] = b->request[root], a->committed[r] = b->committed[root], a->offset[r] = offset;
    }
    enter(a);
    decoder(d);
    if (d->hidden != d->x) memcpy(d->x, d->hidden, a->rows * row);
    for (int64_t r = 0; r < a->rows; r++) a->positions[r]++;
    choices(a);
}
