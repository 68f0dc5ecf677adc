// What stands between the matrix products of a modulated transformer block, each in one pass over
// memory: the norm with its modulation, SiLU with a linear map's bias, and the gated sum. For
// processors with AVX512-BF16.
//
// Tokens are (batches, tokens, width), contiguous; modulation is (batches, width) in float. The
// stream of tokens is float or bf16, branches are bf16, sums are float.

#include <algorithm>
#include <atomic>
#include <cmath>
#include <thread>
#include <vector>

#include "cpu_vectors.h"

namespace {

constexpr int64_t RUN = 64;  // tokens a task
constexpr float SHORTEST = 1e-12f;

inline __m512 load(const float *p) { return _mm512_loadu_ps(p); }
inline __m512 load(const Half *p) {
  __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)p));
  return _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
}
inline void store(float *p, __m512 x) { _mm512_storeu_ps(p, x); }
inline void store(Half *p, __m512 x) {
  _mm256_storeu_si256((__m256i *)p, (__m256i)_mm512_cvtneps_pbh(x));
}
inline void add_to(float *p, __m512 x) { store(p, _mm512_add_ps(load(p), x)); }

// Calls work(thread, batch, first token, end) over all tokens; a thread's runs are consecutive, so
// that sums over them come out the same each time.
template <class Work>
void spread(int64_t batches, int64_t tokens, int threads, Work work) {
  int64_t runs = batches * ((tokens + RUN - 1) / RUN), per_batch = runs / batches;
  auto part = [&](int thread) {
    for (int64_t run = runs * thread / threads; run < runs * (thread + 1) / threads; run++) {
      int64_t first = run % per_batch * RUN;
      work(thread, run / per_batch, first, std::min(first + RUN, tokens));
    }
  };
  std::vector<std::thread> others;
  for (int thread = 1; thread < threads; thread++) others.emplace_back(part, thread);
  part(0);
  for (auto &thread : others) thread.join();
}

void add_up(const std::vector<float> &parts, int threads, int64_t count, float *sum) {
  for (int64_t i = 0; i < count; i++) {
    float total = 0;
    for (int thread = 0; thread < threads; thread++) total += parts[thread * count + i];
    sum[i] = total;
  }
}

// y = x / |x| factor + shift
template <class X>
void norm(int64_t batches, int64_t tokens, int64_t width, const X *x, const float *factor,
          const float *shift, Half *y, float *inverse, int threads) {
  spread(batches, tokens, threads, [=](int, int64_t b, int64_t first, int64_t end) {
    const float *f = factor + b * width, *s = shift + b * width;
    for (int64_t i = b * tokens + first; i < b * tokens + end; i++) {
      const X *row = x + i * width;
      __m512 sum = _mm512_setzero_ps();
      for (int64_t d = 0; d < width; d += 16) {
        __m512 value = load(row + d);
        sum = _mm512_fmadd_ps(value, value, sum);
      }
      inverse[i] = 1.f / std::max(std::sqrt(_mm512_reduce_add_ps(sum)), SHORTEST);
      __m512 by = _mm512_set1_ps(inverse[i]);
      for (int64_t d = 0; d < width; d += 16)
        store(y + i * width + d, _mm512_fmadd_ps(_mm512_mul_ps(load(row + d), by), load(f + d),
                                                 load(s + d)));
    }
  });
}

// x_grad = passed + the norm's own; factor_grad and shift_grad are sums over a batch's tokens.
template <class X>
void norm_backward(int64_t batches, int64_t tokens, int64_t width, const X *x,
                   const float *inverse, const float *factor, const X *passed, const Half *y_grad,
                   X *x_grad, float *factor_grad, float *shift_grad, int threads) {
  int64_t count = batches * width;
  std::vector<float> factors(threads * count), shifts(threads * count);
  spread(batches, tokens, threads, [&](int thread, int64_t b, int64_t first, int64_t end) {
    const float *f = factor + b * width;
    float *to_factor = factors.data() + thread * count + b * width;
    float *to_shift = shifts.data() + thread * count + b * width;
    for (int64_t i = b * tokens + first; i < b * tokens + end; i++) {
      int64_t at = i * width;
      __m512 by = _mm512_set1_ps(inverse[i]), sum = _mm512_setzero_ps();
      for (int64_t d = 0; d < width; d += 16) {
        __m512 unit = _mm512_mul_ps(load(x + at + d), by), grad = load(y_grad + at + d);
        sum = _mm512_fmadd_ps(unit, _mm512_mul_ps(grad, load(f + d)), sum);
        add_to(to_factor + d, _mm512_mul_ps(grad, unit));
        add_to(to_shift + d, grad);
      }
      __m512 along = _mm512_set1_ps(_mm512_reduce_add_ps(sum));
      for (int64_t d = 0; d < width; d += 16) {
        __m512 unit = _mm512_mul_ps(load(x + at + d), by);
        __m512 grad = _mm512_mul_ps(load(y_grad + at + d), load(f + d));
        __m512 own = _mm512_mul_ps(_mm512_fnmadd_ps(unit, along, grad), by);
        store(x_grad + at + d, passed ? _mm512_add_ps(load(passed + at + d), own) : own);
      }
    }
  });
  add_up(factors, threads, count, factor_grad);
  add_up(shifts, threads, count, shift_grad);
}

