#include "src/model/cuda/cudnn/cudnn_calls.h"

#include <algorithm>
#include <array>
#include <string>

#include <fmt/format.h>

#include "ballast/core/error.h"

namespace ballast::model::cuda {
namespace {

/// What cuDNN says about the last call that failed, in one line; may be nothing.
std::string last_words(const Cudnn& library) {
  std::array<char, 512> text = {};
  library.last_error(text.data(), text.size() - 1);
  std::string line = text.data();
  std::replace(line.begin(), line.end(), '\n', ' ');
  while (!line.empty() && line.back() == ' ') line.pop_back();
  return line;
}

}  // namespace

void CudnnCalls::check(cudnnStatus_t status, std::string_view call) const {
  if (status == CUDNN_STATUS_SUCCESS) return;
  std::string line = fmt::format("cuDNN: {}: {}", call, library().status_name(status));
  if (const std::string more = last_words(library()); !more.empty()) line += " (" + more + ")";
  throw Error(ErrorCategory::device, line);
}

Descriptor CudnnCalls::make(cudnnBackendDescriptorType_t type) const {
  cudnnBackendDescriptor_t made = nullptr;
  check(library().create_descriptor(type, &made), "making a descriptor");
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
    check(status, fmt::format("attribute {}", static_cast<int>(name)));
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
    check(status, fmt::format("asking for attribute {}", static_cast<int>(name)));
  }
  return static_cast<std::size_t>(found);
}

}  // namespace ballast::model::cuda
