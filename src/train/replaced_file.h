#pragma once

#include <filesystem>
#include <string>
#include <string_view>

#include "ballast/core/descriptor.h"

namespace ballast::train {

/// A text file that appears under its name whole, or not at all: written as PATH.tmp-PID and
/// renamed at the end.
class ReplacedFile {
 public:
  /// Throws Error(io) naming `path` when no regular file can be put there.
  explicit ReplacedFile(std::filesystem::path path);
  /// Without commit(), nothing is left behind.
  ~ReplacedFile();
  ReplacedFile(const ReplacedFile&) = delete;
  ReplacedFile& operator=(const ReplacedFile&) = delete;

  /// Appends `text`. Throws Error(io) naming the file.
  void write(std::string_view text);
  /// Puts the file in its place, on disk. Throws Error(io) naming it.
  void commit();

 private:
  std::filesystem::path path_;
  std::filesystem::path temporary_;
  Descriptor descriptor_;
  bool committed_ = false;
};

}  // namespace ballast::train
