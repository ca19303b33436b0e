#include "src/engine/states.h"

#define XXH_INLINE_ALL
#include <algorithm>
#include <cstring>
#include <memory>

#include <xxhash.h>

#include "ballast/core/dtype.h"
#include "ballast/core/error.h"

#include "src/engine/state_layout.h"

namespace ballast::engine {
namespace {

constexpr Bytes kBounce = 1 * kMiB;
constexpr Elems kPiece = Elems{1} << 20;

/// The home of a block's weights or states, opened for plain reading and writing by offset: NVMe
/// homes are worked on in their host passing place, device homes through small copies.
class OpenHome {
 public:
  OpenHome(Machine& machine, schedule::BufferId home, schedule::BufferId staging, Bytes bytes)
      : machine_(machine),
        home_(home),
        bytes_(bytes),
        tier_(machine.blueprint.schedule.buffers[home].tier) {
    if (tier_ == Tier::host) memory_ = machine.store.host(home, bytes);
    if (tier_ == Tier::nvme) memory_ = machine.store.host(staging, bytes);
  }

  /// Loads an NVMe home into its passing place.
  void load() {
    if (tier_ == Tier::nvme) machine_.store.fetch(home_, memory_);
  }
  /// Stores the passing place back.
  void save() {
    if (tier_ == Tier::nvme) machine_.store.writeback(home_, memory_);
  }

  void put(Bytes offset, ConstHostBytes data) {
    if (data.empty()) return;
    if (tier_ != Tier::device) {
      std::memcpy(memory_.data() + offset, data.data(), data.size());
      return;
    }
    const DeviceBytes to = machine_.store.device(home_, bytes_).subview(offset, data.size());
    machine_.device.copy_to_device(*machine_.upload_stream, to, data);
    machine_.upload_stream->synchronize();
  }

  void get(Bytes offset, HostBytes data) {
    if (data.empty()) return;
    if (tier_ != Tier::device) {
      std::memcpy(data.data(), memory_.data() + offset, data.size());
      return;
    }
    const DeviceBytes from = machine_.store.device(home_, bytes_).subview(offset, data.size());
    machine_.device.copy_to_host(*machine_.offload_stream, data, from);
    machine_.offload_stream->synchronize();
  }

  void put_zeros(Bytes offset, Bytes count) {
    if (tier_ != Tier::device) {
      std::memset(memory_.data() + offset, 0, count);
      return;
    }
    const std::vector<std::byte> zeros(std::min(count, kBounce));
    for (Bytes done = 0; done < count; done += zeros.size()) {
      put(offset + done, ConstHostBytes(zeros).first(std::min<Bytes>(zeros.size(), count - done)));
    }
  }

  void hash(XXH3_state_t& state) {
    std::vector<std::byte> bounce(std::min(bytes_, kBounce));
    for (Bytes done = 0; done < bytes_; done += bounce.size()) {
      const HostBytes part = HostBytes(bounce).first(std::min<Bytes>(bounce.size(), bytes_ - done));
      get(done, part);
      XXH3_64bits_update(&state, part.data(), part.size());
    }
  }

