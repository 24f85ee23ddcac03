// Attention within each sample of a batch on a CPU: what `attention.py` computes one sample after
// the other, with the samples shared out to all cores: by PyTorch's operators, or by loops where a
// sample is so small that calling them takes longer than what they do. With a window, a sample is
// cut into blocks of queries, each with the keys that it sees.
//
// Shapes: `q` [ΣLq, H, D] is scaled, contiguous and in the dtype that is computed in, as the
// gradient of outputs is; `k` [ΣLk, K, D] and `v` [ΣLk, K, Dv] have K heads for H, and any dtype. A
// sample is the rows between two offsets. In it, G = H / K heads of queries read one head of keys,
// so that a product has Lq · G rows of queries. Of one head of keys, which is what attention over
// raw rows has, all tensors are matrices.

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

// Multiply-adds of a sample's product up to which loops compute it, and from which on all cores
// work on it together.
constexpr int64_t LOOPED_WORK = int64_t{1} << 12;
constexpr int64_t SHARED_WORK = int64_t{1} << 24;

struct Sample {
  int64_t q_begin, q_end, k_begin, k_end;
  int64_t distances_begin;  // each has max(Lq, Lk) of them
  int64_t queries() const { return q_end - q_begin; }
  int64_t keys() const { return k_end - k_begin; }
  int64_t distances() const { return std::max(queries(), keys()); }
};

// Those that have keys: the others' outputs and gradients are zeros.
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

// Queries of a block of a sample whose queries see a window of keys.
int64_t block_of(int64_t window) { return std::max(window, int64_t{64}); }

// Blocks of the sample's queries, each with the keys that any of it sees. Both ends of a block are at
// one place, as the sample's are, so it is attended to as a sample is.
std::vector<Sample> blocks_of(const Sample& s, int64_t window) {
  std::vector<Sample> blocks;
  for (int64_t begin = 0; begin < s.queries(); begin += block_of(window)) {
    const int64_t end = std::min(begin + block_of(window), s.queries());
    const int64_t ahead = s.keys() - s.queries();  // of the keys' positions to the queries'
    const int64_t k_end = ahead + end, k_begin = std::max(ahead + begin + 1 - window, int64_t{0});
    if (k_end <= 0) continue;
    blocks.push_back({s.q_begin + begin, s.q_begin + end, s.k_begin + k_begin, s.k_begin + k_end,
                      s.distances_begin});
  }
  return blocks;
}

// All samples, cut into blocks if there is a window.
std::vector<Sample> cut(const std::vector<Sample>& samples, int64_t window) {
  if (window == 0) return samples;
  std::vector<Sample> blocks;
  for (const Sample& s : samples)
    for (const Sample& block : blocks_of(s, window)) blocks.push_back(block);
  return blocks;
}

// Does `work` on each sample: on large ones with all cores, then on each of the others with one.
// Which are large depends on the sample alone, as its bits do.
template <class Work>
void for_each(const std::vector<Sample>& samples, int64_t row_size, const Work& work) {
  const auto is_large = [&](const Sample& s) {
    return s.queries() * row_size * s.keys() >= SHARED_WORK;
  };
  for (const Sample& s : samples)
    if (is_large(s)) work(s);
  std::atomic<size_t> next{0};
  at::parallel_for(0, at::get_num_threads(), 1, [&](int64_t, int64_t) {
    at::AutoDispatchBelowADInplaceOrView guard;  // where the caller is; other threads begin above
    for (size_t i; (i = next++) < samples.size();)
      if (!is_large(samples[i])) work(samples[i]);
  });
}

Tensor product(const Tensor& a, const Tensor& b) { return a.dim() == 2 ? a.mm(b) : a.bmm(b); }

// Writes a product where `out`, of the same shape, may have another dtype.
void put_product(Tensor out, const Tensor& a, const Tensor& b) {
  if (out.dim() == 2 && out.scalar_type() == a.scalar_type())
    at::mm_out(out, a, b);
  else
    out.copy_(product(a, b));
}

