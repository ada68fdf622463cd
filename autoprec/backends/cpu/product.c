/* The exact product of two INT8 matrices on an x86 CPU with AVX2 and without VNNI, where torch._int_mm is a plain loop
   (torch 2.13: 20 to 100 times slower than fp32) or, where oneDNN's instructions are limited, overflows in 16 bits.

   Codes are widened to int16 and multiplied in pairs (vpmaddwd, 32-bit sums): twice the products of an fp32 FMA. Blocks
   as in Goto and van de Geijn, "Anatomy of High-Performance Matrix Multiplication" (2008): DEEP of the sum at a time,
   a panel of WIDE columns stays in the first cache, a band of BAND rows in the second, a tile of ROWS x WIDE in
   registers. */

#ifdef __AVX2__
#include <immintrin.h>
#include <stdint.h>
#include <string.h>

enum { ROWS = 6, WIDE = 16, DEEP = 512, BAND = 96 };

/* Eight lines of eight pairs of int16 to eight columns. */
static inline void turn(__m256i x[8]) {
    __m256i y[8];
#pragma GCC unroll 2
    for (int i = 0; i < 8; i += 4)
#pragma GCC unroll 2
        for (int j = 0; j < 2; j++) {
            __m256i low = _mm256_unpacklo_epi32(x[i], x[i + 1]), next = _mm256_unpacklo_epi32(x[i + 2], x[i + 3]);
            if (j) low = _mm256_unpackhi_epi32(x[i], x[i + 1]), next = _mm256_unpackhi_epi32(x[i + 2], x[i + 3]);
            y[i + 2 * j] = _mm256_unpacklo_epi64(low, next);
            y[i + 2 * j + 1] = _mm256_unpackhi_epi64(low, next);
        }
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        x[i] = _mm256_permute2x128_si256(y[i], y[i + 4], 0x20);
        x[i + 4] = _mm256_permute2x128_si256(y[i], y[i + 4], 0x31);
    }
}

/* Rows of the left operand as int16 [lines][padded]; from `known` rows and `depth` columns on they are zeros. */
static void widen(const int8_t *restrict x, int64_t row, int64_t inner, int64_t known, int64_t lines, int64_t depth,
                  int64_t padded, int16_t *restrict out) {
    /* of a transpose, which is read as it lies: what is turned in blocks of 8 rows and 16 of the sum */
    int64_t rows = row == 1 ? known / 8 * 8 : 0, turned = row == 1 ? depth / 16 * 16 : 0;
    for (int64_t k = 0; k < turned; k += 16)
        for (int64_t i = 0; i < rows; i += 8) {
            __m256i pairs[8];
#pragma GCC unroll 8
            for (int p = 0; p < 8; p++) {
                const int8_t *from = x + i + (k + 2 * p) * inner;
                __m128i first = _mm_loadl_epi64((const __m128i *)from);
                __m128i second = _mm_loadl_epi64((const __m128i *)(from + inner));
                pairs[p] = _mm256_cvtepi8_epi16(_mm_unpacklo_epi8(first, second));
            }
            turn(pairs);
#pragma GCC unroll 8
            for (int p = 0; p < 8; p++) _mm256_storeu_si256((__m256i *)(out + (i + p) * padded + k), pairs[p]);
        }
    for (int64_t i = 0; i < lines; i++) {
        int64_t to = i < known ? depth : 0, from = i < rows ? turned : 0;
        if (inner == 1)
            for (int64_t k = from; k < to; k++) out[i * padded + k] = x[i * row + k];
        else
            for (int64_t k = from; k < to; k++) out[i * padded + k] = x[i * row + k * inner];
        memset(out + i * padded + to, 0, 2 * (padded - to));
    }
}

/* WIDE columns of the right operand as pairs of int16 along the sum: [depth / 2][WIDE][2]. */
static void pair_columns(const int8_t *restrict x, int64_t stride, int64_t column_stride, int64_t columns,
                         int64_t depth, int64_t padded, int16_t *restrict out) {
    int64_t done = 0;
    if (columns == WIDE && column_stride == 1)
        for (; done < depth / 2 * 2; done += 2) {
            __m128i first = _mm_loadu_si128((const __m128i *)(x + done * stride));
            __m128i second = _mm_loadu_si128((const __m128i *)(x + (done + 1) * stride));
            __m256i *to = (__m256i *)(out + done * WIDE);
            to[0] = _mm256_cvtepi8_epi16(_mm_unpacklo_epi8(first, second));
            to[1] = _mm256_cvtepi8_epi16(_mm_unpackhi_epi8(first, second));
        }
    if (columns == WIDE && stride == 1 && column_stride != 1)
        for (; done < depth / 16 * 16; done += 16)
            for (int64_t j = 0; j < WIDE; j += 8) {
                __m256i lines[8];
#pragma GCC unroll 8
                for (int i = 0; i < 8; i++) {
                    const int8_t *from = x + (j + i) * column_stride + done;
                    lines[i] = _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)from));
                }
                turn(lines);
                __m256i *to = (__m256i *)(out + done * WIDE + 2 * j);
