#include "src/step/placed_problem.h"

#include <algorithm>

#include <fmt/format.h>

#include "ballast/core/error.h"
#include "ballast/plan/plan.h"
#include "ballast/step/problem.h"
#include "ballast/step/program_index.h"

#include "src/step/devices.h"

namespace ballast::step {

bool written_in_background(const Placement& placement, std::uint64_t kept) {
  const auto is_used = [&](Tier tier) {
    return std::any_of(placement.blocks.begin(), placement.blocks.end(), [tier](const auto& block) {
      return block.weights == tier || block.optimizer == tier;
    });
  };
  return is_used(Tier::host) && (kept > 1 || !is_used(Tier::nvme));
}

bool in_one_pass(const Problem& problem, const Placement& placement) {
  const std::optional<model::OnePassHead>& choice = problem.program().one_pass;
  if (!choice) return true;
  if (placement.blocks[choice->keeper].kept != Kept::all) return false;
  const RankSizes sizes(problem);
  std::vector<std::uint8_t> dealt(problem.blocks.size(), 0);
  if (problem.devices > 1) dealt = deal(problem.program(), problem.devices);
  return std::all_of(choice->on_device.begin(), choice->on_device.end(), [&](model::BlockId block) {
    return placement.blocks[block].weights == Tier::device && !sizes.shards_weights(block) &&
           dealt[block] == dealt[choice->keeper];
  });
}

void refuse_arguments(const std::string& message) {
  throw Error(ErrorCategory::config, "schedule: " + message);
}

namespace {

void check_devices(const Problem& problem, const Options& options) {
  if (problem.devices == 0 || problem.devices > plan::kMaxDevices) {
    refuse_arguments(
        fmt::format("a rank has 1 to {} devices, not {}", plan::kMaxDevices, problem.devices));
  }
  if (problem.devices > 1 && options.order != Order::layer_major) {
    refuse_arguments(
        fmt::format("with micro-batch-major order only one of the {} devices would work at a time; "
                    "use layer-major order",
                    problem.devices));
  }
}

void check_order(const Problem& problem, const Options& options) {
  const bool several = options.order != Order::layer_major && problem.micro_batches > 1;
  if (several && options.purpose == Purpose::training && problem.program().counts_step) {
    refuse_arguments(
        "router losses of the whole step need the choices of all micro-batches before the backward "
        "pass; use layer-major order, or set ballast.router_losses to \"micro_batch\"");
  }
}

void check_ranks(const Problem& problem) {
  if (problem.sharers == 0) refuse_arguments("there must be at least 1 rank");
  if (problem.hpz_partition_size > 0 && problem.sharers % problem.hpz_partition_size != 0) {
    refuse_arguments(fmt::format("hpz_partition_size {} does not divide the {} ranks",
                                 problem.hpz_partition_size, problem.sharers));
  }
  if (problem.stage > 3)
    refuse_arguments(fmt::format("stage must be 0 to 3, got {}", problem.stage));
}

void check_speculation(const Problem& problem, const Placement& placement, const Options& options) {
  for (std::size_t b = 0; b < placement.blocks.size(); ++b) {
    const BlockPlacement& block = placement.blocks[b];
    if (!block.speculates) continue;
    if (options.update == Update::eager) {
      refuse_arguments(fmt::format("{} speculates, but updates are eager; use gated updates",
                                   problem.name_of(b)));
    }
    if (block.optimizer == Tier::device) {
      refuse_arguments(
          fmt::format("{} speculates, but its optimizer states are on the device; move them to "
                      "the host or NVMe",
                      problem.name_of(b)));
    }
  }
}

/// Rows of tables are selected in host memory, where updates must leave the weights.
void check_tables(const Problem& problem, const Placement& placement, const Options& options) {
  for (std::size_t b = 0; b < placement.blocks.size(); ++b) {
    if (problem.program().blocks[b].selected == 0) continue;
    const BlockPlacement& block = placement.blocks[b];
    const bool updates = options.purpose == Purpose::training && !problem.blocks[b].is_frozen();
    if (block.weights != Tier::device && !(updates && block.optimizer == Tier::device)) continue;
    refuse_arguments(
        fmt::format("{} is a table, but it is placed on the device; move its weights "
                    "and optimizer states to the host or NVMe",
                    problem.name_of(b)));
  }
}

void check_purpose(const Problem& problem, const Placement& placement, const Options& options) {
  if (options.purpose == Purpose::training) return;
  for (std::size_t b = 0; b < placement.blocks.size(); ++b) {
    if (placement.blocks[b] == BlockPlacement{.weights = placement.blocks[b].weights}) continue;
    refuse_arguments(fmt::format(
        "{} places more than its weights, but an evaluation has nothing else", problem.name_of(b)));
  }
}

}  // namespace

void check_trains(const Options& options) {
  if (options.purpose == Purpose::evaluation) {
    refuse_arguments("an evaluation has no training steps");
  }
}

void check_arguments(const Problem& problem, const Placement& placement, const Options& options) {
  expects(problem.index != nullptr, "schedule: the problem has no program");
  const model::StepProgram& program = problem.program();
  expects(problem.blocks.size() == program.blocks.size(),
          "schedule: the sizes belong to another program");
  if (problem.blocks.size() < 2) refuse_arguments("the model needs an embedding and a head");
  if (placement.blocks.size() != problem.blocks.size()) {
    refuse_arguments(fmt::format("the placement has {} blocks, but the model has {}",
                                 placement.blocks.size(), problem.blocks.size()));
  }
  for (std::size_t b = 0; b < problem.blocks.size(); ++b) {
    if (problem.blocks[b].is_quantized() && !program.is_layer(static_cast<model::BlockId>(b))) {
      refuse_arguments(fmt::format("{} is quantised, but only layers can be", problem.name_of(b)));
    }
  }
  if (problem.index->has_reference() && !program.is_layer(program.first_differentiated)) {
    refuse_arguments(
        "a reference model needs layers that are not cut into tiles, at least one with adapters");
  }
  if (problem.micro_batches == 0) refuse_arguments("a step needs at least 1 micro-batch");
  if (problem.evaluation_micro_batches == 0 ||
      problem.evaluation_micro_batches > problem.micro_batches) {
    refuse_arguments("evaluation_micro_batches must be 1 to micro_batches");
  }
  if (options.buffers.smallest() < 1) {
    refuse_arguments("every number of buffers must be at least 1");
  }
  check_devices(problem, options);
  check_order(problem, options);
  check_ranks(problem);
  check_speculation(problem, placement, options);
  check_tables(problem, placement, options);
  check_purpose(problem, placement, options);
}

PlacedProblem::PlacedProblem(const Problem& problem, const Placement& placement,
                             const Options& options)
    : problem(problem),
      placement(placement),
      options(options),
      sizes(problem),
      form(in_one_pass(problem, placement) ? model::HeadForm::one_pass : model::HeadForm::visits) {
  if (problem.devices == 1) return;
  const model::StepProgram& program = problem.program();
  dealt = deal(program, problem.devices);
  evaluation_routes = Routes(program, stops_of(program.evaluation, model::HeadForm::visits), dealt);
  training_routes =
      trains() ? Routes(program, stops_of(program.training, form), dealt) : evaluation_routes;
}

std::vector<SwappedStates> PlacedProblem::swapped_states(UpdatedIn pass) const {
  std::vector<SwappedStates> swapped;
  for_swapped_states(pass, [&](const SwappedStates& states) { swapped.push_back(states); });
  return swapped;
}

namespace {

bool are_alike(const PlacedProblem& placed, std::uint32_t a, std::uint32_t b) {
  const BlockSizes& of_a = placed.problem.blocks[a];
  const BlockSizes& of_b = placed.problem.blocks[b];
  const auto& program = placed.problem.program().blocks;
  const auto same = [](const SubGroup& one, const SubGroup& other) {
    return one.state_bytes == other.state_bytes;
  };
  return placed.device_of(a) == placed.device_of(b) && placed.at(a) == placed.at(b) &&
         of_a.weight_bytes == of_b.weight_bytes &&
         of_a.dequantized_bytes == of_b.dequantized_bytes &&
         of_a.gradient_bytes == of_b.gradient_bytes && of_a.replicated == of_b.replicated &&
         program[a].per_rank == program[b].per_rank && program[a].selected == program[b].selected &&
         program[a].row_gradients == program[b].row_gradients &&
         std::equal(of_a.sub_groups.begin(), of_a.sub_groups.end(), of_b.sub_groups.begin(),
                    of_b.sub_groups.end(), same);
}

}  // namespace

std::vector<AlikeBlocks> find_alike(const PlacedProblem& placed, bool merges) {
  std::vector<AlikeBlocks> found;
  std::size_t last = 0;  // Most blocks are like the one before them.
  for (std::uint32_t b = 0; b < placed.blocks(); ++b) {
    const auto has_alike = [&](const AlikeBlocks& blocks) {
      return are_alike(placed, blocks.first, b);
    };
    if (merges && b > 0 && !has_alike(found[last])) {
      last = static_cast<std::size_t>(std::ranges::find_if(found, has_alike) - found.begin());
    }
    if (merges && last < found.size()) {
      ++found[last].count;
    } else {
      last = found.size();
      found.push_back({b});
    }
  }
  return found;
}

}  // namespace ballast::step
