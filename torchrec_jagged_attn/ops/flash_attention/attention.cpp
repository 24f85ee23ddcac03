// Attention within each sample of a jagged batch on a CPU, and its gradients. `cpu.py` prepares the
// operands. Each core computes one sample at a time, and all cores share large samples. Products
// and softmax are PyTorch's operators, or loops for small samples, where calls of operators would
// take longer than their work. With a window, a sample is split into blocks of queries, each with
// the keys in their windows.
//
// Shapes: `q` [ΣLq, H, D] and gradients of outputs are contiguous and in the dtype of sums, `q` is
// scaled; `k` [ΣLk, K, D] and `v` [ΣLk, K, Dv] have any dtype. A sample is the rows between two
// offsets. G = H / K heads of queries read one head of keys, so a product of a sample has Lq · G
// rows of queries. With one head of keys, as in target attention, all tensors of a sample are
// matrices.

#include <ATen/ATen.h>
#include <ATen/Dispatch.h>
#include <ATen/Parallel.h>
#include <torch/library.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <limits>
#include <optional>
#include <utility>
#include <tuple>
#include <vector>

namespace {

using at::Tensor;
using std::optional;

// Loops compute samples whose products have up to LOOPED_WORK multiply-adds. From SHARED_WORK on,
// all cores share a sample.
constexpr int64_t LOOPED_WORK = int64_t{1} << 12;
constexpr int64_t SHARED_WORK = int64_t{1} << 24;

struct Sample {
  int64_t q_begin, q_end, k_begin, k_end;
  int64_t distances_begin;  // max(Lq, Lk) distances per sample
  int64_t queries() const { return q_end - q_begin; }
  int64_t keys() const { return k_end - k_begin; }
  int64_t distances() const { return std::max(queries(), keys()); }
};

// Samples with keys. Outputs and gradients of the others are zeros.
std::vector<Sample> samples_of(const Tensor& q_offsets, const Tensor& kv_offsets) {
  const Tensor q = q_offsets.to(at::kLong).contiguous(), k = kv_offsets.to(at::kLong).contiguous();
  const int64_t *q_at = q.const_data_ptr<int64_t>(), *k_at = k.const_data_ptr<int64_t>();
  std::vector<Sample> samples;
  int64_t distances = 0;
  for (int64_t b = 0; b + 1 < q.numel(); ++b) {
    const Sample s{q_at[b], q_at[b + 1], k_at[b], k_at[b + 1], distances};
    distances += s.distances();
    if (s.keys()) samples.push_back(s);
  }
  return samples;
}

// Number of queries of a block, with a window.
int64_t block_size(int64_t window) { return std::max(window, int64_t{64}); }

// Blocks of the queries of a sample, each with all keys in the windows of its queries. Queries and
// keys of a block end at the same position, as in a sample, so a block is computed like a sample.
std::vector<Sample> blocks_of(const Sample& s, int64_t window) {
  std::vector<Sample> blocks;
  for (int64_t begin = 0; begin < s.queries(); begin += block_size(window)) {
    const int64_t end = std::min(begin + block_size(window), s.queries());
    const int64_t ahead = s.keys() - s.queries();  // offset from the row of a query to its own key
    const int64_t k_end = ahead + end, k_begin = std::max(ahead + begin + 1 - window, int64_t{0});
    if (k_end <= 0) continue;
    blocks.push_back({s.q_begin + begin, s.q_begin + end, s.k_begin + k_begin, s.k_begin + k_end,
                      s.distances_begin});
  }
  return blocks;
}

// The samples or, with a window, their blocks.
std::vector<Sample> split_into_blocks(const std::vector<Sample>& samples, int64_t window) {
  if (window == 0) return samples;
  std::vector<Sample> blocks;
  for (const Sample& s : samples)
    for (const Sample& block : blocks_of(s, window)) blocks.push_back(block);
  return blocks;
}

// Calls `work` for each sample: first large samples, with all cores, then the others, with one core
// each. Whether a sample is large depends only on the sample, so its bits do not depend on the
// batch.
template <class Work>
void for_each(const std::vector<Sample>& samples, int64_t row_size, const Work& work) {
  const auto is_large = [&](const Sample& s) {
    return s.queries() * row_size * s.keys() >= SHARED_WORK;
  };
  for (const Sample& s : samples)
    if (is_large(s)) work(s);
  std::atomic<size_t> next{0};
  at::parallel_for(0, at::get_num_threads(), 1, [&](int64_t, int64_t) {
    at::AutoDispatchBelowADInplaceOrView guard;  // threads do not inherit that of the caller
    for (size_t i; (i = next++) < samples.size();)
      if (!is_large(samples[i])) work(samples[i]);
  });
}

Tensor product(const Tensor& a, const Tensor& b) { return a.dim() == 2 ? a.mm(b) : a.bmm(b); }

// Writes a product to `out`, which may have another dtype.
void store_product(Tensor out, const Tensor& a, const Tensor& b) {
  if (out.dim() == 2 && out.scalar_type() == a.scalar_type())
    at::mm_out(out, a, b);
  else
    out.copy_(product(a, b));
}

// View of all keys: [ΣLk, D] with one head, else [K, ΣLk, D].
Tensor key_rows(const Tensor& x) { return x.size(1) == 1 ? x.select(1, 0) : x.transpose(0, 1); }

Tensor keys_of(const Tensor& x, const Sample& s) {
  return x.slice(x.dim() - 2, s.k_begin, s.k_end);
}

// [Lq, Lk] distances between queries and keys, where the last of both have the same position.
Tensor distances(const Sample& s) {
  const Tensor rows = at::arange(s.keys() - s.queries(), s.keys());
  return (rows.unsqueeze(1) - at::arange(s.keys())).abs();
}

// Whether the softmax of a row is NaN: all its scores are -inf, or some are NaN or +inf.
bool has_nan(const Tensor& softmax) {
  return AT_DISPATCH_FLOATING_TYPES(softmax.scalar_type(), "has_nan", [&] {
    const scalar_t* const begin = softmax.const_data_ptr<scalar_t>();
    for (int64_t i = 0; i < softmax.numel(); i += softmax.size(-1))
      if (std::isnan(begin[i])) return true;
    return false;
  });
}

// The function from scores to weights, by index into `arguments.SCORES`.
enum Score : int64_t { SOFTMAX, SILU, SIGMOID };
constexpr double LEAST = -1000;  // σ is zero, as for -inf

// Weight and derivative of a score, if weights are elementwise functions of scores.
template <typename T>
std::pair<T, T> weight_and_slope(T x, int64_t score) {
  x = x < T(LEAST) ? T(LEAST) : x;  // NaN stays
  const T power = std::exp(-std::abs(x)), larger = 1 / (1 + power), smaller = power * larger;
  const T sigma = x < 0 ? smaller : larger, opposite = x < 0 ? larger : smaller;
  if (score == SILU) return {x * sigma, sigma * (1 + x * opposite)};
  return {sigma, sigma * opposite};
}

// Dropout of weights, with the draws of `attention/kernels/dropout.py`.
struct Dropout {
  uint64_t seed;
  int64_t threshold;  // weights are dropped if their draw is below
  const int64_t* row_numbers;  // of keys, to draw by in place of their indices

