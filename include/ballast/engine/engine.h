#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "ballast/comm/communicator.h"
#include "ballast/cpu_adam/shard.h"
#include "ballast/cpu_adam/updater.h"
#include "ballast/engine/blueprint.h"
#include "ballast/engine/saved_states.h"
#include "ballast/engine/snapshot.h"
#include "ballast/engine/step_types.h"
#include "ballast/engine/weight_source.h"
#include "ballast/model/compute.h"
#include "ballast/plan/executor.h"
#include "ballast/plan/timeline.h"
#include "ballast/state/store.h"
#include "ballast/state/swap_plan.h"
#include "ballast/update/device_update.h"

namespace ballast::engine {

class Lanes;
struct StepContext;

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

/// Running totals since start().
struct EngineTotals {
  plan::LaneTotals lanes;
  std::array<Bytes, 3> allocated{};       ///< per tier; never freed, so also the peak
  std::vector<Bytes> nvme_bytes_by_path;  ///< written, initial fill included
  double fill_seconds = 0.0;              ///< start() spent on the initial states
  std::string io_backend;                 ///< "io_uring", "threads", or "" if nothing is on NVMe
  [[nodiscard]] Bytes nvme_bytes_written() const;
};

/// Trains one model on one device, or this rank's share of it on several: binds the schedule's
/// operations to the modules. Not thread-safe. With several ranks every non-const call is
/// collective: all ranks make it, in the same order. With a blueprint for
/// step::Purpose::evaluation it only evaluates: train_step() and the snapshot's functions throw
/// Error(state).
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

  [[nodiscard]] const Blueprint& blueprint() const { return blueprint_; }
  [[nodiscard]] device::Device& device() { return *device_; }
  /// Instruction set of the host update.
  [[nodiscard]] std::string_view update_isa() const { return to_string(updater_.isa()); }

  /// Allocates everything and writes the initial states: weights from `source`, or drawn from
  /// EngineOptions::seed. Before any step. Throws Error(io) for swap files that do not fit
  /// (state::plan_swap), among others, and the errors of `source`.
  void start(WeightSource& source);
  void start();
  /// Instead of start(): allocates everything and takes weights and states from `source`, which is
  /// asked for this rank's entries of every array, in parts. `updates`: see updates(). What follows
  /// has the same bits as if training had never stopped. `here`: what the checkpoint has kept in
  /// this rank's swap files; if this engine places the same states there, it goes on with these
  /// files, does not ask for what is in them, and returns true. `kept`: all that checkpoints keep
  /// in these files. Throws the errors of `source`.
  bool resume(const StateSource& source, std::uint64_t updates, const KeptStates& here = {},
              const state::KeptExtents& kept = {});

  /// From now on appends every operation to `timeline`, which must outlive the engine or the next
  /// call; nullptr stops it. Read it after the next call of record() or when nothing runs.
  void record(plan::Timeline* timeline);

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
  [[nodiscard]] std::uint64_t evaluation_micro_batches() const {
    return blueprint_.problem.evaluation_micro_batches;
  }
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
  [[nodiscard]] std::uint64_t updates() const { return updates_; }
  [[nodiscard]] EngineTotals totals() const;

  /// Weights and states of this rank, to read and to save. After start() or resume().
  [[nodiscard]] Snapshot& snapshot();

 private:
  /// `here`: existing swap files. Passes to `fill` whether they are used.
  void start_with(const state::SwapImage& here, const std::function<void(bool reuses)>& fill);
  [[nodiscard]] std::unique_ptr<plan::Executor> make_executor(
      std::function<void(const plan::Span&)> observer);
  /// Runs plans outside of steps, without totals and timeline.
  [[nodiscard]] Perform perform();
  const plan::Plan& training_plan(std::size_t micro_batches);
  /// Starts the pending updates of the last step.
  void flush();
  /// Copies the batch in, submits the plan and waits for its gate.
  const StepContext& run(const plan::Plan& plan, const TokenBatch& batch, double learning_rate,
                         double loss_scale);

  Blueprint blueprint_;
  EngineOptions options_;
  const std::atomic<bool>* interrupted_;
  comm::Ranks* ranks_;  ///< nullptr for one rank
  std::unique_ptr<device::Device> device_;
  std::unique_ptr<model::Compute> compute_;
  cpu_adam::Updater updater_;
  std::unique_ptr<update::DeviceUpdate> device_update_;
  std::unique_ptr<state::Store> store_;
  std::unique_ptr<Lanes> lanes_;
  std::optional<Snapshot> snapshot_;
  std::unique_ptr<plan::Executor> executor_;
  std::chrono::duration<double> fill_time_{0};
  std::vector<HostBytes> batches_;  ///< per micro-batch: tokens, targets, positions
  /// By number of micro-batches and whether updates are pending.
  std::map<std::pair<std::size_t, bool>, plan::Plan> partial_steps_;
  std::uint64_t submissions_ = 0;
  std::uint64_t updates_ = 0;
  bool pending_updates_ = false;  ///< the last step's updates have not been submitted
  std::atomic<plan::Timeline*> timeline_ = nullptr;
};

}  // namespace ballast::engine
