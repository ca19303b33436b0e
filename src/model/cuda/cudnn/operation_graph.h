#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "src/model/cuda/cudnn/cudnn.h"

namespace ballast::model::cuda {

/// Extents of a tensor [sequences, heads, rows, columns] and the elements between neighbours along
/// each.
struct TensorShape {
  std::array<std::int64_t, 4> extents;
  std::array<std::int64_t, 4> steps;
};

/// What cuDNN shall compute, operation by operation. Tensors and operations belong to the graph,
/// which has to outlive what is planned for it. Sums and intermediate numbers are fp32. Errors as
/// CudnnCalls.
class OperationGraph {
 public:
  using Tensor = cudnnBackendDescriptor_t;

  explicit OperationGraph(const CudnnCalls& calls) : calls_(calls) {}

  /// A tensor in memory, aligned to 16 bytes, whose address is given with each execution, by `id`.
  /// Ids are below kFirstOwn.
  Tensor memory(std::int64_t id, cudnnDataType_t type, const TensorShape& shape);
  /// An fp32 number in host memory, given likewise.
  Tensor number(std::int64_t id);
  /// A tensor that is nowhere outside the engine.
  Tensor between(cudnnDataType_t type, const TensorShape& shape);

  /// c = a b for every sequence and head; b's heads may be fewer, each for several of a's.
  void multiply(Tensor a, Tensor b, Tensor c);
  /// y = mode(x), y = mode(x, other). Extents of 1 of `other` stand for all.
  void pointwise(cudnnPointwiseMode_t mode, Tensor x, Tensor y);
  void pointwise(cudnnPointwiseMode_t mode, Tensor x, Tensor other, Tensor y);
  /// The same of a comparison, whose y is of CUDNN_DATA_BOOLEAN.
  void compare(cudnnPointwiseMode_t mode, Tensor x, Tensor other, Tensor y);
  /// y = condition ? x : other.
  void select(Tensor condition, Tensor x, Tensor other, Tensor y);
  /// y = the place along `axis` of every element of x.
  void index(std::int64_t axis, Tensor x, Tensor y);
  /// Over those axes that are 1 in y.
  void reduce(cudnnReduceTensorOp_t operation, Tensor x, Tensor y);

  /// Finalizes the graph; its operations are in the order in which they were added. Without a
  /// handle the graph is for no device.
  void finish(cudnnHandle_t handle);
  /// After finish().
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