  Dropout(const Tensor& x, const optional<Tensor>& row_numbers)
      : seed(x.const_data_ptr<int64_t>()[0]),
        threshold(x.const_data_ptr<int64_t>()[1]),
        row_numbers(row_numbers ? row_numbers->const_data_ptr<int64_t>() : nullptr) {}

  double factor() const { return double(int64_t{1} << 32) / ((int64_t{1} << 32) - threshold); }

  uint32_t draw_of_query(int64_t r) const {
    uint64_t x = seed + (r + 1) * 0x9E3779B97F4A7C15;
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB;
    return (x ^ (x >> 31)) >> 32;
  }

  bool is_dropped(uint32_t draw, int64_t n) const {
    uint32_t x = draw ^ uint32_t(row_numbers ? row_numbers[n] : n) * 0x9E3779B1;
    x = (x ^ (x >> 16)) * 0x85EBCA6B;
    x = (x ^ (x >> 13)) * 0xC2B2AE35;
    return (x ^ (x >> 16)) < threshold;
  }
};

optional<Dropout> make_dropout(const optional<Tensor>& dropout,
                               const optional<Tensor>& row_numbers) {
  return dropout ? optional<Dropout>(std::in_place, *dropout, row_numbers) : std::nullopt;
}

struct Attention {
  int64_t heads, key_heads;
  optional<Tensor> bias;           // [H, ΣLk], added to scores
  optional<Tensor> distance_bias;  // [distances, H], added to scores
  bool causal;
  int64_t window;  // maximum number of keys of a query; 0 for all
  int64_t score;
  optional<Dropout> dropout;
  int64_t first_key = 0;  // index of the first key in the batch

  // The same attention, for keys `begin` to `end` only.
  Attention slice_keys(int64_t begin, int64_t end) const {
    Attention sliced = *this;
    sliced.first_key += begin;
    if (bias) sliced.bias = bias->slice(1, begin, end).contiguous();
    return sliced;
  }

  bool is_small(const Sample& s, int64_t width) const {
    return s.queries() * heads * width * s.keys() <= LOOPED_WORK;
  }

