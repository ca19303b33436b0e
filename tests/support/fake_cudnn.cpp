#include "tests/support/fake_cudnn.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstring>
#include <map>
#include <span>
#include <stdexcept>
#include <utility>

#include "ballast/core/dtype.h"
#include "ballast/core/error.h"

#include "src/model/cuda/cudnn/cudnn.h"
#include "tests/support/fake_cuda.h"
#include "tests/support/fake_memory.h"
#include "tests/support/fake_stream.h"

namespace ballast::model::cuda {
namespace {

using test::FakeCuda;
using test::FakeCudnn;
using Four = std::array<std::int64_t, 4>;

/// Fails a call with the given reason.
struct Refusal : std::runtime_error {
  explicit Refusal(const std::string& complaint, cudnnStatus_t code = CUDNN_STATUS_BAD_PARAM)
      : std::runtime_error(complaint), status(code) {}
  cudnnStatus_t status;
};
void require(bool condition, const std::string& complaint) {
  if (!condition) throw Refusal(complaint);
}
/// Does `work` and converts its error to a status of cuDNN.
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

struct Tensor {
  Four extents = {};
  Four strides = {};
};
/// Tensors of a graph that have a place in memory, by id.
using Tensors = std::map<std::int64_t, Tensor>;

struct Node {
  cudnnBackendDescriptorType_t type;
  bool finished = false;
  std::map<int, std::vector<std::byte>> attributes = {};
  // tensors of a graph, or of the graph from which the object was made
  Tensors tensors = {};
  FakeCudnn::Engine engine = {};
};
Node& node(cudnnBackendDescriptor_t descriptor) {
  return *static_cast<Node*>(descriptor);
}

std::size_t size_of(cudnnBackendAttributeType_t type) {
  if (type == CUDNN_TYPE_BOOLEAN) return sizeof(bool);
  const bool wide = type == CUDNN_TYPE_INT64 || type == CUDNN_TYPE_VOID_PTR ||
                    type == CUDNN_TYPE_HANDLE || type == CUDNN_TYPE_BACKEND_DESCRIPTOR;
  return wide ? 8 : sizeof(cudnnDataType_t);
}

/// The values of an attribute; empty if it was not set.
template <class T>
std::vector<T> all(const Node& from, int name) {
  const auto found = from.attributes.find(name);
  if (found == from.attributes.end()) return {};
  std::vector<T> values(found->second.size() / sizeof(T));
  std::memcpy(values.data(), found->second.data(), found->second.size());
  return values;
}
template <class T>
T one(const Node& from, int name) {
  require(from.attributes.contains(name), "it lacks attribute " + std::to_string(name));
  T value = {};
  std::memcpy(&value, from.attributes.at(name).data(), sizeof value);
  return value;
}
Node& linked(const Node& from, int name) {
  Node& other = node(one<cudnnBackendDescriptor_t>(from, name));
  require(other.finished, "a link to a descriptor that is not finished");
  return other;
}

Four four(const Node& tensor, int name) {
  const auto values = all<std::int64_t>(tensor, name);
  require(values.size() == 4, "a tensor of another number of dimensions");
  Four result = {};
  std::copy(values.begin(), values.end(), result.begin());
  return result;
}

/// The tensors in memory that the operations of a graph use.
Tensors tensors_of(const Node& graph) {
  Tensors found;
  for (const auto part : all<cudnnBackendDescriptor_t>(graph, CUDNN_ATTR_OPERATIONGRAPH_OPS)) {
    for (const int name : {CUDNN_ATTR_OPERATION_MATMUL_ADESC, CUDNN_ATTR_OPERATION_MATMUL_BDESC,
                           CUDNN_ATTR_OPERATION_MATMUL_CDESC, CUDNN_ATTR_OPERATION_POINTWISE_BDESC,
                           CUDNN_ATTR_OPERATION_POINTWISE_YDESC}) {
      const Node& operation = node(part);
      if (!operation.attributes.contains(name)) continue;
      const Node& tensor = linked(operation, name);
      if (one<bool>(tensor, CUDNN_ATTR_TENSOR_IS_VIRTUAL)) continue;
      found[one<std::int64_t>(tensor, CUDNN_ATTR_TENSOR_UNIQUE_ID)] = {
          four(tensor, CUDNN_ATTR_TENSOR_DIMENSIONS), four(tensor, CUDNN_ATTR_TENSOR_STRIDES)};
    }
  }
  return found;
}

cudnnStatus_t finalize(cudnnBackendDescriptor_t descriptor) {
  return answer([&] {
    Node& made = node(descriptor);
    if (made.type == CUDNN_BACKEND_OPERATIONGRAPH_DESCRIPTOR) {
      made.tensors = tensors_of(made);
    } else if (made.type == CUDNN_BACKEND_ENGINEHEUR_DESCRIPTOR) {
      made.tensors = linked(made, CUDNN_ATTR_ENGINEHEUR_OPERATION_GRAPH).tensors;
    } else if (made.type == CUDNN_BACKEND_EXECUTION_PLAN_DESCRIPTOR) {
      const Node& choice = linked(made, CUDNN_ATTR_EXECUTION_PLAN_ENGINE_CONFIG);
      ++FakeCudnn::plans;
      made.engine = choice.engine;
      made.tensors = choice.tensors;
      if (made.engine.planned != CUDNN_STATUS_SUCCESS) {
        throw Refusal("it cannot be\nplanned ", made.engine.planned);
      }
    }
    made.finished = true;
  });
}

cudnnStatus_t create_descriptor(cudnnBackendDescriptorType_t type, cudnnBackendDescriptor_t* made) {
  *made = new Node{.type = type};
  ++FakeCudnn::alive;
  return CUDNN_STATUS_SUCCESS;
}
cudnnStatus_t destroy_descriptor(cudnnBackendDescriptor_t descriptor) {
  delete &node(descriptor);
  --FakeCudnn::alive;
  return CUDNN_STATUS_SUCCESS;
}

cudnnStatus_t set_attribute(cudnnBackendDescriptor_t descriptor, cudnnBackendAttributeName_t name,
                            cudnnBackendAttributeType_t type, std::int64_t count,
                            const void* values) {
  return answer([&] {
    Node& to = node(descriptor);
    require(!to.finished, "set when finished");
    const bool of_tensors = name >= CUDNN_ATTR_TENSOR_BYTE_ALIGNMENT && name < 1000;
    require(of_tensors == (to.type == CUDNN_BACKEND_TENSOR_DESCRIPTOR), "an attribute of others");
    const auto* const bytes = static_cast<const std::byte*>(values);
    to.attributes[name].assign(bytes, bytes + static_cast<std::size_t>(count) * size_of(type));
  });
}

/// Fills descriptors that the caller has made.
std::int64_t fill(const Node& from, cudnnBackendAttributeName_t name, std::int64_t count,
                  void* values) {
  const std::span others(static_cast<cudnnBackendDescriptor_t*>(values),
                         static_cast<std::size_t>(count));
  if (name != CUDNN_ATTR_ENGINEHEUR_RESULTS) {  // the engine of a configuration
    node(others[0]).engine = from.engine;
    node(others[0]).finished = true;
    return 1;
  }
  const auto mode = one<cudnnBackendHeurMode_t>(from, CUDNN_ATTR_ENGINEHEUR_MODE);
  const auto& engines = mode == CUDNN_HEUR_MODE_A ? FakeCudnn::engines : FakeCudnn::last_resorts;
  for (std::size_t i = 0; i < std::min(others.size(), engines.size()); ++i) {
    Node& choice = node(others[i]);
    choice.engine = engines[i];
    choice.tensors = from.tensors;
    choice.finished = true;
  }
  return static_cast<std::int64_t>(engines.size());
}

cudnnStatus_t get_attribute(cudnnBackendDescriptor_t descriptor, cudnnBackendAttributeName_t name,
                            cudnnBackendAttributeType_t type, std::int64_t count,
                            std::int64_t* found, void* values) {
  return answer([&] {
    const Node& from = node(descriptor);
    require(from.finished, "read before it is finished");
    if (type == CUDNN_TYPE_BACKEND_DESCRIPTOR) {
      *found = fill(from, name, count, values);
    } else if (name == CUDNN_ATTR_EXECUTION_PLAN_WORKSPACE_SIZE) {
      std::memcpy(values, &from.engine.workspace, sizeof from.engine.workspace);
      *found = 1;
    } else {
      require(name == CUDNN_ATTR_ENGINE_NUMERICAL_NOTE, "an attribute that is not known");
      const std::array notes = {CUDNN_NUMERICAL_NOTE_TENSOR_CORE,
                                CUDNN_NUMERICAL_NOTE_NONDETERMINISTIC};
      *found = from.engine.same_bits ? 1 : 2;
      std::memcpy(values, notes.data(), static_cast<std::size_t>(*found) * sizeof notes[0]);
    }
  });
}

/// Bytes of an element of a tensor in memory.
std::size_t width_of(std::int64_t id) {
  return id == static_cast<std::int64_t>(AttentionTensor::log_sums) ? sizeof(float) : sizeof(Bf16);
}

/// Causal attention over the tensors of a graph, with any strides. Ignores the operations of the
/// graph. Reads the scale when it is made.
class Attention {
 public:
  Attention(const Tensors& tensors, const std::map<std::int64_t, void*>& places)
      : tensors_(tensors),
        places_(places),
        scale_(*static_cast<const float*>(
            places.at(static_cast<std::int64_t>(AttentionTensor::scale)))) {}

