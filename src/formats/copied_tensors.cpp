#include "src/formats/copied_tensors.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <span>

#include "ballast/core/memory.h"

#include "src/formats/quantized_matrices.h"
#include "src/formats/weight_reader.h"
#include "src/model/host/team.h"

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

std::vector<ReadAhead::Source> copying_order(const std::vector<std::vector<CopiedTensor>>& files) {
  std::vector<ReadAhead::Source> order;
  for (const auto& file : files) {
    for (const CopiedTensor& tensor : file) {
      const WeightPlace* const place = tensor.source;
      if (place == nullptr) continue;
      const Bytes bytes = tensor.stored.copied_bytes;
      if (!tensor.encoded && !tensor.stored.copied_dtype.empty()) {
        if (bytes > 0) order.push_back({place, 0, bytes});
        continue;
      }
      const Elems all = place->tensor->elements;
      const Elems part = is_sliced(*place) ? all / place->tensor->shape.front() : all;
      for (Elems first = 0; first < all; first += part) {
        const auto ranges = stored_ranges(*place, first, first + part);
        order.insert(order.end(), ranges.begin(), ranges.end());
      }
    }
  }
  return order;
}

/// Copies tensors one after the other.
class Copier {
 public:
  Copier(ReadAhead& reader, MergedAdapters* merged, ModelFolderWriter& writer,
         const std::function<void(Bytes done)>& progress)
      : reader_(reader), merged_(merged), writer_(writer), progress_(progress) {}

  void copy(const CopiedTensor& tensor) {
    if (tensor.source == nullptr) return;
    if (tensor.encoded) return encode(tensor);
    if (!tensor.stored.copied_dtype.empty()) return copy_bytes(tensor);
    if (!is_sliced(*tensor.source)) return convert(tensor);
    copy_decoded(*tensor.source, reader_, tensor.stored, writer_,
                 [&](Elems values) { count(values * size_of(tensor.stored.dtype)); });
  }
  [[nodiscard]] const CodesError& error() const { return error_; }

 private:
  /// Reports the progress before `bytes` are written.
  void count(Bytes bytes) {
    progress_(done_);
    done_ += bytes;
  }

  void copy_bytes(const CopiedTensor& tensor) {
    constexpr Bytes kBytesAtATime = kAtATime * sizeof(float);
    const Bytes all = tensor.stored.copied_bytes;
    for (Bytes first = 0; first < all; first += bytes_.size()) {
      bytes_.resize(std::min(kBytesAtATime, all - first));
      count(bytes_.size());
      reader_.read(*tensor.source, first, bytes_);
      writer_.write_bytes(tensor.stored.name, bytes_, first);
    }
  }

  /// Fills bytes_ with values from `first` on in the type of the source.
  void read(const CopiedTensor& tensor, Elems first, Elems count) {
    bytes_.resize(count * size_of(type_of(*tensor.source)));
    read_elements(*tensor.source, first, bytes_, &reader_);
  }
  /// The values of bytes_ in fp32, changed by the adapters.
  void decode_read(const CopiedTensor& tensor, Elems first, std::span<float> out) {
    decode(bytes_, type_of(*tensor.source), out);
    if (!tensor.merged.empty()) merged_->apply(tensor.merged, first, out);
  }

  void convert(const CopiedTensor& tensor) {
    const TensorToStore& stored = tensor.stored;
    const bool changed = !tensor.merged.empty();
    const Elems all = tensor.source->tensor->elements;
    for (Elems first = 0; first < all; first += values_.size()) {
      values_.resize(std::min(changed ? kMergedAtATime : kAtATime, all - first));
      count(values_.size() * size_of(stored.dtype));
      read(tensor, first, values_.size());
      if (type_of(*tensor.source) == stored.dtype && !changed) {
        writer_.write_stored(stored.name, bytes_, stored.dtype, first);
        continue;
      }
      decode_read(tensor, first, values_);
      writer_.write(stored.name, values_, first);
    }
  }

  void encode(const CopiedTensor& tensor) {
    const auto read_values = [&](Elems first, std::span<float> out) {
      read(tensor, first, out.size());
      decode_read(tensor, first, out);
    };
    write_encoded(
        *tensor.encoded, read_values, writer_, [&](Bytes bytes) { count(bytes); }, error_);
  }

  ReadAhead& reader_;
  MergedAdapters* merged_;
  ModelFolderWriter& writer_;
  const std::function<void(Bytes done)>& progress_;
  std::vector<std::byte> bytes_;
  std::vector<float> values_;
  Bytes done_ = 0;
  CodesError error_;
};

}  // namespace

CopiedTensor copy_of_bytes(const WeightPlace& place) {
  const StoredTensor& tensor = *place.tensor;
  return {.stored = {.name = tensor.name,
                     .shape = tensor.shape,
                     .copied_dtype = tensor.dtype,
                     .copied_bytes = tensor.bytes},
          .source = &place};
}

std::vector<TensorToStore> stored_tensors(const std::vector<CopiedTensor>& tensors) {
  std::vector<TensorToStore> stored;
  stored.reserve(tensors.size());
  for (const CopiedTensor& tensor : tensors) stored.push_back(tensor.stored);
  return stored;
}

