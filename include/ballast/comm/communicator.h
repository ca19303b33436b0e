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

/// Collectives on device buffers over the members of a channel, which are all or some ranks of a
/// run. Every member makes the same calls in the same order. Calls enqueue on `stream` and return;
/// views must stay valid and unchanged until the stream is synchronised. The call or the
/// synchronisation throws Error(comm), for example after a timeout, or Error(interrupted); no
/// collective of the run works after that. All sizes are whole pages (kPage) and the same on every
/// member, except in all_to_all. Violated preconditions throw Error(state) at the call.
///
/// With n members a shard is one of n equal parts of a buffer; part p belongs to member p. In a
/// channel of all ranks, rank r is member r unless the channel was made with another order.
///
/// Sums are deterministic: elements are added in rank order, independent of the members' order, in
/// fp32 and rounded to `type` once. So an all_reduce gives the same bits as a reduce_scatter
/// followed by an all_gather.
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
  /// least n pages of device memory for received data; more, up to whole.size(), means fewer
  /// rounds.
  virtual void reduce_scatter(device::Stream& stream, DeviceBytes whole, DeviceBytes shard,
                              DType type, DeviceBytes scratch) = 0;

  /// `whole` = the sum over members. `scratch` as in reduce_scatter.
  virtual void all_reduce(device::Stream& stream, DeviceBytes whole, DType type,
                          DeviceBytes scratch) = 0;

  /// Sends part p of `leaving` to member p and receives part p of `arriving` from it. The parts lie
  /// one behind the other and have any size, also 0: what one member sends, the other expects.
  virtual void all_to_all(device::Stream& stream, ConstDeviceBytes leaving,
                          std::span<const Bytes> leaving_parts, DeviceBytes arriving,
                          std::span<const Bytes> arriving_parts) = 0;

  /// `data` = member `root`'s `data`.
  virtual void broadcast(device::Stream& stream, DeviceBytes data, std::uint32_t root) = 0;
};

struct JoinOptions {
  /// How long a collective may wait for other ranks before it fails; above 0.
  double timeout_seconds = 300.0;
  /// When set and true, waits end with Error(interrupted).
  const std::atomic<bool>* interrupted = nullptr;
};

/// One process's view of all processes of a run. Its own collectives work on host memory and block;
/// every rank makes them in the same order, from one thread at a time, which need not be the
/// channels' thread. They throw as described at Communicator.
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

  /// Makes a channel of all ranks for buffers of `device`, which must outlive it: over MPI on the
  /// host device (copies with one rank), over NCCL on the CUDA device. Collective. Throws
  /// Error(comm) when the program has no communicator for the device.
  std::unique_ptr<Communicator> make_communicator(device::Device& device) {
    return make_channel(device, {});
  }
  /// Makes a channel of the ranks `members`, including this one; rank members[p] is member p.
  /// Empty: all ranks in order. Collective of all ranks, each with the members of its own channel.
  /// Also throws Error(state) for an invalid list.
  virtual std::unique_ptr<Communicator> make_channel(device::Device& device,
                                                     std::span<const std::uint32_t> members) = 0;

  /// `whole` (world x shard.size() bytes) = the shards of all ranks in order. A shard has any size
  /// below 2 GiB.
  virtual void all_gather(ConstHostBytes shard, HostBytes whole) = 0;
  /// Returns rank 0's `text` on every rank.
  virtual std::string broadcast(std::string text) = 0;
  virtual void barrier() = 0;

  /// Ends all waits for other ranks in this process: collectives under way and all later ones throw
  /// Error(comm). For a rank that has failed alone, before it ends its lanes: the other ranks may
  /// wait for operations that it will not start. abort() follows. Callable from any thread.
  virtual void leave() = 0;

  /// Ends every process of the run at once with `status`, for a rank that failed while others may
  /// wait for it. The caller reports the reason first.
  [[noreturn]] virtual void abort(int status) = 0;
};

/// Joins the run that `launch` describes; with several ranks, once per process. A world of 1 does
/// not load MPI. MPI is finalized when the result and its channels are destroyed, in the thread
/// that joined. After a failed collective or during unwinding it is not finalized, because that
/// would wait for the other ranks; the launcher then ends them. Throws Error(comm) when there are
/// several ranks but mpi_refusal() is not empty, or when MPI contradicts `launch`.
std::unique_ptr<Ranks> join_ranks(const Launch& launch, const JoinOptions& options);

/// Empty when the program can join runs of several ranks; otherwise the reason, one line. The first
/// call loads the program's MPI module, and with it an MPI library. mpi_file(): the module's path,
/// or "".
std::string mpi_refusal();
std::string mpi_file();

/// Empty when the program has a communicator for the CUDA device; otherwise the reason, one line.
/// The first call loads NCCL. nccl_file(): the library's path, or "".
std::string nccl_refusal();
std::string nccl_file();

}  // namespace ballast::comm
