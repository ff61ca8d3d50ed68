#ifndef HEADWAY_RECURRENCE_H
#define HEADWAY_RECURRENCE_H

#include "linear.h"

/* Requests have rows first[b] to first[b + 1], exclusive. The state of its last row replaces the one in a request's slot
 * if `advance` is 1; the rows are a chain then. Without slots states begin with zeros, and none is kept. */
typedef struct {
    const int64_t *first, *slots;
    const uint8_t *advance;
    const int32_t *parents; /* [rows] among the request's, -1: its state; null: chains */
    const void *gates;      /* [rows, 3 channels] b, c and x of c * convolution(b * x); null: it is not gated */
    void *x;                /* [rows, channels], rows `stride` apart; receives b * x, if it is gated */
    const void *weight;     /* [taps, channels] of weight_kind, like bias [channels], which may be null */
    const void *bias;
    void *windows; /* [slots, taps - 1, channels]; null: none */
    void *out;     /* [rows, channels] */
    int64_t requests, stride, channels, taps, silu, kind, weight_kind, threads;
} convolve_args;

typedef struct {
    const int64_t *first, *slots;
    const uint8_t *advance;
    const int32_t *visits; /* of order_trees; null: chains */
    const void *q, *k;     /* [rows, groups, keys], rows q_stride and k_stride apart */
    const void *v;         /* [rows, heads, values], rows v_stride apart */
    const float *decay, *gain; /* [rows, heads] */
    float *states; /* [slots, heads, keys, values]; null: none */
    float *out;    /* [rows, heads, values] */
    float *scratch; /* scan_scratch floats of each thread */
    int64_t requests, rows, places, q_stride, k_stride, v_stride, heads, groups, keys, values, delta, kind;
    int64_t threads;
} scan_args;

/* A gated delta net behind the convolution, of which it has q, k [groups, keys] and v [heads, values]. */
typedef struct {
    const linear_args *z, *ba;         /* projections of the layer's input: of the output's gate; of gains and decays, in fp32 */
    const float *a_log, *dt_bias;      /* [heads] */
    const void *norm;                  /* [values] */
    int64_t heads, groups, keys, values;
    float eps;
} delta_net;

/* Compute the channels of thread `self`, of `threads`. Channels are a multiple of 16; at most MOST_TAPS taps. */
void convolve_share(const convolve_args *a, int64_t self);

/* Compute every a->threads-th head of the requests, heads * request + head, from `self` on. Keys and values are multiples
 * of 16. */
void scan_share(const scan_args *a, int64_t self);

void delta_gates(
    const float *ba, const float *a_log, const float *dt_bias, float *decay, float *gain, int64_t rows, int64_t heads
);
void gated_norm(
    const float *x, const void *z, const void *weight, void *out, int64_t rows, int64_t size, float eps, int64_t kind
);

#endif
