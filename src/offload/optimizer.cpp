#include "src/offload/optimizer.h"

#include <algorithm>
#include <utility>

#include "ballast/core/error.h"

namespace ballast::offload {
namespace {

using cpu_adam::Weights;

/// A gradient for shards that are not updated.
const cpu_adam::Gradient kNoGradient(static_cast<const float*>(nullptr));

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
  for (const ParameterPart& part : parts) {
    const Elems elements = layout_.parameters()[part.parameter].elements;
    if (const ParameterUpdate* update = update_of_[part.parameter]) {
      update_part(layout_.part_states(part, states, update->weights, update->gradient),
                  update->hyper);
    }
    if (part.first + part.count < elements) continue;
    const std::lock_guard lock(mutex_);
    updated_ = part.parameter + 1;
    changed_.notify_all();
  }
  homes_.release(group, WriteBack::now);
}

void OffloadedOptimizer::update_part(const PartStates& states, const cpu_adam::Hyper& hyper) const {
  if (states.shard.weights.format == Weights::Format::plain) {
    return updater_.step(hyper, states.shard);
  }
  updater_.step(hyper, states.shard,
                {.before = [&](Elems first,
                               Elems count) { follow_weights(states, first, count); },
                 .after = [&](Elems first, Elems count) { note_weights(states, first, count); }});
}

void OffloadedOptimizer::forget_master(std::size_t parameter) {
  if (layout_.parameters().at(parameter).type == DType::f32) return;
  visit(parameter, nullptr, [](const ParameterPart&, const PartStates& states) {
    offload::forget_master(states);
    return true;
  });
}

void OffloadedOptimizer::visit(
    std::size_t parameter, void* weights,
    const std::function<bool(const ParameterPart&, const PartStates&)>& work) {
  finish();
  for (std::size_t group = layout_.first_sub_group(parameter);
       group < layout_.sub_groups().size(); ++group) {
    const std::vector<ParameterPart>& parts = layout_.sub_groups()[group].parts;
    if (parts.front().parameter > parameter) return;
    const auto part = std::ranges::find(parts, parameter, &ParameterPart::parameter);
    const HostBytes states = homes_.acquire(group, false);
    try {
      const bool changed =
          work(*part, layout_.part_states(*part, states, weights, kNoGradient));
      homes_.release(group, changed ? WriteBack::later : WriteBack::none);
    } catch (...) {
      homes_.release(group, WriteBack::later);
      throw;
    }
  }
}

}  // namespace ballast::offload