  // View of all queries: [ΣLq · H, D] with one head of keys, else [K, ΣLq, G, D].
  Tensor query_rows(const Tensor& x) const {
    if (key_heads == 1) return x.reshape({x.size(0) * heads, x.size(2)});
    return x.unflatten(1, {key_heads, heads / key_heads}).transpose(0, 1);
  }

  // The rows of a sample in `query_rows`: [Lq · H, D] or [K, Lq · G, D].
  Tensor queries_of(const Tensor& rows, const Sample& s) const {
    if (key_heads == 1) return rows.slice(0, s.q_begin * heads, s.q_end * heads);
    return rows.slice(1, s.q_begin, s.q_end).flatten(1, 2);
  }

  // Writes a product to the rows of a sample.
  void store_queries(const Tensor& rows, const Sample& s, const Tensor& a, const Tensor& b) const {
    if (key_heads == 1) return store_product(queries_of(rows, s), a, b);
    const Tensor out = rows.slice(1, s.q_begin, s.q_end);
    out.copy_(a.bmm(b).view(out.sizes()));
  }

  // View of scores, weights or their gradients in a sample as [K, Lq, G, Lk].
  Tensor pair_view(const Tensor& x, const Sample& s) const {
    return x.view({key_heads, s.queries(), heads / key_heads, s.keys()});
  }

  // Softmax over the keys of a sample: zeros for rows whose scores are all -inf, NaN for rows with
  // a score of NaN or +inf. Adds biases to `scores`.
  Tensor weights(const Tensor& scores, const Sample& s) const {
    if (bias || distance_bias || causal) add_biases(pair_view(scores, s), s);
    const Tensor p = at::_softmax(scores, -1, false);
    return has_nan(p) ? at::_safe_softmax(scores, -1) : p;
  }

  // Elementwise weights and their derivatives. Adds biases to `scores`.
  std::pair<Tensor, Tensor> weights_and_slopes(const Tensor& scores, const Sample& s) const {
    if (bias || distance_bias || causal) add_biases(pair_view(scores, s), s);
    const Tensor x = scores.clamp_min(LEAST), sigma = at::sigmoid(x), opposite = at::sigmoid(-x);
    if (score == SILU) return {x * sigma, sigma * (1 + x * opposite)};
    return {sigma, sigma * opposite};
  }

  // Adds biases to scores [K, Lq, G, Lk], and sets scores of masked keys to -inf.
  void add_biases(Tensor x, const Sample& s) const {
    if (bias) {
      const Tensor key_bias = bias->slice(1, s.k_begin, s.k_end);
      x.add_(key_bias.view({key_heads, 1, heads / key_heads, s.keys()}));
    }
    if (distance_bias) {
      const Tensor pair_bias = distance_bias->index({distances(s)});  // [Lq, Lk, H]
      x.add_(pair_bias.permute({2, 0, 1}).unflatten(0, {key_heads, -1}).transpose(1, 2));
    }
    if (causal) {
      const Tensor pairs = at::ones({s.queries(), s.keys()}, at::kBool);
      Tensor mask = pairs.triu(s.keys() - s.queries() + 1);
      if (window > 0) mask.logical_or_(pairs.tril(s.keys() - s.queries() - window));
      x.masked_fill_(mask.unsqueeze(1), -std::numeric_limits<double>::infinity());
    }
  }

  // Dropout of the weights of query `i` and head `h` for keys `from` to `to` of a sample.
  template <typename T>
  void drop(T* x, const Sample& s, int64_t i, int64_t h, int64_t from, int64_t to) const {
    if (!dropout) return;
    const uint32_t draw = dropout->draw_of_query((s.q_begin + i) * heads + h);
    const int64_t first = first_key + s.k_begin;
    const T factor = dropout->factor();
    for (int64_t j = from; j < to; ++j) x[j] *= dropout->is_dropped(draw, first + j) ? 0 : factor;
  }

  // Dropout of all weights of a sample, or of their gradients, which are contiguous.
  void drop_all(const Tensor& x, const Sample& s) const {
    if (!dropout) return;
    const int64_t group = heads / key_heads, rows = s.queries() * group, keys = s.keys();
    AT_DISPATCH_FLOATING_TYPES(x.scalar_type(), "drop_all", [&] {
      scalar_t* const data = x.data_ptr<scalar_t>();
      at::parallel_for(0, key_heads * rows, 1, [&](int64_t begin, int64_t end) {
        for (int64_t row = begin; row < end; ++row) {
          const int64_t head = row / rows * group + row % group;
          drop(data + row * keys, s, row % rows / group, head, 0, keys);
        }
      });
    });
  }

