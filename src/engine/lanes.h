#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string_view>
#include <utility>
#include <vector>

#include "ballast/comm/communicator.h"
#include "ballast/cpu_adam/optimizer.h"
#include "ballast/cpu_adam/updater.h"
#include "ballast/device/device.h"
#include "ballast/engine/blueprint.h"
#include "ballast/engine/run_states.h"
#include "ballast/engine/side_states.h"
#include "ballast/engine/step_types.h"
#include "ballast/model/compute.h"
#include "ballast/plan/executor.h"
#include "ballast/plan/plan.h"
#include "ballast/state/store.h"
#include "ballast/step/plans.h"
#include "ballast/update/device_update.h"

namespace ballast::engine {

/// A device stream and the end events of the unfinished operations of a lane on it, at most
/// plan::kMaxOnFastStream. One thread enqueues, another waits, and all may let other streams wait.
class QueuedStream {
 public:
  QueuedStream(device::Device& device, std::string_view name)
      : QueuedStream(device, device.make_stream(name)) {}
  /// A lane that shares its stream with another one.
  QueuedStream(device::Device& device, std::shared_ptr<device::Stream> stream)
      : stream_(std::move(stream)) {
    for (End& end : ends_) end.event = device.make_event();
  }

  [[nodiscard]] device::Stream& stream() { return *stream_; }
  /// Call it after all work of `operation` of this submission is enqueued.
  void end_operation(const plan::Operation& operation, std::uint64_t submission) {
    const std::scoped_lock lock(mutex_);
    End& end = ends_[ended_++ % ends_.size()];
    end.operation = &operation;
    end.submission = submission;
    end.event->record(*stream_);
  }
  /// Makes `other` wait until `operation`, which was enqueued, is over.
  void let_wait(device::Stream& other, const plan::Operation& operation, std::uint64_t submission) {
    const std::scoped_lock lock(mutex_);
    for (std::size_t i = finished_; i < ended_; ++i) {
      const End& end = ends_[i % ends_.size()];
      if (end.operation == &operation && end.submission == submission) end.event->wait_on(other);
    }
  }
  /// Blocks until the first unfinished operation has finished. Rethrows the Error of its work.
  void finish_operation() {
    // Its event is not recorded again before the operation has finished.
    std::exception_ptr error;
    try {
      ends_[finished_ % ends_.size()].event->synchronize();
    } catch (...) {
      error = std::current_exception();
    }
    {
      const std::scoped_lock lock(mutex_);
      ++finished_;
    }
    if (error) std::rethrow_exception(error);
  }

 private:
  struct End {
    std::unique_ptr<device::Event> event;
    const plan::Operation* operation = nullptr;
    std::uint64_t submission = 0;
  };

  std::shared_ptr<device::Stream> stream_;
  std::mutex mutex_;
  std::array<End, plan::kMaxOnFastStream> ends_;
  std::size_t ended_ = 0;     ///< changed by the enqueueing thread
  std::size_t finished_ = 0;  ///< changed by the waiting thread
};

/// Unfinished transfers of a lane, at most plan::kMaxEnqueued. One thread starts them, another
/// finishes them.
class TransferQueue {
 public:
  /// `transfer`: null for an operation that has nothing to do.
  void add(std::unique_ptr<state::SwapTransfer> transfer) {
    transfers_[added_++ % transfers_.size()] = std::move(transfer);
  }
  /// Finishes the first unfinished transfer. Rethrows its Error.
  void finish_operation() {
    const auto transfer = std::move(transfers_[finished_++ % transfers_.size()]);
    if (transfer) transfer->finish();
  }

 private:
  std::array<std::unique_ptr<state::SwapTransfer>, plan::kMaxEnqueued> transfers_;
  std::size_t added_ = 0;
  std::size_t finished_ = 0;
};

/// Scalar inputs and results of one submitted plan. Written by the caller before it submits the
/// plan and by the gate; read by operations after the gate and then by the caller.
struct StepContext {
  std::uint32_t micro_batches = 0;
  bool trains = false;
  bool checks_results = false;  ///< see model::GpuChecks
  double loss_scale = 1.0;
  cpu_adam::Hyper hyper;
  StepResult result;

  /// Hyper::gradient_scale of a step that is not clipped: removes the loss scale from the
  /// gradients.
  [[nodiscard]] float unclipped_scale() const { return static_cast<float>(1.0 / loss_scale); }
  /// The divisor of means: counted targets of all ranks, or pairs.
  [[nodiscard]] double divisor() const {
    return static_cast<double>(std::max<std::uint64_t>(result.targets, 1));
  }
  /// Gradient of the scaled loss with respect to the loss of one target or pair.
  [[nodiscard]] float loss_gradient() const { return static_cast<float>(loss_scale / divisor()); }
  /// Gradient for the router losses, which are means over `parts` of the step.
  [[nodiscard]] float router_gradient(std::uint32_t parts) const {
    return static_cast<float>(loss_scale / static_cast<double>(parts));
  }
};

/// Returns whether `operation` exchanges data between the devices of ranks. All ranks must start
/// such operations in the same order.
bool is_collective(const Blueprint& blueprint, const plan::Operation& operation);

/// A device of the rank with its kernels.
struct DeviceModules {
  device::Device& device;
  model::Compute& compute;
  update::DeviceUpdate& update;
};

/// The modules that operations use. They outlive the lanes.
struct Modules {
  const Blueprint& blueprint;
  std::vector<DeviceModules> devices;  ///< by Operation::device
  state::Store& store;
  const cpu_adam::Updater& updater;
  const SideStates& side;
  comm::Ranks* ranks = nullptr;  ///< nullptr with one rank
  model::Preference preference;  ///< see EngineOptions
  double gradient_clipping = 0.0;
  bool nvtx = false;       ///< see EngineOptions
  std::uint64_t seed = 0;  ///< see EngineOptions
};

/// Performs operations. Owns the device streams, the channels between ranks and the pending
/// transfers. Lanes run concurrently; the plan's edges synchronize them.
class Lanes {
 public:
  explicit Lanes(const Modules& modules);

