#ifndef HEADWAY_LINEAR_NARROW_H
#define HEADWAY_LINEAR_NARROW_H

#include "linear.h"

/* Compute panels `first` to `end`, exclusive, of a linear layer with weights of 4 to 8 bits, for all rows, as thread
 * `self`. */
void narrow_share(const linear_args *a, int64_t self, int64_t first, int64_t end);

#endif
