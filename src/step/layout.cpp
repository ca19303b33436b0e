#include "src/step/layout.h"

#include <algorithm>
#include <cstdint>
#include <initializer_list>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include "ballast/step/labels.h"
#include "ballast/step/problem.h"

#include "src/step/placed_problem.h"

namespace ballast::step {
namespace {

/// Maximum size of the buffer for gradients received from other ranks; larger gradients are summed
/// in rounds.
constexpr Bytes kMaxReceivedBytes = 32 * kMiB;
/// Tables with host buffers for their selected rows, for all micro-batches of a stop. Two let the
/// update lane work one layer ahead. The same number holds for row gradients.
constexpr std::size_t kSelectedTables = 2;
/// Maximum number of buffers per device for rows of a table for one micro-batch.
constexpr std::size_t kRowSlots = 2;
/// A host buffer of a step with at least kMinFillBytes bytes also serves to fill and read the
/// device; otherwise a buffer of at most kMaxFillBytes bytes is added.
constexpr Bytes kMinFillBytes = 256 * kKiB;
constexpr Bytes kMaxFillBytes = 1 * kMiB;

class LayoutMaker {
 public:
  LayoutMaker(const PlacedProblem& placed, bool merges)
      : placed_(placed),
        problem_(placed.problem),
        options_(placed.options),
        rank_(placed.sizes),
        alike_(find_alike(placed, merges)),
        list_(merges, placed.devices()) {
    layout_.devices.resize(placed.devices());
  }

  Layout make() {
    homes();
    weight_buffers();
    if (placed_.trains()) {
      state_buffers();
      gradients();
    }
    layout_.values = add_values(placed_, list_);
    if (placed_.trains() && !list_.merges()) gradients_in_sums();
    layout_.decision = list_.add("decision", Tier::host, Kind::batch, 0);
    for (std::uint8_t d = 0; d < placed_.devices(); ++d) {
      if (!placed_.has_blocks(d)) continue;
      layout_.devices[d].workspace =
          list_.add("workspace", Tier::device, Kind::workspace, problem_.workspace_bytes, d);
    }
    fill_staging();
    if (placed_.trains()) checkpoints();
    layout_.buffers = list_.take();
    return std::move(layout_);
  }

 private:
  /// Returns "layer 3 weights".
  [[nodiscard]] std::string name_of(std::uint32_t block, std::string_view what) const {
    return fmt::format("{} {}", problem_.name_of(block), what);
  }
  /// Adds a buffer for each of the blocks; `what`: see name_of().
  BufferId add(const AlikeBlocks& blocks, std::string_view what, Tier tier, Kind kind,
               Bytes bytes) {
    const std::uint8_t device = placed_.device_of(blocks.first);
    if (list_.merges()) return list_.merge(tier, kind, bytes, blocks.count, device);
    return list_.add(name_of(blocks.first, what), tier, kind, bytes, device);
  }

  // Homes of weights and states, undo buffers for a rollback, and extents that checkpoints keep on
  // NVMe.

  void homes() {
    for (const AlikeBlocks& blocks : alike_) {
      const std::uint32_t b = blocks.first;
      const bool split = placed_.has_separate_trained_home(b);
      const BufferId weights =
          add(blocks, split ? "frozen weights" : "weights", placed_.at(b).weights, Kind::weights,
              rank_.resident_weights(b) - placed_.trained_home_bytes(b));
      const BufferId trained = split ? add(blocks, "weights", placed_.trained_tier(b),
                                           Kind::weights, placed_.trained_home_bytes(b))
                                     : kNoBuffer;
      if (list_.merges()) {
        if (placed_.trains()) merge_states(blocks);
        continue;
      }
      layout_.weight_home.push_back(weights);
      layout_.trained_home.push_back(trained);
      if (!placed_.trains()) continue;
      layout_.state_home.push_back(
          add_states(b, name_of(b, "states"), placed_.at(b).optimizer, Kind::states));
      undo(b);
    }
  }

