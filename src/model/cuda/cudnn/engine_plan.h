#pragma once

#include <cstddef>

#include "src/model/cuda/cudnn/cudnn_calls.h"

namespace ballast::model::cuda {

/// A graph with an engine that computes it.
struct EnginePlan {
  Descriptor configuration;   ///< of the engine
  Descriptor plan;            ///< null: none
  std::size_t workspace = 0;  ///< bytes of device memory that an execution needs
};

/// Plans `graph` for the device of `handle` with the engine that cuDNN's heuristics like best among
/// those that give the same bits every time and need at most so many bytes of workspace. Throws
/// Error(device) saying why there is none.
EnginePlan plan_graph(const CudnnCalls& calls, cudnnHandle_t handle, const Descriptor& graph,
                      std::size_t most_workspace);

}  // namespace ballast::model::cuda
