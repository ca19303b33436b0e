#pragma once

#include <array>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <unordered_set>
#include <vector>

#include "ballast/aio/file.h"
#include "ballast/aio/queue.h"
#include "ballast/core/descriptor.h"
#include "ballast/core/view.h"

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
enum class Way { direct, buffered };

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
  Way way = Way::buffered;
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

}  // namespace ballast::python
