#pragma once

#include <cstdint>

#include "ballast/model/attention.h"

#include "src/model/cuda/cudnn/operation_graph.h"

namespace ballast::model::cuda {

/// Ids of the tensors of attention_graph(). `queries`, `keys` and `values` are the addresses of
/// their first heads in one matrix.
enum class AttentionTensor : std::int64_t {
  queries = 1,
  keys,
  values,
  out,
  log_sums,
  scale,   ///< a number: the factor of scores
  hidden,  ///< a number: the score of a masked key, minus infinity
};

/// Describes attention() in bf16 as a graph that cuDNN's engines recognise: these operations in
/// this order (pattern of NVIDIA's cudnn-frontend, CompositeSDPANode). `handle` as in
/// OperationGraph::finish().
OperationGraph attention_graph(const CudnnCalls& calls, const AttentionShape& shape,
                               cudnnHandle_t handle);

}  // namespace ballast::model::cuda
