// A decode step's products and attention on a CPU, float32. kernels.py compiles and calls them.
//
// XLA runs the products of one slot and head on one thread, and between two products of a layer its
// other threads fall asleep. Here all cores share every call, and the MLP's inner result is the
// next product's operand where it lies. Every number is summed in one order, whoever sums it and
// whatever other rows there are.

#include <sched.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;
using Floats = ffi::Buffer<ffi::F32>;
using Result = ffi::ResultBuffer<ffi::F32>;

namespace {

// A vector of floats, and how many of them a product of eight rows keeps in registers.
#ifdef __AVX512F__
constexpr int64_t kLanes = 16, kVectors = 2;
#else
constexpr int64_t kLanes = 8, kVectors = 1;
#endif
constexpr int64_t kRows = 8;
typedef float Vector __attribute__((vector_size(kLanes * 4), aligned(4)));
typedef int32_t Integers __attribute__((vector_size(kLanes * 4)));

int64_t Ceiling(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Threads that take tasks together with the caller; they look for more for a while, then sleep.
class Pool {
 public:
  Pool() {
    cpu_set_t mine;
    int cores = sched_getaffinity(0, sizeof(mine), &mine) ? 1 : CPU_COUNT(&mine);
    // More have nothing to do: a step's work is small.
    for (num_threads_ = 1; num_threads_ < std::min(cores, 16); num_threads_++)
      std::thread([this] { Work(); }).detach();
  }

  template <class Task>
  void Run(int64_t num_tasks, const Task& task) {
    std::unique_lock<std::mutex> only(running_, std::try_to_lock);
    if (num_threads_ == 1 || num_tasks == 1 || !only) {
      for (int64_t i = 0; i < num_tasks; i++) task(i);
      return;
    }
    call_ = [](const void* task, int64_t i) { (*static_cast<const Task*>(task))(i); };
    task_ = &task;
    num_tasks_ = num_tasks;
    next_ = 0;
    round_++;
    round_.notify_all();
    Take();
    // All are taken; whoever comes now finds none, also while the next round is being set up.
    next_ = std::numeric_limits<int64_t>::max() / 2;
    // Whoever is at work may have lost its core to another process, or share this one.
    for (int looks = 0; busy_; looks++)
      if (looks > 1000) std::this_thread::yield();
  }

 private:
  void Take() {
    for (int64_t i; (i = next_++) < num_tasks_;) call_(task_, i);
  }

  void Work() {
    for (uint64_t seen = 0;;) {
      for (int looks = 0; round_ == seen && looks < 20000; looks++) continue;
      round_.wait(seen);
      seen = round_;
      busy_++;
      Take();
      busy_--;
    }
  }

  int num_threads_;
  std::mutex running_;
  std::atomic<uint64_t> round_{0};
  std::atomic<int64_t> next_{std::numeric_limits<int64_t>::max() / 2};
  std::atomic<int> busy_{0};
  int64_t num_tasks_ = 0;
  void (*call_)(const void*, int64_t) = nullptr;
  const void* task_ = nullptr;
};

// Runs task(first, last) over [0, size) in pieces: multiples of `unit` of about 2^18 operations.
template <class Task>
void Share(int64_t size, int64_t unit, int64_t operations, const Task& task) {
  static Pool* pool = new Pool;  // never destroyed: its threads outlive main
  int64_t piece = unit * std::max<int64_t>(1, (1 << 18) / std::max<int64_t>(1, unit * operations));
  pool->Run(Ceiling(size, piece),
            [&](int64_t i) { task(i * piece, std::min(size, (i + 1) * piece)); });
}

// Returns memory of this thread for a call (0) or a task of one (1), from a cache line on.
float* Scratch(int which, int64_t size) {
  static thread_local std::vector<float> memory[2];
  if (static_cast<int64_t>(memory[which].size()) < size + 16) memory[which].resize(size + 16);
  uintptr_t begin = reinterpret_cast<uintptr_t>(memory[which].data());
  return reinterpret_cast<float*>((begin + 63) / 64 * 64);
}

// result[r] = sum over k of row[r][k] * x[k * stride ...], V vectors wide.
template <int64_t R, int64_t V>
inline void Products(const float* const* row, int64_t K, const float* x, int64_t stride,
                     Vector (*result)[V]) {
  constexpr int64_t kLine = 16, kAhead = 4 * kLine;
  const float* rows[R];
  std::copy(row, row + R, rows);
  Vector sums[R][V] = {};
  auto step = [&](int64_t k) __attribute__((always_inline)) {
    Vector part[V];
    for (int64_t v = 0; v < V; v++)
      std::memcpy(&part[v], x + k * stride + v * kLanes, sizeof(Vector));
    for (int64_t r = 0; r < R; r++)
      for (int64_t v = 0; v < V; v++) sums[r][v] += part[v] * rows[r][k];
  };
  int64_t k = 0;
  while (k + kLine <= K) {
    // Weights are read once, from memory, in more streams than the processor foresees: four lines
    // ahead in each, and near a row's end in the row that comes R later.
    int64_t ahead = k + kAhead < K ? k + kAhead : k + kAhead + (R - 1) * K;
    for (int64_t r = 0; r < R; r++) __builtin_prefetch(rows[r] + ahead);
    for (int64_t end = k + kLine; k < end; k++) step(k);
  }
  for (; k < K; k++) step(k);
  std::memcpy(result, sums, sizeof(sums));
}

// exp, of what lies outside [-87, 88] that of the nearer end: 2^n times a polynomial in the rest
// (Cephes' coefficients), within 2 units in the last place.
inline Vector Exp(Vector x) {
  x = x < -87.f ? Vector{} - 87.f : x;
  x = x > 88.f ? Vector{} + 88.f : x;
  Vector n = (x * 1.44269504f + 12582912.f) - 12582912.f;  // rounds to an integer
  Vector r = x - n * 0.693359375f + n * 2.12194440e-4f;
  Vector p = r * 1.9875691500e-4f + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.f;
  return p * (Vector)((__builtin_convertvector(n, Integers) + 127) << 23);
}

// Rows become columns: halves of ever larger blocks off the diagonal are exchanged.
template <int64_t kHalf, size_t... I>
inline void Exchange(Vector& a, Vector& b, std::index_sequence<I...>) {
  Vector first = __builtin_shufflevector(a, b, (I & kHalf ? kLanes + I - kHalf : I)...);
  b = __builtin_shufflevector(a, b, (I & kHalf ? kLanes + I : I + kHalf)...);
  a = first;
}

template <int64_t kHalf = kLanes / 2>
inline void Transpose(Vector (&rows)[kLanes]) {
  for (int64_t i = 0; i < kLanes; i++)
    if (!(i & kHalf)) Exchange<kHalf>(rows[i], rows[i + kHalf], std::make_index_sequence<kLanes>());
  if constexpr (kHalf > 1) Transpose<kHalf / 2>(rows);
}

// Rows [S, K] turned into groups of V vectors of them, each [K, V * kLanes]; missing rows are zero.
template <int64_t V>
void Turn(const float* x, int64_t S, int64_t K, float* turned) {
  constexpr int64_t kColumns = V * kLanes;
  Share(K, kLanes, 64 * S, [&](int64_t first, int64_t last) {
    for (int64_t s = 0; s < Ceiling(S, kColumns) * kColumns; s += kLanes)
      for (int64_t k = first; k < last; k += kLanes) {
        int64_t size = std::min(kLanes, last - k);
        Vector block[kLanes] = {};
        for (int64_t i = 0; i < std::min(kLanes, S - s); i++)
          std::memcpy(&block[i], x + (s + i) * K + k, size * 4);
        Transpose(block);
        float* to = turned + s / kColumns * kColumns * K + k * kColumns + s % kColumns;
        for (int64_t i = 0; i < size; i++)
          std::memcpy(to + i * kColumns, &block[i], sizeof(Vector));
      }
  });
}

// y [S, N] = x [S, K] weight^T, `turned` being x's.
template <int64_t V>
void Multiply(const float* turned, int64_t S, int64_t K, const float* weight, int64_t N, float* y) {
  // Threads write whole cache lines of y.
  Share(N, 16, S * K, [&](int64_t first, int64_t last) {
    for (int64_t n = first; n < last; n += kLanes) {
      int64_t rows = std::min(kLanes, last - n);
      for (int64_t s = 0; s < S; s += V * kLanes) {
        Vector sums[kLanes][V];
        for (int64_t begin = 0; begin < rows; begin += kRows) {
          const float* row[kRows];
          for (int64_t r = 0; r < kRows; r++)
            row[r] = weight + (n + std::min(begin + r, rows - 1)) * K;
          Products<kRows, V>(row, K, turned + s * K, V * kLanes, sums + begin);
        }
        for (int64_t v = 0; v < V; v++) {
          Vector block[kLanes];
          for (int64_t i = 0; i < kLanes; i++) block[i] = sums[i][v];
          Transpose(block);
          for (int64_t i = 0, c = s + v * kLanes; i < kLanes && c + i < S; i++)
            std::memcpy(y + (c + i) * N + n, &block[i], rows * 4);
        }
      }
    }
  });
}

template <int64_t V>
void Product(Floats x, Floats weight, Result y) {
  int64_t N = weight.dimensions()[0], K = weight.dimensions()[1], S = x.element_count() / K;
  float* turned = Scratch(0, Ceiling(S, V * kLanes) * V * kLanes * K);
  Turn<V>(x.typed_data(), S, K, turned);
  Multiply<V>(turned, S, K, weight.typed_data(), N, y->typed_data());
}

template <int64_t V>
void MLP(Floats x, Floats gate, Floats up, Floats down, Result y) {
  constexpr int64_t kColumns = V * kLanes, kHalf = kRows / 2;  // rows of the gate, as many of `up`
  int64_t F = gate.dimensions()[0], D = gate.dimensions()[1], S = x.element_count() / D;
  int64_t columns = Ceiling(S, kColumns) * kColumns;
  float *turned = Scratch(0, columns * (D + F)), *hidden = turned + columns * D;
  Turn<V>(x.typed_data(), S, D, turned);
  Share(F, kHalf, 2 * S * D, [&](int64_t first, int64_t last) {
    for (int64_t f = first; f < last; f += kHalf) {
      const float* row[kRows];
      int64_t rows = std::min(kHalf, last - f);
      for (int64_t r = 0; r < kHalf; r++) {
        row[r] = gate.typed_data() + (f + std::min(r, rows - 1)) * D;
        row[kHalf + r] = up.typed_data() + (f + std::min(r, rows - 1)) * D;
      }
      for (int64_t s = 0; s < S; s += kColumns) {
        Vector sums[kRows][V];
        Products<kRows, V>(row, D, turned + s * D, kColumns, sums);
        for (int64_t r = 0; r < rows; r++)
          for (int64_t v = 0; v < V; v++) {
            Vector g = sums[r][v], h = g * sums[kHalf + r][v] / (1.f + Exp(-g));
            std::memcpy(hidden + s * F + (f + r) * kColumns + v * kLanes, &h, sizeof(h));
          }
      }
    }
  });
  Multiply<V>(hidden, S, F, down.typed_data(), D, y->typed_data());
}

// Few rows fill one vector.
ffi::Error ProductImpl(Floats x, Floats weight, Result y) {
  bool few = x.element_count() / weight.dimensions()[1] <= kLanes;
  (few ? Product<1> : Product<kVectors>)(x, weight, y);
  return ffi::Error::Success();
}

ffi::Error MLPImpl(Floats x, Floats gate, Floats up, Floats down, Result y) {
  bool few = x.element_count() / gate.dimensions()[1] <= kLanes;
  (few ? MLP<1> : MLP<kVectors>)(x, gate, up, down, y);
  return ffi::Error::Success();
}

struct Block {
  const float *keys, *values;  // of one slot and head: [H, size] and [size, H]
  int64_t size;
  int64_t used = 0;  // positions up to the last that is seen, and as many more as are as fast
  int64_t at = 0;    // the place of their scores
  // Of its positions, those in [first, end) are seen that `seen` says, if there is one.
  int64_t first = 0, end = 0;
  const bool* seen = nullptr;
};

// Adds a block behind the others, if anything of it is seen; its scores get whole vectors.
void Add(std::vector<Block>& blocks, Block block) {
  if (block.seen)
    while (block.end > 0 && !block.seen[block.end - 1]) block.end--;
  if (block.first >= block.end) return;
  int64_t whole = Ceiling(block.end, kLanes) * kLanes;
  block.used = std::min(block.size, whole);
  if (!blocks.empty()) {
    const Block& last = blocks.back();
    block.at = last.at + Ceiling(last.used, kLanes) * kLanes;
  }
  blocks.push_back(block);
}

// R x N products of rows with `x` [K, N], `stride` apart, added to `out` where it is asked for.
template <int64_t R>
void Rows(const float* const* row, int64_t K, const float* x, int64_t N, int64_t stride,
          float* const* out, bool add) {
  auto wide = [&]<int64_t V>(int64_t n, std::integral_constant<int64_t, V>) {
    for (; n + V * kLanes <= N; n += V * kLanes) {
      Vector sums[R][V];
      Products<R, V>(row, K, x + n, stride, sums);
      for (int64_t r = 0; r < R; r++)
        for (int64_t v = 0; v < V; v++) {
          float* to = out[r] + n + v * kLanes;
          Vector before{};
          if (add) std::memcpy(&before, to, sizeof(before));
          before += sums[r][v];
          std::memcpy(to, &before, sizeof(before));
        }
    }
    return n;
  };
  constexpr int64_t kMost = R < 4 ? 4 : 2;
  int64_t n = wide(0, std::integral_constant<int64_t, kMost>());
  n = wide(n, std::integral_constant<int64_t, 2>());
  n = wide(n, std::integral_constant<int64_t, 1>());
  for (; n < N; n++)
    for (int64_t r = 0; r < R; r++) {
      float sum = 0.f;
      for (int64_t k = 0; k < K; k++) sum += row[r][k] * x[k * stride + n];
      out[r][n] = add ? out[r][n] + sum : sum;
    }
}

// Turns scores into weights that sum to one; those of what is not seen, or fills a block's last
// vector up, are zero.
void Softmax(float* scores, const std::vector<Block>& blocks, float scale) {
  constexpr float kUnseen = -1e30f;
  int64_t whole = 0;
  for (const Block& block : blocks) {
    float* mine = scores + block.at;
    int64_t end = std::min(block.end, block.used);
    std::fill(mine, mine + block.first, kUnseen);
    std::fill(mine + end, mine + block.used, kUnseen);
    for (int64_t i = block.first; i < end; i++)
      mine[i] = !block.seen || block.seen[i] ? mine[i] * scale : kUnseen;
    whole = block.at + Ceiling(block.used, kLanes) * kLanes;
    std::fill(mine + block.used, scores + whole, kUnseen);
  }
  Vector most = Vector{} + kUnseen, sum{};
  auto each = [&](auto function) {
    for (int64_t i = 0; i < whole; i += kLanes) {
      Vector part;
      std::memcpy(&part, scores + i, sizeof(part));
      part = function(part);
      std::memcpy(scores + i, &part, sizeof(part));
    }
  };
  each([&](Vector part) {
    most = part > most ? part : most;
    return part;
  });
  float top = kUnseen, total = 0.f;
  for (int64_t i = 0; i < kLanes; i++) top = std::max(top, most[i]);
  each([&](Vector part) {
    part = part <= kUnseen ? Vector{} : Exp(part - top);
    sum += part;
    return part;
  });
  for (int64_t i = 0; i < kLanes; i++) total += sum[i];
  each([&](Vector part) { return part / total; });
}

// R queries of one slot and head. Queries and results lie H apart.
template <int64_t R>
void Attend(const float* q, int64_t H, const std::vector<Block>& blocks, float* y) {
  std::fill(y, y + R * H, 0.f);
  if (blocks.empty()) return;
  int64_t whole = blocks.back().at + Ceiling(blocks.back().used, kLanes) * kLanes;
  float *scores = Scratch(1, R * whole), *to[R];
  const float* from[R];
  for (const Block& block : blocks) {
    for (int64_t r = 0; r < R; r++) {
      from[r] = q + r * H;
      to[r] = scores + r * whole + block.at;
    }
    Rows<R>(from, H, block.keys, block.used, block.size, to, false);
  }
  for (int64_t r = 0; r < R; r++)
    Softmax(scores + r * whole, blocks, 1.f / std::sqrt(static_cast<float>(H)));
  for (const Block& block : blocks) {
    for (int64_t r = 0; r < R; r++) {
      from[r] = scores + r * whole + block.at;
      to[r] = y + r * H;
    }
    Rows<R>(from, block.used, block.values, H, H, to, true);
  }
}

using Ints = ffi::Buffer<ffi::S32>;

// q and y [S, Q, N, H]; pages of keys [pages, K, H, P] and of values; table [S, pages of a slot];
// the positions [firsts, ends) of the pages are seen, [S, Q] and [S]; recent keys [S, K, H, R] and
// values, of which `seen` [S, Q, R].
ffi::Error AttentionImpl(Floats q, Floats keys, Floats values, Ints table, Ints firsts, Ints ends,
                         Floats recent_keys, Floats recent_values, ffi::Buffer<ffi::PRED> seen,
                         Result y) {
  auto size = q.dimensions();
  int64_t S = size[0], Q = size[1], N = size[2], H = size[3];
  int64_t K = keys.dimensions()[1], P = keys.dimensions()[3], pages = table.dimensions()[1];
  int64_t recent = seen.dimensions()[2], group = N / K, held = 0;
  for (int64_t s = 0; s < S; s++) held += ends.typed_data()[s] + recent;
  Share(S * K, 1, 2 * Q * group * held / S * H, [&](int64_t first, int64_t last) {
    std::vector<Block> mine;
    for (int64_t i = first; i < last; i++) {
      int64_t s = i / K, head = i % K, end = ends.typed_data()[s];
      const int32_t* row = table.typed_data() + s * pages;
      for (int64_t place = s * Q; place < (s + 1) * Q; place++) {
        mine.clear();
        int64_t from = firsts.typed_data()[place];
        for (int64_t p = from / P; p * P < end; p++) {
          int64_t at = (row[p] * K + head) * H * P;
          Block page{keys.typed_data() + at, values.typed_data() + at, P};
          page.first = std::max<int64_t>(0, from - p * P);
          page.end = std::min(P, end - p * P);
          Add(mine, page);
        }
        int64_t at = i * H * recent;
        Block last_ones{recent_keys.typed_data() + at, recent_values.typed_data() + at, recent};
        last_ones.end = recent;
        last_ones.seen = seen.typed_data() + place * recent;
        Add(mine, last_ones);
        for (int64_t g = 0; g < group;) {
          int64_t to = (place * N + head * group + g) * H, left = group - g;
          const float* asks = q.typed_data() + to;
          float* gets = y->typed_data() + to;
          if (left >= 4) {
            Attend<4>(asks, H, mine, gets);
            g += 4;
          } else if (left >= 2) {
            Attend<2>(asks, H, mine, gets);
            g += 2;
          } else {
            Attend<1>(asks, H, mine, gets);
            g += 1;
          }
        }
      }
    }
  });
  return ffi::Error::Success();
}

}  // namespace

using Call = ffi::Ffi;
XLA_FFI_DEFINE_HANDLER_SYMBOL(product, ProductImpl,
                              Call::Bind().Arg<Floats>().Arg<Floats>().Ret<Floats>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(
    mlp, MLPImpl,
    Call::Bind().Arg<Floats>().Arg<Floats>().Arg<Floats>().Arg<Floats>().Ret<Floats>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(attention, AttentionImpl,
                              Call::Bind()
                                  .Arg<Floats>()
                                  .Arg<Floats>()
                                  .Arg<Floats>()
                                  .Arg<Ints>()
                                  .Arg<Ints>()
                                  .Arg<Ints>()
                                  .Arg<Floats>()
                                  .Arg<Floats>()
                                  .Arg<ffi::Buffer<ffi::PRED>>()
                                  .Ret<Floats>());