 private:
  Machine& machine_;
  schedule::BufferId home_;
  Bytes bytes_;
  Tier tier_;
  HostBytes memory_;
};

OpenHome open_weights(Machine& machine, std::size_t block) {
  const auto& schedule = machine.blueprint.schedule;
  return {machine, schedule.weight_home[block], schedule.weight_staging,
          state_layout(machine.blueprint, block).weight_bytes};
}

OpenHome open_states(Machine& machine, std::size_t block) {
  const auto& schedule = machine.blueprint.schedule;
  return {machine, schedule.state_home[block], schedule.state_staging,
          state_layout(machine.blueprint, block).state_bytes};
}

template <class T>
ConstHostBytes bytes_of(const std::vector<T>& values, Elems count) {
  return {reinterpret_cast<const std::byte*>(values.data()), count * sizeof(T)};
}

/// Puts `values` at element `first` of a block: fp32 as they are, or split.
void put_master(const StateLayout& layout, OpenHome& weights, OpenHome& states, Elems first,
                std::span<const float> values) {
  if (!layout.split) {
    weights.put(first * sizeof(float), std::as_bytes(values));
    return;
  }
  std::vector<Bf16> high(values.size());
  std::vector<std::uint16_t> low(values.size());
  for (std::size_t i = 0; i < values.size(); ++i) {
    const SplitMaster split = split_master(values[i]);
    high[i] = split.weight;
    low[i] = split.remainder;
  }
  weights.put(first * sizeof(Bf16), bytes_of(high, high.size()));
  states.put(layout.remainder.offset + first * sizeof(std::uint16_t), bytes_of(low, low.size()));
}

void initialize_tensor(Machine& machine, const WeightSource& source,
                       const model::TensorSpec& tensor, const StateLayout& layout,
                       OpenHome& weights, OpenHome& states) {
  std::vector<float> values;
  if (source) {
    values.resize(tensor.size);
    source(tensor, values);
    put_master(layout, weights, states, tensor.offset, values);
    return;
  }
  for (Elems done = 0; done < tensor.size; done += kPiece) {
    values.resize(std::min(kPiece, tensor.size - done));
    model::initialize(tensor, machine.config.ballast.seed, done, values);
    put_master(layout, weights, states, tensor.offset + done, values);
  }
}

/// Takes the NVMe homes of activations into use, as those of states are: what is written later only
/// overwrites.
void fill_activations(Machine& machine) {
  const auto& schedule = machine.blueprint.schedule;
  if (schedule.activation_staging == schedule::kNoBuffer) return;
  const HostBytes zeros = machine.store.host(schedule.activation_staging,
                                             schedule.buffers[schedule.activation_staging].bytes);
  std::memset(zeros.data(), 0, zeros.size());
  for (schedule::BufferId id = 0; id < schedule.buffers.size(); ++id) {
    const schedule::Buffer& buffer = schedule.buffers[id];
    const bool there = buffer.kind == schedule::Kind::activations && buffer.tier == Tier::nvme;
    if (there) machine.store.writeback(id, zeros);
  }
}

}  // namespace

void initialize_states(Machine& machine, const WeightSource& source) {
  const auto& blocks = machine.blueprint.model.blocks;
  for (std::size_t b = 0; b < blocks.size(); ++b) {
    const StateLayout layout = state_layout(machine.blueprint, b);
    OpenHome weights = open_weights(machine, b);
    OpenHome states = open_states(machine, b);
    weights.put_zeros(0, layout.weight_bytes);
    states.put_zeros(0, layout.state_bytes);
    for (const auto& tensor : blocks[b].tensors) {
      initialize_tensor(machine, source, tensor, layout, weights, states);
    }
    weights.save();
    states.save();
  }
  fill_activations(machine);
}

std::vector<float> read_master(Machine& machine, std::size_t block,
                               const model::TensorSpec& tensor) {
  const StateLayout layout = state_layout(machine.blueprint, block);
  OpenHome weights = open_weights(machine, block);
  weights.load();
  std::vector<float> values(tensor.size);
  if (!layout.split) {
    weights.get(tensor.offset * sizeof(float), std::as_writable_bytes(std::span(values)));
    return values;
  }
  OpenHome states = open_states(machine, block);
  states.load();
  std::vector<Bf16> high(tensor.size);
  std::vector<std::uint16_t> low(tensor.size);
  weights.get(tensor.offset * sizeof(Bf16), std::as_writable_bytes(std::span(high)));
  states.get(layout.remainder.offset + tensor.offset * sizeof(std::uint16_t),
             std::as_writable_bytes(std::span(low)));
  for (std::size_t i = 0; i < values.size(); ++i) values[i] = join_master({high[i], low[i]});
  return values;
}

std::uint64_t hash_states(Machine& machine) {
  const std::unique_ptr<XXH3_state_t, XXH_errorcode (*)(XXH3_state_t*)> state(XXH3_createState(),
                                                                              &XXH3_freeState);
  expects(state != nullptr, "no memory for a checksum");
  XXH3_64bits_reset(state.get());
  for (std::size_t b = 0; b < machine.blueprint.model.blocks.size(); ++b) {
    OpenHome weights = open_weights(machine, b);
    OpenHome states = open_states(machine, b);
    weights.load();
    weights.hash(*state);
    states.load();
    states.hash(*state);
  }
  return XXH3_64bits_digest(state.get());
}

}  // namespace ballast::engine
