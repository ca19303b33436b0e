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
#include <tuple>
#include <utility>
#include <vector>

#include "ballast/comm/communicator.h"
#include "ballast/cpu_adam/optimizer.h"
#include "ballast/cpu_adam/updater.h"
#include "ballast/engine/blueprint.h"
#include "ballast/engine/run_states.h"
#include "ballast/engine/side_states.h"
#include "ballast/engine/snapshot.h"
#include "ballast/engine/step_types.h"
#include "ballast/model/compute.h"
#include "ballast/plan/executor.h"
#include "ballast/plan/lane_times.h"
#include "ballast/state/store.h"
#include "ballast/state/swap_plan.h"
#include "ballast/step/plans.h"
#include "ballast/update/device_update.h"

namespace ballast::engine {

class Lanes;
struct Modules;
struct StepContext;
class TrialsBeforeSteps;

/// Options of a run in addition to its blueprint. Equal on all ranks, except for the update's
/// threads and the swap paths.
struct EngineOptions {
  std::string device = "auto";  ///< auto, host or cuda; each has the blueprint's budget
  /// GPU number of each device of the rank; empty: local_rank * devices + k for device k.
  std::vector<std::uint32_t> device_numbers;
  int compute_threads = 0;  ///< host device: threads per kernel; 0: all CPUs
  double link_gbps = 0.0;   ///< host device: limits copies to this many GB/s; 0: no limit
  model::KernelOptions kernels;
  cpu_adam::UpdaterOptions update;
  /// Hyperparameters. The engine sets optimizer, learning rate, step and gradient scale.
  cpu_adam::Hyper hyper;
  model::Preference preference;    ///< for Blueprint::pairs
  double gradient_clipping = 1.0;  ///< maximum L2 norm of all gradients; 0: no clipping
  /// Change of each correction bias of a sigmoid router per update, towards equal loads of the
  /// experts; 0: they stay as they are. For step::Purpose::training.
  double router_bias_update_speed = 0.0;
  std::uint64_t seed = 1234;                ///< seed of the initial weights
  state::SwapOptions swap;                  ///< for data that the blueprint places on NVMe
  bool pauses_speculation = true;           ///< see SpeculationPace
  bool serial = false;                      ///< one operation at a time
  bool nvtx = false;                        ///< operations are ranges in NVIDIA's profilers
  std::optional<std::uint64_t> delay_seed;  ///< delays operations at random, for debugging
};

/// Running totals since start().
struct EngineTotals {
  plan::LaneTotals lanes;
  std::array<Bytes, 3> allocated{};        ///< per tier; never freed, so also the peak
  std::vector<Bytes> allocated_on_device;  ///< by device
  std::vector<Bytes> nvme_bytes_by_path;   ///< bytes written, including the initial fill
  double fill_seconds = 0.0;               ///< time that start() spent on the initial states
  std::string io_backend;                  ///< "io_uring", "threads", or "" if nothing is on NVMe
  [[nodiscard]] Bytes nvme_bytes_written() const;
};

/// Trains one model, or this rank's share of it, on the rank's devices, by binding the schedule's
/// operations to the modules. Not thread-safe. With several ranks every non-const call is
/// collective: all ranks make it, in the same order. With a blueprint for step::Purpose::evaluation
/// it only evaluates: train_step() and the snapshot's functions throw Error(state).
class Engine {
 public:
  /// Makes the devices and their kernels and checks the swap paths. `blueprint` must be sized and
  /// placed. When `*interrupted` becomes true, a running step ends with Error(interrupted).
  /// `ranks`: the run's processes, whose number is the blueprint's world; must outlive the engine;
  /// nullptr: one process. Blueprints of ranks differ only in the rank. Throws Error(config),
  /// Error(io), Error(device) or Error(comm).
  explicit Engine(Blueprint blueprint, EngineOptions options = {},
                  const std::atomic<bool>* interrupted = nullptr, comm::Ranks* ranks = nullptr);
  ~Engine();
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  [[nodiscard]] const Blueprint& blueprint() const { return blueprint_; }
  /// Returns the first device.
  [[nodiscard]] device::Device& device() { return *devices_.front().device; }
  /// Instruction set of the host update.
  [[nodiscard]] std::string_view update_isa() const { return to_string(updater_.isa()); }

  /// Allocates everything and writes the initial states: weights from `source`, or drawn from
  /// EngineOptions::seed. Call it before any step. Throws Error(io) for swap files that do not fit
  /// (state::plan_swap), among others, and the errors of `source`.
  void start(WeightSource& source);
  void start();
  /// Alternative to start(): allocates everything and reads weights and states from `source`, in
  /// parts, for this rank's entries of every array. `updates`: see updates(). Training continues
  /// with the same bits as if it had never stopped. `here`: states that the checkpoint keeps in
  /// this rank's swap files. If this engine places the same states there, it continues in these
  /// files, does not read these states from `source`, and returns true. `kept`: all extents that
  /// checkpoints keep in these files. `side`: see side_states(). Throws the errors of
  /// `source`.
  bool resume(const StateSource& source, std::uint64_t updates, const KeptStates& here = {},
              const state::KeptExtents& kept = {}, SideValues side = {});

  /// Appends every operation to `timeline` from now on; it must outlive the engine or the next
  /// call. nullptr stops recording. Read it after the next call of record() or when nothing runs.
  void record(plan::Timeline* timeline);

