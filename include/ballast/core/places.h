#pragma once

#include <array>
#include <cstdint>
#include <string_view>
#include <vector>

namespace ballast {

/// Storage tiers of tensors between uses, fastest first.
enum class Tier : std::uint8_t { device, host, nvme };

inline constexpr std::array<Tier, 3> kTiers = {Tier::device, Tier::host, Tier::nvme};

/// Returns "device", "host" or "nvme".
constexpr std::string_view to_string(Tier tier) noexcept {
  constexpr std::array<std::string_view, 3> kNames = {"device", "host", "nvme"};
  return kNames[static_cast<std::size_t>(tier)];
}

/// The ranks of a run by what they share: `data` x `sequence` x `tensor` places, and this rank's.
/// Tensor places are neighbours and data places are the farthest apart (the order tp-cp-dp of
/// Megatron-LM), so that ranks that exchange most are on one node:
///
///     rank = (data place * sequence + sequence place) * tensor + tensor place
///
/// Ranks of one tensor place have the same tensors and different rows of the batch. They are
/// **sharers**: ZeRO splits states, gradients and weights among them. Ranks of one data place have
/// rows of the same sequences.
struct Mesh {
  std::uint32_t data = 1;
  std::uint32_t sequence = 1;
  std::uint32_t tensor = 1;
  std::uint32_t rank = 0;

  /// Number of processes.
  [[nodiscard]] std::uint32_t ranks() const { return data * sequence * tensor; }
  /// Number of sharers, and this rank's place among them.
  [[nodiscard]] std::uint32_t sharers() const { return data * sequence; }
  [[nodiscard]] std::uint32_t sharer() const { return rank / tensor; }

  [[nodiscard]] std::uint32_t data_place() const { return rank / (sequence * tensor); }
  [[nodiscard]] std::uint32_t sequence_place() const { return rank / tensor % sequence; }
  [[nodiscard]] std::uint32_t tensor_place() const { return rank % tensor; }

  /// Returns the rank with this rank's tensors that has place `sharer` among them.
  [[nodiscard]] std::uint32_t rank_of(std::uint32_t sharer) const {
    return rank_of(sharer, tensor_place());
  }
  /// Returns the rank at place `sharer` among those with the tensors of `place`.
  [[nodiscard]] std::uint32_t rank_of(std::uint32_t sharer, std::uint32_t place) const {
    return sharer * tensor + place;
  }
  /// Returns the ranks, by place, that have this rank's tensors; its sequences; its rows.
  [[nodiscard]] std::vector<std::uint32_t> sharer_ranks() const {
    return line(tensor_place(), tensor, sharers());
  }
  [[nodiscard]] std::vector<std::uint32_t> sequence_ranks() const {
    return line(data_place() * sequence * tensor + tensor_place(), tensor, sequence);
  }
  [[nodiscard]] std::vector<std::uint32_t> tensor_ranks() const {
    return line(sharer() * tensor, 1, tensor);
  }

 private:
  static std::vector<std::uint32_t> line(std::uint32_t first, std::uint32_t step,
                                         std::uint32_t count) {
    std::vector<std::uint32_t> ranks(count);
    for (std::uint32_t i = 0; i < count; ++i) ranks[i] = first + i * step;
    return ranks;
  }
};

}  // namespace ballast
