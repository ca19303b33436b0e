#pragma once

#include <functional>
#include <memory>

#include <nccl.h>

#include "ballast/comm/communicator.h"
#include "ballast/device/cuda_stream.h"

#include "src/comm/members.h"
#include "src/comm/patience.h"

namespace ballast::comm {

/// Whether `code` is no failure: where nothing blocks, "in progress" is as good as success.
bool accepted(ncclResult_t code);

/// One NCCL communicator, of which no call blocks: what takes time is polled, so that other ranks
/// are waited for no longer than Patience allows. A wait that ends otherwise aborts the
/// communicator, which ends its kernels on the device. Used by one thread at a time.
class NcclChannel {
 public:
  /// Joins the members; the calling thread's current device becomes the channel's. Collective.
  /// Throws Error(comm).
  NcclChannel(Ranks& ranks, const Members& members, std::shared_ptr<Patience> patience);
  /// Ends the communicator together with the other ranks; aborts it when something has failed.
  ~NcclChannel();
  NcclChannel(const NcclChannel&) = delete;
  NcclChannel& operator=(const NcclChannel&) = delete;

  [[nodiscard]] ncclComm_t get() const { return communicator_; }

  /// Makes `calls`, which enqueue on a stream and return the first code that is not accepted, as
  /// one group. The first collectives of a channel may wait here for other ranks. Throws
  /// Error(comm) or Error(interrupted).
  void run_group(const Collective& what, const std::function<ncclResult_t()>& calls);

  /// A look at what runs on the device. Throws Error(comm) when it failed or may not be waited for
  /// any longer, Error(interrupted).
  void look(const Collective& what, double waited_seconds);

 private:
  void require(ncclResult_t code, const Collective& what) const;
  void settle(const Collective& what);
  void close();
  void abort();

  std::shared_ptr<Patience> patience_;
  ncclComm_t communicator_ = nullptr;
};

}  // namespace ballast::comm