// y = x + gate branch
template <class X>
void gated_sum(int64_t batches, int64_t tokens, int64_t width, const X *x, const float *gate,
               const Half *branch, X *y, int threads) {
  spread(batches, tokens, threads, [=](int, int64_t b, int64_t first, int64_t end) {
    const float *g = gate + b * width;
    for (int64_t at = (b * tokens + first) * width; at < (b * tokens + end) * width; at += width)
      for (int64_t d = 0; d < width; d += 16)
        store(y + at + d, _mm512_fmadd_ps(load(g + d), load(branch + at + d), load(x + at + d)));
  });
}

template <class X>
void gated_sum_backward(int64_t batches, int64_t tokens, int64_t width, const X *y_grad,
                        const float *gate, const Half *branch, Half *branch_grad,
                        float *gate_grad, int threads) {
  int64_t count = batches * width;
  std::vector<float> gates(threads * count);
  spread(batches, tokens, threads, [&](int thread, int64_t b, int64_t first, int64_t end) {
    const float *g = gate + b * width;
    float *to_gate = gates.data() + thread * count + b * width;
    for (int64_t at = (b * tokens + first) * width; at < (b * tokens + end) * width; at += width)
      for (int64_t d = 0; d < width; d += 16) {
        __m512 grad = load(y_grad + at + d);
        store(branch_grad + at + d, _mm512_mul_ps(grad, load(g + d)));
        add_to(to_gate + d, _mm512_mul_ps(grad, load(branch + at + d)));
      }
  });
  add_up(gates, threads, count, gate_grad);
}

// y = silu(x + bias); y may be x
void silu(int64_t batches, int64_t tokens, int64_t width, const Half *x, const float *bias, Half *y,
          int threads) {
  spread(batches, tokens, threads, [=](int, int64_t b, int64_t first, int64_t end) {
    for (int64_t at = (b * tokens + first) * width; at < (b * tokens + end) * width; at += width)
      for (int64_t d = 0; d < width; d += 16) {
        __m512 value = _mm512_add_ps(load(x + at + d), load(bias + d));
        store(y + at + d, _mm512_mul_ps(value, sigmoid(value)));
      }
  });
}

void silu_backward(int64_t batches, int64_t tokens, int64_t width, const Half *y_grad,
                   const Half *x, const float *bias, Half *x_grad, float *bias_grad, int threads) {
  std::vector<float> biases(threads * width);
  spread(batches, tokens, threads, [&](int thread, int64_t b, int64_t first, int64_t end) {
    float *to_bias = biases.data() + thread * width;
    __m512 one = _mm512_set1_ps(1.f);
    for (int64_t at = (b * tokens + first) * width; at < (b * tokens + end) * width; at += width)
      for (int64_t d = 0; d < width; d += 16) {
        __m512 value = _mm512_add_ps(load(x + at + d), load(bias + d)), part = sigmoid(value);
        __m512 slope = _mm512_fmadd_ps(value, _mm512_sub_ps(one, part), one);
        __m512 grad = _mm512_mul_ps(load(y_grad + at + d), _mm512_mul_ps(part, slope));
        store(x_grad + at + d, grad);
        add_to(to_bias + d, grad);
      }
  });
  add_up(biases, threads, width, bias_grad);
}

}  // namespace

// `half`: the stream of tokens is bf16, else float.
extern "C" {

void block_norm(int half, int64_t batches, int64_t tokens, int64_t width, const void *x,
                const float *factor, const float *shift, Half *y, float *inverse, int threads) {
  if (half)
    norm(batches, tokens, width, (const Half *)x, factor, shift, y, inverse, threads);
  else
    norm(batches, tokens, width, (const float *)x, factor, shift, y, inverse, threads);
}

void block_norm_backward(int half, int64_t batches, int64_t tokens, int64_t width, const void *x,
                         const float *inverse, const float *factor, const void *passed,
                         const Half *y_grad, void *x_grad, float *factor_grad, float *shift_grad,
                         int threads) {
  if (half)
    norm_backward(batches, tokens, width, (const Half *)x, inverse, factor, (const Half *)passed,
                  y_grad, (Half *)x_grad, factor_grad, shift_grad, threads);
  else
    norm_backward(batches, tokens, width, (const float *)x, inverse, factor, (const float *)passed,
                  y_grad, (float *)x_grad, factor_grad, shift_grad, threads);
}

void block_gated_sum(int half, int64_t batches, int64_t tokens, int64_t width, const void *x,
                     const float *gate, const Half *branch, void *y, int threads) {
  if (half)
    gated_sum(batches, tokens, width, (const Half *)x, gate, branch, (Half *)y, threads);
  else
    gated_sum(batches, tokens, width, (const float *)x, gate, branch, (float *)y, threads);
}

void block_gated_sum_backward(int half, int64_t batches, int64_t tokens, int64_t width,
                              const void *y_grad, const float *gate, const Half *branch,
                              Half *branch_grad, float *gate_grad, int threads) {
  if (half)
    gated_sum_backward(batches, tokens, width, (const Half *)y_grad, gate, branch, branch_grad,
                       gate_grad, threads);
  else
    gated_sum_backward(batches, tokens, width, (const float *)y_grad, gate, branch, branch_grad,
                       gate_grad, threads);
}

void block_silu(int, int64_t batches, int64_t tokens, int64_t width, const Half *x,
                const float *bias, Half *y, int threads) {
  silu(batches, tokens, width, x, bias, y, threads);
}

void block_silu_backward(int, int64_t batches, int64_t tokens, int64_t width, const Half *y_grad,
                         const Half *x, const float *bias, Half *x_grad, float *bias_grad,
                         int threads) {
  silu_backward(batches, tokens, width, y_grad, x, bias, x_grad, bias_grad, threads);
}
}
