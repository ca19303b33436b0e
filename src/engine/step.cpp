#include "src/engine/step.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <optional>
#include <span>
#include <vector>

#include "ballast/core/error.h"
#include "ballast/core/random.h"
#include "ballast/schedule/rank_sizes.h"

#include "src/device/profiler_range.h"
#include "src/engine/arguments.h"
#include "src/engine/findings.h"
#include "src/engine/state_layout.h"

namespace ballast::engine {

using schedule::Action;
using schedule::BufferId;
using schedule::Lane;
using schedule::Operation;
using schedule::RankSizes;
using schedule::Role;
using schedule::Speculation;
using schedule::Use;

/// The current operation.
class Lanes::Step : private PassBuffers {
 public:
  /// `before`: of the plan submitted before the operation's.
  Step(Lanes& lanes, const Operation& operation, StepContext& context, const StepContext& before)
      : PassBuffers(lanes.modules_.blueprint, lanes.modules_.store, operation),
        lanes_(lanes),
        modules_(lanes.modules_),
        context_(context),
        before_(before) {}

  /// Returns whether there was something to do.
  bool perform() {
    if (has_work(context_.micro_batches, before_.result.expert_rows)) {
      work_on_lane();
      return true;
    }
    rest();
    return false;
  }

 private:
  /// Instead of work: an expert without rows has a gradient of zeros.
  void rest() {
    const auto clear = [this] {
      const HostBytes bytes = host(target(), operation_.bytes);
      std::memset(bytes.data(), 0, bytes.size());
    };
    switch (operation_.action) {
      case Action::offload_gradient:
      case Action::offload_statistics:
      case Action::fetch_gradient:
        clear();
        break;
      case Action::pack_gradient:
        return clear_home_of_gradient(stream(), sizes().whole_gradient(operation_.block));
      case Action::reduce_gradient:
        if (has(Role::gradient_source)) {
          auto& stream = *lanes_.channels_.reduce_stream;
          clear_home_of_gradient(stream, sizes().gradient_shard(operation_.block));
          stream.synchronize();
        }
        break;
      default:
        break;
    }
    if (operation_.lane == Lane::fetch) lanes_.fetches_.add(nullptr);
    if (operation_.lane == Lane::writeback) lanes_.writebacks_.add(nullptr);
  }

  /// An update on the device reads it there.
  void clear_home_of_gradient(device::Stream& stream, Bytes bytes) {
    if (blueprint_.placement.blocks[operation_.block].optimizer != Tier::device) return;
    modules_.compute.zero(stream, view_as<float>(device(Role::gradient, bytes)));
  }

  void work_on_lane() {
    switch (operation_.lane) {
      case Lane::compute:
      case Lane::update:
        return run_on_lane();
      case Lane::upload:
        return modules_.device.copy_to_device(stream(), device(target(), operation_.bytes),
                                              host(source(), operation_.bytes));
      case Lane::offload:
        return modules_.device.copy_to_host(stream(), offloaded_to(),
                                            device(source(), operation_.bytes));
      case Lane::gather:
        return operation_.action == Action::gather_routing ? gather_routing() : gather_weights();
      case Lane::reduce:
        return reduce_gradient();
      case Lane::fetch: {
        // What an update needs is read ahead of it; a pass needs its weights sooner.
        const Action action = operation_.action;
        const bool ahead = action == Action::fetch_states || action == Action::fetch_gradient;
        return lanes_.fetches_.add(modules_.store.fetch(source().buffer, staged(target()), ahead));
      }
      case Lane::writeback:
        keep_old_slot();
        return lanes_.writebacks_.add(modules_.store.writeback(
            target().buffer, staged(source()), lanes_.zeros_from_[source().buffer]));
    }
  }

  /// The bytes of a staging buffer that NVMe fills or takes.
  [[nodiscard]] HostBytes staged(const Use& use) const {
    const Bytes offset = operation_.offset;
    return modules_.store.host(use.buffer, offset + operation_.bytes).subspan(offset);
  }

