#include "src/comm/nccl_functions.h"

#include <fmt/format.h>

namespace ballast::comm {
namespace {

/// The first version in which all collectives may be nonblocking.
constexpr int kOldest = NCCL_VERSION(2, 18, 0);
constexpr int kNextMajor = NCCL_VERSION(3, 0, 0);

}  // namespace

void Nccl::find(device::Symbols& symbols) {
  symbols.find("ncclGetVersion", version);
  symbols.find("ncclGetErrorString", error_text);
  symbols.find("ncclGetLastError", last_error);
  symbols.find("ncclGetUniqueId", make_identifier);
  symbols.find("ncclCommInitRankConfig", join);
  symbols.find("ncclCommGetAsyncError", state);
  symbols.find("ncclCommFinalize", finalize);
  symbols.find("ncclCommDestroy", destroy);
  symbols.find("ncclCommAbort", abort);
  symbols.find("ncclGroupStart", start_group);
  symbols.find("ncclGroupEnd", end_group);
  symbols.find("ncclSend", send);
  symbols.find("ncclRecv", receive);
  symbols.find("ncclAllGather", all_gather);
  symbols.find("ncclBroadcast", broadcast);
}

std::string Nccl::refusal() const {
  int found = 0;
  if (version(&found) != ncclSuccess) return "its version cannot be read";
  if (found >= kOldest && found < kNextMajor) return "";
  return fmt::format("it is version {}.{}, but this program needs version 2.18 or a newer 2",
                     found / 10000, found / 100 % 100);
}

LoadedNccl load_nccl(std::span<const std::string> names) {
  return device::load_library<Nccl>(names, "install NCCL or add its folder to LD_LIBRARY_PATH");
}

}  // namespace ballast::comm
