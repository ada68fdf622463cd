"""Rounding of many replicas' operands at once, each replica in its own way, by a few lines of C.

:mod:`replicas` trains with it. The same in torch operations, one choice at a time, would gather, scatter, and pass over
memory ten times as often. ``python benchmarks/search/replicas.py`` compares it with :mod:`autoprec.numerics`. The
machine's C compiler builds it once, into the temporary folder.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import subprocess
import tempfile
from pathlib import Path

import numpy as np
from torch import Tensor

from autoprec.trial.inside.observe.measure import keep_freed

#: How one operand of one replica is rounded; the numbers are those of the C code.
KINDS = (
    *("keep", "bf16", "rowwise", "tensorwise", "tensorwise_e5m2", "mxfp8", "nvfp4"),
    *("tf32", "nvfp4_2d", "nvfp4_rht", "nvfp4_sr", "nvfp4_rht_sr", "fp16"),
)

_SOURCE = r"""
#include <math.h>
#include <stdint.h>
#include <string.h>
static inline float from_bits(uint32_t u) { float f; memcpy(&f, &u, 4); return f; }
static inline uint32_t to_bits(float f) { uint32_t u; memcpy(&u, &f, 4); return u; }
static inline float pow2_floor(float x) { return from_bits(to_bits(x) & 0x7F800000u); }
static inline float bf16(float x) {
    uint32_t u = to_bits(x);
    return from_bits((u + 0x7FFFu + ((u >> 16) & 1u)) & 0xFFFF0000u);
}
static inline float tf32(float x) {
    uint32_t u = to_bits(x);
    return from_bits((u + 0xFFFu + ((u >> 13) & 1u)) & 0xFFFFE000u);
}
/* a uniform number of [0, 1) that follows from the value's bits and its place: the same run gives the same noise */
static inline float uniform(float x, uint32_t at) {
    uint32_t h = to_bits(x) ^ (at * 2654435761u);
    h ^= h >> 16; h *= 0x7FEB352Du; h ^= h >> 15; h *= 0x846CA68Bu; h ^= h >> 16;
    return (float)(h >> 8) * 5.9604645e-08f;
}
/* E2M1, rounded up with the probability of the distance: its grid has half steps below 2, then 1, then 2 */
static inline float e2m1_stochastic(float x, float u) {
    float a = fabsf(x) > 6.0f ? 6.0f : fabsf(x);
    float step = a < 2.0f ? 0.5f : (a < 4.0f ? 1.0f : 2.0f);
    return copysignf(floorf(a / step + u) * step, x);
}
/* sixteen values times fixed signs, then the orthonormal Hadamard matrix */
static void hadamard(const float *x, float *y) {
    for (int i = 0; i < 16; i++) y[i] = ((0xB5C3 >> i) & 1) ? -x[i] : x[i];
    for (int h = 1; h < 16; h *= 2)
        for (int i = 0; i < 16; i += 2 * h)
            for (int j = i; j < i + h; j++) {
                float a = y[j], b = y[j + h];
                y[j] = a + b;
                y[j + h] = a - b;
            }
    for (int i = 0; i < 16; i++) y[i] *= 0.25f;
}
/* round to a grid with `add` = 1.5 * 2**(23 - mantissa), smallest exponent 2**e = `least`, ties to even */
static inline float grid(float x, float add, float least, float limit) {
    x = x > limit ? limit : (x < -limit ? -limit : x);
    float power = pow2_floor(x < 0 ? -x : x);
    float magic = (power < least ? least : power) * add;
    return (x + magic) - magic;
}
#define E4M3(x) grid(x, 1572864.0f, 0.015625f, 448.0f)
#define E5M2(x) grid(x, 3145728.0f, 6.103515625e-05f, 57344.0f)
#define FP16(x) grid(x, 12288.0f, 6.103515625e-05f, 65504.0f)
#define E2M1(x) grid(x, 6291456.0f, 1.0f, 6.0f)
static float amax_of(const float *x, long n) {
    int32_t m = 0; /* magnitudes are ordered as their bits are, and integer maxima vectorise */
    for (long i = 0; i < n; i++) {
        int32_t a;
        memcpy(&a, x + i, 4);
        a &= 0x7FFFFFFF;
        m = a > m ? a : m;
    }
    return from_bits((uint32_t)m);
}
/* a power of two is divided by as exactly as it is multiplied with */
static void shifted(const float *x, float *y, long n, float s) {
    float inverse = 1.0f / s;
    for (long i = 0; i < n; i++) y[i] = E4M3(x[i] * s) * inverse;
}
static void scaled(const float *x, float *y, long n, float s, int e5) {
    if (e5) for (long i = 0; i < n; i++) y[i] = E5M2(x[i] * s) / s;
    else for (long i = 0; i < n; i++) y[i] = E4M3(x[i] * s) / s;
}
static void matrix(const float *x, float *y, long rows, long k, int kind) {
    long n = rows * k;
    if (kind == 0) { if (x != y) memcpy(y, x, n * sizeof(float)); return; }
    if (kind == 1) { for (long i = 0; i < n; i++) y[i] = bf16(x[i]); return; }
    if (kind == 7) { for (long i = 0; i < n; i++) y[i] = tf32(x[i]); return; }
    if (kind == 12) { for (long i = 0; i < n; i++) y[i] = FP16(x[i]); return; }
    if (kind == 2) {
        for (long r = 0; r < rows; r++) {
            float a = amax_of(x + r * k, k);
            shifted(x + r * k, y + r * k, k, a > 0 ? pow2_floor(448.0f / a) : 1.0f);
        }
        return;
    }
    float whole = kind == 5 ? 0.0f : amax_of(x, n);
    if (kind == 3 || kind == 4) {
        float limit = kind == 4 ? 57344.0f : 448.0f;
        scaled(x, y, n, whole > 0 ? limit / whole : 1.0f, kind == 4);
        return;
    }
    if (kind == 5) {
        for (long i = 0; i < n; i += 32) {
            float a = amax_of(x + i, 32);
            uint32_t u = to_bits((a > 0 ? a : 1.0f) / 448.0f);
            int e = (int)(u >> 23) - 127 + ((u & 0x7FFFFFu) != 0);
            shifted(x + i, y + i, 32, ldexpf(1.0f, -e));
        }
        return;
    }
    if (kind == 9 || kind == 11) {
        for (long i = 0; i < n; i += 16) {
            float t[16];
            hadamard(x + i, t);
            memcpy(y + i, t, sizeof t);
        }
        x = y;
        whole = amax_of(y, n);
    }
    float tensor = whole / (448.0f * 6.0f);
    if (!(tensor > 0)) tensor = 1.0f;
    long high = kind == 8 ? 16 : 1; /* rows that share a scale */
    for (long r = 0; r < rows; r += high)
        for (long i = 0; i < k; i += 16) {
            float a = 0.0f;
            for (long q = r; q < r + high && q < rows; q++) {
                float here = amax_of(x + q * k + i, 16);
                a = here > a ? here : a;
            }
            float s = a / 6.0f / tensor;
            s = s < 0.015625f ? 0.015625f : (s > 448.0f ? 448.0f : s);
            s = E4M3(s) * tensor;
            for (long q = r; q < r + high && q < rows; q++)
                for (long j = q * k + i; j < q * k + i + 16; j++)
                    y[j] = (kind >= 10 ? e2m1_stochastic(x[j] / s, uniform(x[j], (uint32_t)j)) : E2M1(x[j] / s)) * s;
        }
}
/* y[r] = rounded x[r] ([rows, k], or its transpose [k, rows] when `turned`), along the last axis of the result */
void round_replicas(const float *x, float *y, long count, long rows, long k, const int8_t *kind, int turned) {
    for (long r = 0; r < count; r++) {
        const float *from = x + r * rows * k;
        float *to = y + r * rows * k;
        if (!turned) { matrix(from, to, rows, k, kind[r]); continue; }
        for (long i = 0; i < rows; i += 16)
            for (long j = 0; j < k; j++)
                for (long b = i; b < i + 16 && b < rows; b++) to[j * rows + b] = from[b * k + j];
        matrix(to, to, k, rows, kind[r]);
    }
}
"""


def _library() -> ctypes.CDLL:
    flags = ["-O3", "-march=native", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math", "-shared", "-fPIC"]
    name = hashlib.sha256(" ".join([_SOURCE, *flags]).encode()).hexdigest()[:16]
    path = Path(tempfile.gettempdir()) / f"replica-kernel-{os.getuid()}-{name}.so"
    if not path.exists():
        with tempfile.TemporaryDirectory() as folder:
            source, built = Path(folder, "k.c"), Path(folder, "k.so")
            source.write_text(_SOURCE)
            subprocess.run([os.environ.get("CC", "cc"), *flags, str(source), "-o", str(built), "-lm"], check=True)
            built.replace(path)
    return ctypes.CDLL(str(path))


_LIBRARY: list[ctypes.CDLL] = []


def round_replicas(x: Tensor, kinds: np.ndarray, turned: bool = False) -> Tensor:
    """Round ``x`` ``[R, M, K]`` (or its transpose ``[R, K, M]``) along the last axis, replica r as ``KINDS[kinds[r]]``.

    Args:
        x: float32.
        kinds: ``[R]`` int8.
        turned: transpose the last two axes first.
    """
    if not _LIBRARY:
        _LIBRARY.append(_library())
        keep_freed()  # fresh pages cost more than the rounding
    x = x.contiguous()
    count, rows, k = x.shape
    out = x.new_empty((count, k, rows) if turned else x.shape)
    _LIBRARY[0].round_replicas(
        ctypes.c_void_p(x.data_ptr()),
        ctypes.c_void_p(out.data_ptr()),
        ctypes.c_long(count),
        ctypes.c_long(rows),
        ctypes.c_long(k),
        ctypes.c_void_p(np.ascontiguousarray(kinds, dtype=np.int8).ctypes.data),
        ctypes.c_int(turned),
    )
    return out


#: kind of an operand -> how the product is rounded: to bfloat16 but for these.
_PRODUCT = np.array([{"keep": 0, "tf32": 0, "fp16": KINDS.index("fp16")}.get(k, 1) for k in KINDS], dtype=np.int8)


def rounded_like(x: Tensor, kinds: np.ndarray) -> Tensor:
    """Return products ``x`` rounded to what each replica's layers return: mostly bfloat16."""
    return round_replicas(x, _PRODUCT[kinds])


__all__ = ["KINDS", "round_replicas", "rounded_like"]
