#pragma once

#include <condition_variable>
#include <functional>
#include <mutex>
#include <utility>
#include <vector>

#include "aio/transport.h"

namespace ballast::test {

/// Shared by a test and a GateTransport. The test sees the started blocks in order and decides when
/// and how each ends. No data is moved.
class Gate {
 public:
  /// Waits until `count` blocks have started in total. Returns copies of them.
  std::vector<aio::Block> wait_for_starts(std::size_t count) {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return starts_.size() >= count; });
    return starts_;
  }
  [[nodiscard]] std::vector<aio::Block> starts() const {
    const std::scoped_lock lock(mutex_);
    return starts_;
  }
  /// Ends start number `index`, in full or with `result` (bytes or -errno).
  void finish(std::size_t index) { finish(index, static_cast<long>(starts()[index].length)); }
  void finish(std::size_t index, long result) {
    {
      const std::scoped_lock lock(mutex_);
      blocks_[index]->result = result;
      finished_.push_back(blocks_[index]);
    }
    changed_.notify_all();
  }

 private:
  friend class GateTransport;
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<aio::Block> starts_;
  std::vector<aio::Block*> blocks_;
  std::vector<aio::Block*> finished_;
  bool woken_ = false;
};

class GateTransport final : public aio::Transport {
 public:
  explicit GateTransport(Gate& gate) : gate_(gate) {}

  void start(aio::Block& block) override {
    {
      const std::scoped_lock lock(gate_.mutex_);
      gate_.starts_.push_back(block);
      gate_.blocks_.push_back(&block);
    }
    gate_.changed_.notify_all();
  }
  void reap(std::vector<aio::Block*>& finished, unsigned /*wanted*/,
            std::chrono::milliseconds patience) override {
    std::unique_lock lock(gate_.mutex_);
    gate_.changed_.wait_for(lock, patience,
                            [&] { return gate_.woken_ || !gate_.finished_.empty(); });
    gate_.woken_ = false;
    finished.swap(gate_.finished_);
  }
  void wake() noexcept override {
    {
      const std::scoped_lock lock(gate_.mutex_);
      gate_.woken_ = true;
    }
    gate_.changed_.notify_all();
  }

 private:
  Gate& gate_;
};

}  // namespace ballast::test
