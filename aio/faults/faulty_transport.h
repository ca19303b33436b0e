#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <unordered_map>
#include <vector>

#include "aio/faults/fault_plan.h"

namespace ballast::aio {

/// Wraps another transport and injects faults, which `plan` chooses on the owner thread at every
/// start. Blocks that finish together come back in reverse order.
class FaultyTransport final : public Transport {
 public:
  using Plan = std::function<Fault(const Block&)>;

  FaultyTransport(std::unique_ptr<Transport> inner, Plan plan);

  void start(Block& block) override;
  void reap(std::vector<Block*>& finished, unsigned wanted,
            std::chrono::milliseconds patience) override;
  void wake() noexcept override { inner_->wake(); }

  /// Executes blocks that hang and disables hangs from then on. Thread-safe.
  void end_hangs() noexcept;

 private:
  /// Passed to the inner transport instead of a block.
  struct Shadow : Block {
    Block* original = nullptr;
    Fault fault;
  };
  /// A finished block that is not returned yet.
  struct Held {
    Block* block = nullptr;
    unsigned reaps_left = 0;
    bool reordered = false;
  };

  void carry(Block& block, const Fault& fault);
  void resume_hung();
  void reap_inner(unsigned wanted, std::chrono::milliseconds patience);
  static long outcome(const Shadow& shadow);
  void hand_back(std::vector<Block*>& finished);

  Plan plan_;
  std::unordered_map<Shadow*, std::unique_ptr<Shadow>> carried_;
  std::vector<Held> held_;
  std::vector<Block*> hung_;
  std::atomic<bool> hangs_ended_ = false;
  std::unique_ptr<Transport> inner_;
};

}  // namespace ballast::aio