  // View of one value per row of a product as [Lq, H].
  Tensor by_head(const Tensor& x, const Sample& s) const {
    return x.view({key_heads, s.queries(), heads / key_heads}).transpose(0, 1).flatten(1);
  }
};

// Pointers to the rows of a tensor [rows, heads, width] whose elements are contiguous in a row.
template <typename T>
struct Rows {
  T* data;
  int64_t row, head;
  explicit Rows(const Tensor& x)
      : data(x.data_ptr<T>()), row(x.stride(0)), head(x.stride(1)) {}
  T* at(int64_t i, int64_t h) const { return data + i * row + h * head; }
};

// Whether loops support `x`.
bool fits_loops(const Tensor& x, at::ScalarType dtype) {
  return x.scalar_type() == dtype && (x.stride(2) == 1 || x.size(2) == 1);
}

// The library runs on any processor, and uses vectors of 256 bits if there are any.
#if defined(__x86_64__) && defined(__linux__)
#define WIDE_VECTORS __attribute__((target_clones("arch=haswell", "default")))
#else
#define WIDE_VECTORS
#endif

template <typename T>
WIDE_VECTORS T dot(const T* a, const T* b, int64_t size) {
  T sum = 0;
#pragma omp simd reduction(+ : sum)
  for (int64_t i = 0; i < size; ++i) sum += a[i] * b[i];
  return sum;
}

template <typename T>
WIDE_VECTORS void add(T* to, T factor, const T* x, int64_t size) {
#pragma omp simd
  for (int64_t i = 0; i < size; ++i) to[i] += factor * x[i];
}

// Keys, values and their gradients, of the whole batch or of one block.
struct Keys {
  Tensor k, v, grad_k;
  optional<Tensor> grad_v, grad_bias;  // grad_bias: [H, ΣLk]
  Tensor k_rows = key_rows(k), v_rows = key_rows(v), grad_k_rows = key_rows(grad_k);
  Tensor grad_v_rows = grad_v ? key_rows(*grad_v) : grad_k_rows;

  bool fit_loops(at::ScalarType dtype) const {
    return fits_loops(k, dtype) && fits_loops(v, dtype) && fits_loops(grad_k, dtype) &&
           (!grad_v || fits_loops(*grad_v, dtype));
  }
};

// Queries and gradients of their outputs. Gradients of log-sum-exps are [ΣLq, H], and zeros for
// rows whose scores are all -inf.
struct Queries {
  const Attention& attention;
  const Tensor& grad_out;
  const optional<Tensor>& grad_lse;
  const Tensor &q, &grad_q;
  const optional<Tensor>& grad_distance_bias;
  Tensor q_rows = attention.query_rows(q), grad_q_rows = attention.query_rows(grad_q);
  Tensor grad_out_rows = attention.query_rows(grad_out);
};

// Attention of one sample by loops over queries and keys.
template <typename T>
struct Loops {
  const Attention& attention;
  const Sample& s;
  int64_t num_keys, width, value_width;  // num_keys: of the batch
  const T* bias;  // as in `attention`
  const T* distance_bias;
  std::vector<T> p = std::vector<T>(s.keys()), ds = p, slopes = p;  // of one query and head

  Loops(const Attention& attention, const Sample& s, const Tensor& k, const Tensor& v)
      : attention(attention), s(s), num_keys(k.size(0)), width(k.size(2)), value_width(v.size(2)),
        bias(attention.bias ? attention.bias->const_data_ptr<T>() : nullptr),
        distance_bias(attention.distance_bias ? attention.distance_bias->const_data_ptr<T>()
                                              : nullptr) {}

  int64_t distance(int64_t i, int64_t j) const {
    return std::abs(s.keys() - s.queries() + i - j);
  }

  // The end of the keys that query `i` attends to.
  int64_t visible_end(int64_t i) const {
    if (!attention.causal) return s.keys();
    return std::clamp(s.keys() - s.queries() + i + 1, int64_t{0}, s.keys());
  }

  // The first key that query `i` attends to.
  int64_t visible_begin(int64_t i) const {
    return attention.window > 0 ? std::max(visible_end(i) - attention.window, int64_t{0}) : 0;
  }

