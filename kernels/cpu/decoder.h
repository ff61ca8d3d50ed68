#ifndef HEADWAY_DECODER_H
#define HEADWAY_DECODER_H

#include "attention.h"
#include "linear.h"

typedef struct {
    const void *input_norm, *post_norm;                  /* [hidden]; null input_norm: it reads its input as it is */
    const void *token_norm;                              /* [hidden]; null: there is no token beside it */
    const void *attended_norm, *mlp_norm;                /* [hidden], of what a half adds to the stream; null: as it is */
    const void *q_norm, *k_norm;                         /* [dim], or null */
    const linear_args *qkv, *output, *gate_up, *down;    /* what the weights say of themselves */
    int64_t window;                                      /* 0: none */
    int64_t residual_normed;                             /* whether the normed input goes on, not the input */
    int64_t rotary;                                      /* which of the tables of cos and sin */
} decoder_layer;

typedef struct {
    const decoder_layer *layers;
    void *const *caches;             /* [layers], as attention.h has them */
    void *const *entering;           /* [layers] where to put the stream before a layer, [rows, hidden]; null: nowhere */
    const attention_args *attention; /* what addresses the rows; the rest is filled in here */
    const attention_args *kept;      /* the same of those rows alone whose answer is wanted; null: of all */
    const int64_t *keep;             /* [kept->rows], ascending: which these are */
    const void *tokens;              /* [rows, hidden] embeddings, where a layer has a token_norm */
    const void *final_norm;          /* [hidden]; null: there is none */
    const void *cos, *sin;           /* [tables, rows, dim] */
    void *x;                         /* [rows, hidden]: embeddings, then the stream after the last layer */
    void *hidden;                    /* [rows, hidden] after the final norm. Both of the kept rows, where they are told */
    void *normed; /* [rows, hidden], or [rows, 2 * hidden] where a layer has a token_norm */
    void *qkv, *attended, *inner, *gated; /* [rows, (heads + 2 kv_heads) dim | heads dim | 2 I | I] */
    float *scores;                   /* attention's scratch */
    uint32_t *scratch;               /* as linear.h has it, for the widest of the layers */
    int64_t count, rows, hidden_size, inner_size, kind, slots, threads;
    int64_t centred, gelu; /* as rows.c has them */
    float eps, scale; /* of norms; of attention's scores */
    parallel_fn parallel;
    self_fn self;
    void (*barrier)(void);
} decoder_args;

void decoder(decoder_args *a);

#endif
