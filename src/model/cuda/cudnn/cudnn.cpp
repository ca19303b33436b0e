#include "src/model/cuda/cudnn/cudnn.h"

#include <algorithm>
#include <array>
#include <string>

#include <fmt/format.h>

#include "ballast/core/error.h"

namespace ballast::model::cuda {
namespace {

/// The first version whose attention has no known defect (NVIDIA's cudnn-frontend,
/// sdpa_support_surface.h, lists defects up to 9.10.1), supports heads of more than 128 values, and
/// accepts minus infinity as the score of a masked key.
constexpr std::size_t kOldest = 91002;

/// Returns cuDNN's message about the last failed call in one line; may be empty.
std::string last_words(const Cudnn& library) {
  std::array<char, 512> text = {};
  library.last_error(text.data(), text.size() - 1);
  std::string line = text.data();
  std::replace(line.begin(), line.end(), '\n', ' ');
  while (!line.empty() && line.back() == ' ') line.pop_back();
  return line;
}

}  // namespace

void Cudnn::find(device::Symbols& symbols) {
  symbols.find("cudnnGetVersion", version);
  symbols.find("cudnnGetErrorString", status_name);
  symbols.find("cudnnGetLastErrorString", last_error);
  symbols.find("cudnnCreate", create);
  symbols.find("cudnnDestroy", destroy);
  symbols.find("cudnnSetStream", set_stream);
  symbols.find("cudnnBackendCreateDescriptor", create_descriptor);
  symbols.find("cudnnBackendDestroyDescriptor", destroy_descriptor);
  symbols.find("cudnnBackendSetAttribute", set_attribute);
  symbols.find("cudnnBackendGetAttribute", get_attribute);
  symbols.find("cudnnBackendFinalize", finalize);
  symbols.find("cudnnBackendExecute", execute);
}

std::string Cudnn::refusal() const {
  const std::size_t found = version();
  if (found / 10000 != CUDNN_MAJOR) {
    return fmt::format("it is version {}, but this program needs version {}",
                       device::library_version_text(found), CUDNN_MAJOR);
  }
  if (found >= kOldest) return "";
  return fmt::format("it is version {}, but attention needs at least {}",
                     device::library_version_text(found), device::library_version_text(kOldest));
}

LoadedCudnn load_cudnn(std::span<const std::string> names) {
  return device::load_library<Cudnn>(names, "install cuDNN or add its folder to LD_LIBRARY_PATH");
}

void CudnnCalls::check(cudnnStatus_t status, std::string_view call) const {
  if (status == CUDNN_STATUS_SUCCESS) return;
  std::string line = fmt::format("cuDNN: {}: {}", call, library().status_name(status));
  if (const std::string more = last_words(library()); !more.empty()) line += " (" + more + ")";
  throw Error(ErrorCategory::device, line);
}

Descriptor CudnnCalls::make(cudnnBackendDescriptorType_t type) const {
  cudnnBackendDescriptor_t made = nullptr;
  check(library().create_descriptor(type, &made), "creating a descriptor");
  return {made, {&library()}};
}

void CudnnCalls::finish(const Descriptor& descriptor, std::string_view what) const {
  check(library().finalize(descriptor.get()), what);
}

void CudnnCalls::set_raw(const Descriptor& descriptor, cudnnBackendAttributeName_t name,
                         cudnnBackendAttributeType_t type, std::size_t count,
                         const void* values) const {
  const cudnnStatus_t status = library().set_attribute(descriptor.get(), name, type,
                                                       static_cast<std::int64_t>(count), values);
  if (status != CUDNN_STATUS_SUCCESS) {
    check(status, fmt::format("setting attribute {}", static_cast<int>(name)));
  }
}

std::size_t CudnnCalls::get_raw(const Descriptor& descriptor, cudnnBackendAttributeName_t name,
                                cudnnBackendAttributeType_t type, std::size_t count,
                                void* values) const {
  std::int64_t found = 0;
  const cudnnStatus_t status =
      library().get_attribute(descriptor.get(), name, type, static_cast<std::int64_t>(count),
                              &found, count == 0 ? nullptr : values);
  if (status != CUDNN_STATUS_SUCCESS) {
    check(status, fmt::format("getting attribute {}", static_cast<int>(name)));
  }
  return static_cast<std::size_t>(found);
}

}  // namespace ballast::model::cuda
