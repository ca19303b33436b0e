#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include "ballast/model/step_program.h"
#include "ballast/plan/plan.h"
#include "ballast/step/labels.h"

#include "src/step/placed_problem.h"

namespace ballast::step {

/// A list of buffers under construction: each separately, or one per tier, kind and device if only
/// their sums are needed. Arguments `device` do not count for buffers on NVMe.
class BufferList {
 public:
  BufferList(bool merges, std::uint32_t devices)
      : merges_(merges), devices_(devices), merged_(devices, none()) {}

  [[nodiscard]] bool merges() const { return merges_; }

  [[nodiscard]] const Buffer& operator[](BufferId id) const { return buffers_[id]; }
  [[nodiscard]] std::vector<Buffer> take() { return std::move(buffers_); }
  /// The largest host buffer for data in transit, if buffers are merged.
  [[nodiscard]] Bytes largest_place() const { return largest_place_; }
  /// If buffers are merged: the merged NVMe buffer of a kind, or kNoBuffer.
  [[nodiscard]] BufferId merged_on_nvme(Kind kind) const {
    return merged_.front()
        .at(static_cast<std::size_t>(Tier::nvme))
        .at(static_cast<std::size_t>(kind));
  }

  BufferId add(std::string name, Tier tier, Kind kind, Bytes bytes, std::uint8_t device = 0) {
    if (merges_) return merge(tier, kind, bytes, 1, device);
    if (tier == Tier::device && devices_ > 1) name += fmt::format(", device {}", device);
    buffers_.push_back({std::move(name), tier, kind, bytes, device_of(tier, device)});
    return static_cast<BufferId>(buffers_.size() - 1);
  }

  /// Adds `count` equal buffers to the merged buffer of their tier, kind and device.
  BufferId merge(Tier tier, Kind kind, Bytes bytes, std::size_t count, std::uint8_t device = 0) {
    const bool place = kind == Kind::staging || kind == Kind::gradients;
    if (tier == Tier::host && place) largest_place_ = std::max(largest_place_, bytes);
    const std::uint8_t of = device_of(tier, device);
    BufferId& id =
        merged_.at(of).at(static_cast<std::size_t>(tier)).at(static_cast<std::size_t>(kind));
    if (id == kNoBuffer) {
      id = static_cast<BufferId>(buffers_.size());
      buffers_.push_back({{}, tier, kind, 0, of});
    }
    buffers_[id].bytes += count * round_up(bytes, kPage);
    return id;
  }

  std::vector<BufferId> add_slots(std::string_view name, Tier tier, Kind kind, Bytes bytes,
                                  std::size_t count, std::uint8_t device = 0) {
    if (bytes == 0) return {};
    return add_equal([name](std::size_t i) { return fmt::format("{} {}", name, i); }, tier, kind,
                     bytes, count, device);
  }

  /// If buffers are merged, one represents all.
  template <class Name>
  std::vector<BufferId> add_equal(Name name, Tier tier, Kind kind, Bytes bytes, std::size_t count,
                                  std::uint8_t device = 0) {
    if (count == 0) return {};
    if (merges_) return {merge(tier, kind, bytes, count, device)};
    std::vector<BufferId> buffers;
    buffers.reserve(count);
    for (std::size_t i = 0; i < count; ++i)
      buffers.push_back(add(name(i), tier, kind, bytes, device));
    return buffers;
  }

 private:
  static constexpr std::size_t kKinds = static_cast<std::size_t>(Kind::checkpoints) + 1;
  using Merged = std::array<std::array<BufferId, kKinds>, kTiers.size()>;
  static std::uint8_t device_of(Tier tier, std::uint8_t device) {
    return tier == Tier::nvme ? std::uint8_t{0} : device;
  }
  static Merged none() {
    Merged ids;
    for (auto& of_tier : ids) of_tier.fill(kNoBuffer);
    return ids;
  }

  bool merges_;
  std::uint32_t devices_;
  std::vector<Buffer> buffers_;
  Bytes largest_place_ = 0;
  std::vector<Merged> merged_;  ///< by device
};

/// The buffers that values share on one device.
struct DeviceValues {
  using Buffers = std::vector<BufferId>;

  // By class.
  /// By BufferRule: own: colour * together + micro-batch; in_turn: a ring; scratch: one; step: by
  /// micro-batch.
  std::vector<Buffers> shared;
  std::vector<Buffers> leaving;   ///< a ring, for values that only other devices read
  std::vector<Buffers> of_ranks;  ///< row counts of all ranks, if there are several

