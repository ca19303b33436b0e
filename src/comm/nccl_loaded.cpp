// Loads the installed NCCL. Tests without a GPU link another definition of these functions.
#include "ballast/comm/communicator.h"
#include "ballast/core/error.h"

#include "src/comm/nccl_functions.h"
#include "src/device/cuda/libraries.h"

namespace ballast::comm {
namespace {

const LoadedNccl& loaded() {
  static const LoadedNccl once = load_nccl(device::library_names("libnccl.so", NCCL_MAJOR));
  return once;
}

}  // namespace

std::string nccl_refusal() {
  return loaded().refusal;
}

std::string nccl_file() {
  return loaded().file;
}

const Nccl& nccl() {
  if (!loaded().refusal.empty()) {
    throw Error(ErrorCategory::comm, "ranks on device \"cuda\" need NCCL, but " + loaded().refusal +
                                         ", or set ballast.device to \"host\"");
  }
  return loaded().functions;
}

}  // namespace ballast::comm
