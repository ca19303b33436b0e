#pragma once

#include <atomic>
#include <chrono>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "ballast/aio/queue.h"
#include "ballast/core/memory.h"

#include "tools/io_load/load.h"

namespace ballast::tools {

/// Keeps one region's queue full: completes requests in batches and refills with one submit call.
class IoProducer {
 public:
  using Clock = std::chrono::steady_clock;

  /// `stop` is shared by all producers and set by the first that fails.
  IoProducer(const IoLoad& load, IoRegion& region, std::string task,
             const std::atomic<bool>& interrupted, std::atomic<bool>& stop);

  /// Runs the load; call once. Throws Error.
  void run(Clock::time_point start);

  [[nodiscard]] Clock::time_point ended() const { return ended_; }
  [[nodiscard]] const std::vector<float>& latencies() const { return latencies_; }
  [[nodiscard]] const aio::Queue& queue() const { return *queue_; }

 private:
  struct Slot {
    HostBytes memory;
    aio::Ticket ticket;
    std::uint64_t block = 0;
    aio::Direction direction = aio::Direction::read;
    bool read_back = false;              ///< holds a block to write
    std::atomic<bool> returned = false;  ///< by the queue's thread
  };

  [[nodiscard]] bool stopped() const;
  void refill(Clock::time_point start);
  void prepare(Slot& slot);
  [[nodiscard]] bool next_block(Slot& slot);
  void take_finished();
  void complete(Slot& slot);
  void drain();

  const IoLoad load_;
  IoRegion& region_;
  const std::string task_;
  const std::atomic<bool>& interrupted_;
  std::atomic<bool>& stop_;
  const std::uint64_t blocks_;  ///< number of blocks of the region
  const std::size_t batch_;

  std::optional<aio::File> copy_;  ///< the new file of pattern copy
  std::vector<Slot> slots_;
  Mapping buffers_;  ///< one buffer of whole pages per slot
  std::vector<Slot*> free_;
  std::vector<Slot*> outstanding_;  ///< oldest first
  std::vector<bool> busy_;          ///< whether a block is in a request
  std::vector<aio::Request> requests_;
  std::vector<Slot*> submitted_;
  std::uint64_t cursor_ = 0;
  std::uint64_t begun_ = 0;  ///< blocks
  std::vector<float> latencies_;
  Clock::time_point ended_;
  std::unique_ptr<aio::Queue> queue_;  // destroyed first: it may still use the buffers
};

}  // namespace ballast::tools
