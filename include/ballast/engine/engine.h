#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "ballast/config/config.h"
#include "ballast/engine/blueprint.h"
#include "ballast/schedule/executor.h"
#include "ballast/schedule/timeline.h"

namespace ballast::engine {

/// What one training step did.
struct StepResult {
  double loss = 0.0;       ///< mean cross-entropy per token over the whole batch, nats
  double grad_norm = 0.0;  ///< L2 norm over all gradients before clipping; not finite if skipped
  bool skipped = false;    ///< a gradient was not finite: nothing was updated
};

/// Running totals since start().
struct EngineTotals {
  schedule::LaneTotals lanes;
  std::array<Bytes, 3> allocated{};       ///< per tier; nothing is given back, so also the peak
  std::vector<Bytes> nvme_bytes_by_path;  ///< written, initial fill included
  [[nodiscard]] Bytes nvme_bytes_written() const;
};

/// Initial fp32 values of one tensor into `out` (its size). Throws Error when it has none.
using WeightSource = std::function<void(const model::TensorSpec& tensor, std::span<float> out)>;

/// Trains one model on one device: binds the schedule's operations to the modules.
/// Not thread-safe; one caller.
class Engine {
 public:
  /// Plans only, paths to swap to included (state::plan_swap); allocates nothing of the ledger yet.
  /// When `interrupted` is set and becomes true, a
  /// step under way ends with Error(interrupted). Throws Error(config), Error(memory),
  /// Error(io) or Error(device).
  Engine(const config::Config& config, const std::atomic<bool>* interrupted);
  ~Engine();
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  [[nodiscard]] const Blueprint& blueprint() const;
  [[nodiscard]] device::Device& device();
  /// "io_uring", "threads", or "" when nothing is on NVMe; after start().
  [[nodiscard]] std::string_view io_backend() const;
  /// Instruction set of the host update.
  [[nodiscard]] std::string_view update_isa() const;

  /// Allocates everything and writes the initial states: from `source`, or from the config's seed
  /// when empty. Before any step.
  void start(const WeightSource& source = {});

  /// From now on appends every operation to `timeline`, which must outlive the engine or the next
  /// call; nullptr stops it. To be read when nothing runs, or behind the next call.
  void record(schedule::Timeline* timeline);

  /// One optimizer step. `tokens` and `targets`: [micro-batches, sequences, length] in [0, vocab),
  /// the blueprint's number of micro-batches or, for a last, partial batch, fewer; the gradient is
  /// the mean over the tokens given. `learning_rate` applies to this step's update. Returns when
  /// loss and norm are known; gated updates run under the next step's forward pass.
  StepResult train_step(std::span<const std::int32_t> tokens, std::span<const std::int32_t> targets,
                        double learning_rate);

  /// Number of micro-batches that evaluate() takes.
  [[nodiscard]] std::uint64_t evaluation_micro_batches() const;
  /// Mean loss per token without training. `tokens` and `targets`: [evaluation micro-batches,
  /// sequences, length].
  double evaluate(std::span<const std::int32_t> tokens, std::span<const std::int32_t> targets);

  /// Waits until every update is done and written back.
  void finish();

  /// Number of updates applied so far (steps that were not skipped).
  [[nodiscard]] std::uint64_t updates() const;
  [[nodiscard]] EngineTotals totals() const;

  /// fp32 master weights of one tensor. Waits like finish().
  std::vector<float> read_weights(std::size_t block, const model::TensorSpec& tensor);

  /// XXH3 over all weights and states in block order: equal for every placement that trained the
  /// same. Waits like finish().
  std::uint64_t state_hash();

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace ballast::engine
