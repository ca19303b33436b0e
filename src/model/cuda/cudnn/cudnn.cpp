#include "src/model/cuda/cudnn/cudnn.h"

#include <algorithm>
#include <array>
#include <cstdint>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include "ballast/core/error.h"

namespace ballast::model::cuda {

namespace {

/// The first version whose attention has no known defect (NVIDIA's cudnn-frontend,
/// sdpa_support_surface.h, lists defects up to 9.10.1), supports heads of more than 128 values, and
/// accepts minus infinity as the score of a masked key.
constexpr std::size_t kOldest = 91002;

/// Returns cuDNN's message about the last failed call in one line; may be empty.
std::string last_words(const Cudnn& library) {
  std::array<char, 512> text = {};
  library.last_error(text.data(), text.size() - 1);
  std::string line = text.data();
  std::replace(line.begin(), line.end(), '\n', ' ');
  while (!line.empty() && line.back() == ' ') line.pop_back();
  return line;
}

}  // namespace

void Cudnn::find(device::Symbols& symbols) {
  symbols.find("cudnnGetVersion", version);
  symbols.find("cudnnGetErrorString", status_name);
  symbols.find("cudnnGetLastErrorString", last_error);
  symbols.find("cudnnCreate", create);
  symbols.find("cudnnDestroy", destroy);
  symbols.find("cudnnSetStream", set_stream);
  symbols.find("cudnnBackendCreateDescriptor", create_descriptor);
  symbols.find("cudnnBackendDestroyDescriptor", destroy_descriptor);
  symbols.find("cudnnBackendSetAttribute", set_attribute);
  symbols.find("cudnnBackendGetAttribute", get_attribute);
  symbols.find("cudnnBackendFinalize", finalize);
  symbols.find("cudnnBackendExecute", execute);
}

std::string Cudnn::refusal() const {
  const std::size_t found = version();
  if (found / 10000 != CUDNN_MAJOR) {
    return fmt::format("it is version {}, but this program needs version {}",
                       device::library_version_text(found), CUDNN_MAJOR);
  }
  if (found >= kOldest) return "";
  return fmt::format("it is version {}, but attention needs at least {}",
                     device::library_version_text(found), device::library_version_text(kOldest));
}

LoadedCudnn load_cudnn(std::span<const std::string> names) {
  return device::load_library<Cudnn>(names, "install cuDNN or add its folder to LD_LIBRARY_PATH");
}

void CudnnCalls::check(cudnnStatus_t status, std::string_view call) const {
  if (status == CUDNN_STATUS_SUCCESS) return;
  std::string line = fmt::format("cuDNN: {}: {}", call, library().status_name(status));
  if (const std::string more = last_words(library()); !more.empty()) line += " (" + more + ")";
  throw Error(ErrorCategory::device, line);
}

Descriptor CudnnCalls::make(cudnnBackendDescriptorType_t type) const {
  cudnnBackendDescriptor_t made = nullptr;
  check(library().create_descriptor(type, &made), "creating a descriptor");
  return {made, {&library()}};
}

void CudnnCalls::finish(const Descriptor& descriptor, std::string_view what) const {
  check(library().finalize(descriptor.get()), what);
}

void CudnnCalls::set_raw(const Descriptor& descriptor, cudnnBackendAttributeName_t name,
                         cudnnBackendAttributeType_t type, std::size_t count,
                         const void* values) const {
  const cudnnStatus_t status = library().set_attribute(descriptor.get(), name, type,
                                                       static_cast<std::int64_t>(count), values);
  if (status != CUDNN_STATUS_SUCCESS) {
    check(status, fmt::format("setting attribute {}", static_cast<int>(name)));
  }
}

std::size_t CudnnCalls::get_raw(const Descriptor& descriptor, cudnnBackendAttributeName_t name,
                                cudnnBackendAttributeType_t type, std::size_t count,
                                void* values) const {
  std::int64_t found = 0;
  const cudnnStatus_t status =
      library().get_attribute(descriptor.get(), name, type, static_cast<std::int64_t>(count),
                              &found, count == 0 ? nullptr : values);
  if (status != CUDNN_STATUS_SUCCESS) {
    check(status, fmt::format("getting attribute {}", static_cast<int>(name)));
  }
  return static_cast<std::size_t>(found);
}

namespace {

constexpr std::int64_t kAlignment = 16;

/// Fills the descriptors `others`, which have the attribute's type. Returns how many values the
/// attribute has.
std::size_t fill(const CudnnCalls& calls, const Descriptor& from, cudnnBackendAttributeName_t name,
                 std::span<const Descriptor> others) {
  std::vector<cudnnBackendDescriptor_t> raw;
  for (const Descriptor& other : others) raw.push_back(other.get());
  return calls.fill(from, name, raw);
}

bool always_same_bits(const CudnnCalls& calls, const Descriptor& configuration) {
  const Descriptor engine = calls.make(CUDNN_BACKEND_ENGINE_DESCRIPTOR);
  fill(calls, configuration, CUDNN_ATTR_ENGINECFG_ENGINE, {&engine, 1});
  std::array<cudnnBackendNumericalNote_t, CUDNN_NUMERICAL_NOTE_TYPE_COUNT> notes = {};
  const std::size_t count = calls.get(engine, CUDNN_ATTR_ENGINE_NUMERICAL_NOTE,
                                      std::span<cudnnBackendNumericalNote_t>(notes));
  const std::span noted = std::span(notes).first(std::min(count, notes.size()));
  return std::find(noted.begin(), noted.end(), CUDNN_NUMERICAL_NOTE_NONDETERMINISTIC) ==
         noted.end();
}

EnginePlan plan_of(const CudnnCalls& calls, cudnnHandle_t handle, Descriptor configuration) {
  Descriptor plan = calls.make(CUDNN_BACKEND_EXECUTION_PLAN_DESCRIPTOR);
  calls.set(plan, CUDNN_ATTR_EXECUTION_PLAN_HANDLE, handle);
  calls.link(plan, CUDNN_ATTR_EXECUTION_PLAN_ENGINE_CONFIG, configuration.get());
  calls.finish(plan, "finalizing an execution plan");
  std::int64_t workspace = 0;
  calls.get(plan, CUDNN_ATTR_EXECUTION_PLAN_WORKSPACE_SIZE, std::span(&workspace, 1));
  return {std::move(configuration), std::move(plan), static_cast<std::size_t>(workspace)};
}

/// Tries engines in the order of the heuristics, and keeps the reason why the first one was
/// rejected.
class Search {
 public:
  Search(const CudnnCalls& calls, cudnnHandle_t handle, std::size_t most_workspace)
      : calls_(calls), handle_(handle), most_workspace_(most_workspace) {}

