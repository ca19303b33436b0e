#include "src/engine/handlers.h"

#include <cstring>
#include <optional>
#include <span>
#include <vector>

#include <fmt/format.h>

#include "ballast/core/error.h"
#include "ballast/device/device.h"
#include "ballast/model/block_layout.h"
#include "ballast/model/packed_values.h"
#include "ballast/step/labels.h"

// Handlers of movements, and the table of all handlers.

namespace ballast::engine {

using plan::Action;
using plan::BufferId;
using plan::Lane;
using plan::Operation;
using plan::Payload;
using plan::Role;
using plan::Speculation;
using plan::Use;
using step::MovedValue;
using step::RankSizes;

namespace {

void run_decode(const CurrentOperation& at) {
  at.compute().decode_block(at.stream(), at.operation.block,
                            at.device(Role::source, at.block_sizes().weight_bytes),
                            at.device(Role::target, at.block_sizes().whole_weight_bytes()));
}

/// Returns the gradient sums of the operation's block.
DeviceView<float> sums_of(const CurrentOperation& at, Role role) {
  const step::ProgramIndex& index = *at.problem().index;
  const model::SumId sum = index.sums_of(at.operation.block).front();
  return view_as<float>(at.device(role, index.program().sums[sum].bytes));
}

void run_clear(const CurrentOperation& at) {
  at.compute().clear_gradient(at.stream(), at.operation.block, sums_of(at, Role::target));
}

/// Output for the statistics of the block's gradient; empty if the operation has none.
DeviceView<GradientStats> statistics_of(const CurrentOperation& at) {
  if (!at.has(Role::statistics)) return {};
  return view_as<GradientStats>(at.device(Role::statistics, sizeof(GradientStats)));
}

/// Returns the batches whose tokens have rows in the gradient sums of the operation's block.
std::vector<model::BatchViews> batches_of(const CurrentOperation& at) {
  const model::MicroBatchShape& shape = at.blueprint().shape;
  std::vector<model::BatchViews> batches;
  for (const Use& use : at.operation.uses) {
    if (use.role != Role::tokens) continue;
    const Bytes bytes = at.blueprint().schedule.buffers[use.buffer].bytes;
    batches.push_back(model::BatchViews::cut(at.device(use, bytes), shape.tokens(), shape.slices));
  }
  return batches;
}

/// Returns the sums that the head has added for the tied tile in the operation's block, if any.
DeviceView<float> tied_gradient(const CurrentOperation& at) {
  if (!at.has(Role::added_gradient)) return {};
  const model::Architecture& model = at.blueprint().own();
  const Elems size = model.tile(at.operation.block).rows * model.config.hidden_size;
  return view_as<float>(at.device(Role::added_gradient, size * sizeof(float)));
}

void run_pack(const CurrentOperation& at) {
  const DeviceBytes whole = at.device(Role::target, at.sizes().padded_gradient(at.operation.block));
  const DeviceBytes packed = whole.subview(0, at.block_sizes().gradient_bytes);
  // The reduction includes the padding to equal shards.
  const DeviceBytes padding = whole.subview(packed.size(), whole.size() - packed.size());
  model::Compute& compute = at.compute();
  if (!padding.empty()) compute.zero(at.stream(), view_as<float>(padding));
  const std::vector<model::BatchViews> batches = batches_of(at);
  compute.pack_gradient(
      at.stream(), at.operation.block,
      {.own = sums_of(at, Role::source), .tied = tied_gradient(at), .batches = batches}, packed,
      statistics_of(at));
}

void run_upload(const CurrentOperation& at) {
  const Bytes bytes = at.operation.bytes;
  at.own().device.copy_to_device(at.stream(), at.device(at.target(), bytes),
                                 at.host(at.source(), bytes));
}

void run_offload(const CurrentOperation& at) {
  const Operation& operation = at.operation;
  // The counts of all micro-batches are contiguous.
  const HostBytes place = moves(operation, MovedValue::routing)
                              ? counts_of_micro_batch(at.problem(), at.modules().store,
                                                      at.target().buffer, operation.micro)
                              : at.host(at.target(), operation.bytes);
  at.own().device.copy_to_host(at.stream(), place, at.device(at.source(), operation.bytes));
}

template <class T>
std::span<const T> values_of(HostBytes bytes) {
  return {reinterpret_cast<const T*>(bytes.data()), bytes.size() / sizeof(T)};
}

/// Copies the rows of a table that the tokens of a micro-batch name. Throws Error(data) with the
/// first token that the table does not have.
void run_select(const CurrentOperation& at) {
  const model::BlockSpec& block = at.blueprint().own().blocks[at.operation.block];
  const model::TensorSpec& table = block.tensors.front();
  const std::size_t tokens = at.blueprint().shape.tokens();
  const Bytes row = table.shape.back() * size_of(at.blueprint().type);
  const HostBytes weights = at.host(Role::source, table.size * size_of(at.blueprint().type));
  const HostBytes batch = at.host(Role::tokens, tokens * sizeof(std::int32_t));
  const HostBytes rows = at.host(Role::target, tokens * row);
  const std::span<const std::int32_t> ids = values_of<std::int32_t>(batch);
  for (std::size_t i = 0; i < tokens; ++i) {
    const auto token = static_cast<std::size_t>(ids[i]);
    if (token >= table.shape.front()) {
      throw Error(ErrorCategory::data,
                  fmt::format("token {} has no row in the embeddings of the layers: "
                              "model.vocab_size_per_layer_input is {}",
                              ids[i], table.shape.front()));
    }
    std::memcpy(rows.data() + i * row, weights.data() + token * row, row);
  }
}

/// Packs the gradient of a table from those of the rows that tokens have selected.
void run_scatter(const CurrentOperation& at) {
  const std::uint32_t block = at.operation.block;
  const Bytes bytes = at.problem().program().blocks[block].row_gradients;
  const Bytes ids = at.blueprint().shape.tokens() * sizeof(std::int32_t);
  std::vector<model::RowGradients> micro_batches;
  for (const Use& use : at.operation.uses) {
    if (use.role == Role::source) {
      micro_batches.push_back({.rows = values_of<float>(at.host(use, bytes))});
    } else if (use.role == Role::tokens) {
      micro_batches.back().tokens = values_of<std::int32_t>(at.host(use, ids));
    }
  }
  const std::size_t width = at.blueprint().own().blocks[block].tensors.front().shape.back();
  const GradientStats found =
      model::scatter_rows(at.blueprint().type, micro_batches, width,
                          at.host(Role::target, at.sizes().padded_gradient(block)),
                          model::pad_token(at.blueprint().own().config));
  if (!at.has(Role::statistics)) return;
  std::memcpy(at.host(Role::statistics, sizeof found).data(), &found, sizeof found);
}

/// Returns the bytes of a staging buffer that NVMe reads or writes.
HostBytes staged(const CurrentOperation& at, const Use& use) {
  const Bytes offset = at.operation.offset;
  return at.modules().store.host(use.buffer, offset + at.operation.bytes).subspan(offset);
}

void run_fetch(const CurrentOperation& at) {
  // Data for updates are read ahead; a pass needs its weights sooner.
  const Payload payload = at.operation.payload;
  const bool ahead = payload == Payload::states || payload == Payload::gradient;
  at.lanes.fetches().add(
      at.modules().store.fetch(at.source().buffer, staged(at, at.target()), ahead));
}

void run_writeback(const CurrentOperation& at) {
  const Operation& operation = at.operation;
  state::Store& store = at.modules().store;
  // A speculative writeback writes the other slot; the old one stays for a rollback.
  if (operation.speculation == Speculation::speculates) {
    const bool weights = operation.payload == Payload::weights;
    store.exchange(at.target().buffer,
                   operation.buffer(weights ? Role::undo_weights : Role::undo_states));
  }
  at.lanes.writebacks().add(store.writeback(at.target().buffer, staged(at, at.source()),
                                            at.lanes.zeros_from(at.source().buffer)));
}

/// Decodes this rank's share too, so that all ranks compute with the same weights.
void gather_as_codes(const CurrentOperation& at, comm::Communicator& channel) {
  device::Stream& stream = *at.channels().stream;
  const RankSizes sizes = at.sizes();
  const std::uint32_t block = at.operation.block;
  const Bytes share = sizes.resident_weights(block);
  const Bytes quantized = sizes.partition_codes(block);
  const DeviceBytes codes = at.device(Role::scratch, sizes.gathered_codes(block));
  const DeviceBytes whole = at.device(Role::target, sizes.padded_weights(block));
  const std::uint32_t place = at.blueprint().mesh.sharer() % sizes.ranks_per_copy();
  const DeviceBytes own = codes.subview(place * quantized, quantized);
  model::Compute& compute = at.compute();
  compute.quantize_weights(stream, at.device(Role::source, share), own);
  channel.all_gather(stream, own, codes);
  for (std::uint32_t g = 0; g < sizes.ranks_per_copy(); ++g) {
    compute.dequantize_weights(stream, codes.subview(g * quantized, quantized),
                               whole.subview(g * share, share));
  }
}

/// Gathers split weights from the ranks that share a copy, or updated shards of kept weights in
/// place from all ranks that keep the same weights.
void gather_weights(const CurrentOperation& at, comm::Communicator& channel) {
  device::Stream& stream = *at.channels().stream;
  const RankSizes sizes = at.sizes();
  const std::uint32_t block = at.operation.block;
  if (at.has(Role::source)) {
    return channel.all_gather(stream, at.device(Role::source, sizes.resident_weights(block)),
                              at.device(Role::target, sizes.padded_weights(block)));
  }
  const DeviceBytes kept = at.device(Role::target, sizes.trained_weights(block));
  const Bytes shard = sizes.updated_weights(block);
  channel.all_gather(stream, kept.subview(at.shard_at_home() * shard, shard), kept);
}

void gather_counts(const CurrentOperation& at, comm::Communicator& channel) {
  channel.all_gather(*at.channels().stream,
                     at.device(Role::source, at.problem().index->routing_bytes()),
                     at.device(Role::target, counts_of_micro_batch(at.problem())));
}

/// Completes a value from the parts of all tensor places.
void gather_parts(const CurrentOperation& at) {
  const Mesh& mesh = at.blueprint().mesh;
  const Bytes part = at.operation.bytes / (mesh.tensor - 1);
  const DeviceBytes whole = at.device(at.target(), mesh.tensor * part);
  const DeviceBytes own = at.has(Role::source) ? at.device(Role::source, part)
                                               : whole.subview(mesh.tensor_place() * part, part);
  at.channels().tensor->all_gather(*at.channels().stream, own, whole);
}

void run_gather(const CurrentOperation& at) {
  if (at.operation.group == plan::RankGroup::tensor) return gather_parts(at);
  comm::Communicator& channel = at.channels().gathering(at.operation.group);
  if (at.operation.payload == Payload::value) {
    gather_counts(at, channel);
  } else if (at.has(Role::scratch)) {
    gather_as_codes(at, channel);
  } else {
    gather_weights(at, channel);
  }
}

/// Sums over ranks, in full or only this rank's shard. Statistics are always those of the shard, so
/// that they are equal in every stage.
void run_reduce(const CurrentOperation& at) {
  const Operation& operation = at.operation;
  const RankSizes sizes = at.sizes();
  const auto& channels = at.channels();
  device::Stream& stream = *channels.stream;
  state::Store& store = at.modules().store;
  const Bytes shard = sizes.gradient_shard(operation.block);
  const bool in_place = !at.has(Role::source);
  const DeviceBytes whole = store.device(operation.buffer(in_place ? Role::target : Role::source),
                                         sizes.padded_gradient(operation.block));
  const BufferId received = operation.buffer(Role::scratch);
  const DeviceBytes scratch =
      store.device(received, at.blueprint().schedule.buffers[received].bytes);
  const DeviceBytes sum =
      in_place ? whole.subview(at.shard_number() * shard, shard) : at.device(Role::target, shard);
  const DType type = at.blueprint().type;
  if (sizes.shards_states(operation.block)) {
    channels.all->reduce_scatter(stream, whole, sum, type, scratch);
  } else {
    channels.all->all_reduce(stream, whole, type, scratch);
  }
  at.compute().measure_gradient(stream, sum, scratch, statistics_of(at));
}

/// Lets the visitor read or fill a piece of weights or states. Activations and gradients start as
/// zeros.
void run_visit(const CurrentOperation& at) {
  const Operation& operation = at.operation;
  const Use& use = operation.uses.front();
  const HostBytes bytes = at.modules().store.host(use.buffer, operation.bytes);
  const bool states = operation.payload == Payload::states;
  HomePiece piece = {operation.block, states, operation.sub_group, operation.offset, bytes};
  if (states || operation.payload == Payload::weights) {
    at.lanes.visit(piece);
  } else {
    std::memset(bytes.data(), 0, bytes.size());
    piece.zeros_from = 0;
  }
  at.lanes.zeros_from(use.buffer) = piece.zeros_from;
}

/// Copies between two devices of the rank, or two buffers of one.
void run_copy_on_devices(const CurrentOperation& at) {
  const Bytes bytes = at.operation.bytes;
  const Use& target = at.target();
  const std::uint8_t to = at.blueprint().schedule.buffers[target.buffer].device;
  at.own().device.copy_to_other(at.stream(), at.modules().devices[to].device,
                                at.device(target, bytes), at.device(at.source(), bytes));
}

constexpr std::array<ActionHandler, plan::kActionCount> kHandlers = {
    {{Action::compute, run_pass},
     {Action::decode, run_decode},
     {Action::clear, run_clear},
     {Action::pack, run_pack},
     {Action::upload, run_upload},
     {Action::offload, run_offload},
     {Action::fetch, run_fetch},
     {Action::writeback, run_writeback},
     {Action::gather, run_gather},
     {Action::reduce, run_reduce},
     {Action::gate, run_gate},
     {Action::update, run_update},
     {Action::update_on_device, run_update_on_device},
     {Action::initialize, run_visit},
     {Action::read, run_visit},
     {Action::select, run_select},
     {Action::scatter, run_scatter},
     {Action::transfer, run_copy_on_devices},
     {Action::keep, run_copy_on_devices},
     {Action::exchange, run_exchange}}};

constexpr bool in_order_of_actions() {
  std::size_t number = 0;
  for (const ActionHandler& handler : kHandlers) {
    if (static_cast<std::size_t>(handler.action) != number++) return false;
  }
  return true;
}
static_assert(in_order_of_actions());

/// Writes zeros to a gradient, or its statistics, that no pass has added to.
void clear_target(const CurrentOperation& at) {
  const Operation& operation = at.operation;
  const auto zero = [&](device::Stream& stream, Bytes bytes) {
    at.compute().zero(stream, view_as<float>(at.device(at.target(), bytes)));
  };
  if (operation.action == Action::pack) {
    return zero(at.stream(), at.sizes().padded_gradient(operation.block));
  }
  if (operation.action == Action::reduce) {
    return zero(*at.channels().stream, at.sizes().gradient_shard(operation.block));
  }
  const HostBytes bytes = at.host(at.target(), operation.bytes);
  std::memset(bytes.data(), 0, bytes.size());
}

/// Performs the operation, or starts it if its lane is queued. If its conditions leave nothing to
/// do, clears its target if the operation requires it, and returns false.
bool perform(const CurrentOperation& at) {
  const Operation& operation = at.operation;
  if (has_work(at)) {
    kHandlers.at(static_cast<std::size_t>(operation.action)).run(at);
    return true;
  }
  if (operation.clears_when_idle) clear_target(at);
  if (operation.lane == Lane::fetch) at.lanes.fetches().add(nullptr);
  if (operation.lane == Lane::writeback) at.lanes.writebacks().add(nullptr);
  return false;
}

}  // namespace

void Lanes::start(const Operation& operation, std::uint64_t submission) {
  std::optional<device::ProfilerRange> range;
  if (modules_.nvtx) range.emplace(names_(operation));
  const bool worked =
      perform({*this, operation, context(submission - operation.lag), context(submission - 1)});
  if (!worked) idle_bytes_[static_cast<std::size_t>(operation.lane)] += operation.bytes;
  if (plan::is_on_stream(operation.lane, streams_collectives())) {
    queue_of(operation).end_operation(operation, submission);
  } else if (plan::is_collective_lane(operation.lane)) {
    channels(operation.device).stream->synchronize();
  }
}

}  // namespace ballast::engine