  /// Runs one optimizer step. `batch`: this rank's part of the batch, with the blueprint's number
  /// of micro-batches or, for a partial batch, fewer (the same number on all ranks). Gradient and
  /// results are means over the counted targets of all micro-batches and ranks. `learning_rate`
  /// applies to this step's update. `loss_scale`: gradients are multiplied by it until the update,
  /// so that they do not underflow in fp16 (Micikevicius et al., "Mixed Precision Training", 2018);
  /// equal on all ranks, normally a power of two. Returns when loss and norm are known; gated
  /// updates run during the next step's forward pass. Throws Error(data) for positions that violate
  /// TokenBatch.
  StepResult train_step(const TokenBatch& batch, double learning_rate, double loss_scale = 1.0);

  /// Number of micro-batches for evaluate().
  [[nodiscard]] std::uint64_t evaluation_micro_batches() const {
    return blueprint_.problem.evaluation_micro_batches;
  }
  /// Returns the mean loss over all ranks, without training. `batch`: this rank's evaluation
  /// micro-batches.
  Evaluation evaluate(const TokenBatch& batch);

  /// Waits until every update is done and written back.
  void finish();
  /// Waits until all submitted operations have finished. Submits nothing, so updates that belong to
  /// the next step stay pending. Every rank calls this before its engine ends while the ranks
  /// continue, because a rank that drops operations drops collectives in which another rank may
  /// already wait.
  void drain();

  /// Describes what the bits of losses and weights depend on in addition to config, data and
  /// weights, in a few words: the number of ranks and this rank's model::Compute::arithmetic().
  [[nodiscard]] std::string arithmetic() const;

  /// Side states that this run or the one it has resumed has changed. Weights of a checkpoint
  /// contain the initial ones, because frozen weights do not change.
  [[nodiscard]] const SideValues& side_states() const;
  /// Number of updates applied so far (steps that were not skipped).
  [[nodiscard]] std::uint64_t updates() const { return updates_; }
  [[nodiscard]] EngineTotals totals() const;

  /// Weights and states of this rank, to read and to save. Call it after start() or resume().
  [[nodiscard]] Snapshot& snapshot();

 private:
  struct OwnDevice {
    std::unique_ptr<device::Device> device;
    std::unique_ptr<model::Compute> compute;
    std::unique_ptr<update::DeviceUpdate> update;
  };

  /// Returns the rank's devices, connected with each other.
  [[nodiscard]] std::vector<OwnDevice> make_devices() const;
  [[nodiscard]] static std::string arithmetic_of(const OwnDevice& own);
  /// Throws Error(state) if the blueprint does not suit the ranks or the kernels.
  void check_blueprint() const;
  [[nodiscard]] Modules modules();
  /// `here`: existing swap files. Passes to `fill` whether they are reused.
  void start_with(const state::SwapImage& here, const std::function<void(bool reuses)>& fill);
  /// Reads side states that this run changes, and does not have yet, from the weights.
  void read_side_states();
  /// Returns whether each operation is awaited and its results are checked (model::GpuChecks).
  [[nodiscard]] bool checks_each() const;
  /// Logs versions and memory of a device other than the host device on rank 0.
  void log_start(std::chrono::duration<double> warm_up) const;
  [[nodiscard]] std::unique_ptr<plan::Executor> make_executor(
      std::function<void(const plan::Span&)> observer);
  /// Returns a function that runs plans outside steps, without totals and timeline.
  [[nodiscard]] Perform perform();
  const plan::Plan& training_plan(std::size_t micro_batches);
  /// Starts the pending updates of the last step.
  void flush();
  /// Lets speculation pause or resume after a step. `as_assumed`: see SpeculationPace.
  void pace_speculation(bool as_assumed);
  /// Copies the batch in, submits the plan and waits for its gate.
  const StepContext& run(const plan::Plan& plan, const TokenBatch& batch, double learning_rate,
                         double loss_scale);

  Blueprint blueprint_;
  EngineOptions options_;
  const std::atomic<bool>* interrupted_;
  comm::Ranks* ranks_;                         ///< nullptr for one rank
  std::shared_ptr<TrialsBeforeSteps> trials_;  ///< null if products are not timed
  cpu_adam::Updater updater_;
  std::vector<OwnDevice> devices_;
  std::unique_ptr<SideStates> side_;
  std::unique_ptr<state::Store> store_;
  std::unique_ptr<Lanes> lanes_;
  std::optional<Snapshot> snapshot_;
  std::unique_ptr<plan::Executor> executor_;
  std::chrono::duration<double> fill_time_{0};
  std::vector<HostBytes> batches_;  ///< per micro-batch: tokens, targets, sum rows, positions
  /// By number of micro-batches, and whether updates are pending and speculation pauses.
  std::map<std::tuple<std::size_t, bool, bool>, plan::Plan> partial_steps_;
  SpeculationPace speculation_;
  std::optional<step::GatedPlans> gated_;  ///< built at the first pause of speculation
  std::uint64_t submissions_ = 0;
  std::uint64_t updates_ = 0;
  bool pending_updates_ = false;  ///< the last step's updates have not been submitted
  bool paused_ = false;           ///< speculation pauses, so gated_ has the current plans
  std::atomic<plan::Timeline*> timeline_ = nullptr;
};

}  // namespace ballast::engine
