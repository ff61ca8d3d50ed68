#ifndef HEADWAY_ATTENTION_H
#define HEADWAY_ATTENTION_H

#include "vec.h"

typedef struct {
    const void *q, *k, *v; /* [R, heads, D], [R, kv_heads, D] twice; rows `*_stride` elements apart */
    void *cache;           /* [2, kv_heads, slots, D]; [1, ...] of keys whose first numbers are the values */
    void *out;             /* [R, heads, size of a value], contiguous */
    const int64_t *table;  /* [B, pages] page ids */
    const int64_t *request, *committed, *offset, *words; /* [R] each; words: tree masks, null for causal rows */
    const float *sinks;    /* [heads] scores beside those of the keys, with a value of zero; null: none */
    float *scratch;        /* [threads, attention_scratch(longest)] */
    int64_t q_stride, k_stride, v_stride;
    int64_t rows, heads, kv_heads, dim, slots, pages, page_size, longest, first, window, kind, threads;
    float scale;
} attention_args;

int attention_takes(int64_t dim, int64_t value_dim);
int64_t attention_scratch(int64_t longest);

/* Write the keys and values of rows `first` to `end`, exclusive, to their slots of the cache. */
void attention_write(const attention_args *a, int64_t first, int64_t end);

/* Compute the rows and heads of thread `self`, of `threads`. Everything that a row sees must have been written. */
void attention_share(const attention_args *a, int64_t self);

#endif
