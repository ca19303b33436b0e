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

/// What fake_cudnn.cpp does. It stands in, at link time, for the loaded cuDNN. It keeps what is set
/// of descriptors, answers as is said here, and computes causal attention over the tensors that a
/// graph names. Whether cuDNN's engines take the graph, only a GPU shows: suite gpu. For one
/// thread; set up before the first use.
struct FakeCudnn {
  /// Without it there is no library.
  static inline bool present = false;

  /// What the heuristics find.
  using Engine = FakeEngine;
  static inline std::vector<Engine> engines = {Engine{}};
  /// What they find when asked for a last resort.
  static inline std::vector<Engine> last_resorts = {};

  /// What the next start and the next execution are answered.
  static inline cudnnStatus_t next_start = CUDNN_STATUS_SUCCESS;
  static inline cudnnStatus_t next_execution = CUDNN_STATUS_SUCCESS;

  static inline int plans = 0;
  static inline int executions = 0;
  /// Of the last execution.
  static inline cudaStream_t stream = nullptr;
  static inline std::int64_t workspace = 0;
  /// Descriptors and handles that were made and not ended.
  static inline int alive = 0;
  /// Why the last call was refused.
  static inline std::string complaint;

  /// As at the start; what is alive stays.
  static void reset() {
    present = false;
    engines = {Engine{}};
    last_resorts = {};
    next_start = next_execution = CUDNN_STATUS_SUCCESS;
    plans = executions = 0;
    complaint.clear();
  }
};

}  // namespace ballast::test
