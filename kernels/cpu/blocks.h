#ifndef HEADWAY_BLOCKS_H
#define HEADWAY_BLOCKS_H

#include "linear.h"

/* out `[count, inputs]` = rows `ids` of a packed matrix, each weight rounded once, to `x_kind`. */
void blocks_gather(const linear_args *a, const int64_t *ids, int64_t count, void *out);

#endif