  /// Performs one operation of submission number `submission`, or starts it if its lane is queued.
  /// Throws Error.
  void start(const plan::Operation& operation, std::uint64_t submission);
  /// Returns when the first unfinished operation on the stream or lane of `operation` has finished.
  /// Throws Error.
  void finish(const plan::Operation& operation);
  /// Makes the stream of `next` wait for the end of `before`, an operation of that submission,
  /// which was started on another stream of the device.
  void follow(const plan::Operation& next, const plan::Operation& before, std::uint64_t submission);

  /// Returns whether collectives run on a stream that other streams can wait for: on GPUs. Those of
  /// the host device have ended when start() returns.
  [[nodiscard]] bool streams_collectives() const;
  /// Returns whether start() only enqueues the operations of a lane.
  [[nodiscard]] bool is_queued(plan::Lane lane) const {
    return plan::is_queued(lane, streams_collectives());
  }

  /// A gated update reads the previous submission's context, so four contexts suffice.
  StepContext& context(std::uint64_t submission) {
    return contexts_[submission % contexts_.size()];
  }
  void clear_contexts() { contexts_ = {}; }
  /// Sets the function that operations `initialize` and `read` call. Call it when none of them
  /// runs.
  void set_visitor(Visitor visitor) {
    visitor_ = std::move(visitor);
    zeros_from_.assign(modules_.blueprint.schedule.buffers.size(), state::kNoZeros);
  }

  void visit(HomePiece& piece) const { visitor_(piece); }

  [[nodiscard]] const Modules& modules() const { return modules_; }
  [[nodiscard]] const step::OperationNames& names() const { return names_; }
  /// Returns `totals` of the executor without the bytes of operations that had nothing to do.
  [[nodiscard]] plan::LaneTotals without_idle(plan::LaneTotals totals) const {
    for (std::size_t lane = 0; lane < idle_bytes_.size(); ++lane) {
      totals.bytes[lane] -= idle_bytes_[lane];
    }
    return totals;
  }

  /// Channels between the devices with the same number of all ranks. Gathers and reductions share a
  /// stream, which runs them one at a time in the order of their turns (is_collective).
  struct Channels {
    /// With several sharers: all of them, in the order of their shards.
    std::unique_ptr<comm::Communicator> all;
    /// With several groups: the ranks that share one copy of split weights, and the ranks with the
    /// same share of it; otherwise empty.
    std::unique_ptr<comm::Communicator> weight_copy;
    std::unique_ptr<comm::Communicator> same_share;
    std::shared_ptr<device::Stream> stream;
    /// With expert parallelism: exchange of rows, on the stream of the compute lane. It has its own
    /// channel, because NCCL runs the collectives of one channel one after the other.
    std::unique_ptr<model::AllToAll> rows;
    /// With sequence parallelism: exchange of rows against heads among the ranks that share
    /// sequences, on the same stream.
    std::unique_ptr<model::AllToAll> heads;
    /// With tensor parallelism: the ranks that share the tiles of each matrix, by tensor place, on
    /// the stream of gathers and reductions.
    std::unique_ptr<comm::Communicator> tensor;

    /// Returns the channel for gathers between the ranks of `group`.
    [[nodiscard]] comm::Communicator& gathering(plan::RankGroup group) const;
  };

  /// Returns the channels of a device; empty with one rank.
  [[nodiscard]] const Channels& channels(std::uint8_t device) const {
    return devices_[device]->channels;
  }
  /// Returns the queue of the stream that `operation` runs on.
  [[nodiscard]] QueuedStream& queue_of(const plan::Operation& operation);
  [[nodiscard]] TransferQueue& fetches() { return fetches_; }
  [[nodiscard]] TransferQueue& writebacks() { return writebacks_; }
  /// First byte of a buffer from which on the visitor has left zeros.
  [[nodiscard]] Bytes& zeros_from(plan::BufferId buffer) { return zeros_from_[buffer]; }

 private:
  /// The lanes that each device has.
  struct DeviceLanes {
    DeviceLanes(device::Device& device, bool passes);

    QueuedStream compute;
    QueuedStream upload;
    QueuedStream offload;
    std::optional<QueuedStream> pass;  ///< only with several devices
    Channels channels;
    /// Only if collectives are streamed: both on the stream of the channels.
    std::optional<QueuedStream> gather;
    std::optional<QueuedStream> reduce;
  };

  [[nodiscard]] Channels join_ranks(device::Device& device) const;

  Modules modules_;
  step::OperationNames names_;
  std::vector<std::unique_ptr<DeviceLanes>> devices_;
  TransferQueue fetches_;
  TransferQueue writebacks_;
  Visitor visitor_;
  std::vector<Bytes> zeros_from_;  ///< by buffer
  std::array<StepContext, 4> contexts_;
  std::array<std::atomic<Bytes>, plan::kLaneCount> idle_bytes_{};
};

}  // namespace ballast::engine