  /// The routings of all micro-batches lie next to each other.
  [[nodiscard]] HostBytes offloaded_to() const {
    if (operation_.action != Action::offload_routing) return host(target(), operation_.bytes);
    return of_micro_batch(blueprint_.workload, store_, target().buffer, operation_.micro);
  }

  void run_on_lane() {
    switch (operation_.action) {
      case Action::decode_weights:
        return modules_.compute.decode_block(stream(), operation_.block,
                                             device(Role::weights_source, work().weight_bytes),
                                             weights());
      case Action::clear_gradient:
        return clear_gradient();
      case Action::pack_gradient:
        return pack_gradient();
      case Action::gate:
        return gate();
      case Action::update_on_device:
      case Action::update_on_host:
        return update();
      case Action::initialize:
      case Action::read:
        return visit();
      default:
        return compute();
    }
  }

  /// A speculative writeback writes the other slot; the one before stays for a rollback.
  void keep_old_slot() {
    if (operation_.speculation != Speculation::speculates) return;
    const bool weights = has(Role::undo_weights);
    modules_.store.exchange(target().buffer,
                            operation_.buffer(weights ? Role::undo_weights : Role::undo_states));
  }

  /// Split weights are gathered from the ranks that share a copy; updated shards of weights that a
  /// rank keeps, from all ranks that keep the same weights.
  void gather_weights() {
    if (has(Role::workspace)) return gather_weights_as_codes();
    auto& stream = *lanes_.channels_.gather_stream;
    const std::uint32_t block = operation_.block;
    if (has(Role::weights_source)) {
      in_group().all_gather(stream, device(Role::weights_source, sizes().weights(block)),
                            device(Role::weights, sizes().whole_weights(block)));
    } else {
      const bool share = sizes().splits_weights(block);
      const DeviceBytes kept = device(Role::weights, sizes().updated_by_all(block));
      const Bytes shard = sizes().updated_weights(block);
      (share ? *lanes_.channels_.gathering_share : *lanes_.channels_.gathering)
          .all_gather(stream, kept.subview(shard_at_home() * shard, shard), kept);
    }
    stream.synchronize();
  }

  void gather_routing() {
    auto& stream = *lanes_.channels_.gather_stream;
    lanes_.channels_.gathering->all_gather(
        stream, device(Role::routing_source, blueprint_.workload.routing_bytes),
        device(Role::routing, of_micro_batch(blueprint_.workload)));
    stream.synchronize();
  }

  /// Decodes this rank's share too, so that all ranks compute with the same weights.
  void gather_weights_as_codes() {
    auto& stream = *lanes_.channels_.gather_stream;
    const std::uint32_t block = operation_.block;
    const Bytes share = sizes().weights(block);
    const Bytes coded = sizes().share_codes(block);
    const DeviceBytes codes = device(Role::workspace, sizes().whole_codes(block));
    const DeviceBytes whole = device(Role::weights, sizes().whole_weights(block));
    const std::uint32_t place = blueprint_.rank % sizes().group();
    const DeviceBytes own = codes.subview(place * coded, coded);
    modules_.compute.encode_weights(stream, device(Role::weights_source, share), own);
    in_group().all_gather(stream, own, codes);
    for (std::uint32_t g = 0; g < sizes().group(); ++g) {
      modules_.compute.decode_weights(stream, codes.subview(g * coded, coded),
                                      whole.subview(g * share, share));
    }
    stream.synchronize();
  }

  /// Sums over ranks, in full or only this rank's shard. Statistics are always those of the shard,
  /// so that they are the same in every stage.
  void reduce_gradient() {
    auto& stream = *lanes_.channels_.reduce_stream;
    const Bytes shard = sizes().gradient_shard(operation_.block);
    const bool in_place = !has(Role::gradient_source);
    const BufferId packed = operation_.buffer(in_place ? Role::gradient : Role::gradient_source);
    const DeviceBytes whole =
        modules_.store.device(packed, sizes().whole_gradient(operation_.block));
    const BufferId arriving = operation_.buffer(Role::workspace);
    const DeviceBytes scratch =
        modules_.store.device(arriving, blueprint_.schedule.buffers[arriving].bytes);
    const DeviceBytes sum =
        in_place ? whole.subview(shard_number() * shard, shard) : device(Role::gradient, shard);
    const DType type = blueprint_.type;
    if (sizes().splits_states(operation_.block)) {
      lanes_.channels_.reducing->reduce_scatter(stream, whole, sum, type, scratch);
    } else {
      lanes_.channels_.reducing->all_reduce(stream, whole, type, scratch);
    }
    modules_.compute.measure_gradient(stream, sum, scratch, gradient_statistics());
    stream.synchronize();
  }