// All rows of keys: [ΣLk, D] of one head, else [K, ΣLk, D].
Tensor by_key(const Tensor& x) { return x.size(1) == 1 ? x.select(1, 0) : x.transpose(0, 1); }

Tensor keys_of(const Tensor& x, const Sample& s) {
  return x.slice(x.dim() - 2, s.k_begin, s.k_end);
}

// [Lq, Lk]: how far a key is from a query, where the last of both are at one place.
Tensor distances(const Sample& s) {
  const Tensor rows = at::arange(s.keys() - s.queries(), s.keys());
  return (rows.unsqueeze(1) - at::arange(s.keys())).abs();
}

// Whether the softmax of a row is NaN: all its scores are -inf, or NaN or +inf is among them.
bool has_nan(const Tensor& softmax) {
  return AT_DISPATCH_FLOATING_TYPES(softmax.scalar_type(), "has_nan", [&] {
    const scalar_t* const begin = softmax.const_data_ptr<scalar_t>();
    for (int64_t i = 0; i < softmax.numel(); i += softmax.size(-1))
      if (std::isnan(begin[i])) return true;
    return false;
  });
}

// What makes weights of scores, by its place in `arguments.SCORES`.
enum Score : int64_t { SOFTMAX, SILU, SIGMOID };
constexpr double LEAST = -1000;  // a score whose σ is zero, as that of -inf

// Weights that are a function of a row's own score, and their derivatives.
template <typename T>
std::pair<T, T> weight_and_slope(T x, int64_t score) {
  x = x < T(LEAST) ? T(LEAST) : x;  // NaN stays
  const T power = std::exp(-std::abs(x)), larger = 1 / (1 + power), smaller = power * larger;
  const T of_score = x < 0 ? smaller : larger, of_opposite = x < 0 ? larger : smaller;
  if (score == SILU) return {x * of_score, of_score * (1 + x * of_opposite)};
  return {of_score, of_score * of_opposite};
}

// Which weights are dropped, drawn as `dropout.py` draws them, and what the others are multiplied by.
struct Dropout {
  uint64_t seed;
  int64_t drops;
  const int64_t* row_numbers;  // by which rows of keys draw, if not by their indices

  Dropout(const Tensor& x, const optional<Tensor>& row_numbers)
      : seed(x.const_data_ptr<int64_t>()[0]),
        drops(x.const_data_ptr<int64_t>()[1]),
        row_numbers(row_numbers ? row_numbers->const_data_ptr<int64_t>() : nullptr) {}

  double factor() const { return double(int64_t{1} << 32) / ((int64_t{1} << 32) - drops); }

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
    return (x ^ (x >> 16)) < drops;
  }
};

optional<Dropout> drawn(const optional<Tensor>& dropout, const optional<Tensor>& row_numbers) {
  return dropout ? optional<Dropout>(std::in_place, *dropout, row_numbers) : std::nullopt;
}

struct Attention {
  int64_t heads, key_heads;
  optional<Tensor> bias;         // [H, ΣLk], added to scores
  optional<Tensor> by_distance;  // [distances, H], added to scores
  bool causal;
  int64_t window;  // how many keys a query sees at most; 0 for all
  int64_t score;
  optional<Dropout> dropout;
  int64_t first_key = 0;  // the number of the first row of keys

  // The same over the rows of keys from `begin` to `end` alone.
  Attention over(int64_t begin, int64_t end) const {
    Attention own = *this;
    own.first_key += begin;
    if (bias) own.bias = bias->slice(1, begin, end).contiguous();
    return own;
  }

  bool is_small(const Sample& s, int64_t width) const {
    return s.queries() * heads * width * s.keys() <= LOOPED_WORK;
  }

  // All rows of queries: [ΣLq · H, D] over one head of keys, else [K, ΣLq, G, D].
  Tensor by_query(const Tensor& x) const {
    if (key_heads == 1) return x.reshape({x.size(0) * heads, x.size(2)});
    return x.unflatten(1, {key_heads, heads / key_heads}).transpose(0, 1);
  }