CodesError copy_tensors(const WeightFiles& weights, MergedAdapters* merged,
                        const std::vector<std::vector<CopiedTensor>>& files,
                        ModelFolderWriter& writer,
                        const std::function<void(Bytes done)>& progress) {
  ReadAhead reader(weights.files(), copying_order(files));
  Copier copier(reader, merged, writer, progress);
  for (const auto& file : files) {
    for (const CopiedTensor& tensor : file) copier.copy(tensor);
  }
  return copier.error();
}

namespace {

/// Error of one block.
class BlockError {
 public:
  void add(double weight, double decoded) {
    const double error = std::abs(decoded - weight);
    squares_ += weight * weight;
    errors_ += error * error;
    largest_ = std::max(largest_, error);
    weight_ = std::max(weight_, std::abs(weight));
  }
  void add_to(CodesError& sum) const {
    sum.squares += squares_;
    sum.errors += errors_;
    if (weight_ > 0.0) sum.largest = std::max(sum.largest, largest_ / weight_);
  }

 private:
  double squares_ = 0.0;
  double errors_ = 0.0;
  double largest_ = 0.0;
  double weight_ = 0.0;
};

void write_fp8(const EncodedTensor& tensor, const ReadValues& read, ModelFolderWriter& writer,
               const std::function<void(Bytes bytes)>& count, CodesError& error) {
  const Elems rows = tensor.shape[0];
  const Elems columns = tensor.shape[1];
  const Elems blocks = (columns + fp8::kBlock - 1) / fp8::kBlock;
  std::vector<float> values;
  std::vector<std::byte> codes;
  std::vector<float> scales(blocks);
  std::vector<BlockError> errors;
  const auto& table = fp8::values_of_codes();
  for (Elems row = 0; row < rows; row += fp8::kBlock) {
    values.resize(std::min(fp8::kBlock, rows - row) * columns);
    codes.resize(values.size());
    read(row * columns, values);
    errors.assign(blocks, {});
    model::host::split(blocks, 1, [&](model::host::Range range) {
      for (Elems block = range.begin; block < range.end; ++block) {
        scales[block] = fp8::encode(values, columns, block, tensor.form, codes);
        const Elems begin = block * fp8::kBlock;
        const Elems end = std::min(columns, begin + fp8::kBlock);
        for (Elems first = 0; first < values.size(); first += columns) {
          for (Elems i = first + begin; i < first + end; ++i) {
            const float value = table[std::to_integer<std::size_t>(codes[i])];
            errors[block].add(values[i], value * scales[block]);
          }
        }
      }
    });
    for (const BlockError& one : errors) one.add_to(error);
    count(codes.size() + blocks * size_of(tensor.form.type));
    writer.write_bytes(tensor.codes, codes, row * columns);
    writer.write(tensor.scales, scales, row / fp8::kBlock * blocks);
  }
}

/// Quantises a stack of matrices [in, out], whose blocks are 32 rows of a column.
void write_mxfp4(const EncodedTensor& tensor, const ReadValues& read, ModelFolderWriter& writer,
                 const std::function<void(Bytes bytes)>& count, CodesError& error) {
  const Elems in = tensor.shape[1];
  const Elems out = tensor.shape[2];
  const Elems blocks = in / mxfp4::kBlock;  // of a column
  std::vector<float> values(mxfp4::kBlock * out);
  std::vector<std::byte> codes(out * blocks * mxfp4::kCodes);
  std::vector<std::byte> scales(out * blocks);
  std::vector<BlockError> errors;
  for (Elems matrix = 0; matrix < tensor.shape[0]; ++matrix) {
    for (Elems block = 0; block < blocks; ++block) {
      read((matrix * in + block * mxfp4::kBlock) * out, values);
      errors.assign(out, {});
      model::host::split(out, 16, [&](model::host::Range range) {
        for (Elems column = range.begin; column < range.end; ++column) {
          const Elems at = column * blocks + block;
          const auto place = std::span(codes).subspan(at * mxfp4::kCodes).first<mxfp4::kCodes>();
          const std::uint8_t scale = mxfp4::encode(values.data() + column, out, place);
          scales[at] = static_cast<std::byte>(scale);
          std::array<float, mxfp4::kBlock> decoded;
          mxfp4::decode(place, scale, decoded);
          for (Elems i = 0; i < mxfp4::kBlock; ++i) {
            errors[column].add(values[i * out + column], decoded[i]);
          }
        }
      });
      for (const BlockError& one : errors) one.add_to(error);
    }
    count(codes.size() + scales.size());
    writer.write_bytes(tensor.codes, codes, matrix * codes.size());
    writer.write_bytes(tensor.scales, scales, matrix * scales.size());
  }
}

}  // namespace

double CodesError::relative_rms() const {
  return squares > 0.0 ? std::sqrt(errors / squares) : 0.0;
}

void write_encoded(const EncodedTensor& tensor, const ReadValues& read, ModelFolderWriter& writer,
                   const std::function<void(Bytes bytes)>& count, CodesError& error) {
  ++error.tensors;
  if (tensor.format == QuantizedWeights::Format::mxfp4) {
    return write_mxfp4(tensor, read, writer, count, error);
  }
  write_fp8(tensor, read, writer, count, error);
}

}  // namespace ballast::formats
