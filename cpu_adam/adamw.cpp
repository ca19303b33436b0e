#include "ballast/cpu_adam/adamw.h"

#include <algorithm>
#include <atomic>
#include <cfenv>
#include <cmath>
#include <string>

#include <oneapi/tbb/global_control.h>
#include <oneapi/tbb/parallel_for.h>
#include <oneapi/tbb/partitioner.h>
#include <oneapi/tbb/task_arena.h>

#include "ballast/core/error.h"

#include "cpu_adam/variant.h"

namespace ballast::cpu_adam {
namespace {

/// Elements of one task: small enough to balance, large enough to hide the cost of a task.
constexpr Elems kChunk = Elems{64} * 1024;

/// Rounding to nearest with denormals for the life of the object, whatever the thread had set.
class DefaultFloatingPoint {
 public:
  DefaultFloatingPoint() {
    std::fegetenv(&saved_);
    std::fesetenv(FE_DFL_ENV);
  }
  ~DefaultFloatingPoint() { std::fesetenv(&saved_); }
  DefaultFloatingPoint(const DefaultFloatingPoint&) = delete;
  DefaultFloatingPoint& operator=(const DefaultFloatingPoint&) = delete;

 private:
  std::fenv_t saved_;
};

Coefficients coefficients_of(const AdamW& hyper) {
  const double step = static_cast<double>(hyper.step);
  const double lerp_weight = 1.0 - hyper.beta1;
  const bool lerp_from_gradient = static_cast<float>(lerp_weight) >= 0.5F;
  Coefficients result{};
  result.gradient_scale = hyper.gradient_scale;
  result.decay = static_cast<float>(1.0 - hyper.learning_rate * hyper.weight_decay);
  result.lerp_weight = static_cast<float>(lerp_weight) - (lerp_from_gradient ? 1.0F : 0.0F);
  result.lerp_from_gradient = lerp_from_gradient;
  result.beta2 = static_cast<float>(hyper.beta2);
  result.gradient_weight = static_cast<float>(1.0 - hyper.beta2);
  result.bias_correction2_sqrt = static_cast<float>(std::sqrt(1.0 - std::pow(hyper.beta2, step)));
  result.epsilon = static_cast<float>(hyper.epsilon);
  result.step_size = static_cast<float>(hyper.learning_rate / (1.0 - std::pow(hyper.beta1, step)));
  return result;
}

SplitShard slice(const SplitShard& shard, Elems first, Elems count) {
  return {shard.weight + first,        shard.remainder + first, shard.first_moment + first,
          shard.second_moment + first, shard.gradient + first,  count};
}

PlainShard slice(const PlainShard& shard, Elems first, Elems count) {
  return {shard.weight + first, shard.first_moment + first, shard.second_moment + first,
          shard.gradient + first, count};
}

bool has_null(const SplitShard& shard) {
  return shard.weight == nullptr || shard.remainder == nullptr || shard.first_moment == nullptr ||
         shard.second_moment == nullptr || shard.gradient == nullptr;
}

bool has_null(const PlainShard& shard) {
  return shard.weight == nullptr || shard.first_moment == nullptr ||
         shard.second_moment == nullptr || shard.gradient == nullptr;
}

/// Runs `kernel` over the chunks of `shard`, in `arena` when there is one.
template <class Shard>
void run(const AdamW& hyper, const Shard& shard, tbb::task_arena* arena,
         void (*kernel)(const Coefficients&, const Shard&) noexcept) {
  expects(hyper.step >= 1, "AdamW: the step counts from 1");
  if (shard.size == 0) return;
  expects(!has_null(shard), "AdamW: a shard that is not empty has a null pointer");

  const DefaultFloatingPoint callers_thread;
  const Coefficients coefficients = coefficients_of(hyper);
  const auto update_chunk = [&](Elems chunk) {
    const DefaultFloatingPoint workers_thread;
    const Elems first = chunk * kChunk;
    kernel(coefficients, slice(shard, first, std::min(kChunk, shard.size - first)));
  };
  const Elems chunks = (shard.size + kChunk - 1) / kChunk;
  if (arena == nullptr || chunks == 1) {
    for (Elems chunk = 0; chunk < chunks; ++chunk) update_chunk(chunk);
    return;
  }
  // oneTBB orders the chunks after what came before and before what follows. The two atomics say so
  // once more where ThreadSanitizer, which does not see into the library, can read it.
  std::atomic<bool> begun{false};
  std::atomic<Elems> done{0};
  const auto ordered = [&](Elems chunk) {
    if (begun.load(std::memory_order_acquire)) update_chunk(chunk);
    done.fetch_add(1, std::memory_order_release);
  };
  begun.store(true, std::memory_order_release);
  arena->execute([&] { tbb::parallel_for(Elems{0}, chunks, ordered, tbb::static_partitioner()); });
  expects(done.load(std::memory_order_acquire) == chunks, "AdamW: a chunk was left out");
}

}  // namespace

struct Updater::Arena {
  const Variant& variant;
  int threads;
  /// Set when `threads` is above oneTBB's own limit, which it would enforce with a warning.
  std::unique_ptr<tbb::global_control> limit;
  std::unique_ptr<tbb::task_arena> workers;  ///< null when one thread does all
};

Updater::Updater(int threads, std::optional<Isa> isa) {
  if (threads < 0) {
    throw Error(ErrorCategory::config,
                "CPU Adam: " + std::to_string(threads) + " threads; give 0 (all) or more");
  }
  const int count = threads == 0 ? usable_cpus() : threads;
  const Variant& chosen = variant(isa.value_or(active()));
  arena_.reset(new Arena{chosen, count, nullptr, nullptr});
  if (count == 1) return;
  using Control = tbb::global_control;
  const auto wanted = static_cast<std::size_t>(count);
  if (wanted > Control::active_value(Control::max_allowed_parallelism)) {
    arena_->limit = std::make_unique<Control>(Control::max_allowed_parallelism, wanted);
  }
  arena_->workers = std::make_unique<tbb::task_arena>(count);
}

Updater::~Updater() = default;
Updater::Updater(Updater&&) noexcept = default;
Updater& Updater::operator=(Updater&&) noexcept = default;

void Updater::step(const AdamW& hyper, const SplitShard& shard) const {
  run(hyper, shard, arena_->workers.get(), arena_->variant.split);
}

void Updater::step(const AdamW& hyper, const PlainShard& shard) const {
  run(hyper, shard, arena_->workers.get(), arena_->variant.plain);
}

Isa Updater::isa() const noexcept {
  return arena_->variant.isa;
}

int Updater::threads() const noexcept {
  return arena_->threads;
}

}  // namespace ballast::cpu_adam
