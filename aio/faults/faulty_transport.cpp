#include "aio/faults/faulty_transport.h"

#include <algorithm>
#include <utility>

#include <fmt/format.h>

#include "ballast/core/log.h"

#include "aio/backends.h"

namespace ballast::aio {

FaultyTransport::FaultyTransport(std::unique_ptr<Transport> inner, Plan plan)
    : plan_(std::move(plan)), inner_(std::move(inner)) {}

void FaultyTransport::start(Block& block) {
  const Fault fault = plan_(block);
  if (fault.hang && !hangs_ended_) {
    hung_.push_back(&block);
  } else if (fault.error_number != 0) {
    block.result = -fault.error_number;
    held_.push_back({&block, fault.held_back, fault.reordered});
  } else {
    carry(block, fault);
  }
}

void FaultyTransport::carry(Block& block, const Fault& fault) {
  auto shadow = std::make_unique<Shadow>();
  static_cast<Block&>(*shadow) = block;
  shadow->original = &block;
  shadow->fault = fault;
  if (fault.at_most < block.length) {
    shadow->length = std::min<std::size_t>(block.length, round_up(fault.at_most, kPage));
  }
  if (fault.torn) shadow->length = shadow->length / 2 / kPage * kPage;
  if (fault.lost) shadow->length = 0;
  if (shadow->length == 0) {
    block.result = static_cast<long>(std::min(block.length, fault.at_most));
    held_.push_back({&block, fault.held_back, fault.reordered});
    return;
  }
  inner_->start(*shadow);
  carried_.emplace(shadow.get(), std::move(shadow));
}

void FaultyTransport::end_hangs() noexcept {
  hangs_ended_ = true;
  inner_->wake();
}

void FaultyTransport::resume_hung() {
  for (Block* block : std::exchange(hung_, {})) carry(*block, {});
}

void FaultyTransport::reap(std::vector<Block*>& finished, unsigned wanted,
                           std::chrono::milliseconds patience) {
  if (hangs_ended_) resume_hung();
  if (held_.empty() || !carried_.empty()) reap_inner(wanted, patience);
  hand_back(finished);
}

void FaultyTransport::reap_inner(unsigned wanted, std::chrono::milliseconds patience) {
  std::vector<Block*> shadows;
  // Without blocks in flight, sleeps until wake() or the timeout.
  const auto most = std::max(1U, static_cast<unsigned>(carried_.size()));
  inner_->reap(shadows, held_.empty() ? std::min(wanted, most) : 1, patience);
  for (Block* block : shadows) {
    auto* shadow = static_cast<Shadow*>(block);
    shadow->original->result = outcome(*shadow);
    held_.push_back({shadow->original, shadow->fault.held_back, shadow->fault.reordered});
    carried_.erase(shadow);
  }
}

/// The result to report. Flips a bit in the memory of a read if planned.
long FaultyTransport::outcome(const Shadow& shadow) {
  const Fault& fault = shadow.fault;
  const bool whole = shadow.result == static_cast<long>(shadow.length);
  if (fault.torn && whole) {
    return static_cast<long>(std::min(shadow.original->length, fault.at_most));
  }
  if (shadow.result <= 0) return shadow.result;
  const std::size_t moved = std::min(static_cast<std::size_t>(shadow.result), fault.at_most);
  if (fault.flip && shadow.direction == Direction::read && moved > 0) {
    const std::uint64_t bit = *fault.flip % (moved * 8);
    shadow.data[bit / 8] ^= std::byte{1} << (bit % 8);
  }
  return static_cast<long>(moved);
}

void FaultyTransport::hand_back(std::vector<Block*>& finished) {
  const bool last = carried_.empty();
  const auto ready = [&](const Held& held) { return held.reaps_left == 0 || last; };
  const auto count = std::ranges::count_if(held_, ready);
  std::vector<Held> still_held;
  for (auto it = held_.rbegin(); it != held_.rend(); ++it) {
    const bool alone = it->reordered && count == 1 && !last;
    if (ready(*it) && !alone) {
      finished.push_back(it->block);
    } else {
      still_held.push_back({it->block, it->reaps_left - (ready(*it) ? 0 : 1), it->reordered});
    }
  }
  std::ranges::reverse(still_held);
  held_ = std::move(still_held);
}

std::unique_ptr<Transport> with_faults(std::unique_ptr<Transport> transport) {
  auto plan = faults_from_environment();
  if (!plan) return transport;
  log(LogLevel::warning, fmt::format("aio: injecting faults: {}", plan->text()));
  return std::make_unique<FaultyTransport>(std::move(transport), std::move(*plan));
}

}  // namespace ballast::aio