  /// Refuses tensors that are not in one allocation of the GPU. Without a seed, tests may use any
  /// memory as that of the GPU.
  void check_places() const {
    if (FakeCuda::seed == 0) return;
    for (const auto& [id, place] : places_) {
      if (id == static_cast<std::int64_t>(AttentionTensor::scale)) continue;
      const Tensor& each = tensors_.at(id);
      std::int64_t last = 0;
      for (std::size_t i = 0; i < 4; ++i) last += (each.extents[i] - 1) * each.strides[i];
      const std::size_t bytes = static_cast<std::size_t>(last + 1) * width_of(id);
      if (test::FakeMemory::where(place, bytes) == test::FakeMemory::Where::inside) continue;
      FakeCuda::complain("cudnnBackendExecute: a tensor is not in one allocation of the GPU");
      throw Refusal("a tensor is not in one allocation of the GPU");
    }
  }

  void run() const {
    const auto [sequences, heads, length, size] = tensor(AttentionTensor::queries).extents;
    for (std::int64_t s = 0; s < sequences; ++s) {
      for (std::int64_t h = 0; h < heads; ++h) {
        for (std::int64_t i = 0; i < length; ++i) attend({s, h, i, 0}, size);
      }
    }
  }

 private:
  [[nodiscard]] const Tensor& tensor(AttentionTensor which) const {
    return tensors_.at(static_cast<std::int64_t>(which));
  }
  template <class T>
  [[nodiscard]] T& at(AttentionTensor which, const Four& index) const {
    const Four& strides = tensor(which).strides;
    std::int64_t offset = 0;
    for (std::size_t i = 0; i < 4; ++i) offset += index[i] * strides[i];
    return static_cast<T*>(places_.at(static_cast<std::int64_t>(which)))[offset];
  }

