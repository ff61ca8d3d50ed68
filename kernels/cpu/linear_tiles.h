#ifndef HEADWAY_LINEAR_TILES_H
#define HEADWAY_LINEAR_TILES_H

#include "linear.h"

/* Return whether this linear layer is computed with tiles, for any number of rows. */
int takes_tiles(const linear_args *a);

/* Compute its panels `first` to `end`, exclusive, for all rows, as thread `self`. */
void tile_share(const linear_args *a, int64_t self, int64_t first, int64_t end);

/* Request tiles from the operating system for this process, or stop using them. Return whether they are in use. */
int linear_tiles(int wanted);

#endif
