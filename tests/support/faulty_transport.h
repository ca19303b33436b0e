#pragma once

#include <algorithm>
#include <cstddef>
#include <functional>
#include <limits>
#include <memory>
#include <unordered_map>
#include <utility>
#include <vector>

#include "aio/transport.h"

namespace ballast::test {

/// What befalls one start of one block.
struct Fault {
  /// The block fails with this errno and is not carried out.
  int error_number = 0;
  /// Reported as transferred at most; whole pages are carried, so that direct I/O takes them.
  std::size_t at_most = std::numeric_limits<std::size_t>::max();
  /// Other reaps that happen before this block is handed back.
  unsigned held_back = 0;
};

/// Carries blocks over another transport and spoils some of them on the way: `plan` decides, on the
/// owner thread, at every start. Blocks that finish together come back in reverse order.
class FaultyTransport final : public aio::Transport {
 public:
  using Plan = std::function<Fault(const aio::Block&)>;

  FaultyTransport(std::unique_ptr<aio::Transport> inner, Plan plan)
      : inner_(std::move(inner)), plan_(std::move(plan)) {}

  void start(aio::Block& block) override {
    const Fault fault = plan_(block);
    if (fault.error_number != 0) {
      block.result = -fault.error_number;
      held_.push_back({&block, fault.held_back});
      return;
    }
    auto shadow = std::make_unique<Shadow>();
    static_cast<aio::Block&>(*shadow) = block;
    shadow->reported = std::min(block.length, fault.at_most);
    shadow->length = std::min(block.length, round_up(shadow->reported, kPage));
    shadow->original = &block;
    shadow->held_back = fault.held_back;
    inner_->start(*shadow);
    carried_.emplace(shadow.get(), std::move(shadow));
  }

  void reap(std::vector<aio::Block*>& finished, unsigned wanted,
            std::chrono::milliseconds patience) override {
    if (held_.empty() || !carried_.empty()) reap_inner(wanted, patience);
    std::vector<Held> still_held;
    for (auto it = held_.rbegin(); it != held_.rend(); ++it) {
      if (it->reaps_left == 0 || carried_.empty()) {
        finished.push_back(it->block);
      } else {
        still_held.insert(still_held.begin(), {it->block, it->reaps_left - 1});
      }
    }
    held_ = std::move(still_held);
  }

  void wake() noexcept override { inner_->wake(); }

 private:
  struct Shadow : aio::Block {
    aio::Block* original = nullptr;
    std::size_t reported = 0;
    unsigned held_back = 0;
  };
  struct Held {
    aio::Block* block;
    unsigned reaps_left;
  };

  void reap_inner(unsigned wanted, std::chrono::milliseconds patience) {
    std::vector<aio::Block*> shadows;
    const auto carried = static_cast<unsigned>(carried_.size());
    inner_->reap(shadows, held_.empty() ? std::min(wanted, carried) : 1, patience);
    for (aio::Block* block : shadows) {
      auto* shadow = static_cast<Shadow*>(block);
      shadow->original->result = std::min(shadow->result, static_cast<long>(shadow->reported));
      held_.push_back({shadow->original, shadow->held_back});
      carried_.erase(shadow);
    }
  }

  std::unique_ptr<aio::Transport> inner_;
  Plan plan_;
  std::unordered_map<Shadow*, std::unique_ptr<Shadow>> carried_;
  std::vector<Held> held_;
};

}  // namespace ballast::test