  void compute() {
    modules_.compute.run(stream(), pass(), arguments(scalars(), lanes_.channels_.rows.get()));
  }

  [[nodiscard]] model::PassScalars scalars() const {
    const std::uint32_t ranks = blueprint_.workload.world;
    const bool first = operation_.micro == 0;
    return {.accumulation = first ? model::Accumulation::first : model::Accumulation::later,
            .dropout = operation_.reference ? model::Dropout() : dropout(),
            .loss_gradient = context_.loss_gradient(),
            .router_gradient = context_.router_gradient(ranks),
            .preference = modules_.preference,
            .shard = shard_number(),
            .ranks = ranks};
  }

  /// The same in the passes of a micro-batch, also after a resume.
  [[nodiscard]] model::Dropout dropout() const {
    const std::uint64_t micro =
        std::uint64_t{operation_.micro} * blueprint_.workload.world + blueprint_.rank;
    const auto step = static_cast<std::uint64_t>(context_.hyper.step);
    return {.on = context_.trains, .key = random_u64(modules_.seed, step, micro)};
  }

  void clear_gradient() {
    modules_.compute.clear_gradient(stream(), operation_.block, accumulator());
  }

  void pack_gradient() {
    const DeviceBytes whole = device(Role::gradient, sizes().whole_gradient(operation_.block));
    const DeviceBytes packed = whole.subview(0, work().gradient_bytes);
    // The reduction includes the padding to equal shards.
    const DeviceBytes padding = whole.subview(packed.size(), whole.size() - packed.size());
    if (!padding.empty()) modules_.compute.zero(stream(), view_as<float>(padding));
    modules_.compute.pack_gradient(stream(), accumulator(), output_accumulator(), packed,
                                   gradient_statistics());
  }

  /// Computes loss, global norm (blocks in order, in double) and DeepSpeed's clip coefficient:
  /// norm' = (norm + 1e-6) / clip, coefficient = 1 / max(1, norm'). A gradient that is too large
  /// for the loss scale is infinite in fp16, so it skips the step.
  void gate() {
    if (has(Role::routing)) note_routing(context_.micro_batches, context_.result);
    const Findings all =
        sum_findings(own_losses(context_.micro_batches), own_statistics(), sizes(), modules_.ranks);
    context_.result.pairs = mean_of(all.losses, context_.divisor());
    context_.result.loss = context_.result.pairs.loss;
    if (!has(Role::statistics)) return;
    const double norm = std::sqrt(all.squares) / context_.loss_scale;
    context_.result.grad_norm = norm;
    context_.result.skipped = all.non_finite != 0 || !std::isfinite(norm);
    // Eager updates do not wait for this and are not clipped.
    if (blueprint_.options.update == schedule::Update::eager) return;
    const double clip = modules_.gradient_clipping;
    const double excess = clip > 0.0 ? (norm + 1e-6) / clip : 0.0;
    if (!(excess > 1.0)) return;
    context_.hyper.gradient_scale = static_cast<float>(1.0 / excess / context_.loss_scale);
  }

  void update() {
    const bool on_host = operation_.action == Action::update_on_host;
    const auto at = [&](Role role, Bytes bytes) {
      return on_host ? host(role, bytes).data() : device(role, bytes).raw();
    };
    const std::byte* gradient = at(Role::gradient, sizes().updated_gradient(operation_.block));
    const cpu_adam::Shard shard = sub_group(at, Role::weights, Role::states, gradient);
    const cpu_adam::Updater& updater = modules_.updater;
    if (operation_.speculation == Speculation::redoes) {
      updater.restore(context_.hyper.optimizer, shard, undo(gradient));
    }
    if (!allowed()) return;
    if (!on_host) return modules_.device_update.step(stream(), context_.hyper, shard);
    if (operation_.speculation != Speculation::speculates) {
      return updater.step(context_.hyper, shard);
    }
    // The gate's coefficient is not known yet.
    cpu_adam::Hyper assumed = context_.hyper;
    assumed.gradient_scale = context_.unclipped_scale();
    updater.step(assumed, shard, undo(gradient));
  }

