#pragma once

#include <cstdint>
#include <functional>
#include <optional>

#include "ballast/data/loader.h"
#include "ballast/engine/engine.h"

namespace ballast::train {

engine::TokenBatch of_engine(const data::Batch& batch);

/// Called with the number of finished micro-batches of all ranks, and the total.
using EvaluationProgress = std::function<void(std::uint64_t done, std::uint64_t total)>;

/// Returns the mean loss over the first `requested` micro-batches of `batches`, which the
/// engine's ranks share (see EvaluationShare). Empty if there are none, or if none of their targets
/// counts. Throws like engine::Engine::evaluate() and SequenceSource::read().
std::optional<engine::Evaluation> evaluate(engine::Engine& engine,
                                           const data::EvaluationBatches& batches,
                                           std::uint64_t requested,
                                           const EvaluationProgress& progress = {});

}  // namespace ballast::train
