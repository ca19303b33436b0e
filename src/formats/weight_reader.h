#pragma once

#include <array>
#include <cstddef>
#include <memory>
#include <mutex>
#include <vector>

#include "ballast/core/units.h"
#include "ballast/formats/weight_files.h"
#include "ballast/model/architecture.h"

#include "src/formats/read_ahead.h"

namespace ballast::formats {

/// The bytes of files from which elements [first, end) of a tensor are read: its values or codes,
/// for MXFP4 then the scales.
std::vector<ReadAhead::Source> stored_ranges(const WeightPlace& place, Elems first, Elems end);

/// Fills `out` with elements from `first` on, in the type of the place. `ahead` reads values and
/// codes; null: the page cache. Not for MXFP4, which is read by slices (StoredSlice).
void read_elements(const WeightPlace& place, Elems first, HostBytes out, ReadAhead* ahead);

/// The stored form of one of several stacked tensors (model::StoredRows): a matrix whose rows are
/// columns, or codes of MXFP4. Neighbouring values in memory are far apart in it, so it is read as
/// a whole.
class StoredSlice {
 public:
  /// Slice number `index` of `place`. Throws like ReadAhead::read().
  StoredSlice(const WeightPlace& place, std::uint64_t index, ReadAhead& reader);

  /// Whether this is slice number `index` of `place`.
  [[nodiscard]] bool is(const WeightPlace& place, std::uint64_t index) const {
    return place_ == &place && index_ == index;
  }
  /// Reads values of `tensor` from `first` on, in the order of memory and in the type of the place.
  void read(const model::TensorSpec& tensor, Elems first, HostBytes out) const;
  /// Columns [first, first + count) of a matrix [rows, columns] in MXFP4 as a separate matrix: a
  /// part of the dequantised place.
  [[nodiscard]] std::vector<Bf16> dequantized_columns(Elems first, Elems count) const;

 private:
  void read_part(const model::TensorSpec& tensor, Elems row, Elems column, HostBytes out) const;

  const WeightPlace* place_;
  std::uint64_t index_;
  std::vector<std::byte> stored_;  ///< values or codes
  std::vector<std::byte> scales_;
};

/// Reads weights for a fill, whose threads share it. In addition to the memory of a ReadAhead it
/// keeps two slices, because some threads may still read one while others read the next.
class WeightReader {
 public:
  /// Arguments like those of ReadAhead.
  WeightReader(const WeightFiles& files, const std::vector<ReadAhead::Source>& order)
      : ahead_(files.files(), order) {}

  [[nodiscard]] ReadAhead& ahead() { return ahead_; }
  [[nodiscard]] std::shared_ptr<const StoredSlice> slice(const WeightPlace& place,
                                                         std::uint64_t index);

 private:
  ReadAhead ahead_;
  std::mutex mutex_;
  std::array<std::shared_ptr<const StoredSlice>, 2> slices_;  ///< latest first
};

}  // namespace ballast::formats