  /// Returns an empty plan if none of the engines that `mode` finds can be used.
  EnginePlan among(const Descriptor& graph, cudnnBackendHeurMode_t mode) {
    Descriptor heuristics = calls_.make(CUDNN_BACKEND_ENGINEHEUR_DESCRIPTOR);
    calls_.link(heuristics, CUDNN_ATTR_ENGINEHEUR_OPERATION_GRAPH, graph.get());
    calls_.set(heuristics, CUDNN_ATTR_ENGINEHEUR_MODE, mode);
    calls_.finish(heuristics, "searching for engines");
    const std::size_t most = calls_.fill(heuristics, CUDNN_ATTR_ENGINEHEUR_RESULTS, {});
    if (most == 0) return {};
    std::vector<Descriptor> found(most);
    for (Descriptor& one : found) one = calls_.make(CUDNN_BACKEND_ENGINECFG_DESCRIPTOR);
    // The results include only engines that can run on this machine.
    const std::size_t count = fill(calls_, heuristics, CUDNN_ATTR_ENGINEHEUR_RESULTS, found);
    for (std::size_t i = 0; i < std::min(count, most); ++i) {
      if (EnginePlan plan = try_one(std::move(found[i])); plan.plan != nullptr) return plan;
    }
    return {};
  }

  [[nodiscard]] const std::string& reason() const { return reason_; }
  void refuse(const std::string& reason) {
    if (reason_.empty()) reason_ = reason;
  }

 private:
  EnginePlan try_one(Descriptor configuration) {
    try {
      if (!always_same_bits(calls_, configuration)) {
        refuse("cuDNN: its engine for attention is not deterministic");
        return {};
      }
      EnginePlan plan = plan_of(calls_, handle_, std::move(configuration));
      if (plan.workspace <= most_workspace_) return plan;
      refuse(fmt::format("cuDNN: its engine needs {} bytes of workspace, but has only {}",
                         plan.workspace, most_workspace_));
    } catch (const Error& error) {
      refuse(error.what());
    }
    return {};
  }