#pragma GCC unroll 8
                for (int p = 0; p < 8; p++) to[2 * p] = lines[p];
            }
    for (int64_t k = done; k < padded; k += 2)
        for (int64_t j = 0; j < WIDE; j++) {
            int inside = j < columns;
            out[k * WIDE + 2 * j] = inside && k < depth ? x[k * stride + j * column_stride] : 0;
            out[k * WIDE + 2 * j + 1] = inside && k + 1 < depth ? x[(k + 1) * stride + j * column_stride] : 0;
        }
}

/* Sums of ROWS rows and WIDE columns; the empty asm statements keep them, and both halves of b, in registers. */
__attribute__((noinline)) static void tile(const int16_t *restrict a, const int16_t *restrict b, int64_t padded,
                                           int32_t *restrict out, int64_t stride, int add) {
    __m256i sums[ROWS][2];
#pragma GCC unroll 6
    for (int i = 0; i < ROWS; i++) sums[i][0] = sums[i][1] = _mm256_setzero_si256();
    for (int64_t k = 0; k < padded; k += 2) {
        __m256i low = _mm256_load_si256((const __m256i *)(b + k * WIDE));
        __m256i high = _mm256_load_si256((const __m256i *)(b + k * WIDE + 16));
        __asm__("" : "+x"(low), "+x"(high));
#pragma GCC unroll 6
        for (int i = 0; i < ROWS; i++) {
            int32_t two;
            memcpy(&two, a + i * padded + k, 4);
            __m256i pair = _mm256_set1_epi32(two);
            __asm__("" : "+x"(pair));
            sums[i][0] = _mm256_add_epi32(sums[i][0], _mm256_madd_epi16(pair, low));
            sums[i][1] = _mm256_add_epi32(sums[i][1], _mm256_madd_epi16(pair, high));
            __asm__("" : "+x"(sums[i][0]), "+x"(sums[i][1]) : : "memory");
        }
    }
#pragma GCC unroll 6
    for (int i = 0; i < ROWS; i++)
#pragma GCC unroll 2
        for (int half = 0; half < 2; half++) {
            __m256i *to = (__m256i *)(out + i * stride + 8 * half);
            __m256i sum = sums[i][half];
            _mm256_storeu_si256(to, add ? _mm256_add_epi32(sum, _mm256_loadu_si256(to)) : sum);
        }
}

/* int32 sums [rows, columns] of codes [rows, inner] and [inner, columns] of any strides; inner is 2**17 at most.
   `space` holds the panels of the right operand: DEEP * WIDE int16 for each WIDE columns, 32-byte aligned. */
void product(const int8_t *a, int64_t a_row, int64_t a_inner, const int8_t *b, int64_t b_inner, int64_t b_column,
             int64_t rows, int64_t columns, int64_t inner, int32_t *out, int16_t *space, int32_t threads) {
    int64_t panels = (columns + WIDE - 1) / WIDE, bands = (rows + BAND - 1) / BAND;
    for (int64_t start = 0; start < inner; start += DEEP) {
        int64_t depth = inner - start < DEEP ? inner - start : DEEP, padded = (depth + 1) / 2 * 2;
#pragma omp parallel num_threads(threads) if (threads > 1)
        {
            _Alignas(32) int16_t left[BAND * DEEP];
            _Alignas(32) int32_t edge[ROWS * WIDE];
#pragma omp for
            for (int64_t p = 0; p < panels; p++) {
                int64_t first = p * WIDE, count = columns - first < WIDE ? columns - first : WIDE;
                pair_columns(b + start * b_inner + first * b_column, b_inner, b_column, count, depth, padded,
                             space + p * WIDE * DEEP);
            }
#pragma omp for
            for (int64_t band = 0; band < bands; band++) {
                int64_t top = band * BAND, high = rows - top < BAND ? rows - top : BAND;
                int64_t tiles = (high + ROWS - 1) / ROWS;
                widen(a + top * a_row + start * a_inner, a_row, a_inner, high, tiles * ROWS, depth, padded, left);
                for (int64_t p = 0; p < panels; p++) {
                    int64_t first = p * WIDE, count = columns - first < WIDE ? columns - first : WIDE;
                    for (int64_t t = 0; t < tiles; t++) {
                        int64_t at = top + t * ROWS, lines = rows - at < ROWS ? rows - at : ROWS;
                        int32_t *to = out + at * columns + first;
                        const int16_t *from = left + t * ROWS * padded, *panel = space + p * WIDE * DEEP;
                        if (lines == ROWS && count == WIDE) {
                            tile(from, panel, padded, to, columns, start > 0);
                            continue;
                        }
                        tile(from, panel, padded, edge, WIDE, 0);
                        for (int64_t i = 0; i < lines; i++)
                            for (int64_t j = 0; j < count; j++)
                                to[i * columns + j] = edge[i * WIDE + j] + (start > 0 ? to[i * columns + j] : 0);
                    }
                }
            }
        }
    }
}
#endif
