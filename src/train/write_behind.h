#pragma once

#include <filesystem>
#include <memory>
#include <optional>
#include <vector>

#include "ballast/aio/queue.h"
#include "ballast/core/mapping.h"
#include "ballast/text/files.h"

namespace ballast::train {

/// A large text::ReplacedFile, written while the caller goes on. It takes its space on the disk at
/// once and bypasses the page cache where the file system allows it. Takes 64 MiB of memory.
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
  struct Buffer {
    HostBytes memory;
    std::optional<aio::Ticket> ticket;
  };
  void submit_current();
  void finish(Buffer& buffer);

  std::filesystem::path path_;
  text::ReplacedFile file_;
  aio::File direct_;
  Mapping memory_;
  std::vector<Buffer> buffers_;
  std::size_t current_ = 0;  ///< buffer that is being filled
  Bytes used_ = 0;           ///< bytes of it
  Bytes written_ = 0;        ///< bytes of the file in front of it
  std::unique_ptr<aio::Queue> queue_;
};

}  // namespace ballast::train
