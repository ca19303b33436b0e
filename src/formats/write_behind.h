#pragma once

#include <filesystem>
#include <memory>
#include <optional>
#include <vector>

#include "ballast/aio/queue.h"
#include "ballast/core/memory.h"
#include "ballast/text/files.h"

namespace ballast::formats {

class WriteBehind;

/// Memory and requests of one or several WriteBehind files, for one thread. Takes 64 MiB.
class WriteBuffers {
 public:
  WriteBuffers();

 private:
  friend WriteBehind;
  struct Buffer {
    HostBytes memory;
    const WriteBehind* file = nullptr;  ///< file of the request
    std::optional<aio::Ticket> ticket;
  };
  void write(WriteBehind& file, Bytes at, ConstHostBytes bytes);
  void flush();
  void finish(Buffer& buffer);
  void finish(const WriteBehind& file);
  void abandon(const WriteBehind& file);

  Mapping memory_;
  std::vector<Buffer> buffers_;
  std::size_t current_ = 0;  ///< buffer in which consecutive bytes are collected
  WriteBehind* file_ = nullptr;
  Bytes start_ = 0;  ///< position of the buffer in the file, at a page
  Bytes first_ = 0;  ///< bytes in the buffer: [first_, end_)
  Bytes end_ = 0;
  std::unique_ptr<aio::Queue> queue_;
};

/// A large text::ReplacedFile, written in the background. It takes its space on the disk at once.
/// Consecutive bytes bypass the page cache if the file system allows it. Short pieces go through
/// the page cache, which joins the pages.
class WriteBehind {
 public:
  /// A file of `size` bytes. Throws like ReplacedFile, and Error(io) if the disk lacks the space.
  WriteBehind(std::filesystem::path path, Bytes size,
              std::shared_ptr<WriteBuffers> buffers = std::make_shared<WriteBuffers>());
  /// Without commit(), removes the temporary file and ends all requests, so that other files with
  /// the same buffers fail, too.
  ~WriteBehind();
  WriteBehind(const WriteBehind&) = delete;
  WriteBehind& operator=(const WriteBehind&) = delete;

  /// Writes bytes from byte `at` on. Throws the error of an earlier call, also of a call for
  /// another file with the same buffers: Error(io) naming the file.
  void write(Bytes at, ConstHostBytes bytes);
  /// Waits for all parts, then acts like ReplacedFile::commit().
  void commit();

 private:
  friend WriteBuffers;

  std::filesystem::path path_;
  text::ReplacedFile file_;
  aio::File direct_;
  std::shared_ptr<WriteBuffers> buffers_;
};

}  // namespace ballast::formats