  /// The row of one query of one head.
  void attend(const Four& query, std::int64_t size) const {
    const auto [s, h, i, none] = query;
    const std::int64_t heads = tensor(AttentionTensor::queries).extents[1];
    const std::int64_t kv = h / (heads / tensor(AttentionTensor::keys).extents[1]);
    const auto keys = static_cast<std::size_t>(i + 1);
    std::vector<double> powers(keys);
    for (std::int64_t j = 0; j <= i; ++j) {
      double sum = 0.0;
      for (std::int64_t d = 0; d < size; ++d) {
        sum += double{to_float(at<const Bf16>(AttentionTensor::queries, {s, h, i, d}))} *
               double{to_float(at<const Bf16>(AttentionTensor::keys, {s, kv, d, j}))};
      }
      powers[static_cast<std::size_t>(j)] = sum * double{scale_};
    }
    const double greatest = *std::max_element(powers.begin(), powers.end());
    double total = 0.0;
    for (double& power : powers) {
      power = std::exp(power - greatest);
      total += power;
    }
    at<float>(AttentionTensor::log_sums, {s, h, i, 0}) =
        static_cast<float>(greatest + std::log(total));
    for (std::int64_t d = 0; d < size; ++d) {
      double sum = 0.0;
      for (std::int64_t j = 0; j <= i; ++j) {
        const auto share = static_cast<float>(powers[static_cast<std::size_t>(j)] / total);
        sum += double{to_float(to_bf16(share))} *
               double{to_float(at<const Bf16>(AttentionTensor::values, {s, kv, j, d}))};
      }
      at<Bf16>(AttentionTensor::out, {s, h, i, d}) = to_bf16(static_cast<float>(sum));
    }
  }

