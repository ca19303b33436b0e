#include "ballast/core/error.h"
#include "ballast/update/device_update.h"

namespace ballast::update {

std::unique_ptr<DeviceUpdate> make_cuda_update(device::Device&) {
  throw Error(ErrorCategory::device,
              "this program was built without CUDA and cannot update on a CUDA device; rebuild "
              "with -Dcuda=enabled or set ballast.device to \"host\"");
}

}  // namespace ballast::update
