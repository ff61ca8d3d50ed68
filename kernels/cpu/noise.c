/* Gumbel noise as kernels/noise.py defines it, bit for bit: every addition and multiplication is rounded separately. */
#pragma GCC optimize("fp-contract=off")
#pragma STDC FP_CONTRACT OFF
#include "noise.h"
#include "logarithm.h"
#include "reduce.h"

INLINE uint32_t mix(uint32_t x) {
    x ^= x >> 16;
    x *= 0x85EBCA6Bu;
    x ^= x >> 13;
    x *= 0xC2B2AE35u;
    return x ^ (x >> 16);
}

INLINE uvec mix_lanes(uvec x) {
    x ^= x >> 16;
    x *= 0x85EBCA6Bu;
    x ^= x >> 13;
    x *= 0xC2B2AE35u;
    return x ^ (x >> 16);
}

INLINE vec uniform(uvec word) { return (__builtin_convertvector(word, vec) + 0.5f) * 0x1p-32f; }

INLINE vec gumbel(uvec word) {
    vec u = uniform(word), most = splat(1.0f - 0x1p-24f), f, exponent;
    u = pick(u < most, u, most);
    split(1.0f - u, &f, &exponent);
    ivec near = u < 0.25f;
    vec exponential = -log_of(pick(near, -u, f), pick(near, splat(0.0f), exponent));
    split(exponential, &f, &exponent);
    return -log_of(f, exponent);
}

/* Return an upper bound on gumbel(): -log(-log(1 - u)) <= -log u, which u's exponent bounds in turn. The slack is far
 * above the error of gumbel(). */
INLINE vec most_gumbel(uvec word) {
    ivec exponent = ((ivec)uniform(word) >> 23) - 127;
    return __builtin_convertvector(-exponent, vec) * 0.6931472f + 1e-3f;
}

INLINE int any_above(vec a, vec b) {
#if defined(__AVX512F__)
    return _mm512_cmp_ps_mask((__m512)a, (__m512)b, _CMP_GT_OQ) != 0;
#elif defined(__AVX__)
    return _mm256_movemask_ps(_mm256_cmp_ps((__m256)a, (__m256)b, _CMP_GT_OQ)) != 0;
#else
    return any_lane(a > b);
#endif
}

/* keys [rows], ids [size] -> out [rows, size] */
void gumbel_noise(const int64_t *keys, const int64_t *ids, float *out, int64_t rows, int64_t size) {
    for (int64_t v = 0; v < size; v += LANES) {
        int64_t count = size - v < LANES ? size - v : LANES;
        uint32_t lanes[LANES] = {0};
        for (int64_t i = 0; i < count; i++)
            lanes[i] = mix((uint32_t)ids[v + i]);
        uvec id;
        memcpy(&id, lanes, sizeof id);
        for (int64_t row = 0; row < rows; row++) {
            uint32_t key = (uint32_t)keys[row];
            vec noise = gumbel(mix_lanes((id + key * 0x9E3779B1u) ^ key));
            memcpy(out + row * size + v, &noise, count * sizeof(float));
        }
    }
}

INLINE uint32_t row_key(int64_t low, int64_t high, int64_t position) {
    return mix(mix(mix((uint32_t)low) ^ (uint32_t)high) ^ (uint32_t)position);
}

/* Return the random words from which the noise of the LANES columns from `v` on is computed. */
INLINE uvec column_words(const int64_t *ids, int64_t v, uint32_t key) {
    uint32_t lanes[LANES];
    for (int64_t i = 0; i < LANES; i++)
        lanes[i] = ids ? (uint32_t)ids[v + i] : (uint32_t)(v + i);
    uvec id;
    memcpy(&id, lanes, sizeof id);
    return mix_lanes((mix_lanes(id) + key * 0x9E3779B1u) ^ key);
}

INLINE void choose_rows(
    const void *logits, const float *temperature, const int64_t *low, const int64_t *high, const int64_t *positions,
    const int64_t *ids, int64_t *out, int64_t rows, int64_t stride, int64_t size, int kind
) {
    for (int64_t row = 0; row < rows; row++) {
        uint32_t key = row_key(low[row], high[row], positions[row]);
        int sampled = temperature[row] > 0.0f;
        vec divisor = splat(sampled ? temperature[row] : 1.0f), best = splat(-__builtin_inff()), bar = best;
        ivec at = {0}, lane = lane_numbers(), wrong = {0};
        for (int64_t v = 0; v < size; v += LANES) {
            vec value = load(logits, row * stride + v, kind);
            wrong |= value != value;
            if (sampled) {
                uvec word = column_words(ids, v, key);
                value /= divisor;
                if (!any_above(value + most_gumbel(word), bar)) continue; /* nearly always */
                value += gumbel(word);
            }
            ivec better = value > best;
            best = pick(better, value, best);
            at = ((lane + (int32_t)v) & better) | (at & ~better);
            if (sampled) bar = splat(max_lanes(best));
        }
        float most = max_lanes(best);
        int64_t chosen = size;
        for (int i = 0; i < LANES; i++)
            if (best[i] == most && at[i] < chosen) chosen = at[i];
        out[row] = any_lane(wrong) ? -1 : chosen;
    }
}

