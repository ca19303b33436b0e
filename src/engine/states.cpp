#include "src/engine/states.h"

#define XXH_INLINE_ALL
#include <algorithm>
#include <array>
#include <cstring>
#include <memory>
#include <span>
#include <string>

#include <xxhash.h>

#include "ballast/core/dtype.h"
#include "ballast/core/error.h"
#include "ballast/schedule/rank_sizes.h"

#include "src/engine/state_layout.h"

namespace ballast::engine {
namespace {

constexpr Bytes kBounce = 1 * kMiB;
constexpr Elems kPiece = Elems{1} << 20;

/// A running XXH3.
class Hash {
 public:
  Hash() : state_(XXH3_createState(), &XXH3_freeState) {
    expects(state_ != nullptr, "no memory for a checksum");
    XXH3_64bits_reset(state_.get());
  }
  [[nodiscard]] XXH3_state_t& state() { return *state_; }
  [[nodiscard]] std::uint64_t digest() const { return XXH3_64bits_digest(state_.get()); }

 private:
  std::unique_ptr<XXH3_state_t, XXH_errorcode (*)(XXH3_state_t*)> state_;
};

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
    machine_.device.copy_to_device(machine_.upload_lane.stream(), to, data);
    machine_.upload_lane.stream().synchronize();
  }

