#pragma once

#include <atomic>
#include <cstddef>
#include <functional>
#include <memory>
#include <mutex>
#include <set>
#include <span>
#include <string>
#include <utility>

#include "ballast/model/compute.h"

#include "src/engine/lanes.h"

namespace ballast::engine {

/// Times products until end(). After that, a product that was not seen before uses the library's
/// first choice: a trial allocates device memory and waits for the device, and in a step the device
/// may wait for another rank. Thread-safe.
class TrialsBeforeSteps final : public model::ProductChoices {
 public:
  explicit TrialsBeforeSteps(std::shared_ptr<model::ProductChoices> kept)
      : kept_(std::move(kept)) {}

  std::size_t choose(const std::string& library, const std::string& product,
                     std::span<const model::ProductAlgorithm> candidates,
                     const std::function<std::size_t()>& time) override {
    if (ended_) return 0;
    const std::size_t chosen = kept_->choose(library, product, candidates, time);
    const std::scoped_lock lock(mutex_);
    if (const std::string name = kept_->name(); !name.empty()) names_.insert(name);
    return chosen;
  }
  /// Names of all choices so far, with " and " between them.
  std::string name() const override {
    const std::scoped_lock lock(mutex_);
    std::string all;
    for (const std::string& one : names_) all += (all.empty() ? "" : " and ") + one;
    return all;
  }
  void end() { ended_ = true; }

 private:
  std::shared_ptr<model::ProductChoices> kept_;
  std::atomic<bool> ended_ = false;
  mutable std::mutex mutex_;
  std::set<std::string> names_;
};

/// Returns null if products are not timed.
inline std::shared_ptr<TrialsBeforeSteps> trials_of(const model::KernelOptions& options) {
  return options.products == nullptr ? nullptr
                                     : std::make_shared<TrialsBeforeSteps>(options.products);
}

/// Performs one operation of each kind that computes or communicates, so that the device loads all
/// kernels before the first step. Loading a kernel may wait for all work of a GPU. During a step
/// that work could be a collective that waits for another loading rank. Changes nothing that a step
/// reads. All ranks call it together, before the lanes run. Throws Error.
void warm_up(Lanes& lanes);

}  // namespace ballast::engine