  // A sample's of these: [Lq · H, D] or [K, Lq · G, D].
  Tensor queries_of(const Tensor& rows, const Sample& s) const {
    if (key_heads == 1) return rows.slice(0, s.q_begin * heads, s.q_end * heads);
    return rows.slice(1, s.q_begin, s.q_end).flatten(1, 2);
  }

  // Writes a product there.
  void put_queries(const Tensor& rows, const Sample& s, const Tensor& a, const Tensor& b) const {
    if (key_heads == 1) return put_product(queries_of(rows, s), a, b);
    const Tensor own = rows.slice(1, s.q_begin, s.q_end);
    own.copy_(a.bmm(b).view(own.sizes()));
  }

  // [K, Lq, G, Lk] of what a sample has for each pair of a row of queries and one of keys.
  Tensor by_pair(const Tensor& x, const Sample& s) const {
    return x.view({key_heads, s.queries(), heads / key_heads, s.keys()});
  }

  // Softmax over the keys of a sample: zeros of a row that sees no score but -inf, NaN of one that
  // sees NaN or +inf. Adds biases to the scores.
  Tensor weights(const Tensor& scores, const Sample& s) const {
    if (bias || by_distance || causal) add_biases(by_pair(scores, s), s);
    const Tensor p = at::_softmax(scores, -1, false);
    return has_nan(p) ? at::_safe_softmax(scores, -1) : p;
  }

  // Of other scores than the softmax, and their derivatives. Adds biases to the scores.
  std::pair<Tensor, Tensor> weights_and_slopes(const Tensor& scores, const Sample& s) const {
    if (bias || by_distance || causal) add_biases(by_pair(scores, s), s);
    const Tensor x = scores.clamp_min(LEAST), of_score = at::sigmoid(x), other = at::sigmoid(-x);
    if (score == SILU) return {x * of_score, of_score * (1 + x * other)};
    return {of_score, of_score * other};
  }

  // To the scores of each pair, [K, Lq, G, Lk]; -inf to those that causality hides.
  void add_biases(Tensor x, const Sample& s) const {
    if (bias) {
      const Tensor own = bias->slice(1, s.k_begin, s.k_end);
      x.add_(own.view({key_heads, 1, heads / key_heads, s.keys()}));
    }
    if (by_distance) {
      const Tensor own = by_distance->index({distances(s)});  // [Lq, Lk, H]
      x.add_(own.permute({2, 0, 1}).unflatten(0, {key_heads, -1}).transpose(1, 2));
    }
    if (causal) {
      const Tensor pairs = at::ones({s.queries(), s.keys()}, at::kBool);
      Tensor hidden = pairs.triu(s.keys() - s.queries() + 1);
      if (window > 0) hidden.logical_or_(pairs.tril(s.keys() - s.queries() - window));
      x.masked_fill_(hidden.unsqueeze(1), -std::numeric_limits<double>::infinity());
    }
  }

  // Multiplies a row's weights, of a head and the keys between two of a sample: by zero what is
  // dropped, else by what makes up for it.
  template <typename T>
  void drop(T* x, const Sample& s, int64_t i, int64_t h, int64_t from, int64_t to) const {
    if (!dropout) return;
    const uint32_t draw = dropout->draw_of_query((s.q_begin + i) * heads + h);
    const int64_t first = first_key + s.k_begin;
    const T factor = dropout->factor();
    for (int64_t j = from; j < to; ++j) x[j] *= dropout->is_dropped(draw, first + j) ? 0 : factor;
  }

  // The same of all a sample's weights, or gradients of them, which are contiguous.
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

  // [Lq, H] of what a sample has for each row of a product.
  Tensor by_head(const Tensor& x, const Sample& s) const {
    return x.view({key_heads, s.queries(), heads / key_heads}).transpose(0, 1).flatten(1);
  }
};