  const CudnnCalls& calls_;
  cudnnHandle_t handle_;
  std::size_t most_workspace_;
  std::string reason_;
};

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
  calls_.finish(made, "finalizing a tensor");
  return keep(std::move(made));
}

OperationGraph::Tensor OperationGraph::memory(std::int64_t id, cudnnDataType_t type,
                                              const TensorShape& shape) {
  expects(id < kFirstOwn, "the id of a tensor is reserved for the graph");
  return tensor(id, type, shape, Where::memory);
}
OperationGraph::Tensor OperationGraph::number(std::int64_t id) {
  expects(id < kFirstOwn, "the id of a number is reserved for the graph");
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
  calls_.finish(product, "finalizing a matrix product");
  Descriptor operation = calls_.make(CUDNN_BACKEND_OPERATION_MATMUL_DESCRIPTOR);
  calls_.link(operation, CUDNN_ATTR_OPERATION_MATMUL_ADESC, a);
  calls_.link(operation, CUDNN_ATTR_OPERATION_MATMUL_BDESC, b);
  calls_.link(operation, CUDNN_ATTR_OPERATION_MATMUL_CDESC, c);
  calls_.link(operation, CUDNN_ATTR_OPERATION_MATMUL_DESC, keep(std::move(product)));
  add(std::move(operation), "finalizing the operation of a matrix product");
}

void OperationGraph::apply(const Function& function, const Arguments& arguments, Tensor y) {
  Descriptor made = calls_.make(CUDNN_BACKEND_POINTWISE_DESCRIPTOR);
  calls_.set(made, CUDNN_ATTR_POINTWISE_MODE, function.mode);
  calls_.set(made, CUDNN_ATTR_POINTWISE_MATH_PREC, function.type);
  if (function.axis >= 0) calls_.set(made, CUDNN_ATTR_POINTWISE_AXIS, function.axis);
  calls_.finish(made, "finalizing a pointwise function");
  Descriptor operation = calls_.make(CUDNN_BACKEND_OPERATION_POINTWISE_DESCRIPTOR);
  const auto link = [&](cudnnBackendAttributeName_t name, Tensor tensor) {
    if (tensor != nullptr) calls_.link(operation, name, tensor);
  };
  link(CUDNN_ATTR_OPERATION_POINTWISE_PW_DESCRIPTOR, keep(std::move(made)));
  link(CUDNN_ATTR_OPERATION_POINTWISE_XDESC, arguments.x);
  link(CUDNN_ATTR_OPERATION_POINTWISE_BDESC, arguments.other);
  link(CUDNN_ATTR_OPERATION_POINTWISE_TDESC, arguments.condition);
  link(CUDNN_ATTR_OPERATION_POINTWISE_YDESC, y);
  add(std::move(operation), "finalizing a pointwise operation");
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
  calls_.finish(reduction, "finalizing a reduction");
  Descriptor operation = calls_.make(CUDNN_BACKEND_OPERATION_REDUCTION_DESCRIPTOR);
  calls_.link(operation, CUDNN_ATTR_OPERATION_REDUCTION_XDESC, x);
  calls_.link(operation, CUDNN_ATTR_OPERATION_REDUCTION_YDESC, y);
  calls_.link(operation, CUDNN_ATTR_OPERATION_REDUCTION_DESC, keep(std::move(reduction)));
  add(std::move(operation), "finalizing the operation of a reduction");
}

void OperationGraph::finish(cudnnHandle_t handle) {
  graph_ = calls_.make(CUDNN_BACKEND_OPERATIONGRAPH_DESCRIPTOR);
  if (handle != nullptr) calls_.set(graph_, CUDNN_ATTR_OPERATIONGRAPH_HANDLE, handle);
  calls_.link(graph_, CUDNN_ATTR_OPERATIONGRAPH_OPS,
              std::span<const cudnnBackendDescriptor_t>(operations_));
  calls_.finish(graph_, "finalizing the graph");
}

EnginePlan plan_graph(const CudnnCalls& calls, cudnnHandle_t handle, const Descriptor& graph,
                      std::size_t most_workspace) {
  Search search(calls, handle, most_workspace);
  for (const cudnnBackendHeurMode_t mode : {CUDNN_HEUR_MODE_A, CUDNN_HEUR_MODE_FALLBACK}) {
    try {
      if (EnginePlan plan = search.among(graph, mode); plan.plan != nullptr) return plan;
    } catch (const Error& error) {
      search.refuse(error.what());
    }
  }
  search.refuse("cuDNN has no engine for attention on this GPU");
  throw Error(ErrorCategory::device, search.reason());
}

}  // namespace ballast::model::cuda
