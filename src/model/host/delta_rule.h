#pragma once

#include <cstddef>
#include <vector>

#include "ballast/core/memory.h"

#include "src/model/compute/kernel_arguments.h"
#include "src/model/host/kernel_tables.h"
#include "src/model/host/products.h"

namespace ballast::model::host {

/// The recurrence of a gated delta net, per head of values: S = exp(g) S, u = beta (v - S^T k),
/// S += k u^T, o = S^T q, with g = -exp(A_log) softplus(a + dt_bias), beta = sigmoid(b) (times
/// DeltaShape::beta_factor), and queries and keys of unit length. The state S [key_width,
/// value_width] is zero at the start of each document.
///
/// Rows are computed in chunks of DeltaShape::kChunk, in fp32: the updates of a chunk solve a
/// triangular system (the WY form). Source: Yang et al., "Gated Delta Networks", 2025, section 3.
/// Chunks begin at multiples of their size in the sequence. Inside a chunk, decays across the start
/// of a document are zero. A backward pass recomputes the states between those that are kept.
///
/// Each head is computed by one thread, so results do not depend on the number of threads.
template <class T>
class DeltaRule {
 public:
  /// `threads`: size of the OpenMP team that runs it.
  DeltaRule(const DeltaShape& shape, const TypeKernels<T>& kernels, std::size_t threads);

  /// Bytes of scratch memory, a multiple of the cache line.
  [[nodiscard]] std::size_t scratch_bytes() const;
  /// Writes out [N, values()] and `states` [states()].
  void forward(const DeltaInputs<T>& in, T* out, float* states, std::byte* scratch);
  /// `states`: results of forward(). `dout`: gradient of out.
  void backward(const DeltaInputs<T>& in, const float* states, const T* dout,
                const DeltaGradients<T>& to, std::byte* scratch);

 private:
  struct Scratch;
  struct Chunk;

  Scratch take_scratch(Bump& bump) const;
  [[nodiscard]] Scratch scratch_of(std::byte* scratch, std::size_t thread) const;
  [[nodiscard]] Chunk chunk_at(std::size_t sequence, std::size_t head, std::size_t number) const;
  void prepare();
  void load(const DeltaInputs<T>& in, const Chunk& chunk, const Scratch& s) const;
  void load_decays(const DeltaInputs<T>& in, const Chunk& chunk, const Scratch& s) const;
  void solve(const float* state, const Scratch& s) const;
  void advance(const Scratch& s, float* state) const;
  void forward_head(const DeltaInputs<T>& in, std::size_t sequence, std::size_t head, T* out,
                    float* states, const Scratch& s) const;
  void backward_group(const DeltaInputs<T>& in, std::size_t sequence, std::size_t key_head,
                      const float* states, const T* dout, const DeltaGradients<T>& to,
                      const Scratch& s);
  void backward_chunks(const DeltaInputs<T>& in, const Chunk& first, std::size_t count,
                       const float* state, const T* dout, const DeltaGradients<T>& to,
                       const Scratch& s);
  void backward_chunk(const Chunk& chunk, const float* state, float* dstate, const T* dout,
                      const DeltaGradients<T>& to, float* drows, const Scratch& s) const;
  void differentiate_reads(const float* state, float* dstate, std::size_t last,
                           const Scratch& s) const;
  void differentiate_decays(const DeltaInputs<T>& in, const Chunk& chunk,
                            const DeltaGradients<T>& to, const Scratch& s);
  void write_key_gradients(const DeltaInputs<T>& in, const Chunk& first, std::size_t count,
                           const DeltaGradients<T>& to, const Scratch& s) const;
  /// Returns the index of the kept state of the chunk's first element.
  [[nodiscard]] std::size_t kept_state_at(const Chunk& chunk) const;

  DeltaShape shape_;
  const MixerKernels<T>& kernels_;
  const RowKernels<T>& rows_;
  const RowKernels<float>& sums_;
  std::size_t threads_;
  float scale_;
  std::vector<double> decay_gradients_;  ///< [sequences, value_heads], of the current call
  std::vector<double> shift_gradients_;
  Products products_;
  bool prepared_ = false;
};

}  // namespace ballast::model::host
