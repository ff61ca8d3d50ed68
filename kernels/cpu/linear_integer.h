#ifndef HEADWAY_LINEAR_INTEGER_H
#define HEADWAY_LINEAR_INTEGER_H

#include "linear.h"

/* Compute panels `first` to `end`, exclusive, of a linear layer whose weights are integers of 4 to 8 bits, with the rows
 * quantized to 8 bits, for all rows, as thread `self`. `inputs` is a multiple of 32. */
void integer_share(const linear_args *a, int64_t self, int64_t first, int64_t end);

#endif
