#include "src/engine/arguments.h"

#include "src/engine/report.h"

namespace ballast::engine {

using schedule::BufferId;

DeviceView<float> gradient_of_tile(const CurrentOperation& at, BufferId buffer,
                                   std::size_t number) {
  const model::Architecture& model = at.blueprint().model;
  const model::VocabularyTile tile = model.tile(number);
  const Bytes rows = tile.rows * model.config.hidden_size * sizeof(float);
  const schedule::Workload& work = at.workload();
  const Bytes bytes = work.tied ? rows : work.blocks[tile.block].accumulator_bytes;
  return view_as<float>(at.modules().store.device(buffer, bytes));
}

DeviceView<const std::int32_t> PassBuffers::batch_part(std::size_t part) const {
  if (!has(Port::batch)) return {};
  const auto ids =
      view_as<const std::int32_t>(ConstDeviceBytes(bytes(Port::batch, at_.workload().batch_bytes)));
  const std::size_t size = at_.blueprint().shape.tokens();
  return ids.subview(part * size, size);
}

model::RouterResults PassBuffers::router_results() const {
  const std::size_t starts = at_.modules().compute.memory().experts + 1;
  model::RouterResults results;
  results.starts = view_as<std::int32_t>(bytes(Port::routing, starts * sizeof(std::int32_t)));
  results.totals = router_totals();
  if (!has(Port::losses)) return results;
  const ReportPart part = router_losses_in(at_.blueprint(), at_.operation.micro);
  const DeviceBytes report = bytes(Port::losses, at_.workload().losses_bytes);
  results.losses = view_as<double>(report.subview(part.offset, part.bytes));
  return results;
}

DeviceView<double> PassBuffers::losses() const {
  if (!has(Port::losses)) return {};
  const ReportPart part = head_losses_in(at_.blueprint(), at_.operation.micro);
  const DeviceBytes report = bytes(Port::losses, at_.workload().losses_bytes);
  return view_as<double>(report.subview(part.offset, part.bytes));
}

/// By sequence.
DeviceView<double> PassBuffers::reference_losses() const {
  return view_as<double>(bytes(Port::pairs, at_.blueprint().shape.sequences * sizeof(double)));
}

/// After the losses of the reference.
DeviceView<float> PassBuffers::row_weights() const {
  if (!has(Port::pairs)) return {};
  const model::MicroBatchShape& shape = at_.blueprint().shape;
  const DeviceBytes all = bytes(Port::pairs, at_.workload().pairs_bytes);
  return view_as<float>(
      all.subview(shape.sequences * sizeof(double), shape.tokens() * sizeof(float)));
}

model::HeadLosses PassBuffers::head_losses() const {
  if (!has(Port::pairs)) return {losses()};
  if (is_reference(at_.operation)) return {reference_losses()};
  return {losses(), model::Pairs{at_.modules().preference, reference_losses(), row_weights()}};
}

std::vector<BufferId> PassBuffers::bound_to(Port port) const {
  std::vector<BufferId> found;
  for (const schedule::Use& use : at_.operation.uses) {
    if (use.role == schedule::role_of(port)) found.push_back(use.buffer);
  }
  return found;
}

std::vector<model::OutputTile> PassBuffers::tiles() const {
  const std::vector<BufferId> output_weights = bound_to(Port::output_weights);
  const std::vector<BufferId> sums = bound_to(Port::output_gradient);
  const std::size_t count = at_.blueprint().model.config.vocabulary_tiles;
  const std::size_t own = count - output_weights.size();  // 1: the head's first block has a tile
  std::vector<model::OutputTile> all;
  for (std::size_t t = 0; t < count; ++t) {
    if (t < own) {
      all.push_back({t, weights(), gradient()});
      continue;
    }
    const std::size_t block = at_.blueprint().model.tile(t).block;
    const Bytes bytes = at_.workload().blocks[block].weight_bytes;
    all.push_back({t, at_.modules().store.device(output_weights[t - own], bytes)});
    if (!sums.empty()) all.back().gradient = gradient_of_tile(at_, sums[t - own], t);
  }
  return all;
}

model::OutputTile PassBuffers::tile() const {
  const schedule::Workload& work = at_.workload();
  const std::size_t number = at_.operation.block - (work.tied ? 0 : work.head());
  model::OutputTile one = {number, weights(), gradient()};
  if (has(Port::output_gradient)) {
    const BufferId sums = at_.operation.buffer(schedule::role_of(Port::output_gradient));
    one.gradient = gradient_of_tile(at_, sums, at_.operation.block);
  }
  return one;
}

}  // namespace ballast::engine