  BufferId report = kNoBuffer;  ///< one for all classes
};

/// The buffers of values and of gradient sums.
struct ValueBuffers {
  using Buffers = std::vector<BufferId>;

  std::vector<DeviceValues> devices;
  std::vector<Buffers> on_host;  ///< inputs of the step, by class and micro-batch
  // By value.
  /// Waiting for the backward pass, by micro-batch together; on the device of its owner, or below.
  std::vector<Buffers> own;
  std::vector<BufferId> counts;  ///< row counts of all micro-batches and ranks, on the host

  BufferId report_on_host = kNoBuffer;  ///< copy of the report on the device of the head
  Buffers staging;                      ///< host, for values that wait on NVMe

  // By gradient sum. With Order::micro_batch_major_offload, `sums` has no buffers, and only then
  // the others are used.
  std::vector<BufferId> sums;          ///< on the device
  std::vector<BufferId> sums_on_host;  ///< homes between micro-batches
  std::vector<std::uint32_t> ring_of;  ///< index of its ring
  std::vector<Buffers> sum_rings;      ///< on the device, for the sums of several blocks in turn
};

/// Returns the bytes of a value of one micro-batch that this rank keeps while it waits for the
/// backward pass. Parts are whole pages.
inline Bytes waiting_bytes(const Problem& problem, const model::StepValue& value) {
  const Bytes whole = problem.program().bytes_of(value);
  if (!is_partitioned(problem, value)) return whole;
  return round_up((whole + problem.tensor - 1) / problem.tensor, kPage);
}
/// Returns the bytes that it takes on NVMe, in whole pages.
inline Bytes swapped_bytes(const Problem& problem, const model::StepValue& value) {
  return round_up(waiting_bytes(problem, value), kPage);
}

/// Adds the buffers of values and gradient sums to `list`. If the list merges buffers, the members
/// by value stay empty.
ValueBuffers add_values(const PlacedProblem& placed, BufferList& list);

/// Buffers that each device has for data in transit and in use.
struct DevicePlaces {
  std::vector<BufferId> weight_slots;    ///< whole weights
  std::vector<BufferId> table_rows;      ///< rows of tables for one micro-batch
  std::vector<BufferId> row_gradients;   ///< their gradients
  std::vector<BufferId> share_slots;     ///< this rank's share of split weights
  BufferId codes = kNoBuffer;            ///< gathered weight codes
  std::vector<BufferId> dequantized;     ///< weights dequantised for passes; at most one
  std::vector<BufferId> gradient_slots;  ///< packed gradients
  BufferId received = kNoBuffer;         ///< gradients received from other ranks
  BufferId workspace = kNoBuffer;
};

/// Every buffer of a run by its purpose. Ids index `buffers`; lists that a placement does not need
/// are empty.
struct Layout {
  std::vector<Buffer> buffers;

  // One per block. Purpose::evaluation has only the weights.
  std::vector<BufferId> weight_home;
  std::vector<BufferId>
      trained_home;  ///< PlacedProblem::has_separate_trained_home(), else kNoBuffer
  std::vector<std::vector<BufferId>> state_home;  ///< by sub-group
  /// Values before the last update, for speculating blocks, else kNoBuffer; see Speculation.
  std::vector<BufferId> weight_undo;
  std::vector<std::vector<BufferId>> state_undo;  ///< by sub-group, or empty
  /// Packed gradient until its update: in the memory where the block is updated, or on NVMe;
  /// kNoBuffer if it is updated from staging (PlacedProblem::swaps_gradient() and eager).
  std::vector<BufferId> gradient;
  std::vector<BufferId> statistics_device;
  std::vector<BufferId> statistics_host;

  std::vector<DevicePlaces> devices;

  // Buffers for data in transit on the host.
  std::vector<BufferId> weight_staging;
  std::vector<BufferId> state_staging;     ///< each as large as its largest content
  std::vector<BufferId> gradient_staging;  ///< for gradients on NVMe
  std::vector<BufferId> table_rows;        ///< rows of tables for one micro-batch
  std::vector<BufferId> row_gradients;     ///< their gradients, until the gradient is packed
  std::vector<BufferId> scattered;         ///< packed gradients of tables, summed over the ranks
  /// Host buffer through which weights and states on the device are filled and read, in pieces,
  /// outside steps. It may be a buffer of a step that is large enough.
  BufferId fill_staging = kNoBuffer;

  ValueBuffers values;  ///< values of the passes

  BufferId decision = kNoBuffer;
};

Layout make_layout(const PlacedProblem& placed);

/// See sum_buffers().
std::vector<Buffer> merged_buffers(const PlacedProblem& placed);

}  // namespace ballast::step
