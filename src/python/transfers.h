#pragma once

#include <array>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <deque>
#include <filesystem>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <unordered_set>
#include <vector>

#include "ballast/aio/file.h"
#include "ballast/aio/queue.h"
#include "ballast/core/memory.h"

namespace ballast::python {

/// An eventfd on which an event loop waits for transfers.
class Wakeup {
 public:
  /// Throws Error(io).
  Wakeup();
  void signal() const noexcept;
  [[nodiscard]] int descriptor() const noexcept { return descriptor_.number(); }

 private:
  Descriptor descriptor_;
};

/// The path of a transfer's bytes.
enum class TransferMode { direct, buffered };

struct PythonTransfer;

/// The transfers of one file. Its members belong to Transfers.
struct FileTransfers {
  std::size_t unfinished = 0;
  std::array<std::size_t, 2> writes{};  ///< writes in flight by way
  std::deque<std::shared_ptr<PythonTransfer>> waiting;
};

/// A requested transfer. Its members belong to Transfers.
struct PythonTransfer {
  aio::Direction direction = aio::Direction::read;
  TransferMode way = TransferMode::buffered;
  Bytes offset = 0;
  HostBytes memory;
  std::shared_ptr<void> memory_owner;   ///< released when the transfer has ended
  std::shared_ptr<FileTransfers> file;  ///< transfers of the same open file
  std::shared_ptr<const aio::File> opened;
  aio::Ticket ticket;
  std::chrono::steady_clock::time_point begun;
  bool done = false;
  aio::Completion completion;
  std::vector<std::shared_ptr<Wakeup>> wakeups;
  std::condition_variable ended;
};

/// All transfers of the process: one queue for all files, and a thread that collects finished ones.
/// Thread-safe. Begins at first use; lives until end().
class Transfers {
 public:
  /// Throws Error(state) in a forked child and after end(), Error(io) without a usable backend.
  static Transfers& get();
  /// Like get(), but returns null if there are no transfers yet.
  static Transfers* existing();
  /// Finishes all transfers and ends the threads. Does nothing in a forked child, or if no transfer
  /// was made. Call without locks, and without the GIL: owners of memory are released.
  static void end();

  /// Starts `transfer`, or keeps it until earlier writes have ended (see SharedFile).
  void submit(const std::shared_ptr<PythonTransfer>& transfer);
  [[nodiscard]] bool done(const PythonTransfer& transfer);
  /// Waits until the transfer has ended, but at most for `most`. Returns whether it has ended.
  bool wait(PythonTransfer& transfer, std::chrono::duration<double> most);
  /// Signals `wakeup` when the transfer ends, or now if it has ended.
  void notify(PythonTransfer& transfer, const std::shared_ptr<Wakeup>& wakeup);
  /// Waits until none of these transfers is left, but at most for `most`. Returns whether none is
  /// left.
  bool wait(FileTransfers& file, std::chrono::duration<double> most);

  [[nodiscard]] std::string backend() const { return std::string(queue_->backend()); }

 private:
  Transfers();
  ~Transfers();
  Transfers(const Transfers&) = delete;
  Transfers& operator=(const Transfers&) = delete;

  void launch(const std::shared_ptr<PythonTransfer>& transfer);
  void collect();
  /// Adds transfers that the queue has abandoned without returning their memory, or all.
  void add_late(std::vector<std::shared_ptr<PythonTransfer>>& finished, bool all) const;
  void finish(PythonTransfer& transfer, aio::Completion completion);
  void start_waiting(FileTransfers& file);

  /// Guards the transfers and files. Held while submitting.
  std::mutex mutex_;
  std::unordered_set<std::shared_ptr<PythonTransfer>> in_flight_;
  std::size_t unfinished_ = 0;  ///< number of transfers, including those that wait
  std::condition_variable file_idle_;

  /// Guards what the queue's thread passes on. Never held while submitting.
  std::mutex returned_mutex_;
  std::condition_variable any_returned_;
  std::vector<std::shared_ptr<PythonTransfer>> returned_;
  bool ending_ = false;

  std::unique_ptr<aio::Queue> queue_;
  std::thread collector_;
};

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
  const std::shared_ptr<const aio::File>& opened(TransferMode way);
  [[nodiscard]] TransferMode way_for(Bytes offset, HostBytes memory) const;

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