// The rows of one head follow each other at equal distances.
template <typename T>
struct Rows {
  T* data;
  int64_t row, head;
  explicit Rows(const Tensor& x)
      : data(x.data_ptr<T>()), row(x.stride(0)), head(x.stride(1)) {}
  T* at(int64_t i, int64_t h) const { return data + i * row + h * head; }
};

bool has_rows(const Tensor& x, at::ScalarType dtype) {
  return x.scalar_type() == dtype && (x.stride(2) == 1 || x.size(2) == 1);
}

// What is built is for any processor, and takes vectors of 256 bits where there are such.
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

// Keys and values, and where their gradients go: rows of whole tensors, or of a sample's block.
struct Keys {
  Tensor k, v, grad_k;
  optional<Tensor> grad_v, grad_bias;  // of the bias [H, ΣLk]
  Tensor k_rows = by_key(k), v_rows = by_key(v), grad_k_rows = by_key(grad_k);
  Tensor grad_v_rows = grad_v ? by_key(*grad_v) : grad_k_rows;

  bool have_rows(at::ScalarType dtype) const {
    return has_rows(k, dtype) && has_rows(v, dtype) && has_rows(grad_k, dtype) &&
           (!grad_v || has_rows(*grad_v, dtype));
  }
};

// What backward takes of queries; gradients of log-sum-exps are [ΣLq, H], and zeros of rows that see
// no score but -inf.
struct Queries {
  const Attention& attention;
  const Tensor& grad_out;
  const optional<Tensor>& grad_lse;
  const Tensor &q, &grad_q;
  const optional<Tensor>& grad_by_distance;
  Tensor q_rows = attention.by_query(q), grad_q_rows = attention.by_query(grad_q);
  Tensor grad_out_rows = attention.by_query(grad_out);
};

// A sample's attention, one row of queries after the other.
template <typename T>
struct Loops {
  const Attention& attention;
  const Sample& s;
  int64_t num_keys, width, value_width;  // num_keys: of all samples
  const T* bias;         // as the attention's
  const T* by_distance;
  std::vector<T> p = std::vector<T>(s.keys()), ds = p, slopes = p;  // of one row

  Loops(const Attention& attention, const Sample& s, const Tensor& k, const Tensor& v)
      : attention(attention), s(s), num_keys(k.size(0)), width(k.size(2)), value_width(v.size(2)),
        bias(attention.bias ? attention.bias->const_data_ptr<T>() : nullptr),
        by_distance(attention.by_distance ? attention.by_distance->const_data_ptr<T>() : nullptr) {}

  int64_t distance(int64_t i, int64_t j) const {
    return std::abs(s.keys() - s.queries() + i - j);
  }

  // The end of the keys that a row sees.
  int64_t seen_by(int64_t i) const {
    if (!attention.causal) return s.keys();
    return std::clamp(s.keys() - s.queries() + i + 1, int64_t{0}, s.keys());
  }

  // The first one of them.
  int64_t seen_from(int64_t i) const {
    return attention.window > 0 ? std::max(seen_by(i) - attention.window, int64_t{0}) : 0;
  }

  // Sets `p` to a row's weights of the keys that it sees. Returns the largest score, and one by the
  // softmax's sum: zero if the row sees no score but -inf. Of other scores, sets `slopes`, too, and
  // returns zero and one.
  std::pair<T, T> weigh(const T* q, const Rows<T>& k, int64_t i, int64_t h) {
    const int64_t heads = attention.heads, group = heads / attention.key_heads;
    const int64_t from = seen_from(i), seen = seen_by(i);
    T largest = -std::numeric_limits<T>::infinity();
    double sum = 0;
    for (int64_t j = from; j < seen; ++j) {
      p[j] = dot(q, k.at(s.k_begin + j, h / group), width);
      if (bias) p[j] += bias[h * num_keys + s.k_begin + j];
      if (by_distance) p[j] += by_distance[distance(i, j) * heads + h];
      largest = p[j] > largest || p[j] != p[j] ? p[j] : largest;
    }
    if (attention.score != SOFTMAX) {
      for (int64_t j = from; j < seen; ++j)
        std::tie(p[j], slopes[j]) = weight_and_slope(p[j], attention.score);
      return {T{0}, T{1}};
    }
    if (largest == -std::numeric_limits<T>::infinity()) {
      std::fill(p.begin() + from, p.begin() + seen, T{0});
      return {largest, T{0}};
    }
    for (int64_t j = from; j < seen; ++j) sum += p[j] = std::exp(p[j] - largest);
    for (int64_t j = from; j < seen; ++j) p[j] /= T(sum);
    return {largest, T(1 / sum)};
  }

