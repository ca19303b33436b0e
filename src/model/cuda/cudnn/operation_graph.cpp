#include "src/model/cuda/cudnn/operation_graph.h"

#include <utility>

#include "ballast/core/error.h"

namespace ballast::model::cuda {
namespace {

constexpr std::int64_t kAlignment = 16;

}  // namespace

OperationGraph::Tensor OperationGraph::keep(Descriptor descriptor) {
  parts_.push_back(std::move(descriptor));
  return parts_.back().get();
}

OperationGraph::Tensor OperationGraph::tensor(std::int64_t id, cudnnDataType_t type,
                                              const TensorShape& shape, Where where) {
  Descriptor made = calls_.make(CUDNN_BACKEND_TENSOR_DESCRIPTOR);
  calls_.set(made, CUDNN_ATTR_TENSOR_UNIQUE_ID, id);
  calls_.set(made, CUDNN_ATTR_TENSOR_DATA_TYPE, type);
  calls_.set(made, CUDNN_ATTR_TENSOR_BYTE_ALIGNMENT, kAlignment);
  calls_.set(made, CUDNN_ATTR_TENSOR_DIMENSIONS, std::span<const std::int64_t>(shape.extents));
  calls_.set(made, CUDNN_ATTR_TENSOR_STRIDES, std::span<const std::int64_t>(shape.steps));
  calls_.set(made, CUDNN_ATTR_TENSOR_IS_VIRTUAL, where == Where::nowhere);
  calls_.set(made, CUDNN_ATTR_TENSOR_IS_BY_VALUE, where == Where::host_number);
  calls_.finish(made, "a tensor");
  return keep(std::move(made));
}

OperationGraph::Tensor OperationGraph::memory(std::int64_t id, cudnnDataType_t type,
                                              const TensorShape& shape) {
  expects(id < kFirstOwn, "a graph's tensor of an id that it has itself");
  return tensor(id, type, shape, Where::memory);
}
OperationGraph::Tensor OperationGraph::number(std::int64_t id) {
  expects(id < kFirstOwn, "a graph's number of an id that it has itself");
  return tensor(id, CUDNN_DATA_FLOAT, {{1, 1, 1, 1}, {1, 1, 1, 1}}, Where::host_number);
}
OperationGraph::Tensor OperationGraph::between(cudnnDataType_t type, const TensorShape& shape) {
  return tensor(next_++, type, shape, Where::nowhere);
}

void OperationGraph::add(Descriptor operation, const char* what) {
  calls_.finish(operation, what);
  operations_.push_back(keep(std::move(operation)));
}

void OperationGraph::multiply(Tensor a, Tensor b, Tensor c) {
  Descriptor product = calls_.make(CUDNN_BACKEND_MATMUL_DESCRIPTOR);
  calls_.set(product, CUDNN_ATTR_MATMUL_COMP_TYPE, CUDNN_DATA_FLOAT);
  calls_.finish(product, "a product");
  Descriptor operation = calls_.make(CUDNN_BACKEND_OPERATION_MATMUL_DESCRIPTOR);
  calls_.link(operation, CUDNN_ATTR_OPERATION_MATMUL_ADESC, a);
  calls_.link(operation, CUDNN_ATTR_OPERATION_MATMUL_BDESC, b);
  calls_.link(operation, CUDNN_ATTR_OPERATION_MATMUL_CDESC, c);
  calls_.link(operation, CUDNN_ATTR_OPERATION_MATMUL_DESC, keep(std::move(product)));
  add(std::move(operation), "the operation of a product");
}

void OperationGraph::apply(const Function& function, const Arguments& arguments, Tensor y) {
  Descriptor made = calls_.make(CUDNN_BACKEND_POINTWISE_DESCRIPTOR);
  calls_.set(made, CUDNN_ATTR_POINTWISE_MODE, function.mode);
  calls_.set(made, CUDNN_ATTR_POINTWISE_MATH_PREC, function.type);
  if (function.axis >= 0) calls_.set(made, CUDNN_ATTR_POINTWISE_AXIS, function.axis);
  calls_.finish(made, "a pointwise function");
  Descriptor operation = calls_.make(CUDNN_BACKEND_OPERATION_POINTWISE_DESCRIPTOR);
  const auto link = [&](cudnnBackendAttributeName_t name, Tensor tensor) {
    if (tensor != nullptr) calls_.link(operation, name, tensor);
  };
  link(CUDNN_ATTR_OPERATION_POINTWISE_PW_DESCRIPTOR, keep(std::move(made)));
  link(CUDNN_ATTR_OPERATION_POINTWISE_XDESC, arguments.x);
  link(CUDNN_ATTR_OPERATION_POINTWISE_BDESC, arguments.other);
  link(CUDNN_ATTR_OPERATION_POINTWISE_TDESC, arguments.condition);
  link(CUDNN_ATTR_OPERATION_POINTWISE_YDESC, y);
  add(std::move(operation), "a pointwise operation");
}

void OperationGraph::pointwise(cudnnPointwiseMode_t mode, Tensor x, Tensor y) {
  apply({.mode = mode}, {.x = x}, y);
}
void OperationGraph::pointwise(cudnnPointwiseMode_t mode, Tensor x, Tensor other, Tensor y) {
  apply({.mode = mode}, {.x = x, .other = other}, y);
}
void OperationGraph::compare(cudnnPointwiseMode_t mode, Tensor x, Tensor other, Tensor y) {
  apply({.mode = mode, .type = CUDNN_DATA_BOOLEAN}, {.x = x, .other = other}, y);
}
void OperationGraph::select(Tensor condition, Tensor x, Tensor other, Tensor y) {
  apply({.mode = CUDNN_POINTWISE_BINARY_SELECT}, {.x = x, .other = other, .condition = condition},
        y);
}
void OperationGraph::index(std::int64_t axis, Tensor x, Tensor y) {
  apply({.mode = CUDNN_POINTWISE_GEN_INDEX, .axis = axis}, {.x = x}, y);
}

void OperationGraph::reduce(cudnnReduceTensorOp_t function, Tensor x, Tensor y) {
  Descriptor reduction = calls_.make(CUDNN_BACKEND_REDUCTION_DESCRIPTOR);
  calls_.set(reduction, CUDNN_ATTR_REDUCTION_OPERATOR, function);
  calls_.set(reduction, CUDNN_ATTR_REDUCTION_COMP_TYPE, CUDNN_DATA_FLOAT);
  calls_.finish(reduction, "a reduction");
  Descriptor operation = calls_.make(CUDNN_BACKEND_OPERATION_REDUCTION_DESCRIPTOR);
  calls_.link(operation, CUDNN_ATTR_OPERATION_REDUCTION_XDESC, x);
  calls_.link(operation, CUDNN_ATTR_OPERATION_REDUCTION_YDESC, y);
  calls_.link(operation, CUDNN_ATTR_OPERATION_REDUCTION_DESC, keep(std::move(reduction)));
  add(std::move(operation), "the operation of a reduction");
}

void OperationGraph::finish(cudnnHandle_t handle) {
  graph_ = calls_.make(CUDNN_BACKEND_OPERATIONGRAPH_DESCRIPTOR);
  if (handle != nullptr) calls_.set(graph_, CUDNN_ATTR_OPERATIONGRAPH_HANDLE, handle);
  calls_.link(graph_, CUDNN_ATTR_OPERATIONGRAPH_OPS,
              std::span<const cudnnBackendDescriptor_t>(operations_));
  calls_.finish(graph_, "the graph");
}

}  // namespace ballast::model::cuda
