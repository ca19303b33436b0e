#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "ballast/comm/communicator.h"
#include "ballast/cpu_adam/shard.h"
#include "ballast/cpu_adam/updater.h"
#include "ballast/engine/background_save.h"
#include "ballast/engine/blueprint.h"
#include "ballast/engine/saved_states.h"
#include "ballast/model/compute.h"
#include "ballast/schedule/executor.h"
#include "ballast/schedule/timeline.h"
#include "ballast/state/swap_plan.h"

namespace ballast::engine {

/// Options of a run besides its blueprint. Equal on all ranks, except for the update's threads and
/// the swap paths.
struct EngineOptions {
  std::string device = "auto";  ///< auto, host or cuda; its budget is the blueprint's
  int compute_threads = 0;      ///< host device: threads of a kernel; 0: all CPUs
  double link_gbps = 0.0;       ///< host device: limits copies to so many GB/s; 0: no limit
  model::KernelOptions kernels;
  cpu_adam::UpdaterOptions update;
  /// Hyperparameters. The engine sets optimizer, learning rate, step and gradient scale itself.
  cpu_adam::Hyper hyper;
  model::Preference preference;             ///< for Blueprint::pairs
  double gradient_clipping = 1.0;           ///< largest L2 norm of all gradients; 0: no clipping
  std::uint64_t seed = 1234;                ///< of the initial weights
  state::SwapOptions swap;                  ///< for data that the blueprint places on NVMe
  bool serial = false;                      ///< one operation at a time
  bool nvtx = false;                        ///< operations are ranges in NVIDIA's profilers
  std::optional<std::uint64_t> delay_seed;  ///< operations are delayed at random, for debugging
};

/// Token ids of micro-batches: [micro-batches, sequences, length] each.
struct TokenBatch {
  std::span<const std::int32_t> tokens;   ///< in [0, vocab)
  std::span<const std::int32_t> targets;  ///< below vocab; negative: does not count
  /// Position of each token in its document: 0, or one more than that of the token before.
  /// Attention stays inside a document. Only and always if the blueprint is packed; otherwise every
  /// sequence is one document.
  std::span<const std::int32_t> positions = {};
};

/// Mean loss of an evaluation.
struct Evaluation {
  double loss = 0.0;  ///< mean cross-entropy per target that counts, nats, or loss of a pair
  std::uint64_t targets = 0;  ///< that count, of all ranks, or pairs that have some
};

/// Results of one training step.
struct StepResult {
  /// Mean cross-entropy over the targets of the whole batch that count, nats; with
  /// Blueprint::pairs, mean loss over the pairs.
  double loss = 0.0;
  std::uint64_t targets = 0;  ///< that count, of all ranks, or pairs that have some
  model::PairResult pairs;    ///< means over the pairs of the whole batch
  /// Without their coefficients; the mean over micro-batches, of this rank. 0 without experts.
  double balance_loss = 0.0;
  double router_z_loss = 0.0;
  /// By layer, by expert: rows that its router sent there, of all ranks. Empty for layers without
  /// experts, and without any.
  std::vector<std::vector<std::uint64_t>> expert_rows;
  /// L2 norm over all gradients before clipping, without the loss scale; not finite if skipped.
  double grad_norm = 0.0;
  bool skipped = false;  ///< a gradient was not finite: nothing was updated
  /// The step was clipped or skipped, so its speculative updates were undone and repeated.
  bool rolled_back = false;
};

/// Running totals since start().
struct EngineTotals {
  schedule::LaneTotals lanes;
  std::array<Bytes, 3> allocated{};       ///< per tier; never freed, so also the peak
  std::vector<Bytes> nvme_bytes_by_path;  ///< written, initial fill included
  double fill_seconds = 0.0;              ///< start() spent on the initial states
  [[nodiscard]] Bytes nvme_bytes_written() const;
};

/// Where initial weights come from. Several threads call it at a time.
struct WeightSource {
  /// Writes the fp32 values of elements [first, first + out.size()) of one tensor to `out`. Throws
  /// Error when it has none. Training in bf16 calls it for weights and again for their remainders.
  /// Empty: values are drawn from the seed.
  std::function<void(const model::TensorSpec& tensor, Elems first, std::span<float> out)> read;
  /// Whether read_bf16() delivers the tensor: bf16 holds all of its values exactly.
  std::function<bool(const model::TensorSpec& tensor)> is_bf16 = nullptr;
  /// Writes the bf16 values of elements from `first` on to `out`, 2 bytes each. Training in bf16
  /// calls it instead of read(), and only for the weights, since all remainders are zero. Empty: it
  /// delivers no tensor.
  std::function<void(const model::TensorSpec& tensor, Elems first, HostBytes out)> read_bf16 =
      nullptr;
  /// Whether read() has the magnitudes of adapters, which otherwise follow from their maps.
  bool has_magnitudes = false;
  /// Writes the codes of a tensor that is kept as codes to `out`, as model::CodedArrays has them,
  /// and returns true; or returns false, and its values are encoded. `out` is zeroed. Empty: they
  /// always are.
  std::function<bool(const model::TensorSpec& tensor, HostBytes out)> read_codes = nullptr;
};

/// Trains one model on one device, or this rank's share of it on several: binds the schedule's
/// operations to the modules. Not thread-safe. With several ranks every non-const call is
/// collective: all ranks make it, in the same order. With a blueprint for
/// schedule::Purpose::evaluation it only evaluates: train_step(), read_weights(), read_block() and
/// state_hash() throw Error(state).
class Engine {
 public:
  /// Makes the device and its kernels and checks the swap paths. `blueprint` is sized and placed.
  /// When `*interrupted` becomes true, a running step ends with Error(interrupted). `ranks`: the
  /// run's processes, as many as the blueprint's world; must outlive the engine; nullptr: one
  /// process. Blueprints differ only in the rank. Throws Error(config), Error(io), Error(device) or
  /// Error(comm).
  explicit Engine(Blueprint blueprint, EngineOptions options = {},
                  const std::atomic<bool>* interrupted = nullptr, comm::Ranks* ranks = nullptr);
  ~Engine();
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  [[nodiscard]] const Blueprint& blueprint() const;
  [[nodiscard]] device::Device& device();
  /// "io_uring", "threads", or "" when nothing is on NVMe; after start().
  [[nodiscard]] std::string_view io_backend() const;
  /// Instruction set of the host update.
  [[nodiscard]] std::string_view update_isa() const;