  void forward(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& out,
               const Tensor& stats) {
    const Rows<T> q_rows(q), k_rows(k), v_rows(v), out_rows(out);
    const int64_t group = attention.heads / attention.key_heads;
    for (int64_t i = 0; i < s.queries(); ++i)
      for (int64_t h = 0; h < attention.heads; ++h) {
        const auto [largest, inverse] = weigh(q_rows.at(s.q_begin + i, h), k_rows, i, h);
        T* const own = out_rows.at(s.q_begin + i, h);
        attention.drop(p.data(), s, i, h, seen_from(i), seen_by(i));
        for (int64_t j = seen_from(i), seen = seen_by(i); j < seen; ++j)
          add(own, p[j], v_rows.at(s.k_begin + j, h / group), value_width);
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
    const optional<Tensor>& grad_by_distance = queries.grad_by_distance;
    const int64_t heads = attention.heads, group = heads / attention.key_heads;
    for (int64_t j = s.k_begin; j < s.k_end; ++j)
      for (int64_t h = 0; h < attention.key_heads; ++h) {
        std::fill_n(grad_k_rows.at(j, h), width, T{0});
        std::fill_n(grad_v_rows.at(j, h), value_width, T{0});
      }
    for (int64_t i = 0; i < s.queries(); ++i)
      for (int64_t h = 0; h < heads; ++h) {
        const T* const own_q = q_rows.at(s.q_begin + i, h);
        const T* const own_grad_out = grad_out_rows.at(s.q_begin + i, h);
        weigh(own_q, k_rows, i, h);
        const int64_t from = seen_from(i), seen = seen_by(i);
        double mean = 0;
        for (int64_t j = from; j < seen; ++j)
          ds[j] = dot(own_grad_out, v_rows.at(s.k_begin + j, h / group), value_width);
        attention.drop(ds.data(), s, i, h, from, seen);
        for (int64_t j = from; j < seen; ++j) mean += double{p[j]} * ds[j];
        if (grad_lse) mean -= grad_lse->const_data_ptr<T>()[(s.q_begin + i) * heads + h];
        for (int64_t j = from; j < seen; ++j)
          ds[j] = attention.score == SOFTMAX ? T(p[j] * (ds[j] - mean)) : slopes[j] * ds[j];
        attention.drop(p.data(), s, i, h, from, seen);
        for (int64_t j = from; j < seen; ++j) {
          const int64_t row = s.k_begin + j, head = h / group;
          add(grad_q_rows.at(s.q_begin + i, h), ds[j], k_rows.at(row, head), width);
          add(grad_k_rows.at(row, head), ds[j], own_q, width);
          add(grad_v_rows.at(row, head), p[j], own_grad_out, value_width);
          if (grad_bias) grad_bias->data_ptr<T>()[h * num_keys + row] += ds[j];
          if (!grad_by_distance) continue;
          const int64_t place = s.distances_begin + distance(i, j);
          grad_by_distance->data_ptr<double>()[place * heads + h] += ds[j];
        }
      }
  }
};

// Outputs of `samples` into `out` [ΣLq, H, Dv], and their statistics.
void attend(const Attention& attention, const std::vector<Sample>& samples, const Tensor& q,
            const Tensor& k, const Tensor& v, const Tensor& out, const Tensor& stats) {
  const Tensor q_rows = attention.by_query(q), out_rows = attention.by_query(out);
  const Tensor k_rows = by_key(k), v_rows = by_key(v);
  const auto dtype = q.scalar_type();
  const int64_t score = attention.score;
  const bool loops = has_rows(k, dtype) && has_rows(v, dtype);
  for_each(samples, q.size(1) * q.size(2), [&](const Sample& s) {
    if (loops && attention.is_small(s, std::max(q.size(2), v.size(2)))) {
      AT_DISPATCH_FLOATING_TYPES(dtype, "forward", [&] {
        Loops<scalar_t>(attention, s, k, v).forward(q, k, v, out, stats);
      });
      return;
    }
    const Tensor own_k = keys_of(k_rows, s).to(q.scalar_type());
    const Tensor own_v = v.is_same(k) ? own_k : keys_of(v_rows, s).to(q.scalar_type());
    const Tensor scores = product(attention.queries_of(q_rows, s), own_k.mT());
    const Tensor p = score == SOFTMAX ? attention.weights(scores, s)
                                      : attention.weights_and_slopes(scores, s).first;
    Tensor kept = p;
    if (attention.dropout) attention.drop_all(kept = p.clone(), s);
    attention.put_queries(out_rows, s, kept, own_v);
    if (stats.numel() == 0) return;
    const Tensor own = stats.slice(1, s.q_begin, s.q_end);
    if (score != SOFTMAX) {
      own.select(0, 1).fill_(1);
      return;
    }
    own.select(0, 0).copy_(attention.by_head(scores.amax(-1), s));
    own.select(0, 1).copy_(attention.by_head(p.amax(-1), s));
  });
}

// Samples that follow each other, with a copy of the rows that `indices` name for them.
struct Gathered {
  Tensor indices, k;
  Attention attention;
  std::vector<Sample> samples;

