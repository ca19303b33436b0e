#include "src/engine/lanes.h"

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "ballast/core/error.h"
#include "ballast/engine/blueprint.h"
#include "ballast/step/labels.h"
#include "ballast/step/problem.h"

// The streams of the lanes, and their channels between ranks.

namespace ballast::engine {

using plan::Lane;
using plan::Operation;
using plan::RankGroup;
using step::RankSizes;

namespace {

/// Exchanges rows over a channel whose member p has expert p of each block, or part p of the
/// sequences.
class ChannelExchange final : public model::AllToAll {
 public:
  explicit ChannelExchange(std::unique_ptr<comm::Communicator> channel)
      : channel_(std::move(channel)) {}
  void exchange(device::Stream& stream, ConstDeviceBytes input, std::span<const Bytes> input_parts,
                DeviceBytes output, std::span<const Bytes> output_parts) override {
    channel_->all_to_all(stream, input, input_parts, output, output_parts);
  }

 private:
  std::unique_ptr<comm::Communicator> channel_;
};

}  // namespace

bool is_collective(const Blueprint& blueprint, const Operation& operation) {
  if (operation.lane == Lane::gather || operation.lane == Lane::reduce) return true;
  if (operation.action != plan::Action::compute) return false;
  const model::Kernel kernel = blueprint.problem.program().passes[step::pass_id(operation)].kernel;
  const bool attends = kernel == model::Kernel::layer || kernel == model::Kernel::layer_backward;
  return kernel == model::Kernel::exchanged_expert ||
         kernel == model::Kernel::exchanged_expert_backward ||
         (attends && blueprint.mesh.sequence > 1);
}

Lanes::DeviceLanes::DeviceLanes(device::Device& device, bool passes)
    : compute(device, "device-compute"),
      upload(device, "device-upload"),
      offload(device, "device-offload") {
  if (passes) pass.emplace(device, "device-pass");
}

Lanes::Lanes(const Modules& modules) : modules_(modules), names_(modules.blueprint.problem) {
  devices_.reserve(modules.devices.size());
  for (const DeviceModules& own : modules.devices) {
    devices_.push_back(std::make_unique<DeviceLanes>(own.device, modules.devices.size() > 1));
    DeviceLanes& lanes = *devices_.back();
    if (modules.ranks != nullptr) lanes.channels = join_ranks(own.device);
    if (streams_collectives()) {
      lanes.gather.emplace(own.device, lanes.channels.stream);
      lanes.reduce.emplace(own.device, lanes.channels.stream);
    }
  }
}

Lanes::Channels Lanes::join_ranks(device::Device& device) const {
  comm::Ranks& ranks = *modules_.ranks;
  const Blueprint& blueprint = modules_.blueprint;
  const ChannelMembers members(blueprint.mesh, RankSizes(blueprint.problem).ranks_per_copy(),
                               blueprint.model.split.experts > 1);
  const auto channel_of = [&](const std::vector<std::uint32_t>& places) {
    return places.empty() ? nullptr : ranks.make_channel(device, places);
  };
  const auto exchange_of = [&](const std::vector<std::uint32_t>& places) {
    return places.empty() ? nullptr : std::make_unique<ChannelExchange>(channel_of(places));
  };
  Channels channels;
  channels.all = channel_of(members.all);
  channels.weight_copy = channel_of(members.weight_copy);
  channels.same_share = channel_of(members.same_share);
  channels.rows = exchange_of(members.rows);
  channels.heads = exchange_of(members.heads);
  channels.tensor = channel_of(members.tensor);
  channels.stream = device.make_stream("device-collectives");
  return channels;
}

comm::Communicator& Lanes::Channels::gathering(RankGroup group) const {
  // Without several groups, all ranks share one copy.
  if (group == RankGroup::weight_copy && weight_copy) return *weight_copy;
  return group == RankGroup::same_share ? *same_share : *all;
}

bool Lanes::streams_collectives() const {
  return modules_.ranks != nullptr && modules_.devices.front().device.kind() != "host";
}

void Lanes::follow(const Operation& next, const Operation& before, std::uint64_t submission) {
  queue_of(before).let_wait(queue_of(next).stream(), before, submission);
}

QueuedStream& Lanes::queue_of(const Operation& operation) {
  const std::optional<plan::StreamId> stream = plan::stream_of(operation);
  expects(stream.has_value(), "engine: disk lanes have no stream");
  DeviceLanes& lanes = *devices_.at(stream->device);
  switch (stream->lane) {
    case Lane::upload:
      return lanes.upload;
    case Lane::offload:
      return lanes.offload;
    case Lane::peer:
      return lanes.pass.value();
    case Lane::gather:
      return lanes.gather.value();
    case Lane::reduce:
      return lanes.reduce.value();
    default:
      return lanes.compute;
  }
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