  /// Allocates everything and writes the initial states: from `source`. Before any step. Throws
  /// Error(io) for swap files that do not fit (state::plan_swap), among others.
  void start(const WeightSource& source = {});
  /// Instead of start(): allocates everything and takes weights and states from `source`, which is
  /// asked for this rank's entries of every array, in parts. `updates`: see updates(). What follows
  /// has the same bits as if training had never stopped. `here`: what the checkpoint has kept in
  /// this rank's swap files; if this engine places the same states there, it goes on with these
  /// files, does not ask for what is in them, and returns true. `kept`: all that checkpoints keep
  /// in these files. Throws the errors of `source`.
  bool resume(const StateSource& source, std::uint64_t updates, const KeptStates& here = {},
              const state::KeptExtents& kept = {});

  /// What save_states() passes on: this rank's part of weights and states. The parts of all ranks
  /// are the whole.
  [[nodiscard]] std::vector<StateRange> saved_ranges(schedule::Homes homes = {}) const;
  /// Waits for all updates, then passes the ranges of saved_ranges() to `sink` in this order, each
  /// in one or several parts in ascending order.
  void save_states(const StateSink& sink, schedule::Homes homes = {});

  /// What save_in_background() passes on: this rank's part of what lies in host memory.
  [[nodiscard]] std::vector<StateRange> background_ranges() const;
  /// Waits for all updates. Then passes background_ranges() to `sink` in this order, as they are
  /// now, and calls `end`, both on another thread, while training goes on: an update waits until
  /// its block has been passed on. `sink` and `end` may throw: BackgroundSave::finish() rethrows.
  /// End one before the next.
  std::shared_ptr<BackgroundSave> save_in_background(const StateSink& sink,
                                                     std::function<void()> end);

