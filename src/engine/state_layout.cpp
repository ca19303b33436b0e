#include "src/engine/state_layout.h"

#include <algorithm>

#include "ballast/cpu_adam/traffic.h"
#include "ballast/step/rank_sizes.h"

namespace ballast::engine {
namespace {

using cpu_adam::Codes;
using cpu_adam::Moments;

/// Allocates consecutive arrays.
class Places {
 public:
  StateArray take(Bytes bytes) {
    if (bytes == 0) return {};
    const Bytes offset = round_up(end_, kCacheLine) + cpu_adam::kArraySkew;
    end_ = offset + bytes;
    return {offset, bytes};
  }
  [[nodiscard]] Bytes end() const { return end_; }

 private:
  Bytes end_ = 0;
};

/// Rounds a maximum size of sub-groups down to whole units.
Elems whole_units(Elems size) {
  static_assert(kSubGroupUnit % Codes::kBlock == 0);
  return std::max<Elems>(1, size / kSubGroupUnit) * kSubGroupUnit;
}

/// Returns null if the array is not kept.
template <class T = void>
T* array_in(std::byte* states, const StateArray& array) {
  return states == nullptr || array.bytes == 0 ? nullptr
                                               : reinterpret_cast<T*>(states + array.offset);
}

/// Returns the `ranges` that overlap [first, end).
std::span<const ElementRange> ranges_in(std::span<const ElementRange> ranges, Elems first,
                                        Elems end) {
  const auto from = std::ranges::upper_bound(ranges, first, {}, &ElementRange::end);
  const auto to = std::ranges::lower_bound(ranges, end, {}, &ElementRange::first);
  return {from, std::max(from, to)};
}

}  // namespace

StateLayout::StateLayout(DType type, const StateFormat& format, Elems elements)
    : type(type), format(format), elements(elements), weight_bytes(elements * size_of(type)) {
  const auto arrays =
      cpu_adam::traffic(format.optimizer, cpu_adam::Weights::format_of(type), type, format.moments);
  const bool codes = format.moments == Moments::Format::blockwise8;
  const Bytes exponents = codes ? Codes::exponents_of(elements) : 0;
  Places places;
  master = places.take(elements * cpu_adam::Weights::master_width(type));
  first = places.take(elements * arrays.first_moment);
  second = places.take(elements * arrays.second_moment);
  first_exponents = places.take(first.bytes > 0 ? exponents : 0);
  second_exponents = places.take(second.bytes > 0 ? exponents : 0);
  state_bytes = round_up(places.end(), kPage);
  update_traffic = elements * arrays.bytes_per_element();
}

ShardRange even_shard(const Blueprint& blueprint, std::size_t block, bool states) {
  const model::BlockSpec& spec = blueprint.own().blocks[block];
  const step::RankSizes sizes(blueprint.problem);
  const auto number = static_cast<std::uint32_t>(block);
  const Elems all = states ? spec.trained_elements() : spec.plain_elements();
  const Bytes shard = states ? sizes.gradient_shard(number) : sizes.weight_shard(number);
  const Elems room = shard / size_of(blueprint.type);
  const Elems first = std::min(all, sizes.shard_of(blueprint.mesh.sharer()) * room);
  return {first, std::min(room, all - first), room};
}

ShardRange rank_shard(const Blueprint& blueprint, std::size_t block) {
  const Elems trained = blueprint.own().blocks[block].trained_elements();
  const step::RankSizes sizes(blueprint.problem);
  if (!sizes.keeps_part_of_states(static_cast<std::uint32_t>(block))) return {0, trained, trained};
  return even_shard(blueprint, block, true);
}

std::uint32_t sub_groups(const Blueprint& blueprint, std::size_t block) {
  const Elems size = whole_units(blueprint.sub_group_size);
  const Elems room = rank_shard(blueprint, block).room;
  return static_cast<std::uint32_t>(room / size + (room % size > 0 ? 1 : 0));
}

ShardRange sub_group_range(const Blueprint& blueprint, std::size_t block, std::uint32_t sub_group) {
  const ShardRange shard = rank_shard(blueprint, block);
  const Elems size = whole_units(blueprint.sub_group_size);
  const auto up_to = [&](Elems most) { return std::min(most, sub_group * size); };
  const auto rest = [&](Elems most) { return std::min(most - up_to(most), size); };
  return {shard.first + up_to(shard.elements), rest(shard.elements), rest(shard.room)};
}

StateLayout state_layout(const Blueprint& blueprint, std::size_t block, std::uint32_t sub_group) {
  return {blueprint.type, blueprint.states, sub_group_range(blueprint, block, sub_group).room};
}

cpu_adam::Shard make_shard(const Blueprint& blueprint, std::size_t block, std::uint32_t sub_group,
                           std::byte* weights, std::byte* states, const std::byte* gradient) {
  const StateLayout layout = state_layout(blueprint, block, sub_group);
  const ShardRange own = sub_group_range(blueprint, block, sub_group);
  const Elems before = own.first - rank_shard(blueprint, block).first;
  const Elems first = blueprint.first_elements.at(blueprint.own().blocks[block].number) + own.first;
  const auto undecayed = ranges_in(blueprint.undecayed, first, first + own.elements);
  if (weights != nullptr) weights += before * size_of(blueprint.type);
  if (gradient != nullptr) gradient += before * size_of(blueprint.type);
  return {.weights = cpu_adam::Weights::of(layout.type, weights, array_in(states, layout.master)),
          .moments = {layout.format.moments, array_in(states, layout.first),
                      array_in(states, layout.second),
                      array_in<std::uint8_t>(states, layout.first_exponents),
                      array_in<std::uint8_t>(states, layout.second_exponents)},
          .gradient = {layout.type, gradient},
          .size = own.elements,
          .first_element = first,
          .undecayed = undecayed};
}

}  // namespace ballast::engine
