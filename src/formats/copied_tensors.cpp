#include "src/formats/copied_tensors.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>

#include "ballast/core/convert.h"

#include "src/formats/mxfp4.h"
#include "src/formats/passing_tensors.h"
#include "src/formats/weight_reader.h"

namespace ballast::formats {
namespace {

/// Whether the tensor is read by slices.
bool is_sliced(const WeightPlace& place) {
  return place.quantized != nullptr && place.quantized->format == QuantizedWeights::Format::mxfp4;
}

/// Copies a stack of matrices in MXFP4, some columns of one matrix at a time.
void copy_decoded(const WeightPlace& from, ReadAhead& reader, const TensorToStore& tensor,
                  ModelFolderWriter& writer, const std::function<void(Elems values)>& count) {
  const std::vector<std::uint64_t>& shape = from.tensor->shape;
  std::vector<float> values;
  for (std::uint64_t index = 0; index < shape[0]; ++index) {
    const StoredSlice slice(from, index, reader);
    for (Elems column = 0; column < shape[1]; column += mxfp4::kBlock) {
      const std::vector<Bf16> dequantized = slice.dequantized_columns(column, mxfp4::kBlock);
      const auto bytes = std::as_bytes(std::span(dequantized));
      const Elems first = (index * shape[1] + column) * shape[2];
      count(dequantized.size());
      if (tensor.dtype == DType::bf16) {
        writer.write_stored(tensor.name, bytes, DType::bf16, first);
        continue;
      }
      values.resize(dequantized.size());
      decode(bytes, DType::bf16, values);
      writer.write(tensor.name, values, first);
    }
  }
}

constexpr Elems kAtATime = Elems{1} << 15;
constexpr Elems kMergedAtATime = Elems{1} << 18;  // enough for many threads

/// The place from which a tensor is copied, with the adapters that change it, if any.
const WeightPlace* source_of(const WeightFiles& weights, const MergedAdapters* merged,
                             const TensorToStore& tensor) {
  return merged == nullptr ? weights.find(tensor.name) : merged->source(tensor.name);
}

std::vector<ReadAhead::Source> copying_order(const WeightFiles& weights,
                                             const MergedAdapters* merged,
                                             const std::vector<std::vector<TensorToStore>>& files) {
  std::vector<ReadAhead::Source> order;
  for (const auto& file : files) {
    for (const TensorToStore& tensor : file) {
      const WeightPlace* const place = source_of(weights, merged, tensor);
      if (!tensor.copied_dtype.empty()) {
        if (tensor.copied_bytes > 0) order.push_back({place, 0, tensor.copied_bytes});
        continue;
      }
      const Elems all = place->tensor->elements;
      const Elems part = is_sliced(*place) ? all / tensor.shape.front() : all;
      for (Elems first = 0; first < all; first += part) {
        const auto ranges = stored_ranges(*place, first, first + part);
        order.insert(order.end(), ranges.begin(), ranges.end());
      }
    }
  }
  return order;
}

/// Copies a tensor byte by byte.
void copy_bytes(const WeightPlace& from, ReadAhead& reader, const TensorToStore& tensor,
                ModelFolderWriter& writer, const std::function<void(Bytes bytes)>& count) {
  constexpr Bytes kBytesAtATime = kAtATime * sizeof(float);
  std::vector<std::byte> bytes;
  for (Bytes first = 0; first < tensor.copied_bytes; first += bytes.size()) {
    bytes.resize(std::min(kBytesAtATime, tensor.copied_bytes - first));
    count(bytes.size());
    reader.read(from, first, bytes);
    writer.write_bytes(tensor.name, bytes, first);
  }
}

}  // namespace

TensorToStore copy_of(const WeightFiles& weights, const WeightPlace& place,
                      std::optional<DType> type) {
  const StoredTensor& tensor = *place.tensor;
  if (place.quantized == nullptr && passing_part(weights, tensor.name)) {
    return {.name = tensor.name,
            .shape = tensor.shape,
            .copied_dtype = tensor.dtype,
            .copied_bytes = tensor.bytes};
  }
  // transformers reads the corrections of routers in fp32, whatever type weights have.
  const bool exact = tensor.name.ends_with("e_score_correction_bias");
  return {tensor.name, exact ? type_of(place) : type.value_or(type_of(place)), tensor.shape};
}

void copy_tensors(const WeightFiles& weights, MergedAdapters* merged,
                  const std::vector<std::vector<TensorToStore>>& files, ModelFolderWriter& writer,
                  const std::function<void(Bytes done)>& progress) {
  ReadAhead reader(weights.files(), copying_order(weights, merged, files));
  std::vector<std::byte> stored;
  std::vector<float> values;
  Bytes done = 0;
  for (const auto& file : files) {
    for (const TensorToStore& tensor : file) {
      const WeightPlace& from = *source_of(weights, merged, tensor);
      if (!tensor.copied_dtype.empty()) {
        copy_bytes(from, reader, tensor, writer, [&](Bytes bytes) {
          progress(done);
          done += bytes;
        });
        continue;
      }
      if (is_sliced(from)) {
        copy_decoded(from, reader, tensor, writer, [&](Elems count) {
          progress(done);
          done += count * size_of(tensor.dtype);
        });
        continue;
      }
      const DType type = type_of(from);
      const bool changed = merged != nullptr && merged->changes(tensor.name);
      for (Elems first = 0; first < from.tensor->elements; first += values.size()) {
        progress(done);
        values.resize(std::min(changed ? kMergedAtATime : kAtATime, from.tensor->elements - first));
        stored.resize(values.size() * size_of(type));
        read_elements(from, first, stored, &reader);
        if (type == tensor.dtype && !changed) {
          writer.write_stored(tensor.name, stored, type, first);
        } else {
          decode(stored, type, values);
          if (changed) merged->apply(tensor.name, first, values);
          writer.write(tensor.name, values, first);
        }
        done += values.size() * size_of(tensor.dtype);
      }
    }
  }
}

}  // namespace ballast::formats
