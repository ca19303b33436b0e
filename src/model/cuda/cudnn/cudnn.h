#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>

#include <cudnn.h>

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

}  // namespace ballast::model::cuda
