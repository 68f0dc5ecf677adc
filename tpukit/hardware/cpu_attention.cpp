// Attention in bf16 on processors with AVX512-BF16, forward and backward, blocks of scores kept in
// the first cache (Dao et al., FlashAttention, 2022; Dao, FlashAttention-2, 2023).
//
// Scores are kept in base 2: exp(x) = exp2(x log2 e). Sequence lengths are multiples of 64, the
// head's width is 32 or 64.

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <thread>
#include <vector>

#include "cpu_vectors.h"

namespace {

constexpr int QUERY_BLOCK = 64;
constexpr int KEY_BLOCK = 64;
constexpr float LOG2_E = 1.4426950408889634f;

// Rows of `width` bf16 numbers: element (batch, head, row) starts at the given strides.
struct Rows {
  Half *data;
  int64_t batch, head, row;
  Half *at(int64_t b, int64_t h) const { return data + b * batch + h * head; }
};

struct Sizes {
  int64_t batches, heads, queries, keys;
  float scale;
};

inline float to_float(Half x) {
  Word bits = Word(x) << 16;
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

// Lane n holds the word (first[n], second[n]).
inline __m512i pairs(__m512 first, __m512 second) {
  const __m512i lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  const __m512i upper = _mm512_add_epi32(lane, _mm512_set1_epi32(16));
  const __m512i order = _mm512_or_si512(lane, _mm512_slli_epi32(upper, 16));
  return _mm512_permutexvar_epi16(order, halves(second, first));
}

// C[r][n] += sum over k of A[r][k] B[k][n]; A and B hold words along k, n runs over 16 NZ lanes.
template <int R, int NZ>
inline void multiply_add(const Word *a, int64_t a_row, int64_t a_step, const Word *b, int steps,
                         float *c, int64_t c_row) {
  __m512 sum[R][NZ];
  UNROLLED for (int r = 0; r < R; r++)
    UNROLLED for (int n = 0; n < NZ; n++) sum[r][n] = _mm512_loadu_ps(c + r * c_row + 16 * n);
  for (int k = 0; k < steps; k++) {
    __m512i right[NZ];
    UNROLLED for (int n = 0; n < NZ; n++) right[n] = _mm512_loadu_si512(b + (k * NZ + n) * 16);
    UNROLLED for (int r = 0; r < R; r++) {
      Word left = a[r * a_row + k * a_step];
      UNROLLED for (int n = 0; n < NZ; n++) sum[r][n] = dot(sum[r][n], left, right[n]);
    }
  }
  UNROLLED for (int r = 0; r < R; r++)
    UNROLLED for (int n = 0; n < NZ; n++) _mm512_storeu_ps(c + r * c_row + 16 * n, sum[r][n]);
}

template <int D>
void copy_rows(const Half *source, int64_t stride, int64_t rows, Half *target) {
  for (int64_t i = 0; i < rows; i++) std::memcpy(target + i * D, source + i * stride, 2 * D);
}

// target[w][row]: word w of each row, rows side by side within blocks of KEY_BLOCK rows.
template <int D>
void pack_across(const Half *source, int64_t stride, int64_t rows, Word *target) {
  for (int64_t start = 0; start < rows; start += KEY_BLOCK)
    for (int64_t i = 0; i < KEY_BLOCK; i++) {
      const Word *row = reinterpret_cast<const Word *>(source + (start + i) * stride);
      for (int w = 0; w < D / 2; w++)
        target[start * (D / 2) + w * KEY_BLOCK + i] = row[w];
    }
}

// target[pair of rows][d]: the word (first row's d, second row's d).
template <int D>
void pack_pairs(const Half *source, int64_t stride, int64_t rows, Word *target) {
  for (int64_t i = 0; i < rows / 2; i++) {
    const Half *first = source + 2 * i * stride, *second = first + stride;
    for (int d = 0; d < D; d++) target[i * D + d] = Word(first[d]) | Word(second[d]) << 16;
  }
}

template <int D>
void write_rows(const float *source, float factor, int64_t rows, Half *target, int64_t stride) {
  __m512 by = _mm512_set1_ps(factor);
  for (int64_t i = 0; i < rows; i++)
    for (int d = 0; d < D; d += 32) {
      __m512 low = _mm512_mul_ps(_mm512_loadu_ps(source + i * D + d), by);
      __m512 high = _mm512_mul_ps(_mm512_loadu_ps(source + i * D + d + 16), by);
      _mm512_storeu_si512(target + i * stride + d, halves(high, low));
    }
}

// -- forward ---------------------------------------------------------------------------------
template <int D>
struct ForwardScratch {
  std::vector<Half> query;
  std::vector<Word> key_across, value_pairs;
  alignas(64) float out[QUERY_BLOCK * D];
  alignas(64) float sum[QUERY_BLOCK * 16];
  float top[QUERY_BLOCK];
  explicit ForwardScratch(const Sizes &s)
      : query(QUERY_BLOCK * D), key_across(s.keys * D / 2), value_pairs(s.keys * D / 2) {}
};

constexpr int TILE = 4;
constexpr float LARGEST = 256;    // a sum of weights that makes a row's top follow its scores
constexpr float LOWEST = -1e30f;  // the top to begin with; infinity less infinity would be none

// Products of TILE queries and one block of keys.
template <int D>
inline void multiply_tile(const Half *query, const Word *key,
                          __m512 (&scores)[TILE][KEY_BLOCK / 16]) {
  constexpr int NZ = KEY_BLOCK / 16;
  UNROLLED for (int r = 0; r < TILE; r++)
    UNROLLED for (int n = 0; n < NZ; n++) scores[r][n] = _mm512_setzero_ps();
  const Word *words = reinterpret_cast<const Word *>(query);
  for (int k = 0; k < D / 2; k++) {
    __m512i right[NZ];
    UNROLLED for (int n = 0; n < NZ; n++)
      right[n] = _mm512_loadu_si512(key + k * KEY_BLOCK + 16 * n);
    UNROLLED for (int r = 0; r < TILE; r++)
      UNROLLED for (int n = 0; n < NZ; n++)
        scores[r][n] = dot(scores[r][n], words[r * D / 2 + k], right[n]);
  }
}

template <int D>
void scale_row(float factor, float *sum, float *out) {
  __m512 by = _mm512_set1_ps(factor);
  _mm512_storeu_ps(sum, _mm512_mul_ps(_mm512_loadu_ps(sum), by));
  for (int d = 0; d < D; d += 16)
    _mm512_storeu_ps(out + d, _mm512_mul_ps(_mm512_loadu_ps(out + d), by));
}

// Products as scores: scaled, their bias added.
inline void add_bias(__m512 (&scores)[TILE][KEY_BLOCK / 16], float scale, const float *bias,
                     int64_t bias_row) {
  __m512 by = _mm512_set1_ps(scale);
  UNROLLED for (int r = 0; r < TILE; r++)
    UNROLLED for (int n = 0; n < KEY_BLOCK / 16; n++)
      scores[r][n] = _mm512_fmadd_ps(scores[r][n], by,
                                     _mm512_loadu_ps(bias + r * bias_row + 16 * n));
}

// Turns a row's scores into weights 2^(factor score - top) in bf16, and adds them to its sum. A top
// follows the largest score only where weights would pass LARGEST: sums in float bear as much.
template <int D>
inline void weigh_row(const __m512 (&scores)[KEY_BLOCK / 16], __m512 factor, float *top, float *sum,
                      float *out, Half *weights) {
  constexpr int NZ = KEY_BLOCK / 16;
  static_assert(NZ == 4, "the sum below is of four");
  __m512 weight[NZ], total;
  auto weigh = [&] {
    __m512 shift = _mm512_set1_ps(*top);
    UNROLLED for (int n = 0; n < NZ; n++)
      weight[n] = exp2_of(_mm512_fmsub_ps(scores[n], factor, shift));
    total = _mm512_add_ps(_mm512_add_ps(weight[0], weight[1]), _mm512_add_ps(weight[2], weight[3]));
  };
  weigh();
  if (__builtin_expect(_mm512_cmp_ps_mask(total, _mm512_set1_ps(LARGEST), _CMP_GT_OQ), 0)) {
    __m512 largest = scores[0];
    UNROLLED for (int n = 1; n < NZ; n++) largest = _mm512_max_ps(largest, scores[n]);
    float now = _mm512_reduce_max_ps(_mm512_mul_ps(largest, factor));
    scale_row<D>(std::exp2(*top - now), sum, out);
    *top = now;
    weigh();
  }
  UNROLLED for (int n = 0; n < NZ; n += 2)
    _mm512_store_si512(weights + 16 * n, halves(weight[n + 1], weight[n]));
  _mm512_storeu_ps(sum, _mm512_add_ps(_mm512_loadu_ps(sum), total));
}

// QUERY_BLOCK queries over all keys. A tile's weights meet the values once the next tile's products
// are made, so that neither waits for exponentials.
template <int D, bool BIASED>
void forward_block(const Sizes &s, const float *bias, ForwardScratch<D> &t) {
  alignas(64) Half weights[2][TILE * KEY_BLOCK];
  const __m512 factor = _mm512_set1_ps(BIASED ? LOG2_E : s.scale * LOG2_E);
  const Word *value_before = nullptr;
  float *out_before = nullptr;
  int turn = 0;
  auto add_values = [&] {
    multiply_add<TILE, D / 16>(reinterpret_cast<const Word *>(weights[turn ^ 1]), KEY_BLOCK / 2, 1,
                               value_before, KEY_BLOCK / 2, out_before, D);
  };
  for (int64_t j = 0; j < s.keys; j += KEY_BLOCK)
    for (int r = 0; r < QUERY_BLOCK; r += TILE) {
      __m512 scores[TILE][KEY_BLOCK / 16];
      multiply_tile<D>(t.query.data() + r * D, t.key_across.data() + j * D / 2, scores);
      if (BIASED) add_bias(scores, s.scale, bias + r * s.keys + j, s.keys);
      if (out_before) add_values();
      UNROLLED for (int q = 0; q < TILE; q++)
        weigh_row<D>(scores[q], factor, t.top + r + q, t.sum + 16 * (r + q), t.out + (r + q) * D,
                     weights[turn] + q * KEY_BLOCK);
      value_before = t.value_pairs.data() + j * D / 2;
      out_before = t.out + r * D;
      turn ^= 1;
    }
  add_values();
}

template <int D>
void forward_head(const Sizes &s, const Half *q, int64_t q_row, const Half *k, int64_t k_row,
                  const Half *v, int64_t v_row, const float *bias, Half *out, int64_t out_row,
                  float *logsum, ForwardScratch<D> &t) {
  pack_across<D>(k, k_row, s.keys, t.key_across.data());
  pack_pairs<D>(v, v_row, s.keys, t.value_pairs.data());
  for (int64_t i = 0; i < s.queries; i += QUERY_BLOCK) {
    copy_rows<D>(q + i * q_row, q_row, QUERY_BLOCK, t.query.data());
    std::fill_n(t.out, QUERY_BLOCK * D, 0.f);
    std::fill_n(t.sum, QUERY_BLOCK * 16, 0.f);
    std::fill_n(t.top, QUERY_BLOCK, LOWEST);
    if (bias)
      forward_block<D, true>(s, bias + i * s.keys, t);
    else
      forward_block<D, false>(s, nullptr, t);
    for (int r = 0; r < QUERY_BLOCK; r++) {
      float sum = _mm512_reduce_add_ps(_mm512_loadu_ps(t.sum + 16 * r));
      write_rows<D>(t.out + r * D, 1.f / sum, 1, out + (i + r) * out_row, out_row);
      logsum[i + r] = t.top[r] + std::log2(sum);
    }
  }
}

// -- backward --------------------------------------------------------------------------------
constexpr int64_t QUERY_RUN = 512;  // queries that meet all keys in turn: they fit the second cache

template <int D>
struct BackwardScratch {
  std::vector<Half> query, grad;
  std::vector<Word> key_across, value_across, key_pairs, query_pairs, grad_pairs;
  std::vector<float> query_grad, key_grad, value_grad, delta;
  alignas(64) Half score_grad[QUERY_BLOCK][KEY_BLOCK];
  alignas(64) Word score_grad_pairs[QUERY_BLOCK / 2][KEY_BLOCK];
  alignas(64) Word weight_pairs[QUERY_BLOCK / 2][KEY_BLOCK];
  explicit BackwardScratch(const Sizes &s)
      : query(s.queries * D), grad(s.queries * D), key_across(s.keys * D / 2),
        value_across(s.keys * D / 2), key_pairs(s.keys * D / 2), query_pairs(s.queries * D / 2),
        grad_pairs(s.queries * D / 2), query_grad(s.queries * D), key_grad(s.keys * D),
        value_grad(s.keys * D), delta(s.queries) {}
};

// Weights and score gradients of two queries and 32 keys.
template <int D>
inline void backward_tile(const Half *query, const Half *grad, const Word *key, const Word *value,
                          float factor, const float *bias, int64_t bias_row, const float *logsum,
                          const float *delta, float *bias_grad, Half *score_grad,
                          Word *score_grad_pairs, Word *weight_pairs) {
  constexpr int NZ = 2;
  __m512 weight[TILE][NZ], slope[TILE][NZ];
  UNROLLED for (int r = 0; r < TILE; r++)
    UNROLLED for (int n = 0; n < NZ; n++) weight[r][n] = slope[r][n] = _mm512_setzero_ps();
  const Word *q = reinterpret_cast<const Word *>(query), *g = reinterpret_cast<const Word *>(grad);
  for (int k = 0; k < D / 2; k++) {
    __m512i keys[NZ], values[NZ];
    UNROLLED for (int n = 0; n < NZ; n++) {
      keys[n] = _mm512_loadu_si512(key + k * KEY_BLOCK + 16 * n);
      values[n] = _mm512_loadu_si512(value + k * KEY_BLOCK + 16 * n);
    }
    UNROLLED for (int r = 0; r < TILE; r++)
      UNROLLED for (int n = 0; n < NZ; n++) {
        weight[r][n] = dot(weight[r][n], q[r * D / 2 + k], keys[n]);
        slope[r][n] = dot(slope[r][n], g[r * D / 2 + k], values[n]);
      }
  }
  __m512 by = _mm512_set1_ps(factor), base = _mm512_set1_ps(LOG2_E);
  UNROLLED for (int r = 0; r < TILE; r++) {
    __m512 shift = _mm512_set1_ps(-logsum[r]), mean = _mm512_set1_ps(delta[r]);
    UNROLLED for (int n = 0; n < NZ; n++) {
      __m512 score = _mm512_fmadd_ps(weight[r][n], by, shift);
      if (bias)
        score = _mm512_fmadd_ps(_mm512_loadu_ps(bias + r * bias_row + 16 * n), base, score);
      weight[r][n] = exp2_of(score);
      slope[r][n] = _mm512_mul_ps(weight[r][n], _mm512_sub_ps(slope[r][n], mean));
      if (bias_grad) {
        float *place = bias_grad + r * bias_row + 16 * n;
        _mm512_storeu_ps(place, _mm512_add_ps(_mm512_loadu_ps(place), slope[r][n]));
      }
    }
    _mm512_storeu_si512(score_grad + r * KEY_BLOCK, halves(slope[r][1], slope[r][0]));
  }
  UNROLLED for (int r = 0; r < TILE; r += 2)
    UNROLLED for (int n = 0; n < NZ; n++) {
      int64_t place = r / 2 * KEY_BLOCK + 16 * n;
      _mm512_storeu_si512(score_grad_pairs + place, pairs(slope[r][n], slope[r + 1][n]));
      _mm512_storeu_si512(weight_pairs + place, pairs(weight[r][n], weight[r + 1][n]));
    }
}

// One block of queries and one of keys: adds to the three gradients.
template <int D>
void backward_block(const Sizes &s, const float *bias, const float *logsum, float *bias_grad,
                    int64_t i, int64_t j, BackwardScratch<D> &t) {
  for (int r = 0; r < QUERY_BLOCK; r += TILE)
    for (int n = 0; n < KEY_BLOCK; n += 32) {
      int64_t place = (i + r) * s.keys + j + n;
      backward_tile<D>(t.query.data() + (i + r) * D, t.grad.data() + (i + r) * D,
                       t.key_across.data() + j * D / 2 + n, t.value_across.data() + j * D / 2 + n,
                       s.scale * LOG2_E, bias ? bias + place : nullptr, s.keys, logsum + i + r,
                       t.delta.data() + i + r, bias_grad ? bias_grad + place : nullptr,
                       t.score_grad[r] + n, t.score_grad_pairs[r / 2] + n,
                       t.weight_pairs[r / 2] + n);
    }
  constexpr int R = D == 32 ? 8 : 4, NZ = D / 16;
  for (int r = 0; r < QUERY_BLOCK; r += R)
    multiply_add<R, NZ>(reinterpret_cast<const Word *>(t.score_grad[r]), KEY_BLOCK / 2, 1,
                        t.key_pairs.data() + j * D / 2, KEY_BLOCK / 2,
                        t.query_grad.data() + (i + r) * D, D);
  for (int r = 0; r < KEY_BLOCK; r += R) {
    multiply_add<R, NZ>(&t.weight_pairs[0][r], 1, KEY_BLOCK, t.grad_pairs.data() + i * D / 2,
                        QUERY_BLOCK / 2, t.value_grad.data() + (j + r) * D, D);
    multiply_add<R, NZ>(&t.score_grad_pairs[0][r], 1, KEY_BLOCK, t.query_pairs.data() + i * D / 2,
                        QUERY_BLOCK / 2, t.key_grad.data() + (j + r) * D, D);
  }
}

struct HeadGradients {
  Half *query, *key, *value;
  int64_t query_row, key_row, value_row;
};

template <int D>
void backward_head(const Sizes &s, const Half *q, int64_t q_row, const Half *k, int64_t k_row,
                   const Half *v, int64_t v_row, const float *bias, const Half *out,
                   int64_t out_row, const Half *grad, int64_t grad_row, const float *logsum,
                   const HeadGradients &to, float *bias_grad, BackwardScratch<D> &t) {
  copy_rows<D>(q, q_row, s.queries, t.query.data());
  copy_rows<D>(grad, grad_row, s.queries, t.grad.data());
  pack_across<D>(k, k_row, s.keys, t.key_across.data());
  pack_across<D>(v, v_row, s.keys, t.value_across.data());
  pack_pairs<D>(k, k_row, s.keys, t.key_pairs.data());
  pack_pairs<D>(q, q_row, s.queries, t.query_pairs.data());
  pack_pairs<D>(grad, grad_row, s.queries, t.grad_pairs.data());
  for (int64_t i = 0; i < s.queries; i++) {
    float sum = 0;
    for (int d = 0; d < D; d++)
      sum += to_float(out[i * out_row + d]) * to_float(grad[i * grad_row + d]);
    t.delta[i] = sum;
  }
  for (auto *sums : {&t.query_grad, &t.key_grad, &t.value_grad})
    std::fill(sums->begin(), sums->end(), 0.f);
  for (int64_t run = 0; run < s.queries; run += QUERY_RUN)
    for (int64_t j = 0; j < s.keys; j += KEY_BLOCK)
      for (int64_t i = run; i < std::min(run + QUERY_RUN, s.queries); i += QUERY_BLOCK)
        backward_block<D>(s, bias, logsum, bias_grad, i, j, t);
  write_rows<D>(t.query_grad.data(), s.scale, s.queries, to.query, to.query_row);
  write_rows<D>(t.key_grad.data(), s.scale, s.keys, to.key, to.key_row);
  write_rows<D>(t.value_grad.data(), 1.f, s.keys, to.value, to.value_row);
}

// -- over batches, heads and threads -----------------------------------------------------------
// Calls work(state, task) for each task, on `threads` threads with a state of their own.
template <class State, class Work>
void spread(int64_t tasks, int threads, const Sizes &s, Work work) {
  std::atomic<int64_t> next{0};
  auto run = [&] {
    State state(s);
    for (int64_t task; (task = next++) < tasks;) work(state, task);
  };
  std::vector<std::thread> others;
  for (int64_t i = 1; i < std::min<int64_t>(threads, tasks); i++) others.emplace_back(run);
  run();
  for (auto &thread : others) thread.join();
}

template <int D>
void forward(const Sizes &s, const Rows &q, const Rows &k, const Rows &v, const float *bias,
             const Rows &out, float *logsum, int threads) {
  spread<ForwardScratch<D>>(
      s.batches * s.heads, threads, s, [&](ForwardScratch<D> &state, int64_t task) {
        // A head's batches follow each other: its bias stays in the cache.
        int64_t h = task / s.batches, b = task % s.batches;
        forward_head<D>(s, q.at(b, h), q.row, k.at(b, h), k.row, v.at(b, h), v.row,
                        bias ? bias + h * s.queries * s.keys : nullptr, out.at(b, h), out.row,
                        logsum + (b * s.heads + h) * s.queries, state);
      });
}

// A head's batches stay with one thread: they add to the same bias gradient.
template <int D>
void backward(const Sizes &s, const Rows &q, const Rows &k, const Rows &v, const float *bias,
              const Rows &out, const Rows &grad, const float *logsum, const Rows &q_grad,
              const Rows &k_grad, const Rows &v_grad, float *bias_grad, int threads) {
  int64_t runs = bias_grad ? 1 : s.batches, length = s.batches / runs;
  spread<BackwardScratch<D>>(
      runs * s.heads, threads, s, [&](BackwardScratch<D> &state, int64_t task) {
        int64_t h = task % s.heads, first = task / s.heads * length;
        int64_t place = h * s.queries * s.keys;
        for (int64_t b = first; b < first + length; b++) {
          HeadGradients to{q_grad.at(b, h), k_grad.at(b, h), v_grad.at(b, h),
                           q_grad.row,      k_grad.row,      v_grad.row};
          backward_head<D>(s, q.at(b, h), q.row, k.at(b, h), k.row, v.at(b, h), v.row,
                           bias ? bias + place : nullptr, out.at(b, h), out.row, grad.at(b, h),
                           grad.row, logsum + (b * s.heads + h) * s.queries, to,
                           bias_grad ? bias_grad + place : nullptr, state);
        }
      });
}

}  // namespace

extern "C" {

// Returns 0, or 1 for a width it has no code for.
int attention_forward(const Sizes *s, int width, const Rows *q, const Rows *k, const Rows *v,
                      const float *bias, const Rows *out, float *logsum, int threads) {
  if (width == 32) return forward<32>(*s, *q, *k, *v, bias, *out, logsum, threads), 0;
  if (width == 64) return forward<64>(*s, *q, *k, *v, bias, *out, logsum, threads), 0;
  return 1;
}

int attention_backward(const Sizes *s, int width, const Rows *q, const Rows *k, const Rows *v,
                       const float *bias, const Rows *out, const Rows *grad, const float *logsum,
                       const Rows *q_grad, const Rows *k_grad, const Rows *v_grad,
                       float *bias_grad, int threads) {
  if (width == 32)
    return backward<32>(*s, *q, *k, *v, bias, *out, *grad, logsum, *q_grad, *k_grad, *v_grad,
                        bias_grad, threads), 0;
  if (width == 64)
    return backward<64>(*s, *q, *k, *v, bias, *out, *grad, logsum, *q_grad, *k_grad, *v_grad,
                        bias_grad, threads), 0;
  return 1;
}
}
