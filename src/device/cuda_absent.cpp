#include "ballast/core/error.h"

#include "src/device/implementations.h"

namespace ballast::device {
namespace {

[[noreturn]] void refuse() {
  throw Error(ErrorCategory::device, "this program was " + cuda_refusal());
}

}  // namespace

bool cuda_built_in() {
  return false;
}

std::string cuda_refusal() {
  return "built without CUDA: reconfigure with -Dcuda=enabled";
}

std::string cuda_requirement() {
  return "";
}
std::string gpu_code() {
  return "";
}
std::uint32_t count_gpus() {
  return 0;
}
bool has_gpu() {
  return false;
}
bool gpu_is_outdated(const DeviceOptions&) {
  return false;
}

std::string unsuitable_gpu(const DeviceOptions&) {
  return cuda_refusal();
}
std::string missing_gpu_library() {
  return "";
}

Bytes free_cuda_memory(const DeviceOptions&) {
  return 0;
}

std::string cuda_name(const DeviceOptions&) {
  refuse();
}

std::unique_ptr<Device> make_cuda_device(const DeviceOptions&) {
  refuse();
}

std::unique_ptr<PlainCopies> make_cuda_plain_copies(Device&, Bytes) {
  throw Error(ErrorCategory::device, "plain copies: " + cuda_refusal());
}

}  // namespace ballast::device
