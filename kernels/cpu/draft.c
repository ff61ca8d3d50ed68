/* One level of a batch of drafts with a recurrent head, in one call: embeddings of the tokens drafted last, the head's
 * layers, its LM head, and sampling.
 *
 * The rows of the first level are the unread rows (prefill of the head), several per request; each request's last row
 * is drafted from. Further levels have one row per chain, or the nodes that each tree is grown from. It calls the
 * kernels that otherwise run separately, so it drafts the same tokens as they do.
 */
#include "blocks.h"
#include "decoder.h"
#include "noise.h"
#include "rows.h"

typedef struct {
    decoder_args *decoder;     /* the layers; x: [rows, hidden] states of the rows, on return of those drafted from;
                                * kept: [chains] the last row of each */
    const linear_args *joined; /* projects embedding and state to the input of a layer; null: a layer reads both */
    const void *token_norm, *state_norm; /* [hidden] of what `joined` reads; null: none */
    int64_t state_first;       /* `joined` reads the state, then the embedding */
    int64_t zero_first;        /* the embedding at position 0 is zero */
    const linear_args *lm_head;
    const void *embedding;     /* [V, hidden]; null: it is in `blocks` */
    const linear_args *blocks;
    const void *cos, *sin;     /* [P, rotated], by position */
    const void *norm;          /* [hidden], before the LM head; null: none */
    const int64_t *draft_ids;  /* [lm_head->outputs] target ids */
    int64_t *ids, *positions, *committed, *offset, *request; /* [rows]; the last three as in attention.h */
    const int64_t *low, *high; /* [chains] halves of the seeds, as in noise.c */
    const float *temperature;  /* [chains] */
    void *tokens;              /* [rows, hidden] embeddings; with `joined` [rows, 2 * hidden], with the states */
    void *turned;              /* [2, rows, rotated] cos and sin of the rows */
    void *normed, *logits;     /* [chains, hidden | outputs], the latter of the LM head's `out_kind` */
    int64_t *columns;          /* [chains, count] the best of each, like keys and masses as in choose_best */
    float *keys, *masses;
    uint32_t *scratch;         /* as in linear.h, for `joined` and the LM head */
    int64_t rows, chains, joined_threads, threads;
    int64_t count;             /* 0: only the choice, columns [chains] */
} draft_args;

/* The nodes that trees are grown from next: `width` per root, children of the `before` nodes per root that were run
 * last. Their keys are written after those of all nodes that were run earlier, `used` per root. */
typedef struct {
    const draft_args *draft;
    const int64_t *parent, *tokens; /* [roots, width] indices among the nodes run last; target ids */
    const void *states;             /* [roots, before, hidden] of the nodes run last */
    const int64_t *words;           /* [roots, before] their tree masks, as in attention.h; null: they are roots */
    int64_t *own_words;             /* [roots, width] on return the tree masks of the nodes */
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
    int64_t width = d->kind == FLOAT32 ? sizeof(float) : sizeof(bf16), row = d->hidden_size * width, turn = d->rotated * width;
    int64_t stride = a->joined ? 2 * row : row, size = d->hidden_size;
    char *cos = a->turned, *sin = cos + a->rows * turn;
    for (int64_t r = 0; r < a->rows; r++) {
        char *first = (char *)a->tokens + r * stride, *token = a->state_first ? first + row : first;
        memcpy(cos + r * turn, (const char *)a->cos + a->positions[r] * turn, turn);
        memcpy(sin + r * turn, (const char *)a->sin + a->positions[r] * turn, turn);
        if (a->embedding)
            memcpy(token, (const char *)a->embedding + a->ids[r] * row, row);
        else
            blocks_gather(a->blocks, a->ids + r, 1, token);
        if (a->zero_first && !a->positions[r]) memset(token, 0, row);
        if (a->token_norm) rms_norm(token, a->token_norm, token, 1, size, size, d->eps, d->kind, d->kind, d->kind, d->centered);
        if (!a->joined) continue;
        const char *x = (const char *)d->x + r * row;
        char *state = a->state_first ? first : first + row;
        if (a->state_norm)
            rms_norm(x, a->state_norm, state, 1, size, size, d->eps, d->kind, d->kind, d->kind, d->centered);
        else
            memcpy(state, x, row);
    }
    d->cos = cos, d->sin = sin, d->rows = a->rows;
    if (a->joined)
        apply(a, a->joined, a->tokens, d->x, a->rows, a->joined_threads);
    else
        d->tokens = a->tokens;
}

/* Set up the next row of each chain: the state of its last row, at the next position and place. */
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

/* Prefill the rows without drafting: compute only what other rows will see of them. */
void draft_read(const draft_args *a) {
    enter(a);
    decoder(a->decoder);
}

/* Sample the tokens that follow the states drafted from. */
static void choices(const draft_args *a) {
    const decoder_args *d = a->decoder;
    int64_t size = d->hidden_size, outputs = a->lm_head->outputs, kind = a->lm_head->out_kind;
    if (a->norm) rms_norm(d->x, a->norm, a->normed, a->chains, size, size, d->eps, d->kind, d->kind, d->kind, d->centered);
    apply(a, a->lm_head, a->norm ? a->normed : d->x, a->logits, a->chains, a->threads);
    if (a->count)
        choose_best(
            a->logits, a->temperature, a->low, a->high, a->positions, a->draft_ids, a->columns, a->keys, a->masses, a->count,
            a->chains, outputs, outputs, kind
        );
    else
        choose(
            a->logits, a->temperature, a->low, a->high, a->positions, a->draft_ids, a->columns, a->chains, outputs, outputs,
            kind
        );
}

/* Draft the next token of every chain and set up the row after it; or rank the tokens that trees are grown from. */
void draft(const draft_args *a) {
    enter(a);
    decoder(a->decoder);
    go_on(a);
    choices(a);
    for (int64_t c = 0; c < a->chains; c++) {
        int64_t column = a->columns[c * (a->count ? a->count : 1)];
        a->ids[c] = a->draft_ids[column < 0 ? 0 : column]; /* of NaN logits any draft will do */
    }
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
