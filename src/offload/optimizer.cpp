#include "src/offload/optimizer.h"

#include <algorithm>
#include <atomic>
#include <utility>

#include "ballast/core/error.h"

namespace ballast::offload {
namespace {

using cpu_adam::Shard;
using cpu_adam::Weights;

/// A gradient for shards that are not updated.
const cpu_adam::Gradient kNoGradient(static_cast<const float*>(nullptr));

/// Parts of about this many elements are updated before those that wait for them are woken.
constexpr Elems kBatch = Elems{256} * 1024;

/// The part of a parameter that has one in these, which are in ascending order; otherwise another
/// one or the end.
auto find_part(const std::vector<ParameterPart>& parts, std::size_t parameter) {
  return std::ranges::lower_bound(parts, parameter, {}, &ParameterPart::parameter);
}

template <class T>
std::span<T> array(void* data, Elems size) {
  return {static_cast<T*>(data), size};
}

}  // namespace

OffloadedOptimizer::OffloadedOptimizer(OffloadLayout layout, StatePlace place, int threads)
    : layout_(std::move(layout)),
      updater_({.threads = threads}),
      homes_(layout_, updater_, std::move(place)) {
  know_parts();
}

void OffloadedOptimizer::know_parts() {
  update_of_.resize(layout_.parameters().size());
  for (std::size_t i = knows_master_.size(); i < layout_.sub_groups().size(); ++i) {
    knows_master_.emplace_back(layout_.sub_groups()[i].parts.size());
  }
}

std::size_t OffloadedOptimizer::add(const std::vector<Parameter>& parameters) {
  finish();
  const std::size_t first = layout_.parameters().size();
  OffloadLayout grown = layout_;
  grown.add(parameters);
  homes_.grow(grown);
  layout_ = std::move(grown);
  know_parts();
  return first;
}

OffloadedOptimizer::~OffloadedOptimizer() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  changed_.notify_all();
  if (thread_.joinable()) thread_.join();
}

void OffloadedOptimizer::begin(std::vector<ParameterUpdate> updates) {
  finish();
  std::ranges::fill(update_of_, nullptr);
  updates_ = std::move(updates);
  for (const ParameterUpdate& update : updates_) {
    const ParameterUpdate*& place = update_of_.at(update.parameter);
    expects(place == nullptr, "optimizer step: a parameter is named twice");
    place = &update;
  }
  {
    const std::lock_guard lock(mutex_);
    updated_ = 0;
    running_ = true;
  }
  if (!thread_.joinable()) thread_ = std::thread([this] { run(); });
  changed_.notify_all();
}

void OffloadedOptimizer::rethrow_failure() {
  if (failure_) std::rethrow_exception(failure_);
}

void OffloadedOptimizer::wait(std::size_t parameter) {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return !running_ || updated_ > parameter; });
  rethrow_failure();
}

void OffloadedOptimizer::finish() {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return !running_; });
  rethrow_failure();
}

void OffloadedOptimizer::run() {
  std::unique_lock lock(mutex_);
  while (true) {
    changed_.wait(lock, [&] { return running_ || stopping_; });
    if (!running_) return;
    lock.unlock();
    std::exception_ptr failure;
    try {
      run_step();
    } catch (...) {
      failure = std::current_exception();
    }
    lock.lock();
    failure_ = failure;
    running_ = false;
    changed_.notify_all();
  }
}

void OffloadedOptimizer::run_step() {
  const std::size_t groups = layout_.sub_groups().size();
  for (std::size_t i = 0; i < groups; ++i) update_group(i);
  homes_.finish_writes();
  homes_.read_first();
}

void OffloadedOptimizer::update_group(std::size_t group) {
  const std::vector<ParameterPart>& parts = layout_.sub_groups()[group].parts;
  const auto has_update = [&](const ParameterPart& part) {
    return update_of_[part.parameter] != nullptr;
  };
  if (!std::ranges::any_of(parts, has_update)) return;
  const HostBytes states = homes_.acquire(group, true);
  for (std::size_t first = 0; first < parts.size();) {
    std::size_t last = first;
    for (Elems sum = 0; last < parts.size() && sum < kBatch; ++last) sum += parts[last].count;
    update_parts(group, first, last, states);
    const ParameterPart& end = parts[last - 1];
    const bool complete = end.first + end.count == layout_.parameters()[end.parameter].elements;
    first = last;
    const std::lock_guard lock(mutex_);
    updated_ = end.parameter + (complete ? 1 : 0);
    changed_.notify_all();
  }
  homes_.release(group, true);
}