  Gathered(const Attention& whole, const std::vector<Sample>& own, const Tensor& all_k,
           const Tensor& all_indices)
      : indices(all_indices.slice(0, own.front().k_begin, own.back().k_end)),
        k(all_k.index_select(0, indices)),
        attention(whole.over(own.front().k_begin, own.back().k_end)),
        samples(own) {
    const int64_t begin = own.front().k_begin;
    for (Sample& s : samples) s.k_begin -= begin, s.k_end -= begin;
  }
};

// How many rows are copied at a time, but for a sample that has more.
constexpr int64_t GATHERED_ROWS = int64_t{1} << 13;

// Does `work` on all samples, a few at a time, in their order.
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

// Outputs [ΣLq, H, Dv] in the dtype of `q`. `stats`, of no element or [2, ΣLq, H], receive the
// largest score and the largest weight, which is one by the softmax's sum. With `indices` [ΣLk],
// keys are values, and the rows of `k` that these name.
Tensor forward(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& q_offsets,
               const Tensor& kv_offsets, const optional<Tensor>& indices,
               const optional<Tensor>& bias, const optional<Tensor>& by_distance, bool causal,
               int64_t window, int64_t score, const optional<Tensor>& dropout,
               const optional<Tensor>& row_numbers, const Tensor& stats) {
  const Attention attention{q.size(1), k.size(1), bias,  by_distance,
                            causal,    window,    score, drawn(dropout, row_numbers)};
  Tensor out = q.new_zeros({q.size(0), q.size(1), v.size(2)});
  const auto samples = cut(samples_of(q_offsets, kv_offsets), window);
  if (indices)
    for_gathered(attention, samples, k, *indices, [&](const Gathered& x) {
      attend(x.attention, x.samples, q, x.k, x.k, out, stats);
    });
  else
    attend(attention, samples, q, k, v, out, stats);
  return out;
}

// Gradients of a sample.
void differentiate(const Attention& attention, const Queries& queries, const Keys& keys,
                   const Sample& s, bool loops) {
  const Tensor &q = queries.q, &k = keys.k, &v = keys.v;
  const optional<Tensor>&grad_lse = queries.grad_lse, &grad_bias = keys.grad_bias;
  const optional<Tensor>& grad_by_distance = queries.grad_by_distance;
  const auto dtype = q.scalar_type();
  if (loops && attention.is_small(s, std::max(q.size(2), v.size(2)))) {
    AT_DISPATCH_FLOATING_TYPES(dtype, "backward", [&] {
      Loops<scalar_t>(attention, s, k, v).backward(queries, keys);
    });
    return;
  }
  const Tensor own_q = attention.queries_of(queries.q_rows, s);
  const Tensor own_grad_out = attention.queries_of(queries.grad_out_rows, s);
  const Tensor own_k = keys_of(keys.k_rows, s).to(dtype);
  const Tensor own_v = v.is_same(k) ? own_k : keys_of(keys.v_rows, s).to(dtype);
  const Tensor scores = product(own_q, own_k.mT()), dp = product(own_grad_out, own_v.mT());
  attention.drop_all(dp, s);
  Tensor p, ds;
  if (attention.score == SOFTMAX) {
    p = attention.weights(scores, s);
    ds = at::_softmax_backward_data(dp, p, -1, p.scalar_type());
    if (grad_lse) {
      const Tensor own = grad_lse->slice(0, s.q_begin, s.q_end);
      const Tensor by_head = own.unflatten(1, {attention.key_heads, -1}).transpose(0, 1);
      attention.by_pair(ds, s).addcmul_(attention.by_pair(p, s), by_head.unsqueeze(3));
    }
  } else {
    std::tie(p, ds) = attention.weights_and_slopes(scores, s);
    ds.mul_(dp);
  }
  attention.drop_all(p, s);
  attention.put_queries(queries.grad_q_rows, s, ds, own_k);
  Tensor own_grad_k = keys_of(keys.grad_k_rows, s);
  if (keys.grad_v) {
    put_product(own_grad_k, ds.mT(), own_q);
    put_product(keys_of(keys.grad_v_rows, s), p.mT(), own_grad_out);
  } else if (own_grad_k.dim() == 2 && own_grad_k.scalar_type() == dtype) {
    at::mm_out(own_grad_k, ds.t(), own_q);
    own_grad_k.addmm_(p.t(), own_grad_out);
  } else {
    own_grad_k.copy_(product(ds.mT(), own_q).add_(product(p.mT(), own_grad_out)));
  }
  if (grad_bias) {
    const Tensor own = grad_bias->slice(1, s.k_begin, s.k_end);
    const Tensor terms = attention.by_pair(ds, s);  // [K, Lq, G, Lk]
    own.copy_(s.queries() == 1 ? ds.view(own.sizes()) : terms.sum(1).view(own.sizes()));
  }
  if (grad_by_distance) {
    const Tensor own = grad_by_distance->narrow(0, s.distances_begin, s.distances());
    const Tensor pairs = attention.by_pair(ds, s).permute({1, 3, 0, 2});  // [Lq, Lk, K, G]
    const Tensor terms = pairs.flatten(2).flatten(0, 1).to(own.scalar_type());
    own.index_add_(0, distances(s).flatten(), terms);
  }
}

// Gradients of a sample whose queries see a window of keys: of one block of queries after the other,
// whose keys are those of others, too.
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
    const auto copied = [&](const Tensor& x) {  // as loops read it
      return x.slice(0, block.k_begin, block.k_end).to(dtype).contiguous();
    };
    const Attention of_block = attention.over(block.k_begin, block.k_end);
    const Tensor k = copied(keys.k), v = copied(keys.v);
    Keys own{k, v, at::zeros_like(k), at::zeros_like(v)};
    if (of_block.bias) own.grad_bias = at::zeros_like(*of_block.bias);
    const Sample whole{block.q_begin, block.q_end, 0, block.keys(), block.distances_begin};
    differentiate(of_block, queries, own, whole, true);
    block.k_begin -= s.k_begin, block.k_end -= s.k_begin;
    add(sums.grad_k, own.grad_k, block, 0);
    add(*sums.grad_v, *own.grad_v, block, 0);
    if (own.grad_bias) add(*sums.grad_bias, *own.grad_bias, block, 1);
  }
  keys.grad_k.slice(0, s.k_begin, s.k_end).copy_(sums.grad_k);
  keys.grad_v->slice(0, s.k_begin, s.k_end).copy_(*sums.grad_v);
  if (keys.grad_bias) keys.grad_bias->slice(1, s.k_begin, s.k_end).copy_(*sums.grad_bias);
}

