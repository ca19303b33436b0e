#pragma once

#include <chrono>
#include <deque>
#include <memory>
#include <vector>

#include "aio/request_table.h"

namespace ballast::aio {

/// The owner thread's half of a queue: cuts requests into blocks, starts them in order of priority,
/// mends what comes back, watches for blocks that do not. Used by one thread only.
class Dispatcher {
 public:
  /// Throws Error(config) when an option is out of range.
  Dispatcher(RequestTable& table, const QueueOptions& options);

  /// Serves the table over `transport` until it is stopped and everything is carried out. False
  /// when it was stopped and only blocks are left that the device does not answer: these and the
  /// transport must stay where they are; what owns their memory is kept for ever.
  bool run(Transport& transport);

 private:
  /// A block in flight, advanced past what is transferred each time it is restarted.
  struct Piece : Block {
    Transfer* transfer = nullptr;
    unsigned refusals = 0;  ///< EAGAIN in a row
    Clock::time_point started;
    bool stalled = false;  ///< has been warned of
  };
  using Backlog = std::deque<Transfer*>;

  void accept(const RequestTable::Orders& orders);
  void end_backlog(int error_number);
  Backlog& backlog(const Transfer& transfer);
  void remove_from_backlog(Transfer& transfer);
  void start_blocks(Transport& transport);
  [[nodiscard]] Transfer* next_transfer() const;
  [[nodiscard]] Bytes next_length(const Transfer& transfer) const;
  void cut(Transfer& transfer, Bytes length, Transport& transport);
  void finish(Piece& piece, Transport& transport);
  void restart(Piece& piece, Transport& transport);
  void retire(Piece& piece);
  void fail(Transfer& transfer, int error_number);
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
  const std::chrono::milliseconds tick_;  ///< between two looks at what is in flight

  Backlog waited_;  ///< reads that somebody waits for
  Backlog ahead_;
  Backlog writes_;
  std::vector<Piece> pieces_;
  std::vector<Piece*> idle_;
  Bytes in_flight_bytes_ = 0;
  unsigned stalled_ = 0;  ///< pieces
  bool cancelled_ = false;
  Clock::time_point now_;
  Clock::time_point watched_;
  std::vector<Transfer*> ended_;
  QueueCounters progress_;
};

}  // namespace ballast::aio
