#include "src/comm/host_work.h"

#include <vector>

#include "ballast/core/error.h"

namespace ballast::comm {

void check_host_device(const device::Device& device) {
  if (device.kind() == "host") return;
  throw Error(ErrorCategory::comm, "ranks: no communicator of this program works on device \"" +
                                       std::string(device.kind()) +
                                       "\"; set ballast.device to \"host\"");
}

}  // namespace ballast::comm
