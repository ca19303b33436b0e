#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

#include "aio/transport.h"

namespace ballast::aio {

/// The queue of every backend: requests are cut into blocks here, and only blocks reach the
/// transport. One owner thread starts and reaps; everything below `// owner` is its alone.
class BlockQueue final : public Queue {
 public:
  using MakeTransport = std::function<std::unique_ptr<Transport>(unsigned depth)>;

  /// Starts the owner thread, on which `make_transport` runs. Throws what it throws, and
  /// Error(config) when block_bytes or depth is out of range.
  BlockQueue(std::string backend, const QueueOptions& options, MakeTransport make_transport);
  ~BlockQueue() override;

  Ticket submit(Request request) override;
  std::vector<Ticket> submit(std::span<Request> requests) override;
  Completion wait(Ticket ticket) override;
  void cancel() override;
  [[nodiscard]] std::string_view backend() const override { return backend_; }
  [[nodiscard]] QueueCounters counters() const override;

 private:
  /// A request under way.
  struct Transfer {
    Request request;
    Completion completion;
    Bytes cut = 0;           ///< bytes handed out as blocks
    unsigned in_flight = 0;  ///< blocks
    bool done = false;       ///< guarded by mutex_; from then on the owner thread keeps off
    bool claimed = false;    ///< guarded by mutex_; someone waits for it
  };
  /// A block in flight, advanced past what is transferred each time it is restarted.
  struct Piece : Block {
    Transfer* transfer = nullptr;
    unsigned refusals = 0;  ///< EAGAIN in a row
  };
  using Backlog = std::deque<Transfer*>;

  void run();
  bool take_arrivals();
  void start_blocks();
  void finish(Piece& piece);
  void retire(Piece& piece);
  void fail(Transfer& transfer, int error_number);
  void complete(Transfer& transfer);
  Backlog& backlog(const Transfer& transfer);

  const std::string backend_;
  const Bytes block_bytes_;
  const unsigned depth_;

  mutable std::mutex mutex_;
  std::condition_variable finished_;
  std::unordered_map<std::uint64_t, std::unique_ptr<Transfer>> transfers_;
  Backlog arrivals_;
  std::uint64_t last_id_ = 0;
  QueueCounters counters_;
  bool stopping_ = false;
  bool cancelled_ = false;

  // owner
  Backlog reads_;
  Backlog writes_;
  std::vector<Piece> pieces_;
  std::vector<Piece*> idle_;

  std::unique_ptr<Transport> transport_;
  std::thread owner_;
};

}  // namespace ballast::aio
