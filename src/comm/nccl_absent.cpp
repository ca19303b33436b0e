#include "ballast/core/error.h"

#include "src/comm/channel.h"

namespace ballast::comm {

std::string nccl_refusal() {
  return "built without NCCL: reconfigure with -Dnccl=enabled";
}

std::string nccl_file() {
  return "";
}

std::unique_ptr<Communicator> make_nccl_communicator(Ranks&, const Members&, device::Device&,
                                                     const std::shared_ptr<CollectiveTimeout>&) {
  throw Error(ErrorCategory::comm, "ranks on device \"cuda\" need NCCL, but this program was " +
                                       nccl_refusal() + ", or set ballast.device to \"host\"");
}

}  // namespace ballast::comm
