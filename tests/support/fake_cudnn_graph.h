#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include <cudnn.h>

namespace ballast::test {

/// A tensor of a graph of operations.
struct FakeTensor {
  using Four = std::array<std::int64_t, 4>;
  std::int64_t id = 0;
  cudnnDataType_t type = CUDNN_DATA_FLOAT;
  std::int64_t alignment = 0;
  Four extents = {};
  Four steps = {};
  bool is_virtual = false;
  bool by_value = false;
};

/// One operation; what it does not have is null.
struct FakeOperation {
  enum class Kind { matmul, pointwise, reduction };
  Kind kind;
  cudnnPointwiseMode_t mode = {};
  cudnnReduceTensorOp_t reduction = {};
  std::int64_t axis = -1;
  const FakeTensor* x = nullptr;  ///< a of a product
  const FakeTensor* b = nullptr;
  const FakeTensor* condition = nullptr;
  const FakeTensor* y = nullptr;

  [[nodiscard]] std::vector<const FakeTensor*> inputs() const {
    std::vector<const FakeTensor*> all;
    for (const FakeTensor* tensor : {x, b, condition}) {
      if (tensor != nullptr) all.push_back(tensor);
    }
    return all;
  }
  /// What is wrong with its tensors, or nothing.
  [[nodiscard]] std::string complaint() const;
};

/// Operations in the order of their computation.
struct FakeGraph {
  std::vector<FakeOperation> operations;

  /// What is wrong with their order or their tensors' ids, or nothing.
  [[nodiscard]] std::string complaint() const;
  /// Whether it is what the engines of cuDNN know as causal attention whose log-sums are wanted.
  [[nodiscard]] bool is_attention() const;
  /// Those that are not virtual, by their ids.
  [[nodiscard]] std::map<std::int64_t, const FakeTensor*> bound() const;
  /// Computes it all; `places` by ids.
  void compute(const std::map<std::int64_t, void*>& places) const;
};

}  // namespace ballast::test
