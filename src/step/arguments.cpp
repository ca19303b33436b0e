#include "src/step/arguments.h"

#include <algorithm>

#include <fmt/format.h>

#include "ballast/core/error.h"

namespace ballast::step {

void refuse_arguments(const std::string& message) {
  throw Error(ErrorCategory::config, "schedule: " + message);
}

namespace {

void check_ranks(const Workload& workload) {
  if (workload.world == 0) refuse_arguments("world must be at least 1 rank");
  if (workload.weight_ranks > 0 && workload.world % workload.weight_ranks != 0) {
    refuse_arguments(fmt::format("weight_ranks {} does not divide the {} ranks",
                                 workload.weight_ranks, workload.world));
  }
  if (workload.stage > 3)
    refuse_arguments(fmt::format("stage must be 0 to 3, got {}", workload.stage));
}

void check_speculation(const Workload& workload, const Placement& placement,
                       const Options& options) {
  for (std::size_t b = 0; b < placement.blocks.size(); ++b) {
    const BlockPlacement& block = placement.blocks[b];
    if (!block.speculates) continue;
    if (options.update == Update::eager) {
      refuse_arguments(fmt::format("{} speculates, but updates are eager; use gated updates",
                                   workload.blocks[b].name));
    }
    if (block.optimizer == Tier::device) {
      refuse_arguments(
          fmt::format("{} speculates, but its optimizer states are on the device; move them to "
                      "the host or NVMe",
                      workload.blocks[b].name));
    }
  }
}

void check_purpose(const Workload& workload, const Placement& placement, const Options& options) {
  if (options.purpose == Purpose::training) return;
  for (std::size_t b = 0; b < placement.blocks.size(); ++b) {
    if (placement.blocks[b] == BlockPlacement{.weights = placement.blocks[b].weights}) continue;
    refuse_arguments(
        fmt::format("{} places more than its weights, but an evaluation has nothing else",
                    workload.blocks[b].name));
  }
}

}  // namespace

void check_trains(const Options& options) {
  if (options.purpose == Purpose::evaluation) {
    refuse_arguments("an evaluation has no training steps");
  }
}

void check_arguments(const Workload& workload, const Placement& placement, const Options& options) {
  expects(workload.values != nullptr, "schedule: the workload has no program");
  if (workload.blocks.size() < 2) refuse_arguments("the model needs an embedding and a head");
  if (placement.blocks.size() != workload.blocks.size()) {
    refuse_arguments(fmt::format("the placement has {} blocks, but the model has {}",
                                 placement.blocks.size(), workload.blocks.size()));
  }
  for (std::size_t b = 0; b < workload.blocks.size(); ++b) {
    if (workload.blocks[b].is_coded() && !workload.is_layer(b)) {
      refuse_arguments(
          fmt::format("{} has codes, but only layers are decoded", workload.blocks[b].name));
    }
  }
  if (workload.has_reference() &&
      (workload.cuts_layers() || !workload.is_layer(workload.first_differentiated))) {
    refuse_arguments("a reference needs layers in one piece, of which some have adapters");
  }
  if (workload.micro_batches == 0) refuse_arguments("a step needs at least 1 micro-batch");
  if (workload.evaluation_micro_batches == 0 ||
      workload.evaluation_micro_batches > workload.micro_batches) {
    refuse_arguments("evaluation_micro_batches must be 1 to micro_batches");
  }
  if (options.buffers.smallest() < 1) {
    refuse_arguments("every number of buffers must be at least 1");
  }
  check_ranks(workload);
  check_speculation(workload, placement, options);
  check_purpose(workload, placement, options);
}

}  // namespace ballast::step
