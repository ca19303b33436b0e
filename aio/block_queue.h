#pragma once

#include <chrono>
#include <deque>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "aio/request_table.h"

namespace ballast::aio {

/// The owner thread's part of a queue: splits requests into blocks, starts them by priority,
/// continues short transfers, retries, and watches for blocks that do not return. Used by one
/// thread only.
class Dispatcher {
 public:
  /// Throws Error(config) when an option is out of range.
  Dispatcher(RequestTable& table, const QueueOptions& options);

  /// Serves the table over `transport` until it is stopped and all requests are done. Returns false
  /// when only unanswered blocks are left: these and the transport must then stay alive; the owners
  /// of their memory are never freed.
  bool run(Transport& transport);

 private:
  /// A block in flight, advanced past the transferred bytes at each restart.
  struct Piece : Block {
    ActiveRequest* transfer = nullptr;
    unsigned refusals = 0;  ///< successive EAGAINs
    Clock::time_point started;
    bool stalled = false;  ///< whether a warning was logged
  };
  using Backlog = std::deque<ActiveRequest*>;

  void accept(const RequestTable::Orders& orders);
  void end_backlog(int error_number);
  Backlog& backlog(const ActiveRequest& transfer);
  void remove_from_backlog(ActiveRequest& transfer);
  void start_blocks(Transport& transport);
  [[nodiscard]] ActiveRequest* next_transfer() const;
  [[nodiscard]] Bytes next_length(const ActiveRequest& transfer) const;
  void cut(ActiveRequest& transfer, Bytes length, Transport& transport);
  void finish(Piece& piece, Transport& transport);
  void restart(Piece& piece, Transport& transport);
  void retire(Piece& piece);
  void fail(ActiveRequest& transfer, int error_number);
  void look_at_the_clock();
  void watch();
  void abandon(Piece& piece);
  void settle();
  [[nodiscard]] bool has_room() const;
  [[nodiscard]] bool idle() const { return idle_.size() == pieces_.size(); }
  [[nodiscard]] bool backlog_empty() const;
  [[nodiscard]] unsigned wanted() const;
  [[nodiscard]] bool only_abandoned_left() const;
  void park_unanswered();

  RequestTable& table_;
  const Bytes block_bytes_;
  const Bytes in_flight_limit_;
  const std::chrono::duration<double> stall_;
  const std::chrono::duration<double> abandon_;
  const std::chrono::milliseconds tick_;  ///< interval between checks for stalled blocks

  Backlog waited_;  ///< reads that a caller waits for
  Backlog ahead_;
  Backlog writes_;
  std::vector<Piece> pieces_;
  std::vector<Piece*> idle_;
  Bytes in_flight_bytes_ = 0;
  unsigned stalled_ = 0;  ///< pieces
  bool cancelled_ = false;
  Clock::time_point now_;
  Clock::time_point watched_;
  std::vector<ActiveRequest*> ended_;
  QueueCounters progress_;
};

/// The queue of every backend: a request table shared by callers and owner thread, and a dispatcher
/// and a transport on the owner thread.
class BlockQueue final : public Queue {
 public:
  using MakeTransport = std::function<std::unique_ptr<Transport>(unsigned depth)>;

  /// Starts the owner thread, on which `make_transport` runs. Throws what it throws, and
  /// Error(config) when an option is out of range.
  BlockQueue(std::string backend, const QueueOptions& options, MakeTransport make_transport);
  ~BlockQueue() override;

  Ticket submit(Request request) override { return work_->table.submit({&request, 1}).front(); }
  std::vector<Ticket> submit(std::span<Request> requests) override {
    return work_->table.submit(requests);
  }
  Completion wait(Ticket ticket) override { return work_->table.wait(ticket); }
  void cancel() override { work_->table.cancel(); }
  [[nodiscard]] std::string_view backend() const override { return backend_; }
  [[nodiscard]] QueueCounters counters() const override { return work_->table.counters(); }

 private:
  /// State of the owner thread. It outlives the queue when the device never answers.
  struct Work {
    explicit Work(const QueueOptions& options) : dispatcher(table, options) {}
    RequestTable table;
    Dispatcher dispatcher;
    std::unique_ptr<Transport> transport;
  };
  static void serve(std::shared_ptr<Work> work);

  const std::string backend_;
  std::shared_ptr<Work> work_;
  std::thread owner_;
};

}  // namespace ballast::aio
