#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "src/model/cuda/cudnn/cudnn.h"

namespace ballast::model::cuda {

/// Extents of a tensor [sequences, heads, rows, columns], and its stride (elements) along each
/// axis.
struct TensorShape {
  std::array<std::int64_t, 4> extents;
  std::array<std::int64_t, 4> steps;
};

/// A computation for cuDNN, built operation by operation. The graph owns tensors and operations and
/// must outlive the plans made for it. Sums and intermediate numbers are fp32. Throws like
/// CudnnCalls.
class OperationGraph {
 public:
  using Tensor = cudnnBackendDescriptor_t;

  explicit OperationGraph(const CudnnCalls& calls) : calls_(calls) {}

  /// Adds a tensor in memory, aligned to 16 bytes. Each execution passes its address by `id`. Ids
  /// are below kFirstOwn.
  Tensor memory(std::int64_t id, cudnnDataType_t type, const TensorShape& shape);
  /// Adds an fp32 number in host memory, also passed by `id`.
  Tensor number(std::int64_t id);
  /// Adds an intermediate tensor that exists only inside the engine.
  Tensor between(cudnnDataType_t type, const TensorShape& shape);

  /// c = a b for every sequence and head. b may have fewer heads; each then serves several heads of
  /// a.
  void multiply(Tensor a, Tensor b, Tensor c);
  /// y = mode(x), y = mode(x, other). Axes of extent 1 in `other` are broadcast.
  void pointwise(cudnnPointwiseMode_t mode, Tensor x, Tensor y);
  void pointwise(cudnnPointwiseMode_t mode, Tensor x, Tensor other, Tensor y);
  /// y = mode(x, other), a comparison; y has type CUDNN_DATA_BOOLEAN.
  void compare(cudnnPointwiseMode_t mode, Tensor x, Tensor other, Tensor y);
  /// y = condition ? x : other.
  void select(Tensor condition, Tensor x, Tensor other, Tensor y);
  /// y = index of every element of x along `axis`.
  void index(std::int64_t axis, Tensor x, Tensor y);
  /// Reduces the axes whose extent is 1 in y.
  void reduce(cudnnReduceTensorOp_t operation, Tensor x, Tensor y);

  /// Finalizes the graph. Operations keep the order in which they were added. Without a handle the
  /// graph belongs to no device.
  void finish(cudnnHandle_t handle);
  /// Call it after finish().
  [[nodiscard]] const Descriptor& descriptor() const { return graph_; }

 private:
  static constexpr std::int64_t kFirstOwn = 1000;

  enum class Where { memory, host_number, nowhere };
  Tensor tensor(std::int64_t id, cudnnDataType_t type, const TensorShape& shape, Where where);
  struct Function {
    cudnnPointwiseMode_t mode;
    cudnnDataType_t type = CUDNN_DATA_FLOAT;
    std::int64_t axis = -1;
  };
  struct Arguments {
    Tensor x;
    Tensor other = nullptr;
    Tensor condition = nullptr;
  };
  void apply(const Function& function, const Arguments& arguments, Tensor y);
  Tensor keep(Descriptor descriptor);
  void add(Descriptor operation, const char* what);

  CudnnCalls calls_;
  std::int64_t next_ = kFirstOwn;
  std::vector<Descriptor> parts_;
  std::vector<cudnnBackendDescriptor_t> operations_;
  Descriptor graph_;
};

/// An engine for a graph, with its plan.
struct EnginePlan {
  Descriptor configuration;   ///< engine configuration
  Descriptor plan;            ///< null: none
  std::size_t workspace = 0;  ///< bytes of device memory that an execution needs
};

/// Plans `graph` for the device of `handle`. Takes the first engine of cuDNN's heuristics that is
/// deterministic and needs at most `most_workspace` bytes. Throws Error(device) with the reason if
/// there is none.
EnginePlan plan_graph(const CudnnCalls& calls, cudnnHandle_t handle, const Descriptor& graph,
                      std::size_t most_workspace);

}  // namespace ballast::model::cuda
