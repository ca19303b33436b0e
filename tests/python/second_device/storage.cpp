#include "storage.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include <ATen/EmptyTensor.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/native/Resize.h>
#include <ATen/native/TensorFactories.h>
#include <ATen/ops/_copy_from_native.h>
#include <ATen/ops/_local_scalar_dense.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <torch/library.h>

namespace second_device {
namespace {

std::size_t span_of(const at::Tensor& tensor) {
  return at::detail::computeStorageNbytes(tensor.sizes(), tensor.strides(), tensor.itemsize());
}

at::Tensor over_memory(void* memory, const at::Tensor& like) {
  return at::from_blob(
      memory, like.sizes(), like.strides(), [](void*) {},
      at::TensorOptions().dtype(like.scalar_type()));
}

}  // namespace

at::Tensor kernel_view(const at::Tensor& tensor, std::vector<BlockSerial>& used) {
  TORCH_CHECK(tensor.layout() == at::kStrided, "second device: only strided tensors");
  if (tensor.numel() == 0) return over_memory(nullptr, tensor);
  const void* at = tensor.const_data_ptr();
  used.push_back(block_of(at, span_of(tensor)));
  return over_memory(kernel_address(at), tensor);
}

void run(Kind kind, std::vector<BlockSerial> used, std::function<void()> task) {
  enqueue(current_stream(), kind, [used = std::move(used), task = std::move(task)] {
    for (const BlockSerial serial : used) expect_alive(serial);
    at::AutoDispatchBelowADInplaceOrView below;
    task();
  });
}

at::Tensor to_device(const at::Tensor& tensor) {
  at::Tensor result = at::detail::empty_strided_generic(
      tensor.sizes(), tensor.strides(), c10::GetAllocator(c10::DeviceType::PrivateUse1),
      c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), tensor.scalar_type());
  if (tensor.numel() > 0)
    std::memcpy(kernel_address(result.const_data_ptr()), tensor.const_data_ptr(), span_of(tensor));
  return result;
}

void copy_bytes(void* target, const void* source, std::size_t bytes) {
  if (bytes == 0) return;
  run(Kind::copy, {block_of(target, bytes), block_of(source, bytes)},
      [to = kernel_address(target), from = kernel_address(source), bytes] {
        std::memmove(to, from, bytes);
      });
}

void resize_storage(const c10::Storage& storage, std::size_t bytes) {
  c10::StorageImpl* impl = storage.unsafeGetStorageImpl();
  TORCH_CHECK(impl->resizable(), "Trying to resize storage that is not resizable");
  c10::DataPtr memory = c10::GetAllocator(c10::DeviceType::PrivateUse1)->allocate(bytes);
  copy_bytes(memory.get(), impl->data(), std::min(bytes, impl->nbytes()));
  impl->set_data_ptr_noswap(std::move(memory));
  impl->set_nbytes(bytes);
}