  void get(Bytes offset, HostBytes data) {
    if (data.empty()) return;
    if (tier_ != Tier::device) {
      std::memcpy(data.data(), memory_.data() + offset, data.size());
      return;
    }
    const DeviceBytes from = machine_.store.device(home_, bytes_).subview(offset, data.size());
    machine_.device.copy_to_host(machine_.offload_lane.stream(), data, from);
    machine_.offload_lane.stream().synchronize();
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

  void hash(XXH3_state_t& state, Bytes offset, Bytes size) {
    std::vector<std::byte> bounce(std::min(size, kBounce));
    for (Bytes done = 0; done < size; done += bounce.size()) {
      const HostBytes part = HostBytes(bounce).first(std::min<Bytes>(bounce.size(), size - done));
      get(offset + done, part);
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

/// A block as this rank holds it.
class OpenBlock {
 public:
  OpenBlock(Machine& machine, std::size_t block)
      : machine_(machine),
        layout_(state_layout(machine.blueprint, block)),
        part_(rank_part(machine.blueprint, block)),
        sizes_(machine.blueprint.workload),
        block_(block),
        whole_(machine.blueprint.model.blocks[block].elements),
        weight_bytes_(sizes_.weights(static_cast<std::uint32_t>(block))),
        weights_(machine, machine.blueprint.schedule.weight_home[block],
                 machine.blueprint.schedule.weight_staging, weight_bytes_),
        states_(machine, machine.blueprint.schedule.state_home[block],
                machine.blueprint.schedule.state_staging, layout_.state_bytes) {}

  void clear() {
    weights_.put_zeros(0, weight_bytes_);
    states_.put_zeros(0, layout_.state_bytes);
  }
  /// Both passing places are used: nothing else may be opened until save().
  void load() {
    weights_.load();
    states_.load();
  }
  void save() {
    weights_.save();
    states_.save();
  }

  /// The elements whose weights are here; those of the states are among them.
  [[nodiscard]] RankPart weights_here() const {
    if (!splits_weights()) return {0, whole_, whole_};
    const Elems room = weight_bytes_ / size_of(machine_.blueprint.type);
    const Elems first = std::min(whole_, machine_.blueprint.rank % sizes_.group() * room);
    return {first, std::min(room, whole_ - first), room};
  }
  [[nodiscard]] const RankPart& part() const { return part_; }

  /// Puts `values`, all of them weights that are here, at element `first` of the block.
  void put_master(Elems first, std::span<const float> values) {
    const Elems place = first - weights_here().first;
    if (!layout_.split) {
      weights_.put(place * sizeof(float), std::as_bytes(values));
      return;
    }
    std::vector<Bf16> high(values.size());
    std::vector<std::uint16_t> low(values.size());
    for (std::size_t i = 0; i < values.size(); ++i) {
      const SplitMaster split = split_master(values[i]);
      high[i] = split.weight;
      low[i] = split.remainder;
    }
    weights_.put(place * sizeof(Bf16), std::as_bytes(std::span(high)));
    const Elems begin = std::max(first, part_.first);
    const Elems end = std::min(first + values.size(), part_.first + part_.elements);
    if (begin >= end) return;
    states_.put(layout_.remainder.offset + (begin - part_.first) * sizeof(std::uint16_t),
                std::as_bytes(std::span(low).subspan(begin - first, end - begin)));
  }

  /// Masters of this rank's part from its element `first` on.
  void get_master(Elems first, std::span<float> values) {
    const Elems place = part_.first + first - weights_here().first;
    if (!layout_.split) {
      weights_.get(place * sizeof(float), std::as_writable_bytes(values));
      return;
    }
    std::vector<Bf16> high(values.size());
    std::vector<std::uint16_t> low(values.size());
    weights_.get(place * sizeof(Bf16), std::as_writable_bytes(std::span(high)));
    states_.get(layout_.remainder.offset + first * sizeof(std::uint16_t),
                std::as_writable_bytes(std::span(low)));
    for (std::size_t i = 0; i < values.size(); ++i) values[i] = join_master({high[i], low[i]});
  }

  /// Weights and states of what is this rank's part where states are split: the same bytes in every
  /// stage.
  void hash_part(XXH3_state_t& state) {
    const RankPart own = even_part(machine_.blueprint, block_);
    const Bytes width = size_of(machine_.blueprint.type);
    weights_.hash(state, (own.first - weights_here().first) * width, own.elements * width);
    const Elems skipped = own.first - part_.first;
    for (const StateArray* array : {&layout_.remainder, &layout_.first, &layout_.second}) {
      const Bytes each = array->bytes / std::max<Elems>(layout_.elements, 1);
      states_.hash(state, array->offset + skipped * each, own.elements * each);
    }
    for (const StateArray* array : {&layout_.first_exponents, &layout_.second_exponents}) {
      if (array->bytes == 0) continue;
      states_.hash(state, array->offset + cpu_adam::Codes::exponents_of(skipped),
                   cpu_adam::Codes::exponents_of(own.elements));
    }
  }
  /// Weights that every rank has.
  void hash_common(XXH3_state_t& state) {
    if (!splits_weights()) weights_.hash(state, 0, weight_bytes_);
  }

 private:
  [[nodiscard]] bool splits_weights() const {
    return sizes_.splits_weights(static_cast<std::uint32_t>(block_));
  }

  Machine& machine_;
  StateLayout layout_;
  RankPart part_;
  schedule::RankSizes sizes_;
  std::size_t block_;
  Elems whole_;
  Bytes weight_bytes_;
  OpenHome weights_;
  OpenHome states_;
};

void initialize_tensor(Machine& machine, const WeightSource& source,
                       const model::TensorSpec& tensor, OpenBlock& block) {
  const RankPart here = block.weights_here();
  const Elems begin = std::clamp(here.first, tensor.offset, tensor.offset + tensor.size);
  const Elems end =
      std::clamp(here.first + here.elements, tensor.offset, tensor.offset + tensor.size);
  std::vector<float> values;
  if (source) {
    values.resize(tensor.size);
    source(tensor, values);
    block.put_master(begin, std::span(values).subspan(begin - tensor.offset, end - begin));
    return;
  }
  for (Elems at = begin; at < end; at += values.size()) {
    values.resize(std::min(kPiece, end - at));
    model::initialize(tensor, machine.options.seed, at - tensor.offset, values);
    block.put_master(at, values);
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
    OpenBlock block(machine, b);
    block.clear();
    for (const auto& tensor : blocks[b].tensors) initialize_tensor(machine, source, tensor, block);
    block.save();
  }
  fill_activations(machine);
}

std::vector<float> read_master(Machine& machine, std::size_t block,
                               const model::TensorSpec& tensor) {
  OpenBlock open(machine, block);
  open.load();
  std::vector<float> values(tensor.size);
  if (open.part().room == machine.blueprint.model.blocks[block].elements) {
    open.get_master(tensor.offset, values);
    return values;
  }
  std::vector<float> own(open.part().room);
  open.get_master(0, std::span(own).first(open.part().elements));
  std::vector<float> all(machine.ranks->world() * own.size());
  machine.ranks->all_gather(std::as_bytes(std::span(own)), std::as_writable_bytes(std::span(all)));
  const schedule::RankSizes sizes(machine.blueprint.workload);
  for (std::size_t i = 0; i < values.size(); ++i) {
    const Elems at = tensor.offset + i;
    const auto part = static_cast<std::uint32_t>(at / own.size());
    values[i] = all[sizes.owner_of(part) * own.size() + at % own.size()];
  }
  return values;
}

std::uint64_t hash_states(Machine& machine) {
  Hash own;
  Hash common;
  for (std::size_t b = 0; b < machine.blueprint.model.blocks.size(); ++b) {
    OpenBlock block(machine, b);
    block.load();
    block.hash_part(own.state());
    block.hash_common(common.state());
  }
  if (machine.ranks == nullptr) return own.digest();
  const std::array<std::uint64_t, 2> found = {own.digest(), common.digest()};
  std::vector<std::uint64_t> all(found.size() * machine.ranks->world());
  machine.ranks->all_gather(std::as_bytes(std::span(found)),
                            std::as_writable_bytes(std::span(all)));
  Hash together;
  const schedule::RankSizes sizes(machine.blueprint.workload);
  for (std::uint32_t p = 0; p < machine.ranks->world(); ++p) {
    const std::size_t r = sizes.owner_of(p);
    XXH3_64bits_update(&together.state(), &all[2 * r], sizeof all[0]);
    if (all[2 * r + 1] == found[1]) continue;
    throw Error(ErrorCategory::state,
                "rank " + std::to_string(r) + " has other weights than this one");
  }
  return together.digest();
}

}  // namespace ballast::engine
