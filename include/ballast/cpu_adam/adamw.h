#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "ballast/core/cpu.h"
#include "ballast/core/dtype.h"
#include "ballast/core/units.h"

namespace ballast::cpu_adam {

/// Hyper-parameters of one update. Source: Loshchilov & Hutter, "Decoupled weight decay
/// regularization", ICLR 2019, algorithm 2; order of operations as in torch.optim.AdamW.
struct AdamW {
  double learning_rate = 1e-3;
  double beta1 = 0.9;
  double beta2 = 0.999;
  double epsilon = 1e-8;
  double weight_decay = 0.0;
  /// Number of this update, from 1; enters the bias corrections.
  std::int64_t step = 1;
  /// Every gradient is multiplied by this first: the clip coefficient (and any unscaling).
  float gradient_scale = 1.0F;
};

/// States whose fp32 master is split: `weight` is its rounded high half, `remainder` its low half
/// (core/dtype.h). All of length `size` elements, host memory, any alignment, updated in place
/// except `gradient`.
struct SplitShard {
  Bf16* weight = nullptr;
  std::uint16_t* remainder = nullptr;
  float* first_moment = nullptr;
  float* second_moment = nullptr;
  const Bf16* gradient = nullptr;
  Elems size = 0;
};

/// States with a plain fp32 weight. Same rules as SplitShard.
struct PlainShard {
  float* weight = nullptr;
  float* first_moment = nullptr;
  float* second_moment = nullptr;
  const float* gradient = nullptr;
  Elems size = 0;
};

/// Instruction sets compiled in and supported by this CPU, worst first. The environment variable
/// BALLAST_ISA_MASK (a name) hides every better one.
std::vector<Isa> available();

/// The best of available().
Isa active();

/// Runs updates on a bounded number of threads. The result does not depend on the instruction set,
/// the number of threads or the order of chunks: bit for bit. Calls on one object must not overlap.
class Updater {
 public:
  /// `threads` 0: usable_cpus(). Throws Error(config) when `isa` is named and not available.
  explicit Updater(int threads = 0, std::optional<Isa> isa = {});
  ~Updater();
  Updater(Updater&&) noexcept;
  Updater& operator=(Updater&&) noexcept;

  /// One AdamW update in a single pass over memory. Blocks until done.
  void step(const AdamW& hyper, const SplitShard& shard) const;
  void step(const AdamW& hyper, const PlainShard& shard) const;

  [[nodiscard]] Isa isa() const noexcept;
  [[nodiscard]] int threads() const noexcept;

 private:
  struct Arena;
  std::unique_ptr<Arena> arena_;
};

}  // namespace ballast::cpu_adam
