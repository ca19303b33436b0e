#include <algorithm>

#include <fmt/format.h>

#include "ballast/step/rank_sizes.h"

#include "src/step/home_list.h"
#include "src/step/layout.h"
#include "src/step/plan_types.h"

namespace ballast::step {
namespace {

/// Largest buffer for gradients received from other ranks; larger gradients are summed in rounds.
constexpr Bytes kArriving = 32 * kMiB;
/// A host buffer of a step with at least kServes bytes also serves to fill and read the device;
/// else a buffer of at most kPassing bytes is added.
constexpr Bytes kServes = 256 * kKiB;
constexpr Bytes kPassing = 1 * kMiB;

class LayoutMaker : private HomeList {
 public:
  LayoutMaker(const Problem& problem, const Placement& placement, const Options& options,
              bool merges)
      : HomeList(problem, placement, options, merges),
        question_(question_of(problem, placement, options)) {}

  Layout make() {
    homes();
    weight_passage();
    if (trains()) {
      state_passage();
      gradients();
    }
    layout_.values = add_values(*problem_.table, question_, *this);
    layout_.verdict = add("verdict", Tier::host, Kind::batch, 0);
    layout_.workspace = add("workspace", Tier::device, Kind::workspace, problem_.workspace_bytes);
    passing_place();
    if (trains()) checkpoints();
    layout_.buffers = std::move(buffers_);
    return std::move(layout_);
  }

 private:
  struct Need {
    Bytes bytes = 0;        ///< of the largest
    std::size_t count = 0;  ///< of blocks
  };

  /// The number of blocks for which `counts` holds and the largest `size` of one.
  template <class Size, class Counts>
  [[nodiscard]] Need need(Size size, Counts counts) const {
    Need found;
    for (std::uint32_t b = 0; b < blocks(); ++b) {
      if (!counts(b)) continue;
      found.bytes = std::max(found.bytes, size(b));
      ++found.count;
    }
    return found;
  }

  void weight_passage() {
    const auto passes = [this](std::uint32_t b) {
      return rank_.splits_weights(b) || at(b).weights != Tier::device;
    };
    const Need slots = need([this](std::uint32_t b) { return rank_.whole_weights(b); }, passes);
    const std::size_t wanted = options_.buffers.weight_slots + most_moving_together(passes);
    layout_.weight_slots = add_slots("weights in transit", Tier::device, Kind::staging, slots.bytes,
                                     std::min(wanted, slots.count));
    const auto split_elsewhere = [this](std::uint32_t b) {
      return rank_.splits_weights(b) && at(b).weights != Tier::device;
    };
    const Need shares =
        need([this](std::uint32_t b) { return rank_.weight_share(b); }, split_elsewhere);
    layout_.share_slots =
        add_slots("shares of weights in transit", Tier::device, Kind::staging, shares.bytes,
                  std::min<std::size_t>({2, options_.buffers.weight_slots, shares.count}));
    if (rank_.codes_weights()) {
      const Need codes = need([this](std::uint32_t b) { return rank_.whole_codes(b); },
                              [this](std::uint32_t b) { return rank_.splits_weights(b); });
      if (codes.bytes > 0) {
        layout_.codes = add("weight codes", Tier::device, Kind::workspace, codes.bytes);
      }
    }
    // One is enough: what decodes the next block's runs on the same stream as the passes.
    const Need decoded = need([this](std::uint32_t b) { return problem_.blocks[b].decoded_bytes; },
                              [this](std::uint32_t b) { return problem_.blocks[b].is_coded(); });
    layout_.decoded = add_slots("decoded weights", Tier::device, Kind::workspace, decoded.bytes,
                                std::min<std::size_t>(1, decoded.count));
    const auto on_host = [this](std::uint32_t b) {
      return at(b).weights == Tier::device ? rank_.updated_weights(b) : rank_.weights(b);
    };
    const Need staged = need(on_host, [this](std::uint32_t b) {
      const bool borrowed = at(b).weights == Tier::device && updates_below(b);
      return at(b).weights == Tier::nvme || borrowed;
    });
    layout_.weight_staging =
        add_slots("weight staging", Tier::host, Kind::staging, staged.bytes,
                  std::min<std::size_t>(options_.buffers.weight_staging, staged.count));
  }

  /// Blocks whose weights move for the pass of another block.
  template <class Moves>
  [[nodiscard]] std::size_t most_moving_together(Moves moves) const {
    const model::StepProgram& program = problem_.program();
    std::size_t most = 0;
    for (const model::PassId id : problem_.table->passes_over_blocks(question_.form)) {
      const model::Pass& pass = program.passes[id];
      std::size_t moving = 0;
      for (const model::Operand& operand : pass.operands) {
        if (operand.kind != model::OperandKind::weights || operand.number == pass.block) continue;
        moving += moves(operand.number) ? 1 : 0;
      }
      most = std::max(most, moving);
    }
    return most;
  }