  // Sets `p` to the weights of query `i` and head `h`. Returns the largest score, and 1 / sum of
  // the softmax, or 0 if all scores are -inf. For elementwise weights, also sets `slopes`, and
  // returns 0 and 1.
  std::pair<T, T> compute_weights(const T* q, const Rows<T>& k, int64_t i, int64_t h) {
    const int64_t heads = attention.heads, group = heads / attention.key_heads;
    const int64_t from = visible_begin(i), end = visible_end(i);
    T largest = -std::numeric_limits<T>::infinity();
    double sum = 0;
    for (int64_t j = from; j < end; ++j) {
      p[j] = dot(q, k.at(s.k_begin + j, h / group), width);
      if (bias) p[j] += bias[h * num_keys + s.k_begin + j];
      if (distance_bias) p[j] += distance_bias[distance(i, j) * heads + h];
      largest = p[j] > largest || p[j] != p[j] ? p[j] : largest;
    }
    if (attention.score != SOFTMAX) {
      for (int64_t j = from; j < end; ++j)
        std::tie(p[j], slopes[j]) = weight_and_slope(p[j], attention.score);
      return {T{0}, T{1}};
    }
    if (largest == -std::numeric_limits<T>::infinity()) {
      std::fill(p.begin() + from, p.begin() + end, T{0});
      return {largest, T{0}};
    }
    for (int64_t j = from; j < end; ++j) sum += p[j] = std::exp(p[j] - largest);
    for (int64_t j = from; j < end; ++j) p[j] /= T(sum);
    return {largest, T(1 / sum)};
  }

  void forward(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& out,
               const Tensor& stats) {
    const Rows<T> q_rows(q), k_rows(k), v_rows(v), out_rows(out);
    const int64_t group = attention.heads / attention.key_heads;
    for (int64_t i = 0; i < s.queries(); ++i)
      for (int64_t h = 0; h < attention.heads; ++h) {
        const auto [largest, inverse] = compute_weights(q_rows.at(s.q_begin + i, h), k_rows, i, h);
        T* const out_row = out_rows.at(s.q_begin + i, h);
        attention.drop(p.data(), s, i, h, visible_begin(i), visible_end(i));
        for (int64_t j = visible_begin(i), end = visible_end(i); j < end; ++j)
          add(out_row, p[j], v_rows.at(s.k_begin + j, h / group), value_width);
        if (stats.numel() == 0) continue;
        T* const stat = stats.data_ptr<T>() + (s.q_begin + i) * attention.heads + h;
        stat[0] = largest;
        stat[stats.stride(0)] = inverse;
      }
  }

  void backward(const Queries& queries, const Keys& keys) {
    const Rows<T> grad_out_rows(queries.grad_out), q_rows(queries.q), grad_q_rows(queries.grad_q);
    const Rows<T> k_rows(keys.k), v_rows(keys.v), grad_k_rows(keys.grad_k);
    const Rows<T> grad_v_rows(keys.grad_v ? *keys.grad_v : keys.grad_k);
    const optional<Tensor>&grad_lse = queries.grad_lse, &grad_bias = keys.grad_bias;
    const optional<Tensor>& grad_distance_bias = queries.grad_distance_bias;
    const int64_t heads = attention.heads, group = heads / attention.key_heads;
    for (int64_t j = s.k_begin; j < s.k_end; ++j)
      for (int64_t h = 0; h < attention.key_heads; ++h) {
        std::fill_n(grad_k_rows.at(j, h), width, T{0});
        std::fill_n(grad_v_rows.at(j, h), value_width, T{0});
      }
    for (int64_t i = 0; i < s.queries(); ++i)
      for (int64_t h = 0; h < heads; ++h) {
        const T* const q_row = q_rows.at(s.q_begin + i, h);
        const T* const grad_out_row = grad_out_rows.at(s.q_begin + i, h);
        compute_weights(q_row, k_rows, i, h);
        const int64_t from = visible_begin(i), end = visible_end(i);
        double mean = 0;
        for (int64_t j = from; j < end; ++j)
          ds[j] = dot(grad_out_row, v_rows.at(s.k_begin + j, h / group), value_width);
        attention.drop(ds.data(), s, i, h, from, end);
        for (int64_t j = from; j < end; ++j) mean += double{p[j]} * ds[j];
        if (grad_lse) mean -= grad_lse->const_data_ptr<T>()[(s.q_begin + i) * heads + h];
        for (int64_t j = from; j < end; ++j)
          ds[j] = attention.score == SOFTMAX ? T(p[j] * (ds[j] - mean)) : slopes[j] * ds[j];
        attention.drop(p.data(), s, i, h, from, end);
        for (int64_t j = from; j < end; ++j) {
          const int64_t row = s.k_begin + j, head = h / group;
          add(grad_q_rows.at(s.q_begin + i, h), ds[j], k_rows.at(row, head), width);
          add(grad_k_rows.at(row, head), ds[j], q_row, width);
          add(grad_v_rows.at(row, head), p[j], grad_out_row, value_width);
          if (grad_bias) grad_bias->data_ptr<T>()[h * num_keys + row] += ds[j];
          if (!grad_distance_bias) continue;
          const int64_t index = s.distances_begin + distance(i, j);
          grad_distance_bias->data_ptr<double>()[index * heads + h] += ds[j];
        }
      }
  }
};

// Writes the outputs of `samples` to `out` [ΣLq, H, Dv], and their statistics to `stats`.
void attend(const Attention& attention, const std::vector<Sample>& samples, const Tensor& q,
            const Tensor& k, const Tensor& v, const Tensor& out, const Tensor& stats) {
  const Tensor q_rows = attention.query_rows(q), out_rows = attention.query_rows(out);
  const Tensor k_rows = key_rows(k), v_rows = key_rows(v);
  const auto dtype = q.scalar_type();
  const int64_t score = attention.score;
  const bool use_loops = fits_loops(k, dtype) && fits_loops(v, dtype);
  for_each(samples, q.size(1) * q.size(2), [&](const Sample& s) {
    if (use_loops && attention.is_small(s, std::max(q.size(2), v.size(2)))) {
      AT_DISPATCH_FLOATING_TYPES(dtype, "forward", [&] {
        Loops<scalar_t>(attention, s, k, v).forward(q, k, v, out, stats);
      });
      return;
    }
    const Tensor sample_k = keys_of(k_rows, s).to(q.scalar_type());
    const Tensor sample_v = v.is_same(k) ? sample_k : keys_of(v_rows, s).to(q.scalar_type());
    const Tensor scores = product(attention.queries_of(q_rows, s), sample_k.mT());
    const Tensor p = score == SOFTMAX ? attention.weights(scores, s)
                                      : attention.weights_and_slopes(scores, s).first;
    Tensor kept = p;
    if (attention.dropout) attention.drop_all(kept = p.clone(), s);
    attention.store_queries(out_rows, s, kept, sample_v);
    if (stats.numel() == 0) return;
    const Tensor sample_stats = stats.slice(1, s.q_begin, s.q_end);
    if (score != SOFTMAX) {
      sample_stats.select(0, 1).fill_(1);
      return;
    }
    sample_stats.select(0, 0).copy_(attention.by_head(scores.amax(-1), s));
    sample_stats.select(0, 1).copy_(attention.by_head(p.amax(-1), s));
  });
}

// Consecutive samples, and a copy of their keys, gathered by `indices`.
struct Gathered {
  Tensor indices, k;
  Attention attention;
  std::vector<Sample> samples;