  /// Waits for all updates. Weights and states on NVMe stay as they are then, for `checkpoint`:
  /// later updates are written elsewhere (schedule::Options::kept_checkpoints at a time). Nothing
  /// is copied. Returns when they are on the disks. Throws Error(io).
  KeptStates keep_states(std::uint64_t checkpoint);
  /// The checkpoint needs them no more. Does nothing for an unknown one.
  void release_states(std::uint64_t checkpoint);
  /// The checkpoints for which states are kept.
  [[nodiscard]] std::vector<std::uint64_t> kept_checkpoints() const;
  /// Gives the swap files names, so that they outlive the process: `folder`/`name`-P for path P, or
  /// `elsewhere`-P in its directory if that is on another file system. Returns them by path, or
  /// none where that is impossible (no O_TMPFILE). Throws Error(io).
  [[nodiscard]] std::vector<std::filesystem::path> link_swap_files(
      const std::filesystem::path& folder, const std::string& name,
      const std::string& elsewhere) const;

  /// From now on appends every operation to `timeline`, which must outlive the engine or the next
  /// call; nullptr stops it. Read it after the next call of record() or when nothing runs.
  void record(schedule::Timeline* timeline);

  /// One optimizer step. `batch`: this rank's part of the batch: the blueprint's number of
  /// micro-batches or, for a partial batch, fewer, equally many on all ranks. Gradient and results
  /// are means over the targets of all micro-batches and ranks that count. `learning_rate` applies
  /// to this step's update. `loss_scale`: gradients are so many times as large until the update, so
  /// that they are not too small for fp16 (Micikevicius et al., "Mixed Precision Training", 2018);
  /// equal on all ranks, normally a power of two. Returns when loss and norm are known; gated
  /// updates run during the next step's forward pass. Throws Error(data) for positions that are not
  /// as TokenBatch says.
  StepResult train_step(const TokenBatch& batch, double learning_rate, double loss_scale = 1.0);

  /// Number of micro-batches that evaluate() takes.
  [[nodiscard]] std::uint64_t evaluation_micro_batches() const;
  /// Mean loss of all ranks without training. `batch`: this rank's evaluation micro-batches.
  Evaluation evaluate(const TokenBatch& batch);

  /// Waits until every update is done and written back.
  void finish();
  /// Waits until all operations have finished that were submitted so far. Nothing is submitted, so
  /// updates that belong to the next step stay pending. Every rank of a run calls this before its
  /// engine ends while the ranks continue: a rank that drops operations drops collectives that
  /// another rank may already wait in.
  void drain();

  /// Describes on what the bits of losses and weights depend besides config, data and weights, in a
  /// few words: the number of ranks and this rank's model::Compute::arithmetic().
  [[nodiscard]] std::string arithmetic() const;

  /// Number of updates applied so far (steps that were not skipped).
  [[nodiscard]] std::uint64_t updates() const;
  [[nodiscard]] EngineTotals totals() const;

  /// fp32 master weights of one tensor. Waits like finish().
  std::vector<float> read_weights(std::size_t block, const model::TensorSpec& tensor);

  /// fp32 master weights of a block, at the offsets of its tensors; other elements are zero. Reads
  /// the block once. Waits like finish().
  std::vector<float> read_block(std::size_t block);

  /// XXH3 over the XXH3 of each array of weights and states, in the order of whole_ranges(): equal
  /// for every placement, sub-group size and stage with the same number of ranks. Waits like
  /// finish().
  std::uint64_t state_hash();

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace ballast::engine