  void state_passage() {
    std::vector<SwappedStates> swapped =
        swapped_states(problem_, place_, options_, UpdatedIn::forward);
    const auto backward = swapped_states(problem_, place_, options_, UpdatedIn::backward);
    swapped.insert(swapped.end(), backward.begin(), backward.end());
    std::vector<Bytes> sizes(std::min<std::size_t>(options_.buffers.state_staging, swapped.size()),
                             0);
    for (std::size_t i = 0; i < swapped.size(); ++i) {
      Bytes& size = sizes[i % sizes.size()];
      size = std::max(size, rank_.states(swapped[i].block, swapped[i].sub_group));
    }
    for (std::size_t i = 0; i < sizes.size(); ++i) {
      layout_.state_staging.push_back(
          add(fmt::format("state staging {}", i), Tier::host, Kind::staging, sizes[i]));
    }
  }

  void gradients() {
    const auto statistics = [this](std::uint32_t b, std::string_view what, Tier tier) {
      return add(name_of(b, what), tier, Kind::batch, problem_.statistics_bytes);
    };
    for (std::uint32_t b = 0; b < blocks(); ++b) {
      const bool has = is_trained(b);
      layout_.gradient.push_back(has ? gradient_home(b, name_of(b, "gradient")) : kNoBuffer);
      layout_.statistics_device.push_back(
          has ? statistics(b, "gradient statistics on the device", Tier::device) : kNoBuffer);
      layout_.statistics_host.push_back(has ? statistics(b, "gradient statistics", Tier::host)
                                            : kNoBuffer);
    }
    const auto whole = [this](std::uint32_t b) { return rank_.whole_gradient(b); };
    const Need packed = need(whole, [this](std::uint32_t b) {
      return updates_below(b) || (is_trained(b) && rank_.splits_gradients(b));
    });
    layout_.gradient_slots =
        add_slots("gradients in transit", Tier::device, Kind::staging, packed.bytes,
                  std::min<std::size_t>(options_.buffers.gradient_slots, packed.count));
    const Need swapped =
        need([this](std::uint32_t b) { return swapped_gradient_bytes(problem_, b); },
             [this](std::uint32_t b) { return swaps_gradient(problem_, place_, b); });
    layout_.gradient_staging =
        add_slots("gradient staging", Tier::host, Kind::staging, swapped.bytes,
                  std::min<std::size_t>(options_.buffers.gradient_staging, swapped.count));
    if (rank_.several()) {
      const Need all = need(whole, [this](std::uint32_t b) { return rank_.several(b); });
      const Bytes least = problem_.world * kPage;
      layout_.arriving = add("gradients from other ranks", Tier::device, Kind::workspace,
                             std::clamp(all.bytes, least, std::max(least, kArriving)));
    }
  }

  BufferId gradient_home(std::uint32_t b, std::string name) {
    if (swaps_gradient(problem_, place_, b)) {
      // An eager update takes it from staging.
      if (options_.update == Update::eager) return kNoBuffer;
      return add(std::move(name), Tier::nvme, Kind::gradients, swapped_gradient_bytes(problem_, b));
    }
    const Tier side = at(b).optimizer == Tier::device ? Tier::device : Tier::host;
    const bool shard = side == Tier::device ? rank_.splits_gradients(b) : rank_.splits_states(b);
    return add(std::move(name), side, Kind::gradients,
               shard ? rank_.gradient_shard(b) : rank_.whole_gradient(b));
  }

  void passing_place() {
    const Need weights = need([this](std::uint32_t b) { return rank_.weights(b); },
                              [this](std::uint32_t b) { return at(b).weights == Tier::device; });
    const Need states =
        need([this](std::uint32_t b) { return rank_.states(b, 0); },  // the first is the largest
             [this](std::uint32_t b) {
               return trains() && is_trained(b) && at(b).optimizer == Tier::device;
             });
    const Bytes largest = std::max(weights.bytes, states.bytes);
    if (largest == 0) return;
    const Bytes enough = std::min(largest, kServes);
    if (merges_ ? largest_place_ >= enough : takes_place(enough)) return;
    layout_.passing_place = add("staging for data on the device", Tier::host, Kind::staging,
                                std::min(largest, kPassing));
  }

  /// Whether a buffer of a step has `enough` bytes and becomes the passing place.
  bool takes_place(Bytes enough) {
    for (const auto* places :
         {&layout_.weight_staging, &layout_.state_staging, &layout_.values.staging,
          &layout_.gradient_staging, &layout_.gradient}) {
      for (const BufferId id : *places) {
        if (id == kNoBuffer) continue;
        const Buffer& buffer = buffers_[id];
        if (buffer.tier != Tier::host || buffer.bytes < enough) continue;
        layout_.passing_place = id;
        return true;
      }
    }
    return false;
  }

  ValueQuestion question_;
};

}  // namespace

ValueQuestion question_of(const Problem& problem, const Placement& placement,
                          const Options& options) {
  return {
      .placement = placement,
      .options = options,
      .form = in_one_pass(problem, placement) ? model::HeadForm::one_pass : model::HeadForm::visits,
      .step_micro_batches = problem.micro_batches,
      .evaluation_micro_batches = problem.evaluation_micro_batches,
      .ranks = problem.world};
}

Layout make_layout(const Problem& problem, const Placement& placement, const Options& options) {
  return LayoutMaker(problem, placement, options, false).make();
}

std::vector<Buffer> merged_buffers(const Problem& problem, const Placement& placement,
                                   const Options& options) {
  return std::move(LayoutMaker(problem, placement, options, true).make().buffers);
}

}  // namespace ballast::step