  Gathered(const Attention& whole, const std::vector<Sample>& group, const Tensor& all_k,
           const Tensor& all_indices)
      : indices(all_indices.slice(0, group.front().k_begin, group.back().k_end)),
        k(all_k.index_select(0, indices)),
        attention(whole.slice_keys(group.front().k_begin, group.back().k_end)),
        samples(group) {
    const int64_t begin = group.front().k_begin;
    for (Sample& s : samples) s.k_begin -= begin, s.k_end -= begin;
  }
};

// Maximum number of rows gathered at a time, unless one sample has more.
constexpr int64_t GATHERED_ROWS = int64_t{1} << 13;

// Calls `work` for groups of consecutive samples, in order.
template <class Work>
void for_gathered(const Attention& attention, const std::vector<Sample>& samples, const Tensor& k,
                  const Tensor& indices, const Work& work) {
  for (auto begin = samples.begin(), end = begin; begin != samples.end(); begin = end) {
    while (end != samples.end() &&
           (end == begin || end->k_end - begin->k_begin <= GATHERED_ROWS))
      ++end;
    work(Gathered(attention, {begin, end}, k, indices));
  }
}

// Returns outputs [ΣLq, H, Dv] in the dtype of `q`. `stats`, empty or [2, ΣLq, H], receive the
// largest score and the largest weight, which is 1 / sum of the softmax. With gather indices
// `indices` [ΣLk], keys and values are the rows of `k` at these indices.
Tensor forward(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& q_offsets,
               const Tensor& kv_offsets, const optional<Tensor>& indices,
               const optional<Tensor>& bias, const optional<Tensor>& distance_bias, bool causal,
               int64_t window, int64_t score, const optional<Tensor>& dropout,
               const optional<Tensor>& row_numbers, const Tensor& stats) {
  const Attention attention{q.size(1), k.size(1), bias,  distance_bias,
                            causal,    window,    score, make_dropout(dropout, row_numbers)};
  Tensor out = q.new_zeros({q.size(0), q.size(1), v.size(2)});
  const auto samples = split_into_blocks(samples_of(q_offsets, kv_offsets), window);
  if (indices)
    for_gathered(attention, samples, k, *indices, [&](const Gathered& x) {
      attend(x.attention, x.samples, q, x.k, x.k, out, stats);
    });
  else
    attend(attention, samples, q, k, v, out, stats);
  return out;
}

// Computes the gradients of a sample.
void differentiate(const Attention& attention, const Queries& queries, const Keys& keys,
                   const Sample& s, bool use_loops) {
  const Tensor &q = queries.q, &k = keys.k, &v = keys.v;
  const optional<Tensor>&grad_lse = queries.grad_lse, &grad_bias = keys.grad_bias;
  const optional<Tensor>& grad_distance_bias = queries.grad_distance_bias;
  const auto dtype = q.scalar_type();
  if (use_loops && attention.is_small(s, std::max(q.size(2), v.size(2)))) {
    AT_DISPATCH_FLOATING_TYPES(dtype, "backward", [&] {
      Loops<scalar_t>(attention, s, k, v).backward(queries, keys);
    });
    return;
  }
  const Tensor sample_q = attention.queries_of(queries.q_rows, s);
  const Tensor sample_grad_out = attention.queries_of(queries.grad_out_rows, s);
  const Tensor sample_k = keys_of(keys.k_rows, s).to(dtype);
  const Tensor sample_v = v.is_same(k) ? sample_k : keys_of(keys.v_rows, s).to(dtype);
  const Tensor scores = product(sample_q, sample_k.mT());
  const Tensor dp = product(sample_grad_out, sample_v.mT());
  attention.drop_all(dp, s);
  Tensor p, ds;
  if (attention.score == SOFTMAX) {
    p = attention.weights(scores, s);
    ds = at::_softmax_backward_data(dp, p, -1, p.scalar_type());
    if (grad_lse) {
      const Tensor rows = grad_lse->slice(0, s.q_begin, s.q_end);  // [Lq, H]
      const Tensor by_key_head = rows.unflatten(1, {attention.key_heads, -1}).transpose(0, 1);
      attention.pair_view(ds, s).addcmul_(attention.pair_view(p, s), by_key_head.unsqueeze(3));
    }
  } else {
    std::tie(p, ds) = attention.weights_and_slopes(scores, s);
    ds.mul_(dp);
  }
  attention.drop_all(p, s);
  attention.store_queries(queries.grad_q_rows, s, ds, sample_k);
  Tensor sample_grad_k = keys_of(keys.grad_k_rows, s);
  if (keys.grad_v) {
    store_product(sample_grad_k, ds.mT(), sample_q);
    store_product(keys_of(keys.grad_v_rows, s), p.mT(), sample_grad_out);
  } else if (sample_grad_k.dim() == 2 && sample_grad_k.scalar_type() == dtype) {
    at::mm_out(sample_grad_k, ds.t(), sample_q);
    sample_grad_k.addmm_(p.t(), sample_grad_out);
  } else {
    sample_grad_k.copy_(product(ds.mT(), sample_q).add_(product(p.mT(), sample_grad_out)));
  }
  if (grad_bias) {
    const Tensor out = grad_bias->slice(1, s.k_begin, s.k_end);
    const Tensor terms = attention.pair_view(ds, s);  // [K, Lq, G, Lk]
    out.copy_(s.queries() == 1 ? ds.view(out.sizes()) : terms.sum(1).view(out.sizes()));
  }
  if (grad_distance_bias) {
    const Tensor out = grad_distance_bias->narrow(0, s.distances_begin, s.distances());
    const Tensor pairs = attention.pair_view(ds, s).permute({1, 3, 0, 2});  // [Lq, Lk, K, G]
    const Tensor terms = pairs.flatten(2).flatten(0, 1).to(out.scalar_type());
    out.index_add_(0, distances(s).flatten(), terms);
  }
}

// Computes the gradients of a sample with a window, block by block. Blocks share keys, whose
// gradients are summed.
void differentiate_blocks(const Attention& attention, const Queries& queries, const Keys& keys,
                          const Sample& s) {
  const auto dtype = queries.q.scalar_type();
  const auto add = [](const Tensor& sums, const Tensor& x, const Sample& block, int64_t axis) {
    sums.slice(axis, block.k_begin, block.k_end).add_(x);
  };
  const auto zeros = [&](const Tensor& x) {
    return at::zeros_like(x.slice(0, s.k_begin, s.k_end), x.options().dtype(dtype));
  };
  Keys sums{zeros(keys.k), zeros(keys.v), zeros(keys.k), zeros(keys.v)};
  if (attention.bias)
    sums.grad_bias = at::zeros_like(attention.bias->slice(1, s.k_begin, s.k_end));
  for (Sample block : blocks_of(s, attention.window)) {
    const auto copy_keys = [&](const Tensor& x) {  // contiguous, for loops
      return x.slice(0, block.k_begin, block.k_end).to(dtype).contiguous();
    };
    const Attention block_attention = attention.slice_keys(block.k_begin, block.k_end);
    const Tensor k = copy_keys(keys.k), v = copy_keys(keys.v);
    Keys block_keys{k, v, at::zeros_like(k), at::zeros_like(v)};
    if (block_attention.bias) block_keys.grad_bias = at::zeros_like(*block_attention.bias);
    const Sample whole{block.q_begin, block.q_end, 0, block.keys(), block.distances_begin};
    differentiate(block_attention, queries, block_keys, whole, true);
    block.k_begin -= s.k_begin, block.k_end -= s.k_begin;
    add(sums.grad_k, block_keys.grad_k, block, 0);
    add(*sums.grad_v, *block_keys.grad_v, block, 0);
    if (block_keys.grad_bias) add(*sums.grad_bias, *block_keys.grad_bias, block, 1);
  }
  keys.grad_k.slice(0, s.k_begin, s.k_end).copy_(sums.grad_k);
  keys.grad_v->slice(0, s.k_begin, s.k_end).copy_(*sums.grad_v);
  if (keys.grad_bias) keys.grad_bias->slice(1, s.k_begin, s.k_end).copy_(*sums.grad_bias);
}

// Returns the gradient of `q`. Writes the gradients of `k`, `v` and `bias` to `grad_k`, `grad_v`
// and `grad_bias` [H, ΣLk], and of the distances in each sample to `grad_distance_bias`
// [Σ max(Lq, Lk), H]. Without `grad_v`, keys are values, and `grad_k` receives the sum. A window
// requires `grad_v`. With `indices` there is no `grad_v`, and the sum is added to `grad_k`, which
// has the dtype of `q`.
Tensor backward(const Tensor& grad_out, const optional<Tensor>& grad_lse, const Tensor& q,
                const Tensor& k, const Tensor& v, const Tensor& q_offsets,
                const Tensor& kv_offsets, const optional<Tensor>& indices,
                const optional<Tensor>& bias, const optional<Tensor>& distance_bias, bool causal,
                int64_t window, int64_t score, const optional<Tensor>& dropout,
                const optional<Tensor>& row_numbers, const Tensor& grad_k,
                const optional<Tensor>& grad_v, const optional<Tensor>& grad_bias,
                const optional<Tensor>& grad_distance_bias) {
  const Attention attention{q.size(1), k.size(1), bias,  distance_bias,
                            causal,    window,    score, make_dropout(dropout, row_numbers)};
  const Tensor grad_q = q.new_zeros(q.sizes());
  const auto samples = samples_of(q_offsets, kv_offsets);
  if (indices) {
    for_gathered(attention, samples, k, *indices, [&](const Gathered& x) {
      const Queries queries{x.attention, grad_out, grad_lse, q, grad_q, grad_distance_bias};
      Keys keys{x.k, x.k, at::empty_like(x.k, q.options())};
      if (grad_bias) keys.grad_bias = at::zeros_like(*x.attention.bias);
      const bool use_loops = keys.fit_loops(q.scalar_type());
      for_each(x.samples, q.size(1) * q.size(2), [&](const Sample& s) {
        differentiate(x.attention, queries, keys, s, use_loops);
      });
      grad_k.index_add_(0, x.indices, keys.grad_k);
      if (!grad_bias) return;
      const int64_t begin = x.attention.first_key;
      grad_bias->slice(1, begin, begin + x.k.size(0)).copy_(*keys.grad_bias);
    });
    return grad_q;
  }
  const Queries queries{attention, grad_out, grad_lse, q, grad_q, grad_distance_bias};
  const Keys keys{k, v, grad_k, grad_v, grad_bias};
  const bool use_loops = keys.fit_loops(q.scalar_type());
  for_each(samples, q.size(1) * q.size(2), [&](const Sample& s) {
    if (window > 0)
      differentiate_blocks(attention, queries, keys, s);
    else
      differentiate(attention, queries, keys, s, use_loops);
  });
  return grad_q;
}

}  // namespace

TORCH_LIBRARY(torchrec_jagged_attn_flash_attention, library) {
  library.def(
      "forward(Tensor q, Tensor k, Tensor v, Tensor q_offsets, Tensor kv_offsets,"
      " Tensor? indices, Tensor? bias, Tensor? distance_bias, bool causal, int window, int score,"
      " Tensor? dropout, Tensor? row_numbers, Tensor(a!) stats) -> Tensor",
      forward);
  library.def(
      "backward(Tensor grad_out, Tensor? grad_lse, Tensor q, Tensor k, Tensor v, Tensor q_offsets,"
      " Tensor kv_offsets, Tensor? indices, Tensor? bias, Tensor? distance_bias, bool causal,"
      " int window, int score, Tensor? dropout, Tensor? row_numbers, Tensor(a!) grad_k,"
      " Tensor(b!)? grad_v, Tensor(c!)? grad_bias, Tensor(d!)? grad_distance_bias) -> Tensor",
      backward);
}