  /// Adds extents for checkpoints. No plan uses them: a home and such an extent swap places
  /// (state/store.h).
  void checkpoints() {
    if (options_.kept_checkpoints == 0) return;
    if (list_.merges()) {
      for (const Kind kind : {Kind::weights, Kind::states}) {
        const BufferId homes = list_.merged_on_nvme(kind);
        if (homes == kNoBuffer) continue;
        const Bytes unchanged = kind == Kind::weights ? frozen_on_nvme() : 0;
        const Bytes bytes = list_[homes].bytes - unchanged;
        if (bytes > 0) list_.merge(Tier::nvme, Kind::checkpoints, bytes, extents_for_checkpoints());
      }
      return;
    }
    std::vector<BufferId> homes;
    for (std::uint32_t b = 0; b < placed_.blocks(); ++b) {
      const BufferId trained = layout_.trained_home[b];
      if (placed_.is_trained(b))
        homes.push_back(trained == kNoBuffer ? layout_.weight_home[b] : trained);
    }
    for (const auto& states : layout_.state_home) {
      homes.insert(homes.end(), states.begin(), states.end());
    }
    for (const BufferId home : homes) {
      const Buffer kept = list_[home];
      if (kept.tier != Tier::nvme) continue;
      list_.add_equal(
          [&kept](std::size_t c) { return fmt::format("{} of checkpoint {}", kept.name, c); },
          Tier::nvme, Kind::checkpoints, kept.bytes, options_.kept_checkpoints);
    }
    if (extents_for_checkpoints() == options_.kept_checkpoints) return;
    // Added last, because swap files without these extents then only have to grow.
    for (const BufferId home : homes) {
      const Buffer kept = list_[home];
      if (kept.tier != Tier::nvme) continue;
      list_.add(fmt::format("{} of a new checkpoint", kept.name), Tier::nvme, Kind::checkpoints,
                kept.bytes);
    }
  }

  /// Returns the number of extents per home. A checkpoint that is written while training continues
  /// needs its own, because the older ones stay until it is complete.
  [[nodiscard]] std::uint32_t extents_for_checkpoints() const {
    return options_.kept_checkpoints +
           (written_in_background(placed_.placement, options_.kept_checkpoints) ? 1 : 0);
  }

  /// Adds the sums of states and undo buffers, without lists.
  void merge_states(const AlikeBlocks& blocks) {
    const std::uint32_t b = blocks.first;
    const auto groups = static_cast<std::uint32_t>(problem_.blocks[b].sub_groups.size());
    const std::uint8_t device = placed_.device_of(b);
    const auto merge = [&](Tier tier, Kind kind, Bytes bytes) {
      list_.merge(tier, kind, bytes, blocks.count, device);
    };
    for (std::uint32_t g = 0; g < groups; ++g) {
      merge(placed_.at(b).optimizer, Kind::states, rank_.states(b, g));
      if (placed_.speculates(b)) merge(placed_.at(b).optimizer, Kind::undo, rank_.states(b, g));
    }
    if (placed_.speculates(b)) merge(undo_tier(b), Kind::undo, undo_bytes(b));
  }

  /// Adds one buffer per sub-group.
  std::vector<BufferId> add_states(std::uint32_t b, const std::string& name, Tier tier, Kind kind) {
    const auto groups = static_cast<std::uint32_t>(problem_.blocks[b].sub_groups.size());
    std::vector<BufferId> buffers;
    for (std::uint32_t g = 0; g < groups; ++g) {
      buffers.push_back(list_.add(groups == 1 ? name : fmt::format("{}, sub-group {}", name, g),
                                  tier, kind, rank_.states(b, g), placed_.device_of(b)));
    }
    return buffers;
  }

  /// Returns the bytes of weights that are never written again, in whole pages.
  [[nodiscard]] Bytes frozen_on_nvme() const {
    Bytes sum = 0;
    for (const auto& [b, count] : alike_) {
      if (placed_.at(b).weights != Tier::nvme) continue;
      const Bytes trained = placed_.trained_home_bytes(b);
      const bool counts = !placed_.is_trained(b) || trained > 0;
      sum += counts ? count * round_up(rank_.resident_weights(b) - trained, kPage) : 0;
    }
    return sum;
  }

  /// Returns the tier of a block's updated weights for undo: they are in host memory, wherever
  /// their home is.
  [[nodiscard]] Tier undo_tier(std::uint32_t b) const {
    if (placed_.trained_home_bytes(b) > 0) return placed_.trained_tier(b);
    return placed_.at(b).weights == Tier::nvme ? Tier::nvme : Tier::host;
  }
  [[nodiscard]] Bytes undo_bytes(std::uint32_t b) const {
    if (undo_tier(b) == Tier::host) return rank_.updated_weights(b);
    return placed_.trained_home_bytes(b) > 0 ? placed_.trained_home_bytes(b)
                                             : rank_.resident_weights(b);
  }

