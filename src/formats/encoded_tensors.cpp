#include "src/formats/encoded_tensors.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>

#include "src/formats/mxfp4.h"
#include "src/model/host/team.h"

namespace ballast::formats {
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
