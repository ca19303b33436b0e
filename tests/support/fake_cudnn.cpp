#include "tests/support/fake_cudnn.h"

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstring>
#include <map>
#include <set>
#include <span>
#include <stdexcept>
#include <utility>

#include "ballast/core/error.h"

#include "src/model/cuda/cudnn/cudnn.h"
#include "tests/support/fake_cudnn_graph.h"

namespace ballast::model::cuda {
namespace {

using test::FakeCudnn;
using test::FakeGraph;
using test::FakeOperation;
using test::FakeTensor;
using Kind = FakeOperation::Kind;

/// Refuses a call.
struct Refusal : std::runtime_error {
  explicit Refusal(const std::string& complaint, cudnnStatus_t told = CUDNN_STATUS_BAD_PARAM)
      : std::runtime_error(complaint), status(told) {}
  cudnnStatus_t status;
};
void require(bool condition, const std::string& complaint) {
  if (!condition) throw Refusal(complaint);
}
/// Does `work`, and turns a refusal into what cuDNN answers.
template <class Work>
cudnnStatus_t answer(const Work& work) {
  try {
    work();
    return CUDNN_STATUS_SUCCESS;
  } catch (const Refusal& refusal) {
    FakeCudnn::complaint = refusal.what();
    return refusal.status;
  }
}

struct Node {
  cudnnBackendDescriptorType_t type;
  bool finished = false;
  std::map<int, std::vector<std::byte>> attributes;
  // What it is once it is finished.
  FakeTensor tensor = {};
  FakeOperation operation = {};
  FakeGraph graph = {};
  FakeCudnn::Engine engine = {};
};
std::set<const void*>& nodes() {
  static std::set<const void*> all;
  return all;
}
std::set<const void*>& handles() {
  static std::set<const void*> all;
  return all;
}
Node& node(cudnnBackendDescriptor_t descriptor) {
  require(nodes().contains(descriptor), "no descriptor");
  return *static_cast<Node*>(descriptor);
}

struct Form {
  cudnnBackendDescriptorType_t owner;
  cudnnBackendAttributeType_t type;
  std::size_t least = 1;
  std::size_t most = 1;
  bool wanted = true;
};
const std::map<int, Form>& forms() {
  static const std::map<int, Form> all = {
      {CUDNN_ATTR_TENSOR_UNIQUE_ID, {CUDNN_BACKEND_TENSOR_DESCRIPTOR, CUDNN_TYPE_INT64}},
      {CUDNN_ATTR_TENSOR_DATA_TYPE, {CUDNN_BACKEND_TENSOR_DESCRIPTOR, CUDNN_TYPE_DATA_TYPE}},
      {CUDNN_ATTR_TENSOR_BYTE_ALIGNMENT, {CUDNN_BACKEND_TENSOR_DESCRIPTOR, CUDNN_TYPE_INT64}},
      {CUDNN_ATTR_TENSOR_DIMENSIONS, {CUDNN_BACKEND_TENSOR_DESCRIPTOR, CUDNN_TYPE_INT64, 4, 4}},
      {CUDNN_ATTR_TENSOR_STRIDES, {CUDNN_BACKEND_TENSOR_DESCRIPTOR, CUDNN_TYPE_INT64, 4, 4}},
      {CUDNN_ATTR_TENSOR_IS_VIRTUAL, {CUDNN_BACKEND_TENSOR_DESCRIPTOR, CUDNN_TYPE_BOOLEAN}},
      {CUDNN_ATTR_TENSOR_IS_BY_VALUE, {CUDNN_BACKEND_TENSOR_DESCRIPTOR, CUDNN_TYPE_BOOLEAN}},
      {CUDNN_ATTR_MATMUL_COMP_TYPE, {CUDNN_BACKEND_MATMUL_DESCRIPTOR, CUDNN_TYPE_DATA_TYPE}},
      {CUDNN_ATTR_POINTWISE_MODE, {CUDNN_BACKEND_POINTWISE_DESCRIPTOR, CUDNN_TYPE_POINTWISE_MODE}},
      {CUDNN_ATTR_POINTWISE_MATH_PREC, {CUDNN_BACKEND_POINTWISE_DESCRIPTOR, CUDNN_TYPE_DATA_TYPE}},
      {CUDNN_ATTR_POINTWISE_AXIS,
       {CUDNN_BACKEND_POINTWISE_DESCRIPTOR, CUDNN_TYPE_INT64, 1, 1, false}},
      {CUDNN_ATTR_REDUCTION_OPERATOR,
       {CUDNN_BACKEND_REDUCTION_DESCRIPTOR, CUDNN_TYPE_REDUCTION_OPERATOR_TYPE}},
      {CUDNN_ATTR_REDUCTION_COMP_TYPE, {CUDNN_BACKEND_REDUCTION_DESCRIPTOR, CUDNN_TYPE_DATA_TYPE}},
      {CUDNN_ATTR_OPERATION_MATMUL_ADESC,
       {CUDNN_BACKEND_OPERATION_MATMUL_DESCRIPTOR, CUDNN_TYPE_BACKEND_DESCRIPTOR}},
      {CUDNN_ATTR_OPERATION_MATMUL_BDESC,
       {CUDNN_BACKEND_OPERATION_MATMUL_DESCRIPTOR, CUDNN_TYPE_BACKEND_DESCRIPTOR}},
      {CUDNN_ATTR_OPERATION_MATMUL_CDESC,
       {CUDNN_BACKEND_OPERATION_MATMUL_DESCRIPTOR, CUDNN_TYPE_BACKEND_DESCRIPTOR}},
      {CUDNN_ATTR_OPERATION_MATMUL_DESC,
       {CUDNN_BACKEND_OPERATION_MATMUL_DESCRIPTOR, CUDNN_TYPE_BACKEND_DESCRIPTOR}},
      {CUDNN_ATTR_OPERATION_POINTWISE_PW_DESCRIPTOR,
       {CUDNN_BACKEND_OPERATION_POINTWISE_DESCRIPTOR, CUDNN_TYPE_BACKEND_DESCRIPTOR}},
      {CUDNN_ATTR_OPERATION_POINTWISE_XDESC,
       {CUDNN_BACKEND_OPERATION_POINTWISE_DESCRIPTOR, CUDNN_TYPE_BACKEND_DESCRIPTOR}},
      {CUDNN_ATTR_OPERATION_POINTWISE_BDESC,
       {CUDNN_BACKEND_OPERATION_POINTWISE_DESCRIPTOR, CUDNN_TYPE_BACKEND_DESCRIPTOR, 1, 1, false}},
      {CUDNN_ATTR_OPERATION_POINTWISE_TDESC,
       {CUDNN_BACKEND_OPERATION_POINTWISE_DESCRIPTOR, CUDNN_TYPE_BACKEND_DESCRIPTOR, 1, 1, false}},
      {CUDNN_ATTR_OPERATION_POINTWISE_YDESC,
       {CUDNN_BACKEND_OPERATION_POINTWISE_DESCRIPTOR, CUDNN_TYPE_BACKEND_DESCRIPTOR}},
      {CUDNN_ATTR_OPERATION_REDUCTION_XDESC,
       {CUDNN_BACKEND_OPERATION_REDUCTION_DESCRIPTOR, CUDNN_TYPE_BACKEND_DESCRIPTOR}},
      {CUDNN_ATTR_OPERATION_REDUCTION_YDESC,
       {CUDNN_BACKEND_OPERATION_REDUCTION_DESCRIPTOR, CUDNN_TYPE_BACKEND_DESCRIPTOR}},
      {CUDNN_ATTR_OPERATION_REDUCTION_DESC,
       {CUDNN_BACKEND_OPERATION_REDUCTION_DESCRIPTOR, CUDNN_TYPE_BACKEND_DESCRIPTOR}},
      {CUDNN_ATTR_OPERATIONGRAPH_HANDLE,
       {CUDNN_BACKEND_OPERATIONGRAPH_DESCRIPTOR, CUDNN_TYPE_HANDLE}},
      {CUDNN_ATTR_OPERATIONGRAPH_OPS,
       {CUDNN_BACKEND_OPERATIONGRAPH_DESCRIPTOR, CUDNN_TYPE_BACKEND_DESCRIPTOR, 1, 64}},
      {CUDNN_ATTR_ENGINEHEUR_OPERATION_GRAPH,
       {CUDNN_BACKEND_ENGINEHEUR_DESCRIPTOR, CUDNN_TYPE_BACKEND_DESCRIPTOR}},
      {CUDNN_ATTR_ENGINEHEUR_MODE, {CUDNN_BACKEND_ENGINEHEUR_DESCRIPTOR, CUDNN_TYPE_HEUR_MODE}},
      {CUDNN_ATTR_EXECUTION_PLAN_HANDLE,
       {CUDNN_BACKEND_EXECUTION_PLAN_DESCRIPTOR, CUDNN_TYPE_HANDLE}},
      {CUDNN_ATTR_EXECUTION_PLAN_ENGINE_CONFIG,
       {CUDNN_BACKEND_EXECUTION_PLAN_DESCRIPTOR, CUDNN_TYPE_BACKEND_DESCRIPTOR}},
      {CUDNN_ATTR_VARIANT_PACK_UNIQUE_IDS,
       {CUDNN_BACKEND_VARIANT_PACK_DESCRIPTOR, CUDNN_TYPE_INT64, 1, 64}},
      {CUDNN_ATTR_VARIANT_PACK_DATA_POINTERS,
       {CUDNN_BACKEND_VARIANT_PACK_DESCRIPTOR, CUDNN_TYPE_VOID_PTR, 1, 64}},
      {CUDNN_ATTR_VARIANT_PACK_WORKSPACE,
       {CUDNN_BACKEND_VARIANT_PACK_DESCRIPTOR, CUDNN_TYPE_VOID_PTR}},
  };
  return all;
}
std::size_t size_of(cudnnBackendAttributeType_t type) {
  if (type == CUDNN_TYPE_BOOLEAN) return sizeof(bool);
  const bool wide = type == CUDNN_TYPE_INT64 || type == CUDNN_TYPE_VOID_PTR ||
                    type == CUDNN_TYPE_HANDLE || type == CUDNN_TYPE_BACKEND_DESCRIPTOR;
  return wide ? 8 : sizeof(cudnnDataType_t);
}

/// The values of an attribute; none where it was not set.
template <class T>
std::vector<T> all(const Node& from, cudnnBackendAttributeName_t name) {
  const auto found = from.attributes.find(name);
  if (found == from.attributes.end()) return {};
  std::vector<T> values(found->second.size() / sizeof(T));
  std::memcpy(values.data(), found->second.data(), found->second.size());
  return values;
}
template <class T>
T one(const Node& from, cudnnBackendAttributeName_t name) {
  T value = {};
  std::memcpy(&value, from.attributes.at(name).data(), sizeof value);
  return value;
}
/// The finished descriptor that an attribute names, of the wanted type; null where there is none.
Node* linked(const Node& from, cudnnBackendAttributeName_t name,
             cudnnBackendDescriptorType_t type) {
  const auto found = all<cudnnBackendDescriptor_t>(from, name);
  if (found.empty()) return nullptr;
  Node& other = node(found.at(0));
  require(other.finished && other.type == type, "a link to another kind of descriptor");
  return &other;
}
const FakeTensor* tensor_of(const Node& from, cudnnBackendAttributeName_t name) {
  const Node* const found = linked(from, name, CUDNN_BACKEND_TENSOR_DESCRIPTOR);
  return found == nullptr ? nullptr : &found->tensor;
}

void finish_tensor(Node& made) {
  FakeTensor& tensor = made.tensor;
  tensor.id = one<std::int64_t>(made, CUDNN_ATTR_TENSOR_UNIQUE_ID);
  tensor.type = one<cudnnDataType_t>(made, CUDNN_ATTR_TENSOR_DATA_TYPE);
  tensor.alignment = one<std::int64_t>(made, CUDNN_ATTR_TENSOR_BYTE_ALIGNMENT);
  tensor.is_virtual = one<bool>(made, CUDNN_ATTR_TENSOR_IS_VIRTUAL);
  tensor.by_value = one<bool>(made, CUDNN_ATTR_TENSOR_IS_BY_VALUE);
  const auto extents = all<std::int64_t>(made, CUDNN_ATTR_TENSOR_DIMENSIONS);
  const auto steps = all<std::int64_t>(made, CUDNN_ATTR_TENSOR_STRIDES);
  for (std::size_t i = 0; i < 4; ++i) {
    require(extents[i] > 0 && steps[i] > 0, "a tensor without elements or steps");
    tensor.extents[i] = extents[i];
    tensor.steps[i] = steps[i];
  }
  require(tensor.alignment >= 16, "a tensor that is not aligned to what engines read at once");
  require(!(tensor.is_virtual && tensor.by_value), "a virtual number");
  const FakeTensor::Four single = {1, 1, 1, 1};
  require(!tensor.by_value || (tensor.extents == single && tensor.type == CUDNN_DATA_FLOAT),
          "a number that is a tensor");
  const bool in_memory = !tensor.is_virtual && !tensor.by_value;
  require(!in_memory || tensor.type == CUDNN_DATA_FLOAT || tensor.type == CUDNN_DATA_BFLOAT16,
          "a tensor in memory of another type");
}

void finish_operation(Node& made) {
  FakeOperation& o = made.operation;
  if (made.type == CUDNN_BACKEND_OPERATION_MATMUL_DESCRIPTOR) {
    linked(made, CUDNN_ATTR_OPERATION_MATMUL_DESC, CUDNN_BACKEND_MATMUL_DESCRIPTOR);
    o = {.kind = Kind::matmul,
         .x = tensor_of(made, CUDNN_ATTR_OPERATION_MATMUL_ADESC),
         .b = tensor_of(made, CUDNN_ATTR_OPERATION_MATMUL_BDESC),
         .y = tensor_of(made, CUDNN_ATTR_OPERATION_MATMUL_CDESC)};
  } else if (made.type == CUDNN_BACKEND_OPERATION_REDUCTION_DESCRIPTOR) {
    const Node& how =
        *linked(made, CUDNN_ATTR_OPERATION_REDUCTION_DESC, CUDNN_BACKEND_REDUCTION_DESCRIPTOR);
    o = {.kind = Kind::reduction,
         .reduction = one<cudnnReduceTensorOp_t>(how, CUDNN_ATTR_REDUCTION_OPERATOR),
         .x = tensor_of(made, CUDNN_ATTR_OPERATION_REDUCTION_XDESC),
         .y = tensor_of(made, CUDNN_ATTR_OPERATION_REDUCTION_YDESC)};
  } else {
    const Node& how = *linked(made, CUDNN_ATTR_OPERATION_POINTWISE_PW_DESCRIPTOR,
                              CUDNN_BACKEND_POINTWISE_DESCRIPTOR);
    const auto axis = all<std::int64_t>(how, CUDNN_ATTR_POINTWISE_AXIS);
    o = {.kind = Kind::pointwise,
         .mode = one<cudnnPointwiseMode_t>(how, CUDNN_ATTR_POINTWISE_MODE),
         .axis = axis.empty() ? -1 : axis[0],
         .x = tensor_of(made, CUDNN_ATTR_OPERATION_POINTWISE_XDESC),
         .b = tensor_of(made, CUDNN_ATTR_OPERATION_POINTWISE_BDESC),
         .condition = tensor_of(made, CUDNN_ATTR_OPERATION_POINTWISE_TDESC),
         .y = tensor_of(made, CUDNN_ATTR_OPERATION_POINTWISE_YDESC)};
  }
  require(o.complaint().empty(), o.complaint());
}

void finish_graph(Node& made) {
  require(handles().contains(one<void*>(made, CUDNN_ATTR_OPERATIONGRAPH_HANDLE)), "no handle");
  for (void* const part : all<void*>(made, CUDNN_ATTR_OPERATIONGRAPH_OPS)) {
    const Node& operation = node(part);
    require(operation.finished && operation.operation.y != nullptr, "no operation");
    made.graph.operations.push_back(operation.operation);
  }
  require(made.graph.complaint().empty(), made.graph.complaint());
}

void finish_plan(Node& made) {
  require(handles().contains(one<void*>(made, CUDNN_ATTR_EXECUTION_PLAN_HANDLE)), "no handle");
  const Node& choice =
      *linked(made, CUDNN_ATTR_EXECUTION_PLAN_ENGINE_CONFIG, CUDNN_BACKEND_ENGINECFG_DESCRIPTOR);
  ++FakeCudnn::plans;
  made.engine = choice.engine;
  made.graph = choice.graph;
  if (made.engine.planned != CUDNN_STATUS_SUCCESS) {
    throw Refusal("it cannot be\nplanned ", made.engine.planned);
  }
}

cudnnStatus_t finalize(cudnnBackendDescriptor_t descriptor) {
  return answer([&] {
    Node& made = node(descriptor);
    require(!made.finished, "finished twice");
    for (const auto& [name, form] : forms()) {
      const bool missing =
          form.owner == made.type && form.wanted && !made.attributes.contains(name);
      require(!missing, "it lacks attribute " + std::to_string(name));
    }
    switch (made.type) {
      case CUDNN_BACKEND_TENSOR_DESCRIPTOR:
        finish_tensor(made);
        break;
      case CUDNN_BACKEND_OPERATION_MATMUL_DESCRIPTOR:
      case CUDNN_BACKEND_OPERATION_POINTWISE_DESCRIPTOR:
      case CUDNN_BACKEND_OPERATION_REDUCTION_DESCRIPTOR:
        finish_operation(made);
        break;
      case CUDNN_BACKEND_OPERATIONGRAPH_DESCRIPTOR:
        finish_graph(made);
        break;
      case CUDNN_BACKEND_ENGINEHEUR_DESCRIPTOR:
        made.graph = linked(made, CUDNN_ATTR_ENGINEHEUR_OPERATION_GRAPH,
                            CUDNN_BACKEND_OPERATIONGRAPH_DESCRIPTOR)
                         ->graph;
        break;
      case CUDNN_BACKEND_EXECUTION_PLAN_DESCRIPTOR:
        finish_plan(made);
        break;
      default:
        break;
    }
    made.finished = true;
  });
}

cudnnStatus_t create_descriptor(cudnnBackendDescriptorType_t type, cudnnBackendDescriptor_t* made) {
  *made = new Node{.type = type};
  nodes().insert(*made);
  ++FakeCudnn::alive;
  return CUDNN_STATUS_SUCCESS;
}
cudnnStatus_t destroy_descriptor(cudnnBackendDescriptor_t descriptor) {
  return answer([&] {
    delete &node(descriptor);
    nodes().erase(descriptor);
    --FakeCudnn::alive;
  });
}

cudnnStatus_t set_attribute(cudnnBackendDescriptor_t descriptor, cudnnBackendAttributeName_t name,
                            cudnnBackendAttributeType_t type, std::int64_t count,
                            const void* values) {
  return answer([&] {
    Node& to = node(descriptor);
    require(!to.finished, "set when finished");
    const auto form = forms().find(name);
    require(form != forms().end() && form->second.owner == to.type, "an attribute of others");
    require(form->second.type == type, "an attribute of another type");
    const auto size = static_cast<std::size_t>(count);
    require(size >= form->second.least && size <= form->second.most, "too few or many values");
    const auto* const bytes = static_cast<const std::byte*>(values);
    to.attributes[name].assign(bytes, bytes + size * size_of(type));
  });
}

/// Engines that the heuristics of `from` have.
std::span<const FakeCudnn::Engine> found_by(const Node& from) {
  if (!from.graph.is_attention()) return {};
  const auto mode = one<cudnnBackendHeurMode_t>(from, CUDNN_ATTR_ENGINEHEUR_MODE);
  if (mode == CUDNN_HEUR_MODE_A) return FakeCudnn::engines;
  require(mode == CUDNN_HEUR_MODE_FALLBACK, "heuristics of another kind");
  return FakeCudnn::last_resorts;
}

/// Fills descriptors that the caller has made.
std::int64_t fill(const Node& from, cudnnBackendAttributeName_t name, std::int64_t count,
                  void* values) {
  auto* const others = static_cast<cudnnBackendDescriptor_t*>(values);
  if (name == CUDNN_ATTR_ENGINEHEUR_RESULTS) {
    const auto engines = found_by(from);
    const auto there = static_cast<std::int64_t>(engines.size());
    for (std::int64_t i = 0; i < std::min(count, there); ++i) {
      Node& choice = node(others[i]);
      require(choice.type == CUDNN_BACKEND_ENGINECFG_DESCRIPTOR, "no engine's configuration");
      choice.engine = engines[static_cast<std::size_t>(i)];
      choice.graph = from.graph;
      choice.finished = true;
    }
    return there;
  }
  require(name == CUDNN_ATTR_ENGINECFG_ENGINE && count == 1, "descriptors of another kind");
  Node& engine = node(others[0]);
  require(engine.type == CUDNN_BACKEND_ENGINE_DESCRIPTOR, "no engine");
  engine.engine = from.engine;
  engine.finished = true;
  return 1;
}

cudnnStatus_t get_attribute(cudnnBackendDescriptor_t descriptor, cudnnBackendAttributeName_t name,
                            cudnnBackendAttributeType_t type, std::int64_t count,
                            std::int64_t* found, void* values) {
  return answer([&] {
    const Node& from = node(descriptor);
    require(from.finished, "asked before it is finished");
    if (type == CUDNN_TYPE_BACKEND_DESCRIPTOR) {
      *found = fill(from, name, count, values);
    } else if (name == CUDNN_ATTR_EXECUTION_PLAN_WORKSPACE_SIZE) {
      require(type == CUDNN_TYPE_INT64 && count == 1, "bytes of another type");
      std::memcpy(values, &from.engine.workspace, sizeof from.engine.workspace);
      *found = 1;
    } else {
      require(name == CUDNN_ATTR_ENGINE_NUMERICAL_NOTE && type == CUDNN_TYPE_NUMERICAL_NOTE &&
                  count == CUDNN_NUMERICAL_NOTE_TYPE_COUNT,
              "an attribute that is not known");
      const std::array notes = {CUDNN_NUMERICAL_NOTE_TENSOR_CORE,
                                CUDNN_NUMERICAL_NOTE_NONDETERMINISTIC};
      *found = from.engine.same_bits ? 1 : 2;
      std::memcpy(values, notes.data(), static_cast<std::size_t>(*found) * sizeof notes[0]);
    }
  });
}

cudnnStatus_t execute(cudnnHandle_t handle, cudnnBackendDescriptor_t plan_of,
                      cudnnBackendDescriptor_t pack_of) {
  return answer([&] {
    const Node& plan = node(plan_of);
    const Node& pack = node(pack_of);
    require(handles().contains(handle) && plan.finished && pack.finished, "not ready");
    const auto told = std::exchange(FakeCudnn::next_execution, CUDNN_STATUS_SUCCESS);
    if (told != CUDNN_STATUS_SUCCESS) throw Refusal("as it was told", told);
    const auto ids = all<std::int64_t>(pack, CUDNN_ATTR_VARIANT_PACK_UNIQUE_IDS);
    const auto pointers = all<void*>(pack, CUDNN_ATTR_VARIANT_PACK_DATA_POINTERS);
    const auto bound = plan.graph.bound();
    require(ids.size() == bound.size() && pointers.size() == ids.size(), "too few or many tensors");
    std::map<std::int64_t, void*> places;
    for (std::size_t i = 0; i < ids.size(); ++i) {
      const auto tensor = bound.find(ids[i]);
      require(tensor != bound.end() && places.emplace(ids[i], pointers[i]).second, "a strange id");
      const auto address = reinterpret_cast<std::uintptr_t>(pointers[i]);
      const auto alignment = static_cast<std::uintptr_t>(tensor->second->alignment);
      require(address != 0 && (tensor->second->by_value || address % alignment == 0),
              "a tensor that is not where it was said to be");
    }
    void* const workspace = one<void*>(pack, CUDNN_ATTR_VARIANT_PACK_WORKSPACE);
    const bool usable =
        workspace != nullptr && reinterpret_cast<std::uintptr_t>(workspace) % 256 == 0;
    require(plan.engine.workspace == 0 || usable, "no workspace");
    std::memset(workspace, 0x7f, static_cast<std::size_t>(plan.engine.workspace));
    FakeCudnn::workspace = plan.engine.workspace;
    plan.graph.compute(places);
    ++FakeCudnn::executions;
  });
}

cudnnStatus_t create(cudnnHandle_t* made) {
  const auto told = std::exchange(FakeCudnn::next_start, CUDNN_STATUS_SUCCESS);
  if (told != CUDNN_STATUS_SUCCESS) return told;
  *made = reinterpret_cast<cudnnHandle_t>(new int(0));
  handles().insert(*made);
  ++FakeCudnn::alive;
  return CUDNN_STATUS_SUCCESS;
}
cudnnStatus_t destroy(cudnnHandle_t handle) {
  return answer([&] {
    require(handles().erase(handle) == 1, "no handle");
    delete reinterpret_cast<int*>(handle);
    --FakeCudnn::alive;
  });
}
cudnnStatus_t set_stream(cudnnHandle_t handle, cudaStream_t stream) {
  FakeCudnn::stream = stream;
  return handles().contains(handle) ? CUDNN_STATUS_SUCCESS : CUDNN_STATUS_BAD_PARAM;
}

std::size_t version() {
  return CUDNN_VERSION;
}
const char* status_name(cudnnStatus_t status) {
  return status == CUDNN_STATUS_BAD_PARAM          ? "CUDNN_STATUS_BAD_PARAM"
         : status == CUDNN_STATUS_NOT_SUPPORTED    ? "CUDNN_STATUS_NOT_SUPPORTED"
         : status == CUDNN_STATUS_EXECUTION_FAILED ? "CUDNN_STATUS_EXECUTION_FAILED"
         : status == CUDNN_STATUS_NOT_INITIALIZED  ? "CUDNN_STATUS_NOT_INITIALIZED"
                                                   : "CUDNN_STATUS of a fake";
}
void last_error(char* to, std::size_t size) {
  std::strncpy(to, FakeCudnn::complaint.c_str(), size);
}

}  // namespace

const Cudnn& cudnn() {
  static const Cudnn fake = {.version = &version,
                             .status_name = &status_name,
                             .last_error = &last_error,
                             .create = &create,
                             .destroy = &destroy,
                             .set_stream = &set_stream,
                             .create_descriptor = &create_descriptor,
                             .destroy_descriptor = &destroy_descriptor,
                             .set_attribute = &set_attribute,
                             .get_attribute = &get_attribute,
                             .finalize = &finalize,
                             .execute = &execute};
  if (!FakeCudnn::present) throw Error(ErrorCategory::device, std::string(cudnn_refusal()));
  return fake;
}
std::string_view cudnn_refusal() {
  return FakeCudnn::present ? "" : "libcudnn.so.9 cannot be loaded: a test has none";
}

}  // namespace ballast::model::cuda