  void undo(std::uint32_t b) {
    layout_.weight_undo.push_back(kNoBuffer);
    layout_.state_undo.emplace_back();
    if (!placed_.speculates(b)) return;
    layout_.weight_undo.back() = list_.add(name_of(b, "weights before the update"), undo_tier(b),
                                           Kind::undo, undo_bytes(b), placed_.device_of(b));
    layout_.state_undo.back() =
        add_states(b, name_of(b, "states before the update"), placed_.at(b).optimizer, Kind::undo);
  }

  // Buffers for data in transit.

  struct TransitNeed {
    Bytes bytes = 0;        ///< size of the largest block
    std::size_t count = 0;  ///< number of blocks
  };

  /// Returns the number of blocks for which `counts` holds, and their largest `size`.
  template <class Size, class Counts>
  [[nodiscard]] TransitNeed need(Size size, Counts counts) const {
    TransitNeed found;
    for (const auto& [b, count] : alike_) {
      if (!counts(b)) continue;
      found.bytes = std::max(found.bytes, size(b));
      found.count += count;
    }
    return found;
  }

  void weight_buffers() {
    for (std::uint8_t d = 0; d < placed_.devices(); ++d) weight_buffers_of(d);
    const TransitNeed rows = rows_of_tables([](std::uint32_t) { return true; });
    layout_.table_rows =
        list_.add_slots("rows of tables", Tier::host, Kind::staging, rows.bytes,
                        std::min(rows.count, kSelectedTables) * placed_.micro_batches_per_stop());
    const auto on_host = [this](std::uint32_t b) {
      return placed_.at(b).weights == Tier::device ? rank_.updated_weights(b)
                                                   : rank_.resident_weights(b);
    };
    const TransitNeed staged = need(on_host, [this](std::uint32_t b) {
      const bool borrowed = placed_.at(b).weights == Tier::device && placed_.updates_below(b);
      return placed_.at(b).weights == Tier::nvme || borrowed;
    });
    layout_.weight_staging =
        list_.add_slots("weight staging", Tier::host, Kind::staging, staged.bytes,
                        std::min<std::size_t>(options_.buffers.weight_staging, staged.count));
  }

  /// Returns the number of tables for which `counts` holds, and their most rows.
  template <class Counts>
  [[nodiscard]] TransitNeed rows_of_tables(Counts counts) const {
    return need([this](std::uint32_t b) { return problem_.program().blocks[b].selected; },
                [&](std::uint32_t b) { return placed_.is_table(b) && counts(b); });
  }

  /// Adds the buffers of a device for the weights of its blocks.
  void weight_buffers_of(std::uint8_t device) {
    DevicePlaces& places = layout_.devices[device];
    const auto passes = [this, device](std::uint32_t b) {
      return placed_.device_of(b) == device && placed_.uses_weights_on_device(b) &&
             (rank_.shards_weights(b) || placed_.at(b).weights != Tier::device);
    };
    const TransitNeed rows =
        rows_of_tables([&](std::uint32_t b) { return placed_.device_of(b) == device; });
    places.table_rows =
        list_.add_slots("rows of tables in transit", Tier::device, Kind::staging, rows.bytes,
                        std::min(rows.count * placed_.micro_batches(), kRowSlots), device);
    const TransitNeed slots =
        need([this](std::uint32_t b) { return rank_.padded_weights(b); }, passes);
    const std::size_t wanted = options_.buffers.weight_slots + moved_for_other_blocks(passes);
    places.weight_slots = list_.add_slots("weights in transit", Tier::device, Kind::staging,
                                          slots.bytes, std::min(wanted, slots.count), device);
    const auto split_elsewhere = [&](std::uint32_t b) {
      return passes(b) && rank_.shards_weights(b) && placed_.at(b).weights != Tier::device;
    };
    const TransitNeed shares =
        need([this](std::uint32_t b) { return rank_.weight_partition(b); }, split_elsewhere);
    places.share_slots = list_.add_slots(
        "shares of weights in transit", Tier::device, Kind::staging, shares.bytes,
        std::min<std::size_t>({2, options_.buffers.weight_slots, shares.count}), device);
    if (rank_.quantizes_gathers()) {
      const TransitNeed codes =
          need([this](std::uint32_t b) { return rank_.gathered_codes(b); },
               [&](std::uint32_t b) { return passes(b) && rank_.shards_weights(b); });
      if (codes.bytes > 0) {
        places.codes =
            list_.add("weight codes", Tier::device, Kind::workspace, codes.bytes, device);
      }
    }
    // One is enough, because dequantisation of the next block's weights runs on the same stream as
    // the passes.
    const TransitNeed dequantized =
        need([this](std::uint32_t b) { return problem_.blocks[b].dequantized_bytes; },
             [this, device](std::uint32_t b) {
               return placed_.device_of(b) == device && problem_.blocks[b].is_quantized();
             });
    places.dequantized =
        list_.add_slots("dequantised weights", Tier::device, Kind::workspace, dequantized.bytes,
                        std::min<std::size_t>(1, dequantized.count), device);
  }

