#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

#include <cudnn.h>

#include "ballast/model/attention.h"

#include "src/device/shared_library.h"

namespace ballast::model::cuda {

/// The functions of cuDNN in use, from its backend interface: a computation is described as a graph
/// of operations on tensors, and an engine is chosen for it.
struct Cudnn {
  decltype(&cudnnGetVersion) version = nullptr;
  decltype(&cudnnGetErrorString) status_name = nullptr;
  decltype(&cudnnGetLastErrorString) last_error = nullptr;
  decltype(&cudnnCreate) create = nullptr;
  decltype(&cudnnDestroy) destroy = nullptr;
  decltype(&cudnnSetStream) set_stream = nullptr;
  decltype(&cudnnBackendCreateDescriptor) create_descriptor = nullptr;
  decltype(&cudnnBackendDestroyDescriptor) destroy_descriptor = nullptr;
  decltype(&cudnnBackendSetAttribute) set_attribute = nullptr;
  decltype(&cudnnBackendGetAttribute) get_attribute = nullptr;
  decltype(&cudnnBackendFinalize) finalize = nullptr;
  decltype(&cudnnBackendExecute) execute = nullptr;

  void find(device::Symbols& symbols);
  /// Returns why this version cannot be used; "" if it can.
  [[nodiscard]] std::string refusal() const;
};

/// Returns the library, which is loaded once per process. Throws Error(device) with
/// cudnn_refusal().
const Cudnn& cudnn();
/// Returns why the library cannot be loaded, in one line; "" if it can.
std::string_view cudnn_refusal();
/// Returns the path of the loaded file, or "".
std::string_view cudnn_file();

using LoadedCudnn = device::Loaded<Cudnn>;
/// Loads the first library in `names` that has the major version of this program's headers and is
/// new enough.
LoadedCudnn load_cudnn(std::span<const std::string> names);

/// Deletes a cuDNN descriptor.
struct EndDescriptor {
  const Cudnn* library = nullptr;
  void operator()(void* descriptor) const noexcept {
    static_cast<void>(library->destroy_descriptor(descriptor));
  }
};
using Descriptor = std::unique_ptr<void, EndDescriptor>;

/// Returns cuDNN's type of an attribute whose values are T.
template <class T>
consteval cudnnBackendAttributeType_t attribute_type() {
  if (std::is_same_v<T, std::int64_t>) return CUDNN_TYPE_INT64;
  if (std::is_same_v<T, bool>) return CUDNN_TYPE_BOOLEAN;
  if (std::is_same_v<T, void*>) return CUDNN_TYPE_VOID_PTR;
  if (std::is_same_v<T, cudnnHandle_t>) return CUDNN_TYPE_HANDLE;
  if (std::is_same_v<T, cudnnDataType_t>) return CUDNN_TYPE_DATA_TYPE;
  if (std::is_same_v<T, cudnnPointwiseMode_t>) return CUDNN_TYPE_POINTWISE_MODE;
  if (std::is_same_v<T, cudnnReduceTensorOp_t>) return CUDNN_TYPE_REDUCTION_OPERATOR_TYPE;
  if (std::is_same_v<T, cudnnBackendHeurMode_t>) return CUDNN_TYPE_HEUR_MODE;
  if (std::is_same_v<T, cudnnBackendNumericalNote_t>) return CUDNN_TYPE_NUMERICAL_NOTE;
  throw "not a type of attributes";
}

/// Calls to cuDNN's backend interface. Errors: Error(device), one line with the call, the status
/// and cuDNN's message.
class CudnnCalls {
 public:
  /// `library` must outlive the descriptors made through it.
  explicit CudnnCalls(const Cudnn& library) : library_(library) {}

  [[nodiscard]] const Cudnn& library() const { return library_.get(); }

  void check(cudnnStatus_t status, std::string_view call) const;

  [[nodiscard]] Descriptor make(cudnnBackendDescriptorType_t type) const;
  /// Finalizes a descriptor; its attributes cannot change afterwards. `what` describes the call in
  /// errors.
  void finish(const Descriptor& descriptor, std::string_view what) const;

  template <class T>
  void set(const Descriptor& descriptor, cudnnBackendAttributeName_t name,
           std::span<const T> values) const {
    set_raw(descriptor, name, attribute_type<T>(), values.size(), values.data());
  }
  template <class T>
  void set(const Descriptor& descriptor, cudnnBackendAttributeName_t name, T value) const {
    set_raw(descriptor, name, attribute_type<T>(), 1, &value);
  }
  void link(const Descriptor& descriptor, cudnnBackendAttributeName_t name,
            cudnnBackendDescriptor_t other) const {
    set_raw(descriptor, name, CUDNN_TYPE_BACKEND_DESCRIPTOR, 1, &other);
  }
  void link(const Descriptor& descriptor, cudnnBackendAttributeName_t name,
            std::span<const cudnnBackendDescriptor_t> others) const {
    set_raw(descriptor, name, CUDNN_TYPE_BACKEND_DESCRIPTOR, others.size(), others.data());
  }

  /// Reads up to values.size() values of an attribute. Returns how many it has.
  template <class T>
  std::size_t get(const Descriptor& descriptor, cudnnBackendAttributeName_t name,
                  std::span<T> values) const {
    return get_raw(descriptor, name, attribute_type<T>(), values.size(), values.data());
  }
  /// Fills descriptors in place. Returns how many the attribute has.
  std::size_t fill(const Descriptor& descriptor, cudnnBackendAttributeName_t name,
                   std::span<cudnnBackendDescriptor_t> others) const {
    return get_raw(descriptor, name, CUDNN_TYPE_BACKEND_DESCRIPTOR, others.size(), others.data());
  }

 private:
  void set_raw(const Descriptor& descriptor, cudnnBackendAttributeName_t name,
               cudnnBackendAttributeType_t type, std::size_t count, const void* values) const;
  std::size_t get_raw(const Descriptor& descriptor, cudnnBackendAttributeName_t name,
                      cudnnBackendAttributeType_t type, std::size_t count, void* values) const;

  std::reference_wrapper<const Cudnn> library_;
};

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
