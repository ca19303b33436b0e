#pragma once

#include <cstddef>
#include <filesystem>
#include <memory>
#include <mutex>
#include <optional>
#include <string>

#include "ballast/aio/file.h"
#include "ballast/core/view.h"

#include "src/python/transfers.h"

namespace ballast::python {

/// A file for transfers of any offset, length and address. Transfers of whole pages from aligned
/// memory use direct I/O, others the page cache. The kernel does not keep the two coherent while
/// both write: a page-cache write can bring back old bytes next to it. So writes of one kind wait
/// until those of the other have ended. Reads may run at the same time as either.
class SharedFile : public std::enable_shared_from_this<SharedFile> {
 public:
  enum class Mode { read, read_write, create };

  /// `size`: with create, the size to allocate; with read_write, the new size. Throws Error(io).
  SharedFile(const std::filesystem::path& path, Mode mode, std::optional<Bytes> size);

  /// Starts a transfer. `owner` keeps `memory` alive and is released, on any thread, when the
  /// transfer has ended. Writes past the end make the file longer. Throws Error(usage) for a closed
  /// file, for reads past the end, for writes to a file that is open for reading; Error(io).
  std::shared_ptr<PythonTransfer> start(aio::Direction direction, Bytes offset, HostBytes memory,
                                        std::shared_ptr<void> owner);
  /// Refuses new transfers. Call wait() for running ones, then release().
  void close();
  /// Closes the descriptors as soon as no transfer uses them.
  void release();
  /// Returns when all finished writes are on the disk. Throws Error(io).
  void sync();

  [[nodiscard]] bool closed();
  /// Whether the file system has direct I/O for whole pages.
  [[nodiscard]] bool direct() const { return has_direct_; }
  [[nodiscard]] Bytes size();
  [[nodiscard]] const std::string& path() const { return path_; }
  [[nodiscard]] FileTransfers& transfers() { return transfers_; }

 private:
  void require_open() const;
  [[nodiscard]] bool writable() const { return mode_ != Mode::read; }
  /// For writing, makes the file at least `end` bytes long; for reading, checks that it is.
  void reach(aio::Direction direction, Bytes offset, Bytes end);
  void reopen();
  [[nodiscard]] const aio::File& any() const { return direct_ ? *direct_ : *buffered_; }
  const std::shared_ptr<const aio::File>& opened(Way way);
  [[nodiscard]] Way way_for(Bytes offset, HostBytes memory) const;

  const std::string path_;
  const Mode mode_;
  std::mutex mutex_;  ///< locked before the mutex of Transfers
  bool closed_ = false;
  bool has_direct_ = false;
  Bytes size_ = 0;
  std::shared_ptr<const aio::File> direct_;    ///< null if the file system has no direct I/O
  std::shared_ptr<const aio::File> buffered_;  ///< opened on demand

  FileTransfers transfers_;
};

}  // namespace ballast::python
