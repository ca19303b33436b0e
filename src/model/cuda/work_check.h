#pragma once

#include <array>
#include <cstddef>
#include <initializer_list>
#include <span>
#include <string_view>

#include <cuda_runtime_api.h>

#include "ballast/device/device.h"
#include "ballast/model/attention.h"

#include "src/device/cuda/errors.h"

namespace ballast::model::cuda {

/// Extents of an operation, for messages. Refers to them, so it must not outlive the call.
struct ShapeOfWork : std::span<const std::size_t> {
  ShapeOfWork(std::initializer_list<std::size_t> extents) : span(extents.begin(), extents.size()) {}
  ShapeOfWork(const std::array<std::size_t, 5>& extents) : span(extents) {}
};

/// Sequences, length, heads, heads of keys, size of a head.
inline std::array<std::size_t, 5> extents_of(const AttentionShape& s) {
  return {s.sequences, s.length, s.heads, s.kv_heads, s.head_dim};
}

/// Throws Error(device) with the operation's name and shape, "norm [64, 4096]: ...", if `code`, the
/// result of its launch, is an error or if the stream has failed. Waits for the stream.
void check_work(cudaError_t code, std::string_view what, ShapeOfWork shape, device::Stream& stream);

}  // namespace ballast::model::cuda
