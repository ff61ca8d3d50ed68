/* Walks over a lattice, as kernels/walk.py defines them: each node ranks the candidates of its slot, whose logits are
 * corrected by the token before it. The nodes of a chain follow each other in one call; those of a tree's level are
 * independent of each other.
 */
#include "noise.h"
#include "reduce.h"

#define MOST_CANDIDATES 64

typedef struct {
    const int64_t *columns;   /* [roots, slots, size] draft ids of the candidates of each slot, ascending */
    const int64_t *ids;       /* [roots, slots, size] their target ids */
    const float *logits;      /* [roots, slots, size] */
    const void *successor;    /* [Vd, rank] */
    const void *predecessor;  /* [V, rank] by target id; null: `query` holds the nodes' queries */
    const void *factor;       /* [roots, slots, rank] of the predecessor's row; null: 1 */
    const void *query;        /* [roots, width, rank] */
    const int64_t *before;    /* [roots, width] the token before the first level */
    const float *temperature; /* [roots], like the halves of the seeds and positions as in noise.c */
    const int64_t *low, *high;
    const int64_t *positions; /* [roots], of the first level */
    int64_t *tokens;          /* [roots, width, levels, count] the best candidates' target ids, like keys */
    float *keys, *masses;     /* masses [roots, width, levels], as in choose_best */
    int64_t roots, width, slots, first /* slot */, levels, size, rank, count, kind;
} walk_args;

/* Compute the node's query, rounded as a tensor of `kind`. */
INLINE void make_query(const walk_args *a, int64_t node, int64_t slot, int64_t before, float *query, int kind) {
    for (int64_t i = 0; i < a->rank; i += LANES) {
        vec q = a->predecessor ? load(a->predecessor, before * a->rank + i, kind) : load(a->query, node * a->rank + i, kind);
        if (a->predecessor && a->factor) q = rounded(q * load(a->factor, slot * a->rank + i, kind), kind);
        store_f32(query + i, q);
    }
}

INLINE int64_t rank_node(const walk_args *a, int64_t node, int64_t level, int64_t before, int kind) {
    int64_t root = node / a->width, slot = root * a->slots + a->first + level, held = 0, columns[MOST_CANDIDATES];
    const int64_t *ids = a->ids + slot * a->size;
    float query[a->rank], keys[MOST_CANDIDATES];
    make_query(a, node, slot, before, query, kind);
    for (int64_t i = 0; i < MOST_CANDIDATES; i++) keys[i] = -__builtin_inff();
    for (int64_t i = 0; i < a->size; i++) {
        int64_t row = a->columns[slot * a->size + i] * a->rank;
        vec sum = splat(0.0f);
        for (int64_t j = 0; j < a->rank; j += LANES) sum += load(a->successor, row + j, kind) * load_f32(query + j);
        keys[i] = a->logits[slot * a->size + i] + sum_lanes(sum);
    }
    if (a->temperature[root] > 0.0f)
        add_noise(a->temperature[root], a->low[root], a->high[root], a->positions[root] + level, ids, keys, a->size);
    int64_t out = (node * a->levels + level) * a->count;
    for (int64_t i = 0; i < a->size; i++) held = insert(keys[i], i, a->keys + out, columns, held, a->count);
    for (int64_t i = 0; i < a->count; i++) a->tokens[out + i] = ids[columns[i]];
    vec mass = splat(0.0f);
    for (int64_t i = 0; i < MOST_CANDIDATES; i += LANES) mass += vec_exp(load_f32(keys + i) - a->keys[out]);
    a->masses[node * a->levels + level] = sum_lanes(mass);
    return a->tokens[out];
}

void walk(const walk_args *a) {
    for (int64_t node = 0; node < a->roots * a->width; node++) {
        int64_t before = a->before ? a->before[node] : 0;
        for (int64_t level = 0; level < a->levels; level++)
            before = a->kind == FLOAT32 ? rank_node(a, node, level, before, FLOAT32) : rank_node(a, node, level, before, BFLOAT16);
    }
}
