#include "ballast/engine/snapshot.h"

#include <algorithm>
#include <utility>

#include "ballast/comm/agreement.h"
#include "ballast/core/error.h"
#include "ballast/engine/run_states.h"
#include "ballast/engine/side_states.h"
#include "ballast/state/swap_space.h"

#include "src/engine/held_states.h"
#include "src/engine/initial_weights.h"

namespace ballast::engine {

BackgroundSave::BackgroundSave(std::vector<Item> parts, std::function<void()> end)
    : parts_(std::move(parts)), end_(std::move(end)), thread_([this] { run(); }) {}

BackgroundSave::~BackgroundSave() {
  cancel();
}

/// Returns whether the next part must be saved.
bool BackgroundSave::next() {
  const std::lock_guard lock(mutex_);
  return !cancelled_ && saved_ < parts_.size();
}

void BackgroundSave::run() {
  std::exception_ptr error;
  try {
    while (next()) {
      parts_[saved_].save();
      {
        const std::lock_guard lock(mutex_);
        ++saved_;
      }
      changed_.notify_all();
    }
    if (saved_ < parts_.size()) {
      throw Error(ErrorCategory::state, "engine: it ended before its states were saved");
    }
    end_();
  } catch (...) {
    error = std::current_exception();
  }
  {
    const std::lock_guard lock(mutex_);
    error_ = error;
    saved_ = parts_.size();
    done_ = true;
  }
  changed_.notify_all();
}

void BackgroundSave::before_write(plan::BufferId buffer) {
  std::unique_lock lock(mutex_);
  if (saved_ == parts_.size()) return;  // the usual case
  const auto part = std::find_if(parts_.begin(), parts_.end(),
                                 [buffer](const Item& one) { return one.buffer == buffer; });
  if (part == parts_.end()) return;
  const auto index = static_cast<std::size_t>(part - parts_.begin());
  changed_.wait(lock, [&] { return saved_ > index || saved_ == parts_.size(); });
}

bool BackgroundSave::done() const {
  const std::lock_guard lock(mutex_);
  return done_;
}

void BackgroundSave::finish() {
  if (thread_.joinable()) thread_.join();
  if (error_) std::rethrow_exception(error_);
}

void BackgroundSave::cancel() {
  {
    const std::lock_guard lock(mutex_);
    cancelled_ = true;
  }
  if (thread_.joinable()) thread_.join();
}

Snapshot::Snapshot(const Blueprint& blueprint, state::Store& store, const SideStates& side,
                   comm::Ranks* ranks, std::function<void()> settle, Perform perform)
    : blueprint_(blueprint),
      store_(store),
      side_(side),
      ranks_(ranks),
      settle_(std::move(settle)),
      perform_(std::move(perform)) {}

void Snapshot::settle() const {
  expects(blueprint_.options.purpose == step::Purpose::training,
          "engine: a blueprint for evaluation has no states");
  settle_();
}

void Snapshot::save(const StateSink& sink, step::Homes homes) {
  settle();
  save_states(blueprint_, sink, perform_, homes);
}

std::shared_ptr<BackgroundSave> Snapshot::save_in_background(const StateSink& sink,
                                                             std::function<void()> end) {
  settle();
  std::vector<BackgroundSave::Item> parts;
  for (KeptHome& home : host_homes_by_update(blueprint_)) {
    const plan::BufferId buffer = buffer_of(blueprint_, home);
    parts.push_back({buffer, [this, sink, buffer, ranges = std::move(home.ranges)] {
                       for (const auto& [range, offset] : ranges) {
                         const Bytes bytes = range.bytes();
                         sink(range, store_.host(buffer, offset + bytes).subspan(offset));
                       }
                     }});
  }
  saving_ = std::make_shared<BackgroundSave>(std::move(parts), std::move(end));
  return saving_;
}

void Snapshot::before(const plan::Operation& operation) const {
  if (!saving_) return;
  for (const plan::Use& use : operation.uses) {
    if (use.writes) saving_->before_write(use.buffer);
  }
}

void Snapshot::cancel() {
  if (saving_) saving_->cancel();
}

KeptStates Snapshot::keep(std::uint64_t checkpoint) {
  settle();
  KeptStates kept = {.homes = homes_on(blueprint_, Tier::nvme)};
  if (blueprint_.options.kept_checkpoints == 0) kept.homes.clear();
  if (kept.homes.empty()) return kept;
  std::vector<plan::BufferId> ids;
  for (const KeptHome& home : kept.homes) ids.push_back(buffer_of(blueprint_, home));
  std::vector<state::KeptExtent> contents = store_.keep(checkpoint, ids);
  for (std::size_t h = 0; h < contents.size(); ++h) {
    kept.homes[h].content = std::move(contents[h]);
  }
  kept.image = store_.swap_space()->image();
  return kept;
}

void Snapshot::release(std::uint64_t checkpoint) {
  store_.release(checkpoint);
}

std::vector<std::uint64_t> Snapshot::kept() const {
  return store_.kept();
}

std::vector<std::filesystem::path> Snapshot::link(const state::SwapNames& names) const {
  expects(store_.swap_space() != nullptr, "engine: nothing is on NVMe");
  return store_.swap_space()->link(names);
}

void Snapshot::restore(const StateSource& source, bool reused, const KeptStates& here,
                       const state::KeptExtents& kept) {
  if (reused) {
    std::vector<std::pair<plan::BufferId, state::KeptExtent>> contents;
    contents.reserve(here.homes.size());
    for (const KeptHome& home : here.homes) {
      contents.emplace_back(buffer_of(blueprint_, home), home.content);
    }
    store_.restore(contents, kept);
  }
  WholeWeights weights(blueprint_, ranks_);
  comm::collective_try(ranks_, [&] {
    restore_states(blueprint_, source, weights.hashing(perform_),
                   reused ? step::kHomesInMemory : step::Homes{});
  });
  weights.require_equal();
}

std::vector<float> Snapshot::read_weights(std::size_t block, const model::TensorSpec& tensor) {
  settle();
  std::vector<float> values =
      read_master(blueprint_, ranks_, block, tensor.offset, tensor.size, perform_);
  side_.replace_in(block, tensor.offset, values);
  return values;
}

std::vector<float> Snapshot::read_block(std::size_t block) {
  settle();
  const Elems elements = blueprint_.model.blocks[block].elements;
  std::vector<float> values = read_master(blueprint_, ranks_, block, 0, elements, perform_);
  side_.replace_in(block, 0, values);
  return values;
}

std::uint64_t Snapshot::hash() {
  settle();
  return hash_with(hash_states(blueprint_, ranks_, perform_), side_.values());
}

}  // namespace ballast::engine
