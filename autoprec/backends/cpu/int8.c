/* INT8 operands of a GEMM on a CPU: largest magnitudes, scales, codes, and the rescaled product, without temporaries.

   Bit for bit what autoprec.numerics.quantize and autoprec.numerics.gemm compute with torch's operators: every product
   and quotient is rounded by itself (-ffp-contract=off), ties go to even, NaN and infinity reach the inverse scale as
   NaN. Magnitudes are compared as integers, which orders finite values, infinity and NaN (largest) as wanted.

   Included once for each dtype of the operand: VALUE is its type, LOAD reads one as float, NAME(x) is the function's
   name. Compiled for the machine at hand by library.py. */

#ifndef ONCE
#define ONCE
#include <math.h>
#include <stdint.h>
#include <string.h>

typedef struct {
    float limit, epsilon;
    int32_t power_of_2;
} rule;

static inline float as_float(uint32_t bits) {
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

static inline uint32_t as_bits(float value) {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    return bits;
}

static inline float from_bf16(uint16_t value) { return as_float((uint32_t)value << 16); }

static inline uint16_t to_bf16(float value) {
    uint32_t bits = as_bits(value);
    return (bits & 0x7FFFFFFF) > 0x7F800000 ? 0x7FC0 : (uint16_t)((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16);
}

static inline int8_t code(float scaled) { return (int8_t)(int32_t)rintf(scaled); }

/* From the bits of an amax to its scale (as scaling.scale_of) and the inverse (as scaling.inverse_of). */
static void scales(const uint32_t *amax, int64_t count, rule how, float *scale, float *inverse) {
    for (int64_t i = 0; i < count; i++) {
        uint32_t bits = amax[i], lowest = as_bits(how.epsilon);
        bits = bits < lowest ? lowest : bits;
        float found = 1.0f;
        if (bits > 0 && bits < 0x7F800000) {
            found = how.limit / as_float(bits);
            found = found > 3.4028234663852886e38f ? 3.4028234663852886e38f : found;
        }
        if (how.power_of_2) found = as_float(as_bits(found) & 0x7F800000);
        scale[i] = found;
        inverse[i] = amax[i] < 0x7F800000 ? 1.0f / found : as_float(0x7FC00000);
    }
}

/* Widen the int32 sums of a GEMM in place and multiply them by one scale, or by one of each row and of each column. */
void rescale(float *restrict out, int64_t rows, int64_t columns, const float *restrict row,
             const float *restrict column, float whole, int32_t threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (int64_t i = 0; i < rows; i++) {
        float *restrict line = out + i * columns;
        if (row == 0) {
            for (int64_t j = 0; j < columns; j++) line[j] = (float)(int32_t)as_bits(line[j]) * whole;
        } else {
            float left = row[i];
            for (int64_t j = 0; j < columns; j++) line[j] = (float)(int32_t)as_bits(line[j]) * left * column[j];
        }
    }
}

void narrow(const float *restrict wide, int64_t count, uint16_t *restrict out, int32_t threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (int64_t i = 0; i < count; i++) out[i] = to_bf16(wide[i]);
}

#define VALUE float
#define LOAD(x) (x)
#define NAME(x) x##_fp32
#include __FILE__
#undef VALUE
#undef LOAD
#undef NAME
#define VALUE uint16_t
#define LOAD(x) from_bf16(x)
#define NAME(x) x##_bf16
#include __FILE__
#else

/* One scale for the whole matrix [rows, columns], whose rows are `stride` values apart. */
void NAME(whole)(const VALUE *restrict x, int64_t rows, int64_t columns, int64_t stride, rule how,
                 float *restrict inverse, int8_t *restrict codes, int32_t threads) {
    uint32_t largest = 0;
    float scale;
#pragma omp parallel for num_threads(threads) if (threads > 1) reduction(max : largest)
    for (int64_t i = 0; i < rows; i++) {
        const VALUE *restrict line = x + i * stride;
        uint32_t most = 0;
        for (int64_t j = 0; j < columns; j++) {
            uint32_t bits = as_bits(LOAD(line[j])) & 0x7FFFFFFF;
            most = bits > most ? bits : most;
        }
        largest = most > largest ? most : largest;
    }
    scales(&largest, 1, how, &scale, inverse);
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (int64_t i = 0; i < rows; i++) {
        const VALUE *restrict line = x + i * stride;
        int8_t *restrict out = codes + i * columns;
        for (int64_t j = 0; j < columns; j++) out[j] = code(LOAD(line[j]) * scale);
    }
}

/* A scale for each row, for each column, or both at once (two sets of codes). What is not asked for is null.
   `space` holds the scales of rows, then `threads` times the magnitudes of columns, as 32 bits. */
void NAME(lines)(const VALUE *restrict x, int64_t rows, int64_t columns, int64_t stride, rule how, rule how_across,
                 float *restrict inverse, int8_t *restrict codes, float *restrict inverse_across,
                 int8_t *restrict across, uint32_t *restrict space, int32_t threads) {
    uint32_t *restrict by_row = space, *restrict by_column = space + rows;
    if (across) memset(by_column, 0, 4 * columns * threads);
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (int64_t part = 0; part < threads; part++) {
        uint32_t *restrict most_of = by_column + part * columns;
        for (int64_t i = rows * part / threads; i < rows * (part + 1) / threads; i++) {
            const VALUE *restrict line = x + i * stride;
            uint32_t most = 0;
            if (codes)
                for (int64_t j = 0; j < columns; j++) {
                    uint32_t bits = as_bits(LOAD(line[j])) & 0x7FFFFFFF;
                    most = bits > most ? bits : most;
                }
            by_row[i] = most;
            if (across)
                for (int64_t j = 0; j < columns; j++) {
                    uint32_t bits = as_bits(LOAD(line[j])) & 0x7FFFFFFF;
                    most_of[j] = bits > most_of[j] ? bits : most_of[j];
                }
        }
    }
    if (across) {
        for (int64_t part = 1; part < threads; part++)
            for (int64_t j = 0; j < columns; j++) {
                uint32_t bits = by_column[part * columns + j];
                by_column[j] = bits > by_column[j] ? bits : by_column[j];
            }
        scales(by_column, columns, how_across, (float *)by_column, inverse_across);
    }
    if (codes) scales(by_row, rows, how, (float *)by_row, inverse);
    const float *restrict column_scale = (const float *)by_column;
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (int64_t i = 0; i < rows; i++) {
        const VALUE *restrict line = x + i * stride;
        float scale = as_float(by_row[i]);
        if (codes)
            for (int64_t j = 0; j < columns; j++) codes[i * columns + j] = code(LOAD(line[j]) * scale);
        if (across)
            for (int64_t j = 0; j < columns; j++) across[i * columns + j] = code(LOAD(line[j]) * column_scale[j]);
    }
}
#endif
