#pragma once

#include <filesystem>
#include <optional>
#include <thread>
#include <vector>

#include "ballast/core/units.h"
#include "ballast/text/files.h"

#include "src/train/buffer_ring.h"

namespace ballast::train {

/// A large text::ReplacedFile that is written on threads of its own, in buffers of 8 MiB. It takes
/// its space on the disk at once and bypasses the page cache where the file system allows it.
class WriteBehind {
 public:
  /// A file of `size` bytes. Throws like ReplacedFile, and Error(io) if the disk lacks the space.
  WriteBehind(std::filesystem::path path, Bytes size);
  /// Without commit(): removes the temporary file.
  ~WriteBehind();
  WriteBehind(const WriteBehind&) = delete;
  WriteBehind& operator=(const WriteBehind&) = delete;

  /// Appends. Throws the error of an earlier part: Error(io) naming the file.
  void write(ConstHostBytes bytes);
  /// Waits for all parts; then like ReplacedFile::commit().
  void commit();

 private:
  void run();
  void pass_on();
  void end();

  text::ReplacedFile file_;
  BufferRing ring_;
  std::optional<BufferRing::Empty> buffer_;  ///< being filled
  Bytes used_ = 0;                           ///< bytes of it
  std::vector<std::thread> threads_;
};

}  // namespace ballast::train