namespace {

c10::DispatchKeySet key_set() {
  return c10::DispatchKeySet(c10::DispatchKey::PrivateUse1);
}

at::Tensor empty(at::IntArrayRef size, std::optional<at::ScalarType> dtype,
                 std::optional<at::Layout>, std::optional<at::Device>, std::optional<bool> pin,
                 std::optional<at::MemoryFormat> format) {
  TORCH_CHECK(!pin.value_or(false), "Only dense CPU tensors can be pinned");
  return at::detail::empty_generic(size, c10::GetAllocator(c10::DeviceType::PrivateUse1), key_set(),
                                   c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(at::IntArrayRef size, at::IntArrayRef stride,
                         std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                         std::optional<at::Device>, std::optional<bool> pin) {
  TORCH_CHECK(!pin.value_or(false), "Only dense CPU tensors can be pinned");
  return at::detail::empty_strided_generic(size, stride,
                                           c10::GetAllocator(c10::DeviceType::PrivateUse1),
                                           key_set(), c10::dtype_or_default(dtype));
}

void enlarge(const at::Tensor& self) {
  const auto* impl = self.unsafeGetTensorImpl();
  if (impl->numel() == 0) return;
  const std::size_t needed =
      at::detail::computeStorageNbytes(impl->sizes(), impl->strides(), self.itemsize(),
                                       static_cast<std::size_t>(impl->storage_offset()));
  if (needed > self.storage().nbytes()) resize_storage(self.storage(), needed);
}

const at::Tensor& resize_(const at::Tensor& self, at::IntArrayRef size,
                          std::optional<at::MemoryFormat> format) {
  self.unsafeGetTensorImpl()->set_sizes_contiguous(size);
  if (format.has_value()) self.unsafeGetTensorImpl()->empty_tensor_restride(*format);
  enlarge(self);
  return self;
}

at::Tensor& set_storage(at::Tensor& self, at::Storage source, std::int64_t offset,
                        at::IntArrayRef size, at::IntArrayRef stride) {
  at::native::checkSetStorage(self, std::move(source), offset, size, stride);
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_offset(offset);
  if (stride.data() == nullptr)
    impl->set_sizes_contiguous(size);
  else
    impl->set_sizes_and_strides(size, stride);
  enlarge(self);
  return self;
}

at::Tensor& set_whole_storage(at::Tensor& self, at::Storage source) {
  const auto count = static_cast<std::int64_t>(source.nbytes() / self.itemsize());
  return set_storage(self, std::move(source), 0, {count}, {});
}

at::Tensor& set_empty(at::Tensor& self) {
  c10::Storage storage(c10::Storage::use_byte_size_t(), 0,
                       c10::GetAllocator(c10::DeviceType::PrivateUse1), true);
  return set_storage(self, std::move(storage), 0, {0}, {});
}

/// A copy to or from host memory that is not pinned, and any that is not `non_blocking`, ends
/// before this returns.
at::Tensor copy_from(const at::Tensor& self, const at::Tensor& target, bool non_blocking) {
  if (self.numel() == 0 || target.numel() == 0) return target;
  std::vector<BlockSerial> used;
  std::vector<std::shared_ptr<void>> owners;
  bool late = true;
  const auto view = [&](const at::Tensor& tensor) {
    if (tensor.is_privateuseone()) return kernel_view(tensor, used);
    TORCH_CHECK(tensor.is_cpu(), "second device: no copies from or to ", tensor.device());
    owners.push_back(pinned_owner(tensor.const_data_ptr()));
    late = late && non_blocking && owners.back() != nullptr;
    return over_memory(const_cast<void*>(tensor.const_data_ptr()), tensor);
  };
  at::Tensor from = view(self), to = view(target);
  from._set_conj(self.is_conj());
  from._set_neg(self.is_neg());
  const bool within = self.is_privateuseone() && target.is_privateuseone();
  run(within ? Kind::kernel : Kind::copy, std::move(used),
      [from, to, owners] { at::Tensor(to).copy_(from); });
  if (!late) synchronize(current_stream());
  return target;
}

at::Tensor copy_from_and_resize(const at::Tensor& self, const at::Tensor& target) {
  target.resize_(self.sizes());
  return copy_from(self, target, false);
}

at::Scalar local_scalar(const at::Tensor& self) {
  std::vector<BlockSerial> used;
  const at::Tensor view = kernel_view(self, used);
  synchronize(current_stream());
  return at::_local_scalar_dense(view);
}

void record_stream(at::Tensor& self, at::Stream stream) {
  record_use(self.storage().data(), static_cast<StreamId>(stream.id()));
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("resize_", &resize_);
  m.impl("set_.source_Storage_storage_offset", &set_storage);
  m.impl("set_.source_Storage", &set_whole_storage);
  m.impl("set_.source_Tensor", &at::native::set_tensor_);
  m.impl("set_", &set_empty);
  m.impl("as_strided", &at::native::as_strided_tensorimpl);
  m.impl("view", &at::native::view);
  m.impl("_reshape_alias", &at::native::_reshape_alias);
  m.impl("unfold", &at::native::unfold);
  m.impl("view_as_real", &at::native::view_as_real);
  m.impl("view_as_complex", &at::native::view_as_complex);
  m.impl("_copy_from", &copy_from);
  m.impl("_copy_from_and_resize", &copy_from_and_resize);
  m.impl("_local_scalar_dense", &local_scalar);
  m.impl("record_stream", &record_stream);
}

}  // namespace
}  // namespace second_device
