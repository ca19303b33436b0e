#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>

#include "ballast/comm/launch.h"
#include "ballast/core/dtype.h"
#include "ballast/core/view.h"
#include "ballast/device/device.h"

namespace ballast::comm {

/// Collectives on device buffers over the members of a channel, which are all ranks of a run or
/// some of them: every member makes the same calls in the same order. Calls enqueue on `stream` and
/// return; views stay valid and untouched until the stream is synchronised, which throws what went
/// wrong unless the call itself has: Error(comm), such as a rank that did not answer within the
/// timeout, or Error(interrupted). No collective of the run works after that. All sizes are whole
/// pages (kPage) and the same on every member; breaches of what is said here throw Error(state) at
/// the call.
///
/// With n members a shard is one of n equal parts of a buffer; the p-th is that of member p. Of all
/// ranks, rank r is member r unless the channel was made with another order.
///
/// Sums are deterministic: the elements of all members are added in rank order, whatever the order
/// of the members, in fp32 and rounded to `type` once. So an all_reduce gives the bits of a
/// reduce_scatter followed by an all_gather.
class Communicator {
 public:
  virtual ~Communicator() = default;
  Communicator() = default;
  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;

  /// `whole` (n x shard.size() bytes) = the shards of all members in order. `shard` may be this
  /// rank's shard of `whole`.
  virtual void all_gather(device::Stream& stream, ConstDeviceBytes shard, DeviceBytes whole) = 0;

  /// `shard` = the sum over members of this rank's shard of their `whole` (n x shard.size() bytes).
  /// `shard` may be this rank's shard of `whole`; the rest of `whole` is not changed. `scratch`: at
  /// least n pages of device memory for what arrives from the others; more of it means fewer
  /// rounds, up to whole.size().
  virtual void reduce_scatter(device::Stream& stream, DeviceBytes whole, DeviceBytes shard,
                              DType type, DeviceBytes scratch) = 0;

  /// `whole` = the sum over members. `scratch` as in reduce_scatter.
  virtual void all_reduce(device::Stream& stream, DeviceBytes whole, DType type,
                          DeviceBytes scratch) = 0;

  /// `data` = member `root`'s.
  virtual void broadcast(device::Stream& stream, DeviceBytes data, std::uint32_t root) = 0;
};

struct JoinOptions {
  /// How long a collective may wait for other ranks before it fails; above 0.
  double timeout_seconds = 300.0;
  /// When set and true, waits end with Error(interrupted).
  const std::atomic<bool>* interrupted = nullptr;
};

/// The processes of a run, from the point of view of one of them. Its own collectives work on host
/// memory and block; every rank makes them in the same order, from one thread at a time, which may
/// be another one than that of the channels. They throw as described at Communicator.
class Ranks {
 public:
  virtual ~Ranks() = default;
  Ranks() = default;
  Ranks(const Ranks&) = delete;
  Ranks& operator=(const Ranks&) = delete;

  [[nodiscard]] virtual const Launch& launch() const = 0;
  [[nodiscard]] std::uint32_t rank() const { return launch().rank; }
  [[nodiscard]] std::uint32_t world() const { return launch().world; }
  /// "self" or "mpi".
  [[nodiscard]] virtual std::string_view kind() const = 0;

  /// A channel of all ranks for buffers of `device` (which must outlive it): of the host device
  /// over what the ranks themselves use, of the CUDA device over NCCL. Collective. Throws
  /// Error(comm) when the program has no communicator for the device.
  std::unique_ptr<Communicator> make_communicator(device::Device& device) {
    return make_channel(device, {});
  }
  /// A channel of the ranks `members`, this one among them, whose places in it are their numbers;
  /// none: all ranks in order. Collective of all ranks, each with the members of its own channel;
  /// a rank is in one of them. Throws also Error(state) for members that are no such
  /// list.
  virtual std::unique_ptr<Communicator> make_channel(device::Device& device,
                                                     std::span<const std::uint32_t> members) = 0;

  /// `whole` (world x shard.size() bytes) = the shards of all ranks in order. A shard has any size
  /// below 2 GiB.
  virtual void all_gather(ConstHostBytes shard, HostBytes whole) = 0;
  /// Rank 0's text on every rank.
  virtual std::string broadcast(std::string text) = 0;
  virtual void barrier() = 0;

  /// Ends every process of the run at once with `status`; for a rank that failed while others may
  /// be waiting for it. The caller has said why.
  [[noreturn]] virtual void abort(int status) = 0;
};

/// Joins the run that `launch` describes. A world of 1 calls nothing of MPI. Several ranks: once
/// per process. MPI ends when the result and its channels are destroyed, in the thread that joined,
/// unless a collective failed or an exception is under way: then ending MPI would wait for the
/// other ranks, and the launcher, which sees a process end without it, ends them. Throws
/// Error(comm) when there are several ranks but the program was built without MPI, or when MPI does
/// not agree with `launch`.
std::unique_ptr<Ranks> join_ranks(const Launch& launch, const JoinOptions& options);

/// Empty when runs of several ranks can be joined; else the reason, one line.
std::string mpi_refusal();

/// Empty when the program has a communicator for the CUDA device; else the reason, one line.
std::string nccl_refusal();

}  // namespace ballast::comm
