#pragma once

#include <filesystem>
#include <vector>

#include "ballast/text/json.h"

#include "src/formats/write_behind.h"

namespace ballast::checkpoint {

/// Writes a file of a checkpoint in order and computes the checksums of its chunks.
class StatesWriter {
 public:
  /// Creates a file of `size` bytes. Throws like WriteBehind.
  StatesWriter(const std::filesystem::path& path, Bytes size);

  void write(ConstHostBytes bytes);
  /// Waits until everything is on the disk, and returns the checksums (checksum_text()).
  text::Json finish();

 private:
  void pass_on();

  formats::WriteBehind file_;
  Bytes written_ = 0;  ///< without the current chunk
  std::vector<std::byte> chunk_;
  text::Json checksums_ = text::Json::array();
};

}  // namespace ballast::checkpoint
