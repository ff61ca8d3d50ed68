#ifndef HEADWAY_DECODER_H
#define HEADWAY_DECODER_H

#include "attention.h"
#include "linear.h"
#include "recurrence.h"

/* A convolution of a sublayer with two taps along the rows of a block (kernels/convolution.py). */
typedef struct {
    const void *base;             /* [2 sides, 2 taps, hidden] */
    const linear_args *projection; /* of the normed input: what is added to the base for each group of channels */
    int64_t group;                /* channels */
} convolution;

typedef struct {
    const void *input_norm, *post_norm;                  /* [hidden]; null input_norm: the input is not normed */
    const void *token_norm;                              /* [hidden], of the token embedding; null: none is read */
    const void *attended_norm, *mlp_norm;                /* [hidden], of the outputs of attention and MLP; null: none */
    const void *q_norm, *k_norm;                         /* [dim], or null */
    const linear_args *qkv, *output, *gate_up, *down;    /* their weights; other fields are filled in */
    int64_t window;                                      /* 0: none */
    int64_t residual_normed;                             /* whether the normed input is the residual stream */
    int64_t rotary;                                      /* index of the table of cos and sin */
    const convolution *attention_conv, *mlp_conv;        /* null: none */
    const convolve_args *causal_conv; /* weights of a causal convolution in place of attention; null: attention */
    const delta_net *delta;           /* behind it, of the projected input; null: it is gated, and its b, c and x are projected */
    int64_t gated;                    /* whether a projected query is followed by a gate of its head's output */
} decoder_layer;

typedef struct {
    const decoder_layer *layers;
    void *const *caches;             /* [layers], as in attention.h; of recurrent layers null */
    void *const *entering;           /* [layers] receives the residual stream before a layer, [rows, hidden] of `stream`; or null */
    const attention_args *attention; /* addresses of the rows; the rest is filled in here */
    const convolve_args *recurrent;  /* which rows follow each other; the rest is filled in here */
    const scan_args *scan;           /* the same for linear recurrences */
    void *const *windows, *const *states; /* [layers], as in recurrence.h; of attention null */
    void *const *inputs;             /* [layers] receives what a recurrent layer convolves, [rows, channels] */
    void *const *outputs, *const *gates; /* [layers] of delta nets receives that convolved, [rows, channels], and decays and
                                            gains, [2, rows, heads] */
    const attention_args *kept;      /* the same for the rows whose outputs are needed; null: of all rows */
    const int64_t *keep;             /* [kept->rows], ascending: indices of these rows */
    const void *tokens;              /* [rows, hidden] embeddings, if a layer has a token_norm */
    const void *final_norm;          /* [hidden]; null: none */
    const void *cos, *sin;           /* [tables, rows, rotated] */
    void *x;                         /* [rows, hidden] of `stream`: embeddings, on return the stream after the last layer */
    void *hidden;                    /* [rows, hidden] after the final norm; x and hidden return only the kept rows */
    void *normed; /* [rows, hidden], or [rows, 2 * hidden] if a layer has a token_norm */
    void *deltas, *mixed; /* [rows, 4 * hidden / group], [rows, hidden]; of convolutions */
    void *raw; /* [rows, (2 heads + 2 kv_heads) dim], if projected queries are gated */
    void *z;                /* [rows, heads values], of delta nets */
    float *ba, *scanned;    /* [rows, 2 heads], [rows, heads values], of delta nets */
    void *qkv, *attended, *inner, *gated; /* [rows, (heads + 2 kv_heads) dim | heads dim | 2 I | I] */
    float *scores;                   /* attention's scratch */
    uint32_t *scratch;               /* as in linear.h, for the widest of the layers */
    int64_t count, rows, hidden_size, inner_size, stream, kind /* of all else */, slots, threads;
    int64_t centered, gelu; /* as in rows.c */
    int64_t rotated; /* numbers of a head that rotary embedding turns */
    int64_t block; /* rows of a block, for convolutions */
    int64_t reach; /* positions that windows reach further back */
    float eps, scale; /* of norms; of attention's scores */
} decoder_args;

void decoder(decoder_args *a);

#endif
