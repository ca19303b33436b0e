#include "src/comm/host_work.h"

#include "ballast/core/error.h"

namespace ballast::comm {

device::HostStream& as_host(device::Stream& stream) {
  auto* host = dynamic_cast<device::HostStream*>(&stream);
  expects(host != nullptr, "collectives of the host device were given a stream of another device");
  return *host;
}

void check_host_device(const device::Device& device) {
  if (device.kind() == "host") return;
  throw Error(ErrorCategory::comm, "ranks: no communicator of this program works on device \"" +
                                       std::string(device.kind()) +
                                       "\"; set ballast.device to \"host\"");
}

}  // namespace ballast::comm
