#pragma once

#include "ballast/model/quantization.h"
#include "ballast/model/quantized_values.h"

namespace ballast::model::host {

/// Dequantises all elements of `matrix` in fp32 and rounds them to T (nearest even), on a team of
/// threads. One kernel serves all instruction sets, because elements of a 4-bit block take only 16
/// products.
template <class T>
void dequantize_base(const QuantizedMatrix& matrix, T* out);

/// Copies `size` bytes on a team of threads.
void copy_bytes(const std::byte* from, std::byte* to, std::size_t size);

}  // namespace ballast::model::host
