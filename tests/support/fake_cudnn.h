#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include <cudnn.h>

namespace ballast::test {

/// An engine for a graph.
struct FakeEngine {
  std::int64_t workspace = 256;
  bool same_bits = true;
  cudnnStatus_t planned = CUDNN_STATUS_SUCCESS;
};

/// Controls fake_cudnn.cpp, which replaces the loaded cuDNN at link time. It stores the attributes
/// of descriptors, returns the results below, and computes causal attention over the tensors of a
/// graph. Whether cuDNN's engines accept the graph is tested only on a GPU (suite gpu). For one
/// thread; set the members before the first use.
struct FakeCudnn {
  /// If false, the library is missing.
  static inline bool present = false;

  /// The engines that the heuristics find.
  using Engine = FakeEngine;
  static inline std::vector<Engine> engines = {Engine{}};
  /// The engines that the fallback heuristics find.
  static inline std::vector<Engine> last_resorts = {};

  /// The results of the next creation of a handle and of the next execution.
  static inline cudnnStatus_t next_start = CUDNN_STATUS_SUCCESS;
  static inline cudnnStatus_t next_execution = CUDNN_STATUS_SUCCESS;
  /// Number of executions after which one fails; negative: none does.
  static inline int executions_left = -1;

  static inline int plans = 0;
  static inline int executions = 0;
  /// Values of the last execution.
  static inline cudaStream_t stream = nullptr;
  static inline std::int64_t workspace = 0;
  /// Number of existing descriptors and handles.
  static inline int alive = 0;
  /// The reason of the last refusal.
  static inline std::string complaint;

  /// Resets the members; existing objects stay.
  static void reset() {
    present = false;
    engines = {Engine{}};
    last_resorts = {};
    next_start = next_execution = CUDNN_STATUS_SUCCESS;
    plans = executions = 0;
    executions_left = -1;
    complaint.clear();
  }
};

}  // namespace ballast::test
