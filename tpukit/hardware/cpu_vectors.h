// What the processor's kernels share. For AVX512-BF16.
//
// A "word" is two bf16 numbers in 32 bits: what one lane of _mm512_dpbf16_ps multiplies.
#pragma once

#include <immintrin.h>

#include <cstdint>

// Loops over a tile: left rolled, the compiler keeps the tile's sums in memory, at twice the time.
#define UNROLLED _Pragma("GCC unroll 16")

using Word = uint32_t;
using Half = uint16_t;

inline __m512 dot(__m512 sum, Word left, __m512i right) {
  return _mm512_dpbf16_ps(sum, (__m512bh)_mm512_set1_epi32(int(left)), (__m512bh)right);
}

// 32 bf16 numbers: those of `low`, then those of `high`.
inline __m512i halves(__m512 high, __m512 low) { return (__m512i)_mm512_cvtne2ps_pbh(high, low); }

// 2^x for x up to 127, relative error 1e-4: below what bf16 tells apart.
inline __m512 exp2_of(__m512 x) {
  __m512 part = _mm512_reduce_ps(x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
  __m512 y = _mm512_set1_ps(7.802452e-2f);
  y = _mm512_fmadd_ps(y, part, _mm512_set1_ps(2.260671678e-1f));
  y = _mm512_fmadd_ps(y, part, _mm512_set1_ps(6.958335289e-1f));
  y = _mm512_fmadd_ps(y, part, _mm512_set1_ps(9.999252205e-1f));
  return _mm512_scalef_ps(y, x);
}

// 1 / (1 + exp(-x)); relative error 2e-4.
inline __m512 sigmoid(__m512 x) {
  __m512 grown = exp2_of(_mm512_mul_ps(x, _mm512_set1_ps(-1.44269504f)));
  return _mm512_rcp14_ps(_mm512_add_ps(grown, _mm512_set1_ps(1.f)));
}
