/* Matrix tiles (AMX) computed in C, as Intel's manual defines them, to run kernels/cpu/linear_tiles.c on processors
 * without them: compiled with -include and -D__AMX_BF16__. A product of tiles whose shapes do not fit, and a tile that is
 * not configured, give NaN. */
#include <immintrin.h>
#include <math.h>
#include <stdint.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

static __thread struct {
    uint8_t palette, start, unused[14];
    uint16_t bytes[16];
    uint8_t rows[16];
} tile_config;
static __thread union {
    float sums[16][16];
    uint16_t halves[16][32];
    char bytes[16][64];
} tile[8];

static inline void emulated_zero(int t) { memset(&tile[t], 0, sizeof tile[t]); }

static inline void emulated_load(int t, const void *from, size_t stride) {
    emulated_zero(t);
    for (int r = 0; r < tile_config.rows[t]; r++)
        memcpy(tile[t].bytes[r], (const char *)from + r * stride, tile_config.bytes[t]);
}

static inline void emulated_store(int t, void *to, size_t stride) {
    for (int r = 0; r < tile_config.rows[t]; r++)
        memcpy((char *)to + r * stride, tile[t].bytes[r], tile_config.bytes[t]);
}

static inline float wide_half(uint16_t half) {
    uint32_t word = (uint32_t)half << 16;
    float value;
    memcpy(&value, &word, sizeof value);
    return value;
}

static inline void emulated_product(int to, int a, int b) {
    int rows = tile_config.rows[to], outputs = tile_config.bytes[to] / 4, pairs = tile_config.bytes[a] / 4;
    int fits = rows && outputs && pairs && tile_config.rows[a] == rows && tile_config.rows[b] == pairs &&
               tile_config.bytes[b] == tile_config.bytes[to];
    for (int r = 0; r < 16; r++)
        for (int n = 0; n < 16; n++) {
            float even = fits ? 0 : NAN, odd = 0;
            for (int k = 0; fits && k < pairs; k++) {
                even += wide_half(tile[a].halves[r][2 * k]) * wide_half(tile[b].halves[k][2 * n]);
                odd += wide_half(tile[a].halves[r][2 * k + 1]) * wide_half(tile[b].halves[k][2 * n + 1]);
            }
            tile[to].sums[r][n] += even + odd;
        }
}

#undef _tile_loadconfig
#undef _tile_release
#undef _tile_zero
#undef _tile_loadd
#undef _tile_stored
#undef _tile_dpbf16ps
#define _tile_loadconfig(from) memcpy(&tile_config, from, sizeof tile_config)
#define _tile_release() memset(&tile_config, 0, sizeof tile_config)
#define _tile_zero emulated_zero
#define _tile_loadd emulated_load
#define _tile_stored emulated_store
#define _tile_dpbf16ps emulated_product
#define syscall(...) 0 /* the request for tiles, which the operating system grants */
