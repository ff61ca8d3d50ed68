#ifndef HEADWAY_LOGARITHM_H
#define HEADWAY_LOGARITHM_H

#include "vec.h"

/* (1 + *f) 2^*exponent = x, sqrt(1/2) <= 1 + *f < sqrt(2) */
INLINE void split(vec x, vec *f, vec *exponent) {
    ivec bits = (ivec)x, e = (bits - 0x3F3504F3) >> 23;
    *f = (vec)(bits - (e << 23)) - 1.0f;
    *exponent = __builtin_convertvector(e, vec);
}

/* log((1 + f) 2^exponent) */
INLINE vec log_of(vec f, vec exponent) {
    vec value = splat(-0.08103015273809433f);
    value = value * f + 0.1271306723356247f;
    value = value * f + -0.12972047924995422f;
    value = value * f + 0.14202052354812622f;
    value = value * f + -0.1664225459098816f;
    value = value * f + 0.20001474022865295f;
    value = value * f + -0.2500029504299164f;
    value = value * f + 0.333333283662796f;
    vec square = f * f;
    value = value * f * square - 0.5f * square;
    return value + exponent * -2.12194440e-4f + f + exponent * 0.693359375f;
}

#endif