INLINE void best_rows(
    const void *logits, const float *temperature, const int64_t *low, const int64_t *high, const int64_t *positions,
    const int64_t *ids, int64_t *columns, float *keys, float *masses, int64_t count, int64_t rows, int64_t stride,
    int64_t size, int kind
) {
    for (int64_t row = 0; row < rows; row++, columns += count, keys += count) {
        uint32_t key = row_key(low[row], high[row], positions[row]);
        int sampled = temperature[row] > 0.0f;
        vec divisor = splat(sampled ? temperature[row] : 1.0f), peak = splat(-__builtin_inff()), mass = splat(0.0f);
        int64_t held = 0;
        for (int64_t v = 0; v < size; v += LANES) {
            vec value = load(logits, row * stride + v, kind);
            value = pick(value == value, value, splat(-__builtin_inff())); /* a NaN ranks last */
            if (sampled) {
                uvec word = column_words(ids, v, key);
                value /= divisor;
                if (!masses && held == count && !any_above(value + most_gumbel(word), splat(keys[count - 1]))) continue;
                value += gumbel(word);
            }
            if (masses) {
                vec most = pick(value > peak, value, peak);
                mass = mass * vec_exp(peak - most) + vec_exp(value - most);
                peak = most;
            }
            if (held < count || any_above(value, splat(keys[count - 1])))
                for (int i = 0; i < LANES; i++) held = insert(value[i], v + i, keys, columns, held, count);
        }
        if (masses) masses[row] = sum_lanes(mass * vec_exp(peak - keys[0]));
    }
}

/* Turn the logits `keys` [size] of columns with these ids into keys of the same rule, for a row that is sampled. */
void add_noise(
    float temperature, int64_t low, int64_t high, int64_t position, const int64_t *ids, float *keys, int64_t size
) {
    uint32_t key = row_key(low, high, position);
    for (int64_t i = 0; i < size; i += LANES) {
        int64_t count = size - i < LANES ? size - i : LANES, part_ids[LANES] = {0};
        float part[LANES] = {0};
        memcpy(part_ids, ids + i, count * sizeof(int64_t)), memcpy(part, keys + i, count * sizeof(float));
        store_f32(part, load_f32(part) / splat(temperature) + gumbel(column_words(part_ids, 0, key)));
        memcpy(keys + i, part, count * sizeof(float));
    }
}

/* Choose a column of each row by the rule of kernels/choose.py, -1 if it has a NaN, without top-k, top-p and min-p: logits [rows, size],
 * size a multiple of 16, rows `stride` elements apart; temperature, halves of the seeds and positions [rows]; ids
 * [size] of the columns, or null. */
void choose(
    const void *logits, const float *temperature, const int64_t *low, const int64_t *high, const int64_t *positions,
    const int64_t *ids, int64_t *out, int64_t rows, int64_t stride, int64_t size, int64_t kind
) {
    if (kind == FLOAT32)
        choose_rows(logits, temperature, low, high, positions, ids, out, rows, stride, size, FLOAT32);
    else
        choose_rows(logits, temperature, low, high, positions, ids, out, rows, stride, size, BFLOAT16);
}

/* Return the `count` <= size columns that the same rule ranks first, [rows, count], and their keys; masses [rows]: sums
 * of e^(key - best key) over all keys of a row, whose last bits may differ from other implementations', or null. */
void choose_best(
    const void *logits, const float *temperature, const int64_t *low, const int64_t *high, const int64_t *positions,
    const int64_t *ids, int64_t *columns, float *keys, float *masses, int64_t count, int64_t rows, int64_t stride,
    int64_t size, int64_t kind
) {
    if (kind == FLOAT32)
        best_rows(logits, temperature, low, high, positions, ids, columns, keys, masses, count, rows, stride, size, FLOAT32);
    else
        best_rows(logits, temperature, low, high, positions, ids, columns, keys, masses, count, rows, stride, size, BFLOAT16);
}