  /// Number of blocks whose weights move for the pass of another block. `moves`: for blocks of one
  /// device.
  template <class Moves>
  [[nodiscard]] std::size_t moved_for_other_blocks(Moves moves) const {
    const model::StepProgram& program = problem_.program();
    std::size_t most = 0;
    for (const model::PassId id : problem_.index->passes_over_blocks(placed_.form)) {
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

  void state_buffers() {
    std::vector<Bytes> sizes;  // of the buffers, which sub-groups use in turn
    const auto use_in_turn = [&](std::initializer_list<UpdatedIn> passes, bool speculates) {
      const std::size_t most = options_.buffers.state_staging;
      std::size_t next = 0;
      for (const UpdatedIn pass : passes) {
        placed_.for_swapped_states(
            pass,
            [&](const SwappedStates& swapped) {
              if (next == sizes.size()) sizes.push_back(0);
              sizes[next] = std::max(sizes[next], rank_.states(swapped.block, swapped.sub_group));
              next = next + 1 < most ? next + 1 : 0;
            },
            speculates);
      }
    };
    use_in_turn({UpdatedIn::forward, UpdatedIn::backward}, true);
    // While speculation pauses, all blocks are updated in the forward pass, in another order.
    if (placed_.any_speculates()) use_in_turn({UpdatedIn::forward}, false);
    for (std::size_t i = 0; i < sizes.size(); ++i) {
      layout_.state_staging.push_back(
          list_.add(list_.merges() ? std::string() : fmt::format("state staging {}", i), Tier::host,
                    Kind::staging, sizes[i]));
    }
  }

  void gradients() {
    for (const AlikeBlocks& blocks : alike_) {
      const auto statistics = [&](std::string_view what, Tier tier) {
        return add(blocks, what, tier, Kind::batch, problem_.statistics_bytes);
      };
      const bool has = placed_.is_trained(blocks.first);
      layout_.gradient.push_back(has ? gradient_home(blocks) : kNoBuffer);
      layout_.statistics_device.push_back(
          placed_.packs_on_device(blocks.first)
              ? statistics("gradient statistics on the device", Tier::device)
              : kNoBuffer);
      layout_.statistics_host.push_back(has ? statistics("gradient statistics", Tier::host)
                                            : kNoBuffer);
    }
    for (std::uint8_t d = 0; d < placed_.devices(); ++d) gradient_slots_of(d);
    row_gradients();
    const TransitNeed swapped =
        need([this](std::uint32_t b) { return placed_.swapped_gradient_bytes(b); },
             [this](std::uint32_t b) { return placed_.swaps_gradient(b); });
    layout_.gradient_staging =
        list_.add_slots("gradient staging", Tier::host, Kind::staging, swapped.bytes,
                        std::min<std::size_t>(options_.buffers.gradient_staging, swapped.count));
    if (!rank_.is_distributed()) return;
    for (std::uint8_t d = 0; d < placed_.devices(); ++d) {
      const TransitNeed all = need([this](std::uint32_t b) { return rank_.padded_gradient(b); },
                                   [this, d](std::uint32_t b) {
                                     return placed_.device_of(b) == d && rank_.is_distributed(b);
                                   });
      const Bytes least = problem_.sharers * kPage;
      layout_.devices[d].received =
          list_.add("gradients from other ranks", Tier::device, Kind::workspace,
                    std::clamp(all.bytes, least, std::max(least, kMaxReceivedBytes)), d);
    }
  }

  void gradient_slots_of(std::uint8_t device) {
    const TransitNeed packed =
        need([this](std::uint32_t b) { return rank_.padded_gradient(b); },
             [this, device](std::uint32_t b) {
               return placed_.device_of(b) == device && placed_.packs_on_device(b) &&
                      (placed_.updates_below(b) || rank_.shards_gradients(b));
             });
    layout_.devices[device].gradient_slots = list_.add_slots(
        "gradients in transit", Tier::device, Kind::staging, packed.bytes,
        std::min<std::size_t>(options_.buffers.gradient_slots, packed.count), device);
  }

  /// Adds the buffers for gradients of tables on their way to the host, and there until the
  /// gradient is packed: for all micro-batches of a table, or of all tables if these pass one by
  /// one.
  void row_gradients() {
    const auto rows = [this](std::uint32_t b) {
      return problem_.program().blocks[b].row_gradients;
    };
    const auto trained = [this](std::uint32_t b) { return placed_.is_trained_table(b); };
    for (std::uint8_t d = 0; d < placed_.devices(); ++d) {
      const TransitNeed own =
          need(rows, [&](std::uint32_t b) { return trained(b) && placed_.device_of(b) == d; });
      layout_.devices[d].row_gradients =
          list_.add_slots("gradients of rows in transit", Tier::device, Kind::staging, own.bytes,
                          std::min(own.count * placed_.micro_batches(), kRowSlots), d);
    }
    const TransitNeed all = need(rows, trained);
    const bool together = placed_.micro_batches_per_stop() == placed_.micro_batches();
    layout_.row_gradients = list_.add_slots(
        "gradients of rows", Tier::host, Kind::staging, all.bytes,
        (together ? std::min(all.count, kSelectedTables) : all.count) * placed_.micro_batches());
    const TransitNeed summed =
        need([this](std::uint32_t b) { return rank_.padded_gradient(b); },
             [&](std::uint32_t b) { return trained(b) && rank_.is_distributed(b); });
    layout_.scattered = list_.add_slots("gradients of tables", Tier::host, Kind::staging,
                                        summed.bytes, std::min<std::size_t>(1, summed.count));
  }

  BufferId gradient_home(const AlikeBlocks& blocks) {
    constexpr std::string_view kName = "gradient";
    const std::uint32_t b = blocks.first;
    if (placed_.swaps_gradient(b)) {
      // An eager update takes it from staging.
      if (options_.update == Update::eager) return kNoBuffer;
      return add(blocks, kName, Tier::nvme, Kind::gradients, placed_.swapped_gradient_bytes(b));
    }
    if (placed_.keeps_gradient_in_sum(b)) return kNoBuffer;
    if (placed_.updates_below(b)) {
      return add(blocks, kName, Tier::host, Kind::gradients, rank_.updated_gradient(b));
    }
    return add(blocks, kName, Tier::device, Kind::gradients,
               rank_.shards_gradients(b) ? rank_.gradient_shard(b) : rank_.padded_gradient(b));
  }

  void gradients_in_sums() {
    for (std::uint32_t b = 0; b < placed_.blocks(); ++b) {
      if (!placed_.keeps_gradient_in_sum(b)) continue;
      const model::SumId sum = problem_.index->sums_of(b).front();
      layout_.gradient[b] = layout_.values.sums_on_host[sum];
    }
  }

  void fill_staging() {
    const TransitNeed weights =
        need([this](std::uint32_t b) { return rank_.resident_weights(b); },
             [this](std::uint32_t b) { return placed_.at(b).weights == Tier::device; });
    const TransitNeed states =
        need([this](std::uint32_t b) { return rank_.states(b, 0); },  // the first is the largest
             [this](std::uint32_t b) {
               return placed_.trains() && placed_.is_trained(b) &&
                      placed_.at(b).optimizer == Tier::device;
             });
    const Bytes largest = std::max(weights.bytes, states.bytes);
    if (largest == 0) return;
    const Bytes enough = std::min(largest, kMinFillBytes);
    if (list_.merges() ? list_.largest_place() >= enough : takes_place(enough)) return;
    layout_.fill_staging = list_.add("staging for data on the device", Tier::host, Kind::staging,
                                     std::min(largest, kMaxFillBytes));
  }

  /// Returns whether a buffer of a step has `enough` bytes and becomes the passing place.
  bool takes_place(Bytes enough) {
    for (const auto* places :
         {&layout_.weight_staging, &layout_.state_staging, &layout_.values.staging,
          &layout_.gradient_staging, &layout_.gradient}) {
      for (const BufferId id : *places) {
        if (id == kNoBuffer) continue;
        const Buffer& buffer = list_[id];
        if (buffer.tier != Tier::host || buffer.bytes < enough) continue;
        layout_.fill_staging = id;
        return true;
      }
    }
    return false;
  }

  const PlacedProblem& placed_;
  const Problem& problem_;
  const Options& options_;
  const RankSizes& rank_;
  std::vector<AlikeBlocks> alike_;
  BufferList list_;
  Layout layout_;
};

}  // namespace

Layout make_layout(const PlacedProblem& placed) {
  return LayoutMaker(placed, false).make();
}

std::vector<Buffer> merged_buffers(const PlacedProblem& placed) {
  return std::move(LayoutMaker(placed, true).make().buffers);
}

}  // namespace ballast::step
