// Linear maps where no gradient is wanted, and a perceptron's two with SiLU between in one pass:
// its middle stays in the second cache. For processors with AVX512-BF16.
//
// Tokens are bf16, weights and biases float as they are kept, sums float.

#include <algorithm>
#include <atomic>
#include <thread>
#include <vector>

#include "cpu_vectors.h"

namespace {

constexpr int LANES = 16;
constexpr int ACROSS = 4;              // vectors of outputs a tile
constexpr int PANEL = ACROSS * LANES;  // outputs packed side by side
constexpr int DOWN = 6;                // rows a tile: with ACROSS vectors they fill the registers
constexpr int64_t STRETCH = 128;       // inputs packed at a time: they fit the first cache
constexpr int64_t RUN = 96;            // rows a task: their middle fits the second cache

struct Plain {
  static __m512 of(__m512 x) { return x; }
};
struct Silu {
  static __m512 of(__m512 x) { return _mm512_mul_ps(x, sigmoid(x)); }
};

// A linear map: weight (outputs, inputs), bias (outputs,); `packed` holds panels of PANEL outputs,
// in each, word by word along the inputs, the outputs side by side.
struct Map {
  int64_t inputs, outputs;
  const float *weight, *bias;
  Word *packed;
  int64_t panels() const { return outputs / PANEL; }
  int64_t panel_words() const { return inputs / 2 * PANEL; }

  void pack(int64_t panel) const {
    for (int64_t start = 0; start < inputs; start += STRETCH)
      for (int64_t n = 0; n < PANEL; n++) {
        const float *row = weight + (panel * PANEL + n) * inputs;
        Word *target = packed + panel * panel_words() + n;
        for (int64_t k = start; k < std::min(start + STRETCH, inputs); k += 2 * LANES) {
          alignas(64) Word words[LANES];
          _mm512_store_si512(words, halves(_mm512_loadu_ps(row + k + LANES),
                                           _mm512_loadu_ps(row + k)));
          for (int i = 0; i < LANES; i++) target[(k / 2 + i) * PANEL] = words[i];
        }
      }
  }
};

// R rows of one panel: y = f(x weight^T + bias).
template <int R, class F>
inline void tile(const Half *x, int64_t x_row, const Word *panel, const float *bias, int64_t words,
                 Half *y, int64_t y_row) {
  __m512 sum[R][ACROSS];
  UNROLLED for (int r = 0; r < R; r++)
    UNROLLED for (int n = 0; n < ACROSS; n++) sum[r][n] = _mm512_loadu_ps(bias + LANES * n);
  const Word *left = reinterpret_cast<const Word *>(x);
  for (int64_t k = 0; k < words; k++) {
    __m512i right[ACROSS];
    UNROLLED for (int n = 0; n < ACROSS; n++)
      right[n] = _mm512_loadu_si512(panel + k * PANEL + LANES * n);
    UNROLLED for (int r = 0; r < R; r++)
      UNROLLED for (int n = 0; n < ACROSS; n++)
        sum[r][n] = dot(sum[r][n], left[r * x_row / 2 + k], right[n]);
  }
  UNROLLED for (int r = 0; r < R; r++)
    UNROLLED for (int n = 0; n < ACROSS; n += 2)
      _mm512_storeu_si512(y + r * y_row + LANES * n,
                          halves(F::of(sum[r][n + 1]), F::of(sum[r][n])));
}

template <class F>
void apply(const Map &map, const Half *x, int64_t rows, Half *y) {
  for (int64_t p = 0; p < map.panels(); p++) {
    const Word *panel = map.packed + p * map.panel_words();
    const float *bias = map.bias + p * PANEL;
    int64_t r = 0;
    for (; r + DOWN <= rows; r += DOWN)
      tile<DOWN, F>(x + r * map.inputs, map.inputs, panel, bias, map.inputs / 2,
                    y + r * map.outputs + p * PANEL, map.outputs);
    for (; r < rows; r++)
      tile<1, F>(x + r * map.inputs, map.inputs, panel, bias, map.inputs / 2,
                 y + r * map.outputs + p * PANEL, map.outputs);
  }
}

// Calls work(task) for each task, on `threads` threads.
template <class Work>
void spread(int64_t tasks, int threads, Work work) {
  std::atomic<int64_t> next{0};
  auto run = [&] {
    for (int64_t task; (task = next++) < tasks;) work(task);
  };
  std::vector<std::thread> others;
  for (int64_t i = 1; i < std::min<int64_t>(threads, tasks); i++) others.emplace_back(run);
  run();
  for (auto &thread : others) thread.join();
}

int64_t runs_of(int64_t rows) { return (rows + RUN - 1) / RUN; }

// Room for packed weights, kept by the caller's thread: fresh memory costs as much as packing.
Word *room_for(int64_t words) {
  thread_local std::vector<Word> room;
  room.resize(std::max<size_t>(room.size(), words));
  return room.data();
}

}  // namespace

extern "C" {

// x (rows, inputs), weight (outputs, inputs), bias (outputs,) to y (rows, outputs). All widths here
// are multiples of 64.
void linear(int64_t rows, int64_t inputs, int64_t outputs, const Half *x, const float *weight,
            const float *bias, Half *y, int threads) {
  Map map{inputs, outputs, weight, bias, room_for(inputs / 2 * outputs)};
  spread(map.panels(), threads, [&](int64_t panel) { map.pack(panel); });
  spread(runs_of(rows), threads, [&](int64_t run) {
    int64_t first = run * RUN;
    apply<Plain>(map, x + first * inputs, std::min(RUN, rows - first), y + first * outputs);
  });
}

// x (rows, width), inner_weight (middle, width), outer_weight (width, middle) to y (rows, width).
void silu_mlp(int64_t rows, int64_t width, int64_t middle, const Half *x, const float *inner_weight,
              const float *inner_bias, const float *outer_weight, const float *outer_bias, Half *y,
              int threads) {
  Word *room = room_for(width * middle);
  Map inner{width, middle, inner_weight, inner_bias, room};
  Map outer{middle, width, outer_weight, outer_bias, room + width / 2 * middle};
  spread(inner.panels() + outer.panels(), threads, [&](int64_t panel) {
    panel < inner.panels() ? inner.pack(panel) : outer.pack(panel - inner.panels());
  });
  spread(runs_of(rows), threads, [&](int64_t run) {
    int64_t first = run * RUN, count = std::min(RUN, rows - first);
    thread_local std::vector<Half> between;
    between.resize(std::max<size_t>(between.size(), RUN * middle));
    apply<Silu>(inner, x + first * width, count, between.data());
    apply<Plain>(outer, between.data(), count, y + first * width);
  });
}
}
