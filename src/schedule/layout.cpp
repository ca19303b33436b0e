#include "src/schedule/layout.h"

#include <algorithm>

#include <fmt/format.h>

#include "ballast/schedule/rank_sizes.h"

#include "src/schedule/home_list.h"

namespace ballast::schedule {
namespace {

/// Largest buffer for gradients received from other ranks; larger gradients are summed in rounds.
constexpr Bytes kArriving = 32 * kMiB;
/// A host buffer of a step with at least kServes bytes also serves to fill and read the device;
/// else a buffer of at most kPassing bytes is added.
constexpr Bytes kServes = 256 * kKiB;
constexpr Bytes kPassing = 1 * kMiB;

class LayoutMaker : private HomeList {
 public:
  LayoutMaker(const Workload& workload, const Placement& placement, const Options& options,
              bool merges)
      : HomeList(workload, placement, options, merges) {}

  Layout make() {
    homes();
    weight_passage();
    if (trains()) {
      state_passage();
      gradients();
      activations();
    } else {
      passing_activations();
    }
    tiles();
    routing();
    batch();
    reference();
    layout_.workspace = add("workspace", Tier::device, Kind::workspace, work_.workspace_bytes);
    passing_place();
    if (trains()) checkpoints();
    layout_.buffers = std::move(buffers_);
    return std::move(layout_);
  }

 private:
  [[nodiscard]] std::uint32_t batches() const {
    return trains() ? work_.micro_batches : work_.evaluation_micro_batches;
  }

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
    const bool tied_in_transit = work_.tied && work_.vocabulary_tiles == 1 && passes(0);
    const std::size_t wanted = options_.buffers.weight_slots + (tied_in_transit ? 1 : 0);
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
    const Need decoded = need([this](std::uint32_t b) { return work_.blocks[b].decoded_bytes; },
                              [this](std::uint32_t b) { return work_.blocks[b].is_coded(); });
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

  void state_passage() {
    std::vector<SwappedStates> swapped =
        swapped_states(work_, place_, options_, UpdatedIn::forward);
    const auto backward = swapped_states(work_, place_, options_, UpdatedIn::backward);
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
      return add(name_of(b, what), tier, Kind::batch, work_.statistics_bytes);
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
    const Need swapped = need([this](std::uint32_t b) { return swapped_gradient_bytes(work_, b); },
                              [this](std::uint32_t b) { return swaps_gradient(work_, place_, b); });
    layout_.gradient_staging =
        add_slots("gradient staging", Tier::host, Kind::staging, swapped.bytes,
                  std::min<std::size_t>(options_.buffers.gradient_staging, swapped.count));
    if (rank_.several()) {
      const Need all = need(whole, [this](std::uint32_t b) { return rank_.several(b); });
      const Bytes least = work_.world * kPage;
      layout_.arriving = add("gradients from other ranks", Tier::device, Kind::workspace,
                             std::clamp(all.bytes, least, std::max(least, kArriving)));
    }
    accumulators();
  }

  BufferId gradient_home(std::uint32_t b, std::string name) {
    if (swaps_gradient(work_, place_, b)) {
      // An eager update takes it from staging.
      if (options_.update == Update::eager) return kNoBuffer;
      return add(std::move(name), Tier::nvme, Kind::gradients, swapped_gradient_bytes(work_, b));
    }
    const Tier side = at(b).optimizer == Tier::device ? Tier::device : Tier::host;
    const bool shard = side == Tier::device ? rank_.splits_gradients(b) : rank_.splits_states(b);
    return add(std::move(name), side, Kind::gradients,
               shard ? rank_.gradient_shard(b) : rank_.whole_gradient(b));
  }

  BufferId own_accumulator(std::uint32_t b) {
    if (!is_trained(b)) return kNoBuffer;
    return add(name_of(b, "accumulator"), Tier::device, Kind::accumulators,
               work_.blocks[b].accumulator_bytes);
  }

