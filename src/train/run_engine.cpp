#include "src/train/run_engine.h"

#include <algorithm>
#include <cstdint>
#include <set>
#include <utility>
#include <vector>

#include <fmt/format.h>

namespace ballast::train {

namespace {

template <class Values>
void add_each(Values& sums, const Values& more) {
  for (std::size_t i = 0; i < sums.size() && i < more.size(); ++i) sums[i] += more[i];
}

}  // namespace

std::string describe_devices(engine::Engine& engine) {
  const std::uint32_t devices = engine.blueprint().problem.devices;
  const std::string device = engine.device().description();
  return devices == 1 ? device : fmt::format("{} devices: {}", devices, device);
}

RestartableEngine::RestartableEngine(engine::Blueprint blueprint, engine::EngineOptions options,
                                     const std::atomic<bool>* interrupted, comm::Ranks* ranks)
    : blueprint_(std::move(blueprint)),
      options_(std::move(options)),
      interrupted_(interrupted),
      ranks_(ranks) {
  engine_.emplace(blueprint_, options_, interrupted_, ranks_);
}

void RestartableEngine::replace() {
  // Ranks are at different operations of the same plans. Each completes all of them, because
  // another rank may wait in a collective that this one has not begun.
  if (engine_ && ranks_ != nullptr) engine_->drain();
  if (engine_) before_ = totals();
  engine_.reset();  // frees memory and swap files before the next engine takes its own
  comm::collective_try(ranks_,
                       [&] { engine_.emplace(blueprint_, options_, interrupted_, ranks_); });
}

void RestartableEngine::leave(bool jointly) {
  if (ranks_ == nullptr) return;
  if (jointly && engine_) {
    try {
      return engine_->drain();
    } catch (...) {  // this rank has also failed alone; the caller reports the first error
    }
  }
  ranks_->leave();
}

engine::EngineTotals RestartableEngine::totals() const {
  engine::EngineTotals sums = engine_ ? engine_->totals() : before_;
  if (!engine_) return sums;
  add_each(sums.lanes.busy_seconds, before_.lanes.busy_seconds);
  add_each(sums.lanes.stalled_seconds, before_.lanes.stalled_seconds);
  add_each(sums.lanes.enqueueing_seconds, before_.lanes.enqueueing_seconds);
  add_each(sums.lanes.bytes, before_.lanes.bytes);
  add_each(sums.lanes.busy_by_device, before_.lanes.busy_by_device);
  add_each(sums.lanes.stalled_by_device, before_.lanes.stalled_by_device);
  sums.nvme_bytes_by_path.resize(
      std::max(sums.nvme_bytes_by_path.size(), before_.nvme_bytes_by_path.size()));
  add_each(sums.nvme_bytes_by_path, before_.nvme_bytes_by_path);
  return sums;
}

double RestartableEngine::measure_gemm_peak(double seconds) {
  const double one =
      model::measure_gemm_peak(engine_->device(), blueprint_.type, seconds, options_.kernels.set);
  if (engine_->device().kind() != "cuda") return one;
  const std::vector<std::uint32_t>& numbers = options_.device_numbers;
  const std::set<std::uint32_t> gpus(numbers.begin(), numbers.end());
  return one * static_cast<double>(gpus.empty() ? blueprint_.problem.devices : gpus.size());
}

std::string RestartableEngine::describe_update() {
  const auto& blocks = blueprint_.placement.blocks;
  const auto on_gpu = engine_->device().kind() != "cuda"
                          ? 0
                          : std::count_if(blocks.begin(), blocks.end(), [](const auto& block) {
                              return block.optimizer == Tier::device;
                            });
  const std::string isa(engine_->update_isa());
  if (on_gpu == 0) return isa;
  return static_cast<std::size_t>(on_gpu) == blocks.size() ? "on the GPU" : isa + " and on the GPU";
}

engine::TokenBatch of_engine(const data::Batch& batch) {
  return {.tokens = batch.tokens,
          .targets = batch.targets,
          .positions = batch.positions,
          .whole_positions = batch.whole_positions};
}

std::optional<engine::Evaluation> evaluate(engine::Engine& engine,
                                           const data::EvaluationBatches& batches,
                                           std::uint64_t requested,
                                           const EvaluationProgress& progress) {
  const std::uint64_t available = batches.size();
  const std::uint64_t wanted = std::min(requested, available);
  if (wanted == 0) return std::nullopt;
  const Mesh& mesh = engine.blueprint().mesh;
  const data::EvaluationShare share = {.together = engine.evaluation_micro_batches(),
                                       .place = mesh.data_place(),
                                       .places = mesh.data};
  const std::uint64_t runs = share.runs(requested, available);
  double sum = 0.0;
  std::uint64_t targets = 0;
  for (std::uint64_t run = 0; run < runs; ++run) {
    if (progress) progress(std::min(wanted, run * share.together * share.places), wanted);
    data::Batch joined;
    for (std::uint64_t m = 0; m < share.together; ++m) {
      joined.append(batches.batch(share.index(run, m, requested, available)));
    }
    const engine::Evaluation found = engine.evaluate(of_engine(joined));
    sum += found.loss * static_cast<double>(found.targets);
    targets += found.targets;
  }
  if (targets == 0) return std::nullopt;
  return engine::Evaluation{sum / static_cast<double>(targets), targets};
}

}  // namespace ballast::train
