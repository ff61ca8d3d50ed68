/* Packing of matrices of 4- and 8-bit numbers for linear_narrow.c. */
#include "panels.h"
#include "threads.h"

typedef struct {
    const uint8_t *values; /* [outputs, inputs]; of 4-bit numbers the lower half of each byte counts */
    const int32_t *order;  /* [inputs] the column of each input; null: in order */
    uint32_t *words;       /* [panels, words of a row, 64] of zeros */
    int64_t inputs, outputs, bits, threads;
} pack_args;

INLINE uint32_t pack_word(const uint8_t *row, const int32_t *order, int64_t k, int bits) {
    uint32_t word = 0;
    for (int i = 0; i < 32 / bits; i++, k++)
        word |= (row[order ? order[k] : k] & ((1u << bits) - 1)) << (bits * (i / 2) + 16 * (i % 2));
    return word;
}

static void pack_share(void *data) {
    const pack_args *a = data;
    int64_t self = this_thread(a->threads), steps = a->inputs * a->bits / 32, panels = (a->outputs + PANEL - 1) / PANEL;
    for (int64_t panel = part(panels, self, a->threads); panel < part(panels, self + 1, a->threads); panel++) {
        int64_t first = panel * PANEL, lanes = a->outputs - first < PANEL ? a->outputs - first : PANEL;
        uint32_t *words = a->words + first * steps;
        for (int64_t step = 0; step < steps; step++, words += PANEL)
            for (int64_t lane = 0; lane < lanes; lane++) {
                const uint8_t *row = a->values + (first + lane) * a->inputs;
                words[lane] = a->bits == 4 ? pack_word(row, a->order, 8 * step, 4) : pack_word(row, a->order, 4 * step, 8);
            }
    }
}

void pack_numbers(pack_args *a) {
    run_threads(pack_share, a, &a->threads);
}