  void accumulators() {
    if (options_.order == Order::layer_major) {
      const Need largest =
          need([this](std::uint32_t b) { return work_.blocks[b].accumulator_bytes; },
               [](std::uint32_t) { return true; });
      const BufferId shared =
          add("gradient accumulator", Tier::device, Kind::accumulators, largest.bytes);
      for (std::uint32_t b = 0; b < blocks(); ++b) {
        layout_.accumulator.push_back(is_trained(b) ? shared : kNoBuffer);
      }
    } else {
      for (std::uint32_t b = 0; b < blocks(); ++b) {
        layout_.accumulator.push_back(own_accumulator(b));
      }
    }
    const bool one_pass = in_one_pass(work_, place_);
    const std::uint32_t number = work_.vocabulary_tiles;
    if (work_.trains_tied()) {
      const bool all = one_pass || options_.order == Order::micro_batch_major;
      const auto name = [](std::size_t tile) { return fmt::format("tied accumulator {}", tile); };
      layout_.output_accumulator = add_equal(name, Tier::device, Kind::accumulators,
                                             work_.tied_accumulator_bytes, all ? number : 1);
      layout_.output_accumulator.resize(number, layout_.output_accumulator.back());
    } else if (one_pass && !work_.tied && options_.order == Order::layer_major) {
      // The first tile uses the shared one.
      for (std::uint32_t b = work_.head() + 1; b < blocks(); ++b) {
        layout_.accumulator[b] = own_accumulator(b);
      }
    }
  }

  /// What tiles of layers and of the head need between them.
  void tiles() {
    const bool head = work_.vocabulary_tiles > 1;
    const bool layers = work_.cuts_layers();
    const bool one_pass = trains() && in_one_pass(work_, place_);
    const std::uint32_t together = micro_batches_together();
    // An evaluation visits one tile of the head after the other.
    const bool evaluates_only = one_pass && !layers;
    if (head || layers) {
      layout_.rows =
          add_slots("rows between tiles", Tier::device, Kind::activations, work_.rows_bytes,
                    evaluates_only ? std::min(work_.evaluation_micro_batches, together) : together);
    }
    layout_.head_rows = layout_.rows;
    // The backward pass of a tied embedding still needs those of the head.
    if (head && layers && work_.trains_tied() && trains() && !one_pass) {
      layout_.head_rows = add_slots("rows of the head", Tier::device, Kind::activations,
                                    work_.rows_bytes, micro_batches_together());
    }
    if (layers || (head && trains() && !one_pass)) {
      layout_.row_sums = add_slots("sums over tiles", Tier::device, Kind::activations,
                                   work_.row_sums_bytes, micro_batches_together());
    }
    if (head && one_pass) {
      layout_.intermediates[work_.head()] =
          add_slots("logits", Tier::device, Kind::intermediates,
                    work_.blocks[work_.head()].intermediate_bytes, 1);
    }
  }

  void routing() {
    const std::uint32_t together = micro_batches_together();
    layout_.routing_device = add_slots("routing on the device", Tier::device, Kind::batch,
                                       work_.routing_bytes, together);
    layout_.routing_of_ranks =
        add_slots("routing of all ranks", Tier::device, Kind::batch,
                  work_.world > 1 ? work_.world * work_.routing_bytes : 0, together);
    layout_.router_totals = add_slots("sums over routers", Tier::device, Kind::batch,
                                      trains() ? work_.router_totals_bytes : 0, together);
    layout_.routing_host.assign(blocks(), kNoBuffer);
    for (std::uint32_t b = 0; b < blocks(); ++b) {
      if (!work_.blocks[b].routes) continue;
      layout_.routing_host[b] = add(name_of(b, "routing"), Tier::host, Kind::batch,
                                    batches() * (work_.world * work_.routing_bytes));
    }
  }

  /// Micro-batches that pass a block before the next block's turn.
  [[nodiscard]] std::uint32_t micro_batches_together() const {
    return options_.order == Order::layer_major ? batches() : 1;
  }

