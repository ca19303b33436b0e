#pragma once

#include <cstddef>
#include <functional>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/core/Storage.h>

#include "memory.h"

namespace second_device {

/// A CPU tensor over the memory of a device tensor, for kernels alone. Adds the block that has its
/// memory to `used`. Throws c10::Error if the memory was freed, or its storage refuses access.
at::Tensor kernel_view(const at::Tensor& tensor, std::vector<BlockSerial>& used);

/// Runs a task in the current stream. It fails if a block in `used` was freed before.
void run(Kind kind, std::vector<BlockSerial> used, std::function<void()> task);

/// A new device tensor with the values and strides of a CPU tensor that no task will write. The
/// current stream must be idle or already ordered after the CPU tensor was written.
at::Tensor to_device(const at::Tensor& tensor);

/// Copies between addresses of the device in the current stream.
void copy_bytes(void* target, const void* source, std::size_t bytes);

/// Gives the storage new memory with the same leading bytes.
void resize_storage(const c10::Storage& storage, std::size_t bytes);

/// Makes operators that have a kernel for the CPU run it, also those that have one for all devices,
/// which could compute other bits. Views and operators that are registered by now keep theirs.
void register_operators();

/// See shallow_copies.cpp.
void allow_data_of_other_device();

}  // namespace second_device
