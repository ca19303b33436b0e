#pragma once

#include <cstdint>

#include "ballast/model/attention.h"

#include "src/model/cuda/cudnn/operation_graph.h"

namespace ballast::model::cuda {

/// Tensors of attention_graph(), by their ids. `queries`, `keys` and `values` start at those of the
/// first head, in one matrix.
enum class AttentionTensor : std::int64_t {
  queries = 1,
  keys,
  values,
  out,
  log_sums,
  scale,   ///< a number: what scores are multiplied by
  hidden,  ///< a number: the score of a key that is not seen, minus infinity
};

/// attention() in bf16 as a graph of cuDNN: what its engines recognise as attention, operation by
/// operation and in this order (the pattern is that of NVIDIA's cudnn-frontend,
/// CompositeSDPANode). `handle` as in OperationGraph::finish().
OperationGraph attention_graph(const CudnnCalls& calls, const AttentionShape& shape,
                               cudnnHandle_t handle);

}  // namespace ballast::model::cuda
