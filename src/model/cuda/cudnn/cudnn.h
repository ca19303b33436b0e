#pragma once

#include <span>
#include <string>
#include <string_view>

#include <cudnn.h>

#include "src/model/cuda/shared_library.h"

namespace ballast::model::cuda {

/// The functions of cuDNN that are used: its backend interface, which describes a computation as a
/// graph of operations on tensors and picks an engine for it.
struct Cudnn {
  decltype(&cudnnGetVersion) version = nullptr;
  decltype(&cudnnGetErrorString) status_name = nullptr;
  decltype(&cudnnGetLastErrorString) last_error = nullptr;
  decltype(&cudnnCreate) create = nullptr;
  decltype(&cudnnDestroy) destroy = nullptr;
  decltype(&cudnnSetStream) set_stream = nullptr;
  decltype(&cudnnBackendCreateDescriptor) create_descriptor = nullptr;
  decltype(&cudnnBackendDestroyDescriptor) destroy_descriptor = nullptr;
  decltype(&cudnnBackendSetAttribute) set_attribute = nullptr;
  decltype(&cudnnBackendGetAttribute) get_attribute = nullptr;
  decltype(&cudnnBackendFinalize) finalize = nullptr;
  decltype(&cudnnBackendExecute) execute = nullptr;

  void find(Symbols& symbols);
  /// Why this version will not do, or nothing.
  [[nodiscard]] std::string refusal() const;
};

/// The library, loaded once for the whole process. Throws Error(device) with cudnn_refusal().
const Cudnn& cudnn();
/// Empty when it can be loaded; else the reason, one line.
std::string_view cudnn_refusal();

using LoadedCudnn = Loaded<Cudnn>;
/// Loads the first of these that has the major version that this program is made for and is new
/// enough.
LoadedCudnn load_cudnn(std::span<const std::string> names);

}  // namespace ballast::model::cuda
