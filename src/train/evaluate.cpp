#include "src/train/evaluate.h"

#include <algorithm>

namespace ballast::train {

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
