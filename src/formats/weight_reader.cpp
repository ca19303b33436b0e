#include "src/formats/weight_reader.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <span>
#include <utility>

#include "ballast/core/dtype.h"

#include "src/formats/quantized_matrices.h"

namespace ballast::formats {
namespace {

std::vector<std::byte> read_range(const ReadAhead::Source& from, ReadAhead& reader) {
  std::vector<std::byte> bytes(from.end - from.begin);
  reader.read(*from.place, from.begin, bytes);
  return bytes;
}

/// Number of columns that are processed together, so that their parts of a few rows of the file
/// stay in a cache.
constexpr Elems kTogether = 4 * mxfp4::kBlock;

/// Gathers values of `Width` bytes that are `step` apart.
template <Bytes Width>
void collect(const std::byte* from, Elems step, Elems count, std::byte* to) {
  for (Elems i = 0; i < count; ++i) {
    std::memcpy(to + i * Width, from + i * step * Width, Width);
  }
}

}  // namespace

std::vector<ReadAhead::Source> stored_ranges(const WeightPlace& place, Elems first, Elems end) {
  if (place.quantized == nullptr) {
    const Bytes width = size_of(type_of(place));
    return {{&place, first * width, end * width}};
  }
  const QuantizedWeights& quantized = *place.quantized;
  using Format = QuantizedWeights::Format;
  if (quantized.format == Format::int8 || quantized.format == Format::fp8) {
    return {{&quantized.codes, first, end}};
  }
  std::vector<ReadAhead::Source> ranges = {{&quantized.codes, first / 2, (end + 1) / 2}};
  if (quantized.format == Format::mxfp4) {
    ranges.push_back({&quantized.scales, first / mxfp4::kBlock, end / mxfp4::kBlock});
  }
  return ranges;
}

void read_elements(const WeightPlace& place, Elems first, HostBytes out, ReadAhead* ahead) {
  if (place.quantized != nullptr) return read_quantized(place, first, out, ahead);
  read_stored(place, first * size_of(type_of(place)), out, ahead);
}

StoredSlice::StoredSlice(const WeightPlace& place, std::uint64_t index, ReadAhead& reader)
    : place_(&place), index_(index) {
  const Elems size = place.tensor->elements / place.tensor->shape.front();
  const auto ranges = stored_ranges(place, index * size, (index + 1) * size);
  stored_ = read_range(ranges.front(), reader);
  if (ranges.size() > 1) scales_ = read_range(ranges.back(), reader);
}

void StoredSlice::read(const model::TensorSpec& tensor, Elems first, HostBytes out) const {
  const Bytes width = size_of(type_of(*place_));
  const Elems columns = tensor.size / tensor.shape.front();
  const Elems end = first + out.size() / width;
  for (Elems block = 0; block < columns; block += kTogether) {
    for (Elems row = first / columns; row * columns < end; ++row) {
      const Elems from = std::max(first, row * columns + block);
      const Elems to = std::min(end, row * columns + std::min(block + kTogether, columns));
      if (from >= to) continue;
      read_part(tensor, row, from - row * columns,
                out.subspan((from - first) * width, (to - from) * width));
    }
  }
}

/// Reads at most kTogether values of a row from `column` on.
void StoredSlice::read_part(const model::TensorSpec& tensor, Elems row, Elems column,
                            HostBytes out) const {
  const Elems rows = tensor.shape.front();
  const Elems columns = tensor.size / rows;
  const Elems there = model::run_in_files(tensor, row * columns).first - tensor.first_element();
  if (place_->quantized != nullptr) {
    std::array<Bf16, kTogether> values;
    const auto part = std::span(values).first(out.size() / sizeof(Bf16));
    mxfp4::decode(stored_, scales_, there * columns + column, part);
    std::memcpy(out.data(), part.data(), out.size());
    return;
  }
  const Bytes width = size_of(type_of(*place_));
  const std::byte* const from = stored_.data() + (column * rows + there) * width;
  if (width == sizeof(float)) {
    collect<sizeof(float)>(from, rows, out.size() / width, out.data());
  } else {
    collect<sizeof(Bf16)>(from, rows, out.size() / width, out.data());
  }
}

std::vector<Bf16> StoredSlice::dequantized_columns(Elems first, Elems count) const {
  const Elems columns = place_->tensor->shape[1];
  const Elems rows = place_->tensor->shape[2];
  std::vector<Bf16> values(rows * count);
  std::vector<Bf16> of_row(count);
  for (Elems row = 0; row < rows; ++row) {
    mxfp4::decode(stored_, scales_, row * columns + first, of_row);
    for (Elems i = 0; i < count; ++i) values[i * rows + row] = of_row[i];
  }
  return values;
}

std::shared_ptr<const StoredSlice> WeightReader::slice(const WeightPlace& place,
                                                       std::uint64_t index) {
  const std::lock_guard lock(mutex_);
  for (const auto& known : slices_) {
    if (known != nullptr && known->is(place, index)) return known;
  }
  slices_[1] = std::exchange(slices_[0], nullptr);
  slices_[0] = std::make_shared<const StoredSlice>(place, index, ahead_);
  return slices_[0];
}

}  // namespace ballast::formats
