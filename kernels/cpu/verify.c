/* Verification of draft trees on the host: the accepted path, as defined in kernels/verify.py. */
#include <stdint.h>

/* All [batch, width] except length and last, [batch]. `likely` is the mask of typical acceptance, or null. */
void accept(
    const int64_t *token, const int32_t *parent, const int32_t *depth, const int64_t *ancestors, const int64_t *length,
    const int64_t *choice, const uint8_t *likely, int64_t *last, int64_t batch, int64_t width
) {
    for (int64_t b = 0; b < batch; b++) {
        int64_t row = b * width, best = 0;
        uint64_t ok = 1;
        for (int64_t i = 1; i < length[b]; i++)
            if (token[row + i] == choice[row + parent[row + i]] || (likely && likely[row + i])) ok |= (uint64_t)1 << i;
        for (int64_t i = 1; i < length[b]; i++)
            if (!((uint64_t)ancestors[row + i] & ~ok) && depth[row + i] > depth[row + best]) best = i;
        last[b] = best;
    }
}
