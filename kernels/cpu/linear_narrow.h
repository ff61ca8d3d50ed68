#ifndef HEADWAY_LINEAR_NARROW_H
#define HEADWAY_LINEAR_NARROW_H

#include "linear.h"

/* Compute panels `first` to `end`, exclusive, of a linear layer with weights of 4 to 8 bits, for all rows, as thread
 * `self`. */
void narrow_share(const linear_args *a, int64_t self, int64_t first, int64_t end);

/* Compute the sums of x over each group of weights, `[groups, places]`, for `rows` rows from `row` on; zeros for the places
 * beyond them. A row's bits do not depend on the others. */
void group_sums(const linear_args *a, int64_t row, int64_t rows, int64_t places, float *to);

#endif