void OffloadedOptimizer::update_parts(std::size_t group, std::size_t first, std::size_t last,
                                      HostBytes states) {
  const std::vector<ParameterPart>& parts = layout_.sub_groups()[group].parts;
  std::vector<std::size_t> updated;
  std::vector<Elems> sizes;
  for (std::size_t i = first; i < last; ++i) {
    if (update_of_[parts[i].parameter] == nullptr) continue;
    updated.push_back(i);
    sizes.push_back(parts[i].count);
  }
  updater_.for_each(sizes, [&](std::size_t number) {
    const std::size_t i = updated[number];
    const ParameterUpdate& update = *update_of_[parts[i].parameter];
    const Shard shard = layout_.shard(parts[i], states, update.weights, update.gradient);
    require_master(shard, knows_master_[group][i]);
    updater_.step(update.hyper, shard);
  });
}

bool OffloadedOptimizer::require_master(const Shard& shard, char& known) const {
  const Weights& weights = shard.weights;
  if (known != 0) {
    return weights.format == Weights::Format::copy_f16 && follow_weights(weights, shard.size);
  }
  known = 1;
  if (weights.format == Weights::Format::split) {
    std::ranges::fill(array<std::uint16_t>(weights.remainder_or_copy, shard.size),
                      std::uint16_t{0});
  } else if (weights.format == Weights::Format::copy_f16) {
    auto* master = static_cast<float*>(weights.main);
    const auto* weight = static_cast<const F16*>(weights.remainder_or_copy);
    updater_.for_ranges(
        shard.size,
        [&](Elems first, Elems last) {
          for (Elems i = first; i < last; ++i) master[i] = to_float(weight[i]);
        },
        cpu_adam::Updater::kSmall);
  }
  return true;
}

bool OffloadedOptimizer::follow_weights(const Weights& weights, Elems size) const {
  auto* master = static_cast<float*>(weights.main);
  const auto* weight = static_cast<const F16*>(weights.remainder_or_copy);
  std::atomic<bool> changed = false;
  updater_.for_ranges(
      size,
      [&](Elems first, Elems last) {
        for (Elems i = first; i < last; ++i) {
          if (to_f16(master[i]).bits == weight[i].bits) continue;
          master[i] = to_float(weight[i]);
          changed.store(true, std::memory_order_relaxed);
        }
      },
      cpu_adam::Updater::kSmall);
  return changed;
}

void OffloadedOptimizer::forget_master(std::size_t parameter) {
  finish();
  for (std::size_t group = layout_.first_sub_group(parameter); group < knows_master_.size();
       ++group) {
    const std::vector<ParameterPart>& parts = layout_.sub_groups()[group].parts;
    const auto part = find_part(parts, parameter);
    if (part == parts.end() || part->parameter != parameter) return;
    knows_master_[group][static_cast<std::size_t>(part - parts.begin())] = 0;
  }
}

void OffloadedOptimizer::visit(
    std::size_t parameter, void* weights,
    const std::function<bool(const ParameterPart&, const Shard&)>& work) {
  finish();
  for (std::size_t group = layout_.first_sub_group(parameter); group < knows_master_.size();
       ++group) {
    const std::vector<ParameterPart>& parts = layout_.sub_groups()[group].parts;
    if (parts.front().parameter > parameter) return;
    const auto part = find_part(parts, parameter);
    const HostBytes states = homes_.acquire(group, false);
    const Shard shard = layout_.shard(*part, states, weights, kNoGradient);
    char& known = knows_master_[group][static_cast<std::size_t>(part - parts.begin())];
    const bool made_master = weights != nullptr && require_master(shard, known);
    const bool changed = work(*part, shard);
    homes_.release(group, changed || made_master);
  }
}

}  // namespace ballast::offload
