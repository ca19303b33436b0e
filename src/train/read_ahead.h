#pragma once

#include <optional>
#include <thread>
#include <vector>

#include "ballast/core/units.h"
#include "ballast/train/weight_files.h"

#include "src/train/buffer_ring.h"

namespace ballast::train {

/// A part of a tensor as it is stored.
struct StoredPiece {
  const WeightFiles::Place* place = nullptr;
  Bytes first = 0;  ///< from the start of the tensor
  Bytes bytes = 0;  ///< at most ReadAhead::kPiece
};

/// Reads pieces of weights on threads of its own, a few ahead of the caller. It bypasses the
/// page cache where the file system allows it: weights larger than memory would only displace what
/// is of use there, and the copy out of the cache costs more time than the disk.
class ReadAhead {
 public:
  static constexpr Bytes kPiece = 8 * kMiB;

  /// The places must outlive the object.
  explicit ReadAhead(std::vector<StoredPiece> pieces);
  ~ReadAhead();
  ReadAhead(const ReadAhead&) = delete;
  ReadAhead& operator=(const ReadAhead&) = delete;

  /// The bytes of the next piece, valid until the next call; one call for each piece. Throws
  /// Error(data) if the file is too short, Error(io).
  ConstHostBytes next();

 private:
  class DirectFile;
  void run();

  std::vector<StoredPiece> pieces_;
  BufferRing ring_;
  std::optional<BufferRing::Filled> held_;  ///< what next() gave out
  std::vector<std::thread> threads_;
};

}  // namespace ballast::train
