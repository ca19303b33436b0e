#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <memory>

#include "ballast/comm/communicator.h"
#include "ballast/cpu_adam/optimizer.h"
#include "ballast/cpu_adam/updater.h"
#include "ballast/device/device.h"
#include "ballast/engine/blueprint.h"
#include "ballast/engine/engine.h"
#include "ballast/model/compute.h"
#include "ballast/state/store.h"
#include "ballast/update/device_update.h"

#include "src/engine/queued_lane.h"

namespace ballast::engine {

/// What one submitted plan carries besides tensors. Written by the caller before the plan is
/// submitted and by the gate; read by operations behind the gate and, after it, by the caller.
struct StepContext {
  std::uint32_t micro_batches = 0;
  cpu_adam::Hyper hyper;
  StepResult result;
};

/// The modules that operations work with. All of them outlive the lanes.
struct Modules {
  const Blueprint& blueprint;
  device::Device& device;
  model::Compute& compute;
  state::Store& store;
  const cpu_adam::Updater& updater;
  update::DeviceUpdate& device_update;
  comm::Ranks* ranks = nullptr;  ///< nullptr for one rank alone
  double gradient_clipping = 0.0;
};

/// A piece of what this rank keeps of a block's weights or states, in host memory.
struct HomePiece {
  std::uint32_t block = 0;
  bool states = false;  ///< of the states; else of the weights
  Bytes offset = 0;     ///< of its first byte among those that the rank keeps
  HostBytes bytes;
};

/// Fills or reads pieces. Those of a plan come one at a time, in the order of blocks, a block's
/// weights before its states, each in ascending order.
using Visitor = std::function<void(const HomePiece&)>;

/// Performs operations: has the streams of the device, the channels between ranks and the transfers
/// under way that the lanes work with, and tells each lane what an operation means. Lanes are used
/// at the same time; the plan's edges keep them apart.
class Lanes {
 public:
  explicit Lanes(const Modules& modules);

  /// Performs one operation of the plan that was submitted as number `submission`, or starts it
  /// where its lane is queued. Throws Error.
  void start(const schedule::Operation& operation, std::uint64_t submission);
  /// Returns when the first operation on the stream or lane of `operation` is over that was started
  /// and not finished. Throws Error.
  void finish(const schedule::Operation& operation);

  /// A gated update reads that of the submission before its own, which is under way until the next
  /// one but two is submitted.
  StepContext& context(std::uint64_t submission) {
    return contexts_[submission % contexts_.size()];
  }
  void clear_contexts() { contexts_ = {}; }
  /// Who is called by the operations `initialize` and `read` from now on. To be set when none runs.
  void set_visitor(Visitor visitor) { visitor_ = std::move(visitor); }

  [[nodiscard]] const Modules& modules() const { return modules_; }

 private:
  class Step;

  /// Each lane between ranks has a channel of its own: their orders are independent. Where ranks
  /// have copies of the weights together in groups, gathers have one more for each of the two ways.
  struct Channels {
    std::unique_ptr<comm::Communicator> gathering;  ///< all ranks, by number of their shards
    std::unique_ptr<comm::Communicator> reducing;   ///< the same
    /// Those that have a copy of split weights together, and those with the same share of it; none
    /// when that is `gathering` and nobody.
    std::unique_ptr<comm::Communicator> gathering_in_group;
    std::unique_ptr<comm::Communicator> gathering_share;
    std::unique_ptr<device::Stream> gather_stream;
    std::unique_ptr<device::Stream> reduce_stream;
  };

  void join_ranks();
  /// The queue of the stream that `operation` runs on.
  [[nodiscard]] QueuedStream& queue_of(const schedule::Operation& operation);

  Modules modules_;
  QueuedStream compute_;
  QueuedStream upload_;
  QueuedStream offload_;
  TransferQueue fetches_;
  TransferQueue writebacks_;
  Channels channels_;  ///< empty for one rank alone
  Visitor visitor_;
  std::array<StepContext, 4> contexts_;
};

}  // namespace ballast::engine
