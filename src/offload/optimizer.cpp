#include "src/offload/optimizer.h"

#include <algorithm>
#include <utility>

#include "ballast/core/error.h"

namespace ballast::offload {
namespace {

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

}  // namespace

OffloadedOptimizer::OffloadedOptimizer(OffloadLayout layout, StatePlace place, int threads)
    : layout_(std::move(layout)),
      updater_({.threads = threads}),
      homes_(layout_, updater_, std::move(place)),
      update_of_(layout_.parameters().size()) {}

std::size_t OffloadedOptimizer::add(const std::vector<Parameter>& parameters) {
  finish();
  const std::size_t first = layout_.parameters().size();
  OffloadLayout grown = layout_;
  grown.add(parameters);
  homes_.grow(grown);
  layout_ = std::move(grown);
  update_of_.resize(layout_.parameters().size());
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
  homes_.release(group, WriteBack::now);
}

void OffloadedOptimizer::update_part(const PartStates& states, const cpu_adam::Hyper& hyper) const {
  if (states.shard.weights.format == Weights::Format::plain) {
    return updater_.step(hyper, states.shard);
  }
  updater_.step(hyper, states.shard,
                {.before = [&](Elems first, Elems count) { follow_weights(states, first, count); },
                 .after = [&](Elems first, Elems count) { note_weights(states, first, count); }});
}

void OffloadedOptimizer::forget_master(std::size_t parameter) {
  if (layout_.parameters().at(parameter).type == DType::f32) return;
  visit(parameter, nullptr, [](const ParameterPart&, const PartStates& states) {
    offload::forget_master(states);
    return true;
  });
}

void OffloadedOptimizer::update_parts(std::size_t group, std::size_t first, std::size_t last,
                                      HostBytes states) const {
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
    update_part(layout_.part_states(parts[i], states, update.weights, update.gradient),
                update.hyper);
  });
}

void OffloadedOptimizer::visit(
    std::size_t parameter, void* weights,
    const std::function<bool(const ParameterPart&, const PartStates&)>& work) {
  finish();
  for (std::size_t group = layout_.first_sub_group(parameter); group < layout_.sub_groups().size();
       ++group) {
    const std::vector<ParameterPart>& parts = layout_.sub_groups()[group].parts;
    if (parts.front().parameter > parameter) return;
    const auto part = find_part(parts, parameter);
    const HostBytes states = homes_.acquire(group, false);
    try {
      const bool changed = work(*part, layout_.part_states(*part, states, weights, kNoGradient));
      homes_.release(group, changed ? WriteBack::later : WriteBack::none);
    } catch (...) {
      homes_.release(group, WriteBack::later);
      throw;
    }
  }
}

}  // namespace ballast::offload