// Gradients of `q`, and those of `k` and `v` into `grad_k` and `grad_v`, of `bias` into `grad_bias`
// [H, ΣLk] and of each sample's distances into `grad_by_distance` [Σ max(Lq, Lk), H]. Without
// `grad_v`, keys are values: `grad_k` receives the sum. With a window there is one. With `indices`
// there is none, and `grad_k`, in the dtype of `q`, is added to.
Tensor backward(const Tensor& grad_out, const optional<Tensor>& grad_lse, const Tensor& q,
                const Tensor& k, const Tensor& v, const Tensor& q_offsets,
                const Tensor& kv_offsets, const optional<Tensor>& indices,
                const optional<Tensor>& bias, const optional<Tensor>& by_distance, bool causal,
                int64_t window, int64_t score, const optional<Tensor>& dropout,
                const optional<Tensor>& row_numbers, const Tensor& grad_k,
                const optional<Tensor>& grad_v, const optional<Tensor>& grad_bias,
                const optional<Tensor>& grad_by_distance) {
  const Attention attention{q.size(1), k.size(1), bias,  by_distance,
                            causal,    window,    score, drawn(dropout, row_numbers)};
  const Tensor grad_q = q.new_zeros(q.sizes());
  const auto samples = samples_of(q_offsets, kv_offsets);
  if (indices) {
    for_gathered(attention, samples, k, *indices, [&](const Gathered& x) {
      const Queries queries{x.attention, grad_out, grad_lse, q, grad_q, grad_by_distance};
      Keys keys{x.k, x.k, at::empty_like(x.k, q.options())};
      if (grad_bias) keys.grad_bias = at::zeros_like(*x.attention.bias);
      const bool loops = keys.have_rows(q.scalar_type());
      for_each(x.samples, q.size(1) * q.size(2), [&](const Sample& s) {
        differentiate(x.attention, queries, keys, s, loops);
      });
      grad_k.index_add_(0, x.indices, keys.grad_k);
      if (!grad_bias) return;
      const int64_t begin = x.attention.first_key;
      grad_bias->slice(1, begin, begin + x.k.size(0)).copy_(*keys.grad_bias);
    });
    return grad_q;
  }
  const Queries queries{attention, grad_out, grad_lse, q, grad_q, grad_by_distance};
  const Keys keys{k, v, grad_k, grad_v, grad_bias};
  const bool loops = keys.have_rows(q.scalar_type());
  for_each(samples, q.size(1) * q.size(2), [&](const Sample& s) {
    if (window > 0)
      differentiate_blocks(attention, queries, keys, s);
    else
      differentiate(attention, queries, keys, s, loops);
  });
  return grad_q;
}

}  // namespace

TORCH_LIBRARY(torchrec_jagged_attn_flash_attention, library) {
  library.def(
      "forward(Tensor q, Tensor k, Tensor v, Tensor q_offsets, Tensor kv_offsets,"
      " Tensor? indices, Tensor? bias, Tensor? by_distance, bool causal, int window, int score,"
      " Tensor? dropout, Tensor? row_numbers, Tensor(a!) stats) -> Tensor",
      forward);
  library.def(
      "backward(Tensor grad_out, Tensor? grad_lse, Tensor q, Tensor k, Tensor v, Tensor q_offsets,"
      " Tensor kv_offsets, Tensor? indices, Tensor? bias, Tensor? by_distance, bool causal,"
      " int window, int score, Tensor? dropout, Tensor? row_numbers, Tensor(a!) grad_k,"
      " Tensor(b!)? grad_v, Tensor(c!)? grad_bias, Tensor(d!)? grad_by_distance) -> Tensor",
      backward);
}
