#ifndef HEADWAY_LINEAR_TILES_H
#define HEADWAY_LINEAR_TILES_H

#include "linear.h"

/* Whether this linear is multiplied by tiles here, whatever the number of its rows. */
int takes_tiles(const linear_args *a);

/* Panels `first` to `end` of it, for all rows. */
void tile_share(const linear_args *a, int64_t first, int64_t end);

/* Asks the kernel for tiles, for this process, or gives them up. Answers whether they are in use. */
int linear_tiles(int wanted);

#endif