  void activations() {
    const std::uint32_t together = micro_batches_together();
    layout_.input_home.resize(blocks());
    layout_.intermediates.resize(blocks());
    std::size_t leaving = 0;
    std::size_t to_nvme = 0;
    for (std::uint32_t b = work_.first_layer(); b < work_.head(); ++b) {
      if (!work_.places_input(b)) continue;
      const bool leaves = input_leaves(work_, place_, b);
      leaving += leaves ? 1 : 0;
      to_nvme += leaves && at(b).activations == Tier::nvme ? together : 0;
      add_inputs(b, leaves ? at(b).activations : Tier::device, together);
      if (keeps_intermediates(work_, place_, b)) {
        layout_.intermediates[b] =
            add_slots(name_of(b, "intermediates"), Tier::device, Kind::intermediates,
                      work_.blocks[b].intermediate_bytes, together);
      }
    }
    add_middles(together);
    // Inputs of layers without a backward pass only pass through.
    const bool passes = leaving > 0 || work_.first_differentiated > work_.first_layer();
    if (!passes) add_inputs(work_.head(), Tier::device, together);
    if (passes) {
      layout_.activation_slots = add_slots("activations in transit", Tier::device,
                                           Kind::activations, work_.activation_bytes, together + 2);
    }
    layout_.activation_staging =
        add_slots("activation staging", Tier::host, Kind::staging, swapped_input_bytes(work_),
                  std::min<std::size_t>(options_.buffers.activation_staging, to_nvme));
    layout_.flow = add_slots("activation gradient", Tier::device, Kind::activations,
                             work_.activation_bytes, together);
  }

  /// Inputs of the second halves of layers: kept, or passing through buffers that all others share.
  void add_middles(std::uint32_t together) {
    std::uint32_t shared = 0;
    for (std::uint32_t b = work_.first_layer(); b < work_.head(); ++b) {
      if (!work_.blocks[b].mid_layer) continue;
      const bool keeps = work_.has_intermediates(b) && at(b).keeps_intermediates;
      if (shared > 0 && !keeps) {
        layout_.input_home[b] = layout_.input_home[shared];
        continue;
      }
      add_inputs(b, Tier::device, together);
      if (!keeps) shared = b;
    }
  }

  /// A block's outputs while those of the block before are read, one after the other.
  void passing_activations() {
    const std::uint32_t together = micro_batches_together();
    layout_.input_home.resize(blocks());
    // With one more than are read, or fewer for a model without layers.
    const std::uint32_t count = together + (work_.head() > work_.first_layer() ? 1 : 0);
    layout_.activation_slots =
        add_slots("activations", Tier::device, Kind::activations, work_.activation_bytes, count);
  }

  void add_inputs(std::uint32_t block, Tier tier, std::uint32_t count) {
    const Bytes bytes = tier == Tier::nvme ? swapped_input_bytes(work_) : work_.activation_bytes;
    const std::string& name = work_.blocks[block].name;
    layout_.input_home[block] =
        add_equal([&name](std::size_t m) { return fmt::format("input of {}, {}", name, m); }, tier,
                  Kind::activations, bytes, count);
  }

  void batch() {
    layout_.batch_host = add_slots("batch", Tier::host, Kind::batch, work_.batch_bytes, batches());
    layout_.batch_device =
        add_slots("batch on the device", Tier::device, Kind::batch, work_.batch_bytes, batches());
    layout_.losses_device =
        add("losses on the device", Tier::device, Kind::batch, work_.losses_bytes);
    layout_.losses_host = add("losses", Tier::host, Kind::batch, work_.losses_bytes);
    layout_.verdict = add("verdict", Tier::host, Kind::batch, 0);
  }

  /// What passes of the reference need besides those of the trained model.
  void reference() {
    if (!work_.has_reference()) return;
    const std::uint32_t together = micro_batches_together();
    layout_.pairs = add_slots("pairs", Tier::device, Kind::batch, work_.pairs_bytes, batches());
    layout_.reference_slots = add_slots("activations of the reference", Tier::device,
                                        Kind::activations, work_.activation_bytes, together + 1);
    if (work_.vocabulary_tiles > 1) {
      layout_.reference_rows = add_slots("rows of the reference", Tier::device, Kind::activations,
                                         work_.rows_bytes, together);
    }
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
         {&layout_.weight_staging, &layout_.state_staging, &layout_.activation_staging,
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
};

}  // namespace

Layout make_layout(const Workload& workload, const Placement& placement, const Options& options) {
  return LayoutMaker(workload, placement, options, false).make();
}

std::vector<Buffer> merged_buffers(const Workload& workload, const Placement& placement,
                                   const Options& options) {
  return std::move(LayoutMaker(workload, placement, options, true).make().buffers);
}

}  // namespace ballast::schedule
