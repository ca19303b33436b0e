#include "src/model/host/base_codes.h"

#include <algorithm>
#include <array>
#include <cstring>

#include "ballast/core/dtype.h"
#include "ballast/model/quantized_values.h"

#include "src/model/host/team.h"

namespace ballast::model::host {
namespace {

template <class T>
void decode_nf4(const std::byte* codes, float scale, Elems count, T* out) {
  std::array<T, 16> products;
  for (std::size_t i = 0; i < products.size(); ++i)
    products[i] = from_float<T>(scale * nf4_values()[i]);
  for (Elems i = 0; i + 1 < count; i += 2) {
    const auto pair = static_cast<unsigned>(codes[i / 2]);
    out[i] = products[pair >> 4U];
    out[i + 1] = products[pair & 0xfU];
  }
  if (count % 2 > 0) out[count - 1] = products[static_cast<unsigned>(codes[count / 2]) >> 4U];
}

template <class T>
void decode_int8(const std::byte* codes, float scale, Elems count, T* out) {
  const std::array<float, 256>& map = dynamic_map();
  for (Elems i = 0; i < count; ++i) {
    out[i] = from_float<T>(scale * map[static_cast<std::size_t>(codes[i])]);
  }
}

}  // namespace

template <class T>
void dequantize_base(const QuantizedMatrix& matrix, T* out) {
  const QuantizedArrays& arrays = matrix.arrays;
  const Elems block = matrix.quantization.block();
  const bool nf4 = matrix.quantization.format == Quantization::Format::nf4;
  split(arrays.scales_count, 1, [&](Range here) {
    for (Elems b = here.begin; b < here.end; ++b) {
      const Elems first = b * block;
      const Elems count = std::min<Elems>(block, arrays.elements - first);
      const float scale = scale_at(arrays, matrix.at, b);
      if (nf4) {
        decode_nf4(matrix.at + first / 2, scale, count, out + first);
      } else {
        decode_int8(matrix.at + first, scale, count, out + first);
      }
    }
  });
}

void copy_bytes(const std::byte* from, std::byte* to, std::size_t size) {
  split(size, kPage,
        [&](Range here) { std::memcpy(to + here.begin, from + here.begin, here.size()); });
}

template void dequantize_base(const QuantizedMatrix&, float*);
template void dequantize_base(const QuantizedMatrix&, Bf16*);
template void dequantize_base(const QuantizedMatrix&, F16*);

}  // namespace ballast::model::host
