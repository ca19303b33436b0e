#pragma once

#include <span>
#include <string>

#include <nccl.h>

#include "src/device/shared_library.h"

namespace ballast::comm {

/// The functions of NCCL in use.
struct Nccl {
  decltype(&ncclGetVersion) version = nullptr;
  decltype(&ncclGetErrorString) error_text = nullptr;
  decltype(&ncclGetLastError) last_error = nullptr;
  decltype(&ncclGetUniqueId) make_identifier = nullptr;
  decltype(&ncclCommInitRankConfig) join = nullptr;
  decltype(&ncclCommGetAsyncError) state = nullptr;
  decltype(&ncclCommFinalize) finalize = nullptr;
  decltype(&ncclCommDestroy) destroy = nullptr;
  decltype(&ncclCommAbort) abort = nullptr;
  decltype(&ncclGroupStart) start_group = nullptr;
  decltype(&ncclGroupEnd) end_group = nullptr;
  decltype(&ncclSend) send = nullptr;
  decltype(&ncclRecv) receive = nullptr;
  decltype(&ncclAllGather) all_gather = nullptr;
  decltype(&ncclBroadcast) broadcast = nullptr;

  void find(device::Symbols& symbols);
  /// Returns why this version cannot be used; "" if it can.
  [[nodiscard]] std::string refusal() const;
};

/// Returns the library, which is loaded once per process. Throws Error(comm) with nccl_refusal().
const Nccl& nccl();

using LoadedNccl = device::Loaded<Nccl>;
/// Loads the first library in `names` that is NCCL 2.18 or a newer 2.
LoadedNccl load_nccl(std::span<const std::string> names);

}  // namespace ballast::comm