  /// The undo buffers in host memory; null for values that are on NVMe.
  [[nodiscard]] cpu_adam::Shard undo(const std::byte* gradient) const {
    const auto at = [&](Role role, Bytes bytes) {
      return has(role) ? host(role, bytes).data() : nullptr;
    };
    return sub_group(at, Role::undo_weights, Role::undo_states, gradient);
  }

  template <class At>
  [[nodiscard]] cpu_adam::Shard sub_group(At at, Role weights, Role states,
                                          const std::byte* gradient) const {
    const Operation& op = operation_;
    return make_shard(blueprint_, op.block, op.sub_group,
                      at(weights, sizes().updated_weights(op.block)),
                      at(states, sizes().states(op.block, op.sub_group)), gradient);
  }

  /// The visitor reads or fills a piece; activations begin as zeros.
  void visit() {
    const Use& use = operation_.uses.front();
    const HostBytes bytes = modules_.store.host(use.buffer, operation_.bytes);
    HomePiece piece = {operation_.block, use.role == Role::states, operation_.sub_group,
                       operation_.offset, bytes};
    if (use.role == Role::output) {
      std::memset(bytes.data(), 0, bytes.size());
      piece.zeros_from = 0;
    } else {
      lanes_.visitor_(piece);
    }
    lanes_.zeros_from_[use.buffer] = piece.zeros_from;
  }

  [[nodiscard]] device::Stream& stream() const { return lanes_.queue_of(operation_).stream(); }
  [[nodiscard]] comm::Communicator& in_group() const {
    return lanes_.channels_.gathering_in_group ? *lanes_.channels_.gathering_in_group
                                               : *lanes_.channels_.gathering;
  }
  /// Of each block's gradient.
  [[nodiscard]] std::vector<model::GradientStats> own_statistics() const {
    std::vector<model::GradientStats> own;
    for (const schedule::Use& use : operation_.uses) {
      if (use.role == Role::statistics) own.push_back(statistics(use.buffer));
    }
    return own;
  }

  /// Whether the update may run: the gate's decision, which a speculative one does not wait for. An
  /// eager update neither; other blocks may already be updated, so a gradient that is not finite is
  /// an error.
  [[nodiscard]] bool allowed() const {
    if (operation_.speculation == Speculation::speculates) return true;
    if (!has(Role::statistics)) return !context_.result.skipped;
    if (statistics(operation_.buffer(Role::statistics)).non_finite == 0) return true;
    throw Error(ErrorCategory::numeric,
                "the gradient is not finite, and later blocks are already updated; set "
                "ballast.update to \"gated\", which skips such steps, or lower the learning rate");
  }

  Lanes& lanes_;
  const Modules& modules_;
  StepContext& context_;
  const StepContext& before_;
};

void Lanes::start(const Operation& operation, std::uint64_t submission) {
  std::optional<device::ProfilerRange> range;
  if (modules_.nvtx) range.emplace(describe(operation, modules_.blueprint.workload));
  const bool worked =
      Step(*this, operation, context(submission - operation.lag), context(submission - 1))
          .perform();
  if (!worked) idle_bytes_[static_cast<std::size_t>(operation.lane)] += operation.bytes;
  if (mode_of(operation.lane) == schedule::Mode::streamed) queue_of(operation).end_operation();
}

void Lanes::finish(const Operation& operation) {
  switch (operation.lane) {
    case Lane::fetch:
      return fetches_.finish_operation();
    case Lane::writeback:
      return writebacks_.finish_operation();
    default:
      return queue_of(operation).finish_operation();
  }
}

}  // namespace ballast::engine
