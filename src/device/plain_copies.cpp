#include "ballast/device/plain_copies.h"

#include "ballast/device/device.h"

#include "src/device/factories.h"

namespace ballast::device {

std::unique_ptr<PlainCopies> make_plain_copies(Device& device, Bytes bytes) {
  return device.kind() == "cuda" ? make_cuda_plain_copies(device, bytes)
                                 : make_host_plain_copies(bytes);
}

}  // namespace ballast::device
