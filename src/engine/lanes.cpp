#include "src/engine/lanes.h"

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "ballast/core/error.h"
#include "ballast/step/labels.h"
#include "ballast/step/rank_sizes.h"

// The streams of the lanes, and their channels between ranks.

namespace ballast::engine {

using plan::Lane;
using plan::Operation;
using plan::RankGroup;
using step::RankSizes;

namespace {

/// Exchanges rows over a channel whose member p has expert p of each block, or part p of the
/// sequences.
class ChannelExchange final : public model::RowExchange {
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

Lanes::Lanes(const Modules& modules)
    : modules_(modules),
      names_(modules.blueprint.problem),
      compute_(modules.device, "device-compute"),
      upload_(modules.device, "device-upload"),
      offload_(modules.device, "device-offload") {
  if (modules.ranks != nullptr) join_ranks();
}

void Lanes::join_ranks() {
  comm::Ranks& ranks = *modules_.ranks;
  const RankSizes sizes(modules_.blueprint.problem);
  std::vector<std::uint32_t> all;
  std::vector<std::uint32_t> group;
  std::vector<std::uint32_t> share;
  const Mesh& mesh = modules_.blueprint.mesh;
  const std::uint32_t here = mesh.sharer();
  for (std::uint32_t shard = 0; shard < mesh.sharers(); ++shard) {
    const std::uint32_t sharer = sizes.owner_of(shard);
    const std::uint32_t rank = mesh.rank_of(sharer);
    all.push_back(rank);
    if (sharer / sizes.ranks_per_copy() == here / sizes.ranks_per_copy()) group.push_back(rank);
    if (sharer % sizes.ranks_per_copy() == here % sizes.ranks_per_copy()) share.push_back(rank);
  }
  device::Device& device = modules_.device;
  channels_.all = ranks.make_channel(device, all);
  if (sizes.copies() > 1) {
    channels_.weight_copy = ranks.make_channel(device, group);
    channels_.same_share = ranks.make_channel(device, share);
  }
  if (modules_.blueprint.model.expert_ranks > 1) {
    channels_.rows = std::make_unique<ChannelExchange>(ranks.make_channel(device, all));
  }
  if (mesh.sequence > 1) {
    channels_.heads =
        std::make_unique<ChannelExchange>(ranks.make_channel(device, mesh.sequence_ranks()));
  }
  channels_.stream = device.make_stream("device-collectives");
}

comm::Communicator& Lanes::gathering(RankGroup group) const {
  // Without several groups, all ranks share one copy.
  if (group == RankGroup::weight_copy && channels_.weight_copy) return *channels_.weight_copy;
  return group == RankGroup::same_share ? *channels_.same_share : *channels_.all;
}

QueuedStream& Lanes::queue_of(const Operation& operation) {
  const std::optional<plan::StreamId> stream = plan::stream_of(operation);
  expects(stream && stream->device == 0, "engine: each lane has one stream");
  switch (stream->lane) {
    case Lane::upload:
      return upload_;
    case Lane::offload:
      return offload_;
    default:
      return compute_;
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
