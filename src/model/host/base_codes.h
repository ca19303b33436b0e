#pragma once

#include "ballast/model/quantization.h"
#include "ballast/model/quantized_values.h"

namespace ballast::model::host {

/// out = all elements of `matrix`, decoded in fp32 and rounded to T to nearest even, on a team of
/// threads. There is one kernel for all instruction sets: the elements of a block of 4 bits are one
/// of 16 products.
template <class T>
void decode_base(const CodedMatrix& matrix, T* out);

/// Copies `size` bytes on a team of threads.
void copy_bytes(const std::byte* from, std::byte* to, std::size_t size);

}  // namespace ballast::model::host
