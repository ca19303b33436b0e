#include "src/train/run_warnings.h"

#include <algorithm>
#include <cstddef>
#include <set>
#include <sstream>
#include <utility>

#include <fmt/format.h>

#include "ballast/comm/agreement.h"

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

RoundedRouters::RoundedRouters(const model::Architecture& model, DType type) : type_(type) {
  if (type == DType::f32) return;
  for (const model::BlockSpec& block : model.blocks) {
    if (block.content != model::BlockContent::router) continue;
    for (const model::TensorSpec& tensor : block.tensors) {
      if (tensor.shape.size() == 2) routers_.insert(tensor.name);
    }
  }
}

void RoundedRouters::add(const model::TensorSpec& tensor, std::span<const float> values) {
  if (!routers_.contains(tensor.name)) return;
  const bool rounded = with_training_type(type_, [&](auto type) {
    return std::ranges::any_of(
        values, [](float value) { return to_float(from_float<decltype(type)>(value)) != value; });
  });
  if (!rounded) return;
  const std::scoped_lock lock(mutex_);
  rounded_.insert(tensor.name);
}

std::string RoundedRouters::warning() const {
  const std::scoped_lock lock(mutex_);
  if (rounded_.empty()) return "";
  const bool bf16 = type_ == DType::bf16;
  return fmt::format(
      "model.weights: {} of {} router weights, such as {}, have values that {} rounds; routers "
      "compute with rounded weights, so some choices of experts may differ from those of "
      "transformers, which may keep routers in fp32; to keep all bits set {} to false",
      rounded_.size(), routers_.size(), *rounded_.begin(), bf16 ? "bf16" : "fp16",
      bf16 ? "bf16.enabled" : "fp16.enabled");
}

}  // namespace ballast::train
