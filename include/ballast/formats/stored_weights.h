#pragma once

#include <cstdint>
#include <span>
#include <string>

#include "ballast/core/dtype.h"
#include "ballast/core/units.h"
#include "ballast/formats/safetensors.h"

namespace ballast::formats {

struct QuantizedWeights;

/// Place of a stored tensor of a model.
struct WeightPlace {
  const StoredTensor* tensor = nullptr;
  const SafetensorsReader* file = nullptr;
  /// The quantised form from which the tensor is dequantised, if the files store it quantised.
  /// `tensor` is then the result, in a type of weights, and nowhere in the file.
  const QuantizedWeights* quantized = nullptr;
  /// The stored tensor of which `tensor` is a part (ballast/formats/weight_files.h); nullptr if it
  /// is stored separately.
  const WeightPlace* stack = nullptr;

  /// The place of the stored tensor that has the values: the stack, or this place.
  [[nodiscard]] const WeightPlace& whole() const { return stack == nullptr ? *this : *stack; }
  /// Index in whole() of the first element.
  [[nodiscard]] Elems first_in_whole() const;
};

/// Tensors of the files that together store a quantised tensor.
struct QuantizedWeights {
  enum class Format : std::uint8_t {
    mxfp4,  ///< a stack of matrices (src/formats/quantized_matrices.h)
    nf4,    ///< a matrix (src/formats/quantized_matrices.h)
    int8,   ///< a matrix (also there)
    fp8     ///< a matrix (src/formats/quantized_matrices.h)
  };
  Format format = Format::mxfp4;
  WeightPlace codes;
  WeightPlace scales;
  WeightPlace nested;  ///< for nf4: the scales of quantised scales, otherwise no tensor
  float mean = 0.0F;   ///< mean to be added to the scales
  /// Type of the weights if they are written without codes; "": that of the dequantised tensor.
  std::string plain_type = {};
};

/// Size of the tensor as it is stored: of a quantised one, its codes and scales.
Bytes stored_bytes(const WeightPlace& place);

/// Bytes [first, first + out.size()) of a tensor as they are stored, through the page cache. Throws
/// Error(data) if the file is too short, Error(io).
void read_stored(const WeightPlace& place, Bytes first, std::span<std::byte> out);

/// Throws Error(data): "FILE: tensor 'NAME' WHAT".
[[noreturn]] void refuse_tensor(const WeightPlace& place, const std::string& what);

/// Throws Error(data) naming file and tensor if the dtype is not one of weights.
DType type_of(const WeightPlace& place);

}  // namespace ballast::formats

// Why files of weights do not have the tensors of the model, for messages. Texts begin with ", " or
// ": " and are empty if no cause is known.

namespace ballast::formats {

/// The reason why a model whose tensors are `tensors` has no tensor `name`: a prefix of
/// torch.compile, DDP or FSDP, a PEFT model that is not merged, a model of text and images, or
/// quantised weights.
std::string cause_of_missing(std::span<const WeightPlace> tensors, const std::string& name);

/// The owner of a tensor that the model does not use.
std::string cause_of_unused(const std::string& name);

}  // namespace ballast::formats
