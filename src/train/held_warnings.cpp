#include "src/train/held_warnings.h"

#include <cstddef>
#include <set>
#include <sstream>
#include <utility>

#include <fmt/format.h>

#include "ballast/comm/collective_try.h"

#include "src/comm/gathered_texts.h"

namespace ballast::train {

HeldWarnings::HeldWarnings(comm::Ranks* ranks) : ranks_(ranks) {
  if (ranks_ == nullptr) return;
  holds_ = true;
  former_ =
      set_log_sink([this, first = ranks_->rank() == 0](LogLevel level, std::string_view line) {
        const bool warning = level == LogLevel::warning;
        if (warning) {
          const std::scoped_lock lock(mutex_);
          lines_.emplace_back(line);
        }
        if ((first || !warning) && former_) former_(level, line);
      });
}

HeldWarnings::~HeldWarnings() {
  if (!holds_) return;
  restore();
  if (ranks_->rank() == 0) return;
  for (const std::string& line : lines_) log(LogLevel::warning, line);
}

void HeldWarnings::restore() {
  set_log_sink(former_);
  holds_ = false;
}

void HeldWarnings::share() {
  if (!holds_) return;
  std::string text;
  {
    const std::scoped_lock lock(mutex_);
    for (const std::string& line : lines_) text += line + '\n';
  }
  const std::vector<std::string> all = comm::gather_texts(*ranks_, text);
  restore();
  if (ranks_->rank() != 0) return;
  std::set<std::string> seen(lines_.begin(), lines_.end());
  for (std::size_t rank = 1; rank < all.size(); ++rank) {
    std::istringstream lines(all[rank]);
    for (std::string line; std::getline(lines, line);) {
      if (seen.insert(line).second) {
        log(LogLevel::warning, fmt::format("rank {}: {}", rank, line));
      }
    }
  }
}

void with_held_warnings(comm::Ranks* ranks, const std::function<void()>& work) {
  HeldWarnings warnings(ranks);
  try {
    work();
  } catch (const comm::JointError&) {
    warnings.share();
    throw;
  }
  warnings.share();
}

}  // namespace ballast::train
