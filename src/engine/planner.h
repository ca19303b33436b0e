#pragma once

#include "ballast/engine/planner.h"

#include "src/engine/search.h"

namespace ballast::engine {

/// decide() with the workspace's size as the question says.
Decision decide_with(const Question& question);

/// What the kernels of the device that `rates` are about need. `model` must outlive it.
WorkspaceOf workspace_on(const config::Config& config, const model::Architecture& model,
                         const schedule::Rates& rates);

/// find_improvements() with the workspace's size as the question says.
std::vector<Variant> find_improvements_with(const Decision& decision, const Question& question);

}  // namespace ballast::engine