  Tensors tensors_;
  std::map<std::int64_t, void*> places_;
  float scale_;
};

cudnnStatus_t execute(cudnnHandle_t, cudnnBackendDescriptor_t plan_of,
                      cudnnBackendDescriptor_t pack_of) {
  return answer([&] {
    const Node& plan = node(plan_of);
    const Node& pack = node(pack_of);
    const auto code = std::exchange(FakeCudnn::next_execution, CUDNN_STATUS_SUCCESS);
    if (code != CUDNN_STATUS_SUCCESS) throw Refusal("as it was told", code);
    if (FakeCuda::refuses("cudnnBackendExecute") || FakeCuda::fault != cudaSuccess) {
      throw Refusal("as it was told", CUDNN_STATUS_EXECUTION_FAILED);
    }
    if (FakeCudnn::executions_left >= 0 && FakeCudnn::executions_left-- == 0) {
      throw Refusal("as it was told", CUDNN_STATUS_EXECUTION_FAILED);
    }
    const auto ids = all<std::int64_t>(pack, CUDNN_ATTR_VARIANT_PACK_UNIQUE_IDS);
    const auto pointers = all<void*>(pack, CUDNN_ATTR_VARIANT_PACK_DATA_POINTERS);
    require(ids.size() == plan.tensors.size() && pointers.size() == ids.size(),
            "too few or many tensors");
    std::map<std::int64_t, void*> places;
    for (std::size_t i = 0; i < ids.size(); ++i) {
      require(plan.tensors.contains(ids[i]) && pointers[i] != nullptr, "a strange id");
      places.emplace(ids[i], pointers[i]);
    }
    void* const workspace = one<void*>(pack, CUDNN_ATTR_VARIANT_PACK_WORKSPACE);
    const bool usable =
        workspace != nullptr && reinterpret_cast<std::uintptr_t>(workspace) % 256 == 0;
    require(plan.engine.workspace == 0 || usable, "no workspace");
    const auto size = static_cast<std::size_t>(plan.engine.workspace);
    FakeCudnn::workspace = plan.engine.workspace;
    const Attention attention(plan.tensors, places);
    attention.check_places();
    test::on_stream(FakeCudnn::stream, [workspace, size, attention] {
      std::memset(workspace, 0x7f, size);
      attention.run();
    });
    ++FakeCudnn::executions;
  });
}

cudnnStatus_t create(cudnnHandle_t* made) {
  if (FakeCuda::refuses("cudnnCreate")) return CUDNN_STATUS_INTERNAL_ERROR;
  if (!FakeCuda::start_library(FakeCuda::started_cudnn)) return CUDNN_STATUS_INTERNAL_ERROR;
  const auto code = std::exchange(FakeCudnn::next_start, CUDNN_STATUS_SUCCESS);
  if (code != CUDNN_STATUS_SUCCESS) return code;
  *made = reinterpret_cast<cudnnHandle_t>(new int(0));
  ++FakeCudnn::alive;
  return CUDNN_STATUS_SUCCESS;
}
cudnnStatus_t destroy(cudnnHandle_t handle) {
  delete reinterpret_cast<int*>(handle);
  --FakeCudnn::alive;
  return CUDNN_STATUS_SUCCESS;
}
cudnnStatus_t set_stream(cudnnHandle_t, cudaStream_t stream) {
  FakeCudnn::stream = stream;
  return CUDNN_STATUS_SUCCESS;
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
std::string_view cudnn_file() {
  return "";
}

}  // namespace ballast::model::cuda
