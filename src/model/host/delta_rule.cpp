#include "src/model/host/delta_rule.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "src/model/host/team.h"

namespace ballast::model::host {
namespace {

constexpr std::size_t kChunk = DeltaShape::kChunk;
constexpr std::size_t kChunksOfState = DeltaShape::kChunksOfState;

double softplus(double x) {
  return x > 20.0 ? x : std::log1p(std::exp(x));
}
double logistic(double x) {
  return 1.0 / (1.0 + std::exp(-x));
}

/// y[r] = factors[r] * x[r] for rows [kChunk, width].
void scale_rows(const RowKernels<float>& kernels, const float* x, const float* factors, float* y,
                std::size_t width) {
  for (std::size_t r = 0; r < kChunk; ++r) {
    kernels.scale(x + r * width, factors[r], y + r * width, width);
  }
}

}  // namespace

/// Memory of one thread. Matrices have no gaps.
template <class T>
struct DeltaRule<T>::Scratch {
  float* rows;     ///< [2, kChunk, key_width]: keys, then queries
  float* values;   ///< [kChunk, value_width]
  float* read;     ///< [2, kChunk, value_width]: rows times the state
  float* written;  ///< [kChunk, value_width]: updates of the state
  float* faded;    ///< keys times `left`
  float* scores;   ///< [2, kChunk, kChunk] of keys and of queries with keys
  float* decay;    ///< [kChunk, kChunk]
  float* system;   ///< [kChunk, kChunk]
  float* beta;     ///< [kChunk]
  float* sums;     ///< [kChunk] sums of g since the start of the chunk or document
  float*
      carried;   ///< [kChunk] decay of the chunk's first state before the row; 0: another document
  float* carry;  ///< [1] decay of the state over the chunk; 0: another document begins in it
  float* left;   ///< [kChunk] decay from the row to the end of the chunk; 0: another document
  std::int32_t* first;  ///< [kChunk] first row of the chunk in the document of the row
  float* states;        ///< [kChunksOfState, state()]
  // Memory for the backward pass.
  float* dstates;  ///< [value heads per key head, state()]
  float* drows;    ///< [2, kChunksOfState, kChunk, key_width], sums over heads of values
  float* dkeys;    ///< [2, kChunk, key_width]
  float* dpair;    ///< [2, kChunk, value_width]: minus gradient of updates; gradient of results
  float* dread;    ///< like read
  float* dfaded;   ///< like faded
  float* dscores;  ///< like scores
  float* dbeta;    ///< [kChunk]
  float* dsums;    ///< [kChunk]
};

/// Chunk `number` of one head of a sequence: rows [row, row + rows) of the micro-batch.
template <class T>
struct DeltaRule<T>::Chunk {
  std::size_t sequence;
  std::size_t head;  ///< index among the heads of values
  std::size_t number;
  std::size_t row;
  std::size_t rows;
};

template <class T>
DeltaRule<T>::DeltaRule(const DeltaShape& shape, const TypeKernels<T>& kernels, std::size_t threads)
    : shape_(shape),
      kernels_(kernels.mixers),
      rows_(kernels.rows),
      sums_(best_kernels<float>().rows),
      threads_(threads),
      scale_(static_cast<float>(1.0 / std::sqrt(static_cast<double>(shape.key_width)))) {}

template <class T>
auto DeltaRule<T>::take_scratch(Bump& bump) const -> Scratch {
  const std::size_t keys = kChunk * shape_.key_width;
  const std::size_t values = kChunk * shape_.value_width;
  constexpr std::size_t kSquare = kChunk * kChunk;
  const std::size_t shared = shape_.value_heads / shape_.key_heads;
  Scratch s{};
  s.rows = bump.take<float>(2 * keys);
  s.values = bump.take<float>(values);
  s.read = bump.take<float>(2 * values);
  s.written = bump.take<float>(values);
  s.faded = bump.take<float>(keys);
  s.scores = bump.take<float>(2 * kSquare);
  s.decay = bump.take<float>(kSquare);
  s.system = bump.take<float>(kSquare);
  for (float** each : {&s.beta, &s.sums, &s.carried, &s.left, &s.dbeta, &s.dsums}) {
    *each = bump.take<float>(kChunk);
  }
  s.carry = bump.take<float>(1);
  s.first = bump.take<std::int32_t>(kChunk);
  s.states = bump.take<float>(kChunksOfState * shape_.state());
  s.dstates = bump.take<float>(shared * shape_.state());
  s.drows = bump.take<float>(2 * kChunksOfState * keys);
  s.dkeys = bump.take<float>(2 * keys);
  s.dpair = bump.take<float>(2 * values);
  s.dread = bump.take<float>(2 * values);
  s.dfaded = bump.take<float>(keys);
  s.dscores = bump.take<float>(2 * kSquare);
  return s;
}

template <class T>
std::size_t DeltaRule<T>::scratch_bytes() const {
  if (shape_.key_heads == 0) return 0;
  Bump counting;
  take_scratch(counting);
  return threads_ * counting.used();
}

template <class T>
auto DeltaRule<T>::scratch_of(std::byte* scratch, std::size_t thread) const -> Scratch {
  Bump bump(scratch + thread * (scratch_bytes() / threads_));
  return take_scratch(bump);
}

template <class T>
auto DeltaRule<T>::chunk_at(std::size_t sequence, std::size_t head, std::size_t number) const
    -> Chunk {
  const std::size_t first = number * kChunk;
  return {sequence, head, number, sequence * shape_.length + first,
          std::min(kChunk, shape_.length - first)};
}

template <class T>
std::size_t DeltaRule<T>::kept_state_at(const Chunk& chunk) const {
  const std::size_t head = chunk.sequence * shape_.value_heads + chunk.head;
  return (head * shape_.kept_states() + chunk.number / kChunksOfState) * shape_.state();
}

/// Makes primitives for one thread, because each later runs on one thread of a parallel region.
template <class T>
void DeltaRule<T>::prepare() {
  if (prepared_) return;
  const SingleThreaded guard;
  const std::size_t k = shape_.key_width;
  const std::size_t v = shape_.value_width;
  const float* const none = nullptr;
  const Matrix keys = matrix(none, k);
  const Matrix values = matrix(none, v);
  const Matrix square = matrix(none, kChunk);
  const Matrix keys_flipped = transposed(none, k);
  const Matrix values_flipped = transposed(none, v);
  const Matrix square_flipped = transposed(none, kChunk);
  products_.prepare({2 * kChunk, kChunk, k}, keys, keys_flipped, square);
  products_.prepare({2 * kChunk, v, k}, keys, values, values);
  products_.prepare({kChunk, v, kChunk}, square, values, values, true);
  products_.prepare({k, v, kChunk}, keys_flipped, values, values, true);
  products_.prepare({kChunk, v, kChunk}, square_flipped, values, values);
  products_.prepare({kChunk, v, k}, keys, values, values, true);
  products_.prepare({2 * kChunk, kChunk, v}, values, values_flipped, square);
  products_.prepare({kChunk, k, v}, values, values_flipped, keys);
  products_.prepare({2 * kChunk, k, v}, values, values_flipped, keys);
  products_.prepare({k, v, 2 * kChunk}, keys_flipped, values, values, true);
  products_.prepare({2 * kChunk, k, kChunk}, square, keys, keys, true);
  products_.prepare({kChunk, k, 2 * kChunk}, square_flipped, keys, keys, true);
  prepared_ = true;
}

/// Loads the rows of a chunk. Rows after the end of the sequence are zero and change nothing.
template <class T>
void DeltaRule<T>::load(const DeltaInputs<T>& in, const Chunk& chunk, const Scratch& s) const {
  const std::size_t k = shape_.key_width;
  const std::size_t v = shape_.value_width;
  const std::size_t key_head = chunk.head / (shape_.value_heads / shape_.key_heads);
  for (std::size_t i = 0; i < chunk.rows; ++i) {
    const T* const row = in.channels + (chunk.row + i) * shape_.channels();
    kernels_.unit_row(row + shape_.keys() + key_head * k, 1.0F, s.rows + i * k, k);
    kernels_.unit_row(row + key_head * k, scale_, s.rows + (kChunk + i) * k, k);
    rows_.widen(row + 2 * shape_.keys() + chunk.head * v, s.values + i * v, v);
  }
  const std::size_t rest = kChunk - chunk.rows;
  std::fill_n(s.rows + chunk.rows * k, rest * k, 0.0F);
  std::fill_n(s.rows + (kChunk + chunk.rows) * k, rest * k, 0.0F);
  std::fill_n(s.values + chunk.rows * v, rest * v, 0.0F);
  load_decays(in, chunk, s);
}

template <class T>
void DeltaRule<T>::load_decays(const DeltaInputs<T>& in, const Chunk& chunk,
                               const Scratch& s) const {
  const double rate = std::exp(static_cast<double>(to_float(in.decay[chunk.head])));
  const auto shift = static_cast<double>(to_float(in.shift[chunk.head]));
  const auto position = [&](std::size_t i) {
    return in.positions == nullptr ? chunk.number * kChunk + i
                                   : static_cast<std::size_t>(in.positions[chunk.row + i]);
  };
  for (std::size_t i = 0; i < chunk.rows; ++i) {
    const T* const b = in.betas + (chunk.row + i) * in.betas_step + chunk.head;
    const bool continues = position(i) > i;  // the document began before the chunk
    s.first[i] = continues ? 0 : static_cast<std::int32_t>(i - position(i));
    s.beta[i] =
        shape_.beta_factor * static_cast<float>(logistic(static_cast<double>(to_float(b[0]))));
    const double a = static_cast<double>(to_float(b[shape_.value_heads])) + shift;
    const double before = position(i) == 0 || i == 0 ? 0.0 : static_cast<double>(s.sums[i - 1]);
    s.sums[i] = static_cast<float>(before - rate * softplus(a));
    s.carried[i] = continues ? std::exp(s.sums[i]) : 0.0F;
  }
  const std::size_t last = chunk.rows - 1;
  *s.carry = s.carried[last];
  for (std::size_t i = 0; i < chunk.rows; ++i) {
    const bool same = last - i <= position(last) && position(last) - position(i) == last - i;
    s.left[i] = same ? std::exp(s.sums[last] - s.sums[i]) : 0.0F;
  }
  for (std::size_t i = chunk.rows; i < kChunk; ++i) {
    s.first[i] = static_cast<std::int32_t>(i);
    s.beta[i] = s.carried[i] = s.left[i] = 0.0F;
    s.sums[i] = s.sums[last];
  }
}

/// Computes the updates of a loaded chunk that begins with `state`, and what they depend on.
template <class T>
void DeltaRule<T>::solve(const float* state, const Scratch& s) const {
  const std::size_t k = shape_.key_width;
  const std::size_t v = shape_.value_width;
  products_.multiply_prepared({2 * kChunk, kChunk, k}, matrix(s.rows, k), transposed(s.rows, k),
                              matrix(s.scores, kChunk));
  products_.multiply_prepared({2 * kChunk, v, k}, matrix(s.rows, k), matrix(state, v),
                              matrix(s.read, v));
  kernels_.chunk_decays(s.sums, s.first, s.decay);
  kernels_.chunk_scores(s.decay, s.beta, s.scores, s.scores + kChunk * kChunk, s.system);
  for (std::size_t i = 0; i < kChunk; ++i) {
    sums_.scale(s.values + i * v, s.beta[i], s.written + i * v, v);
    sums_.accumulate_scaled(s.written + i * v, s.read + i * v, -s.beta[i] * s.carried[i], v);
  }
  kernels_.chunk_solve(s.system, s.written, v, false);
  scale_rows(sums_, s.rows, s.left, s.faded, k);
}

/// Replaces the state before a solved chunk by that after it.
template <class T>
void DeltaRule<T>::advance(const Scratch& s, float* state) const {
  const std::size_t k = shape_.key_width;
  const std::size_t v = shape_.value_width;
  sums_.scale(state, *s.carry, state, shape_.state());
  products_.multiply_prepared({k, v, kChunk}, transposed(s.faded, k), matrix(s.written, v),
                              matrix(state, v), true);
}

template <class T>
void DeltaRule<T>::forward(const DeltaInputs<T>& in, T* out, float* states, std::byte* scratch) {
  prepare();
  const std::size_t units = shape_.sequences * shape_.value_heads;
  on_team(threads_, [&](std::size_t thread) {
    const Scratch mine = scratch_of(scratch, thread);
    const Range here = range_of(units, threads_, thread);
    for (std::size_t unit = here.begin; unit < here.end; ++unit) {
      forward_head(in, unit / shape_.value_heads, unit % shape_.value_heads, out, states, mine);
    }
  });
}

template <class T>
void DeltaRule<T>::forward_head(const DeltaInputs<T>& in, std::size_t sequence, std::size_t head,
                                T* out, float* states, const Scratch& s) const {
  const std::size_t v = shape_.value_width;
  float* const state = s.states;
  std::fill_n(state, shape_.state(), 0.0F);
  for (std::size_t number = 0; number < shape_.chunks(); ++number) {
    const Chunk chunk = chunk_at(sequence, head, number);
    if (number % kChunksOfState == 0) {
      std::memcpy(states + kept_state_at(chunk), state, shape_.state() * sizeof(float));
    }
    load(in, chunk, s);
    solve(state, s);
    float* const result = s.read + kChunk * v;
    scale_rows(sums_, result, s.carried, result, v);
    products_.multiply_prepared({kChunk, v, kChunk}, matrix(s.scores + kChunk * kChunk, kChunk),
                                matrix(s.written, v), matrix(result, v), true);
    rows_.convert(result, v, out + chunk.row * shape_.values() + head * v, shape_.values(),
                  chunk.rows, v);
    advance(s, state);
  }
}

template <class T>
void DeltaRule<T>::backward(const DeltaInputs<T>& in, const float* states, const T* dout,
                            const DeltaGradients<T>& to, std::byte* scratch) {
  prepare();
  const std::size_t heads = shape_.sequences * shape_.value_heads;
  decay_gradients_.assign(heads, 0.0);
  shift_gradients_.assign(heads, 0.0);
  const std::size_t units = shape_.sequences * shape_.key_heads;
  on_team(threads_, [&](std::size_t thread) {
    const Scratch mine = scratch_of(scratch, thread);
    const Range here = range_of(units, threads_, thread);
    for (std::size_t unit = here.begin; unit < here.end; ++unit) {
      backward_group(in, unit / shape_.key_heads, unit % shape_.key_heads, states, dout, to, mine);
    }
  });
  const auto add = [&](const std::vector<double>& gradients, float* sums) {
    for (std::size_t h = 0; sums != nullptr && h < heads; ++h) {
      sums[h % shape_.value_heads] += static_cast<float>(gradients[h]);
    }
  };
  add(decay_gradients_, to.decay);
  add(shift_gradients_, to.shift);
}

/// Processes all heads of values that share a head of keys, the last chunks first.
template <class T>
void DeltaRule<T>::backward_group(const DeltaInputs<T>& in, std::size_t sequence,
                                  std::size_t key_head, const float* states, const T* dout,
                                  const DeltaGradients<T>& to, const Scratch& s) {
  const std::size_t shared = shape_.value_heads / shape_.key_heads;
  std::fill_n(s.dstates, shared * shape_.state(), 0.0F);
  for (std::size_t end = shape_.kept_states(); end > 0; --end) {
    const std::size_t begin = (end - 1) * kChunksOfState;
    const std::size_t count = std::min(kChunksOfState, shape_.chunks() - begin);
    std::fill_n(s.drows, 2 * kChunksOfState * kChunk * shape_.key_width, 0.0F);
    for (std::size_t i = 0; i < shared; ++i) {
      const Chunk first = chunk_at(sequence, key_head * shared + i, begin);
      backward_chunks(in, first, count, states + kept_state_at(first), dout, to, s);
    }
    write_key_gradients(in, chunk_at(sequence, key_head * shared, begin), count, to, s);
  }
}

/// Recomputes the states of `count` chunks from the first one, `state`, and differentiates them.
template <class T>
void DeltaRule<T>::backward_chunks(const DeltaInputs<T>& in, const Chunk& first, std::size_t count,
                                   const float* state, const T* dout, const DeltaGradients<T>& to,
                                   const Scratch& s) {
  const std::size_t size = shape_.state();
  std::memcpy(s.states, state, size * sizeof(float));
  const auto at = [&](std::size_t i) {
    return chunk_at(first.sequence, first.head, first.number + i);
  };
  for (std::size_t i = 0; i + 1 < count; ++i) {
    float* const next = s.states + (i + 1) * size;
    std::memcpy(next, s.states + i * size, size * sizeof(float));
    load(in, at(i), s);
    solve(next, s);
    advance(s, next);
  }
  const std::size_t shared = shape_.value_heads / shape_.key_heads;
  float* const dstate = s.dstates + first.head % shared * size;
  for (std::size_t i = count; i-- > 0;) {
    load(in, at(i), s);
    solve(s.states + i * size, s);
    backward_chunk(at(i), s.states + i * size, dstate, dout, to,
                   s.drows + i * kChunk * shape_.key_width, s);
    differentiate_decays(in, at(i), to, s);
  }
}

/// Differentiates a solved chunk. `dstate`: gradient of the state after it, replaced by that of
/// `state`. Writes the gradients of the values, dbeta and dsums, and adds those of unit keys and
/// queries to `drows`.
template <class T>
void DeltaRule<T>::backward_chunk(const Chunk& chunk, const float* state, float* dstate,
                                  const T* dout, const DeltaGradients<T>& to, float* drows,
                                  const Scratch& s) const {
  const std::size_t k = shape_.key_width;
  const std::size_t v = shape_.value_width;
  constexpr std::size_t kSquare = kChunk * kChunk;
  float* const dwritten = s.dpair;
  float* const dresult = s.dpair + kChunk * v;
  for (std::size_t i = 0; i < chunk.rows; ++i) {
    rows_.widen(dout + (chunk.row + i) * shape_.values() + chunk.head * v, dresult + i * v, v);
  }
  std::fill_n(dresult + chunk.rows * v, (kChunk - chunk.rows) * v, 0.0F);
  products_.multiply_prepared({kChunk, v, kChunk}, transposed(s.scores + kSquare, kChunk),
                              matrix(dresult, v), matrix(dwritten, v));
  products_.multiply_prepared({kChunk, v, k}, matrix(s.faded, k), matrix(dstate, v),
                              matrix(dwritten, v), true);
  kernels_.chunk_solve(s.system, dwritten, v, true);
  scale_rows(sums_, dwritten, s.beta, s.dread, v);
  rows_.convert(s.dread, v, to.channels + chunk.row * to.step + 2 * shape_.keys() + chunk.head * v,
                to.step, chunk.rows, v);
  sums_.scale(dwritten, -1.0F, dwritten, kChunk * v);
  products_.multiply_prepared({2 * kChunk, kChunk, v}, matrix(s.dpair, v), transposed(s.written, v),
                              matrix(s.dscores, kChunk));
  products_.multiply_prepared({kChunk, k, v}, matrix(s.written, v), transposed(dstate, v),
                              matrix(s.dfaded, k));
  std::fill_n(s.dsums, kChunk, 0.0F);
  kernels_.chunk_scores_backward({s.decay, s.beta, s.scores, s.scores + kSquare, s.system},
                                 s.dscores, s.dscores + kSquare, s.dbeta, s.dsums);
  differentiate_reads(state, dstate, chunk.rows - 1, s);
  scale_rows(sums_, s.dfaded, s.left, s.dfaded, k);
  products_.multiply_prepared({2 * kChunk, k, kChunk}, matrix(s.dscores, kChunk), matrix(s.rows, k),
                              matrix(s.dkeys, k), true);
  products_.multiply_prepared({kChunk, k, 2 * kChunk}, transposed(s.dscores, kChunk),
                              matrix(s.rows, k), matrix(s.dkeys, k), true);
  sums_.accumulate(s.dkeys, s.dfaded, kChunk * k);
  sums_.accumulate(drows, s.dkeys, kChunk * k);
  sums_.accumulate(drows + kChunksOfState * kChunk * k, s.dkeys + kChunk * k, kChunk * k);
}

/// Differentiates what a chunk reads from its first state and leaves in its last one. `last`: its
/// last row. Needs the gradients in dpair, and dfaded before it is multiplied by `left`.
template <class T>
void DeltaRule<T>::differentiate_reads(const float* state, float* dstate, std::size_t last,
                                       const Scratch& s) const {
  const std::size_t k = shape_.key_width;
  const std::size_t v = shape_.value_width;
  const auto dot = [&](const float* a, const float* b, std::size_t width) {
    float sum = 0.0F;
    sums_.row_dot(a, width, b, width, &sum, 1, width);
    return sum;
  };
  s.dsums[last] += dot(dstate, state, shape_.state()) * *s.carry;
  for (std::size_t i = 0; i < kChunk; ++i) {
    const float* const dwritten = s.dpair + i * v;  // negative
    const float* const dresult = s.dpair + (kChunk + i) * v;
    const float of_keys = dot(dwritten, s.read + i * v, v);
    const float of_queries = dot(dresult, s.read + (kChunk + i) * v, v);
    s.dbeta[i] += s.carried[i] * of_keys - dot(dwritten, s.values + i * v, v);
    s.dsums[i] += s.carried[i] * (s.beta[i] * of_keys + of_queries);
    const float of_left = s.left[i] * dot(s.dfaded + i * k, s.rows + i * k, k);
    s.dsums[last] += of_left;
    s.dsums[i] -= of_left;
    sums_.scale(dwritten, s.beta[i] * s.carried[i], s.dread + i * v, v);
    sums_.scale(dresult, s.carried[i], s.dread + (kChunk + i) * v, v);
  }
  products_.multiply_prepared({2 * kChunk, k, v}, matrix(s.dread, v), transposed(state, v),
                              matrix(s.dkeys, k));
  sums_.scale(dstate, *s.carry, dstate, shape_.state());
  products_.multiply_prepared({k, v, 2 * kChunk}, transposed(s.rows, k), matrix(s.dread, v),
                              matrix(dstate, v), true);
}

/// Writes the gradients of `b` and `a`, and adds those of the decay and its shift.
template <class T>
void DeltaRule<T>::differentiate_decays(const DeltaInputs<T>& in, const Chunk& chunk,
                                        const DeltaGradients<T>& to, const Scratch& s) {
  const double rate = std::exp(static_cast<double>(to_float(in.decay[chunk.head])));
  const auto shift = static_cast<double>(to_float(in.shift[chunk.head]));
  const std::size_t unit = chunk.sequence * shape_.value_heads + chunk.head;
  double dg = 0.0;
  for (std::size_t i = chunk.rows; i-- > 0;) {
    const std::size_t row = chunk.row + i;
    const bool ends = i + 1 == chunk.rows || s.first[i + 1] == static_cast<std::int32_t>(i + 1);
    dg = static_cast<double>(s.dsums[i]) + (ends ? 0.0 : dg);
    const auto a = static_cast<double>(
        to_float(in.betas[row * in.betas_step + shape_.value_heads + chunk.head]));
    const double da = -dg * rate * logistic(a + shift);
    const double beta = static_cast<double>(s.beta[i]);
    const double sigmoid = beta / static_cast<double>(shape_.beta_factor);
    T* const d = to.betas + row * to.step + chunk.head;
    d[0] =
        from_float<T>(static_cast<float>(static_cast<double>(s.dbeta[i]) * beta * (1.0 - sigmoid)));
    d[shape_.value_heads] = from_float<T>(static_cast<float>(da));
    decay_gradients_[unit] -= dg * rate * softplus(a + shift);
    shift_gradients_[unit] += da;
  }
}

/// Writes the gradients of queries and keys of `count` chunks from `first` on, from the sums of
/// drows.
template <class T>
void DeltaRule<T>::write_key_gradients(const DeltaInputs<T>& in, const Chunk& first,
                                       std::size_t count, const DeltaGradients<T>& to,
                                       const Scratch& s) const {
  const std::size_t k = shape_.key_width;
  const std::size_t rows = std::min(count * kChunk, shape_.length - first.number * kChunk);
  const std::size_t column = first.head / (shape_.value_heads / shape_.key_heads) * k;
  const float* const dqueries = s.drows + kChunksOfState * kChunk * k;
  for (std::size_t i = 0; i < rows; ++i) {
    const T* const x = in.channels + (first.row + i) * shape_.channels() + column;
    T* const dx = to.channels + (first.row + i) * to.step + column;
    kernels_.unit_row_backward(x, scale_, dqueries + i * k, dx, k);
    kernels_.unit_row_backward(x + shape_.keys(), 1.0F, s.drows + i * k, dx + shape_.keys(), k);
  }
}

template class DeltaRule<float>;
template class DeltaRule<Bf16>;
template class DeltaRule<F16>;

}  // namespace ballast::model::host
