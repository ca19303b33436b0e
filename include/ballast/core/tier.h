#pragma once

#include <array>
#include <cstdint>
#include <string_view>

namespace ballast {

/// Storage tiers of tensors between uses, fastest first.
enum class Tier : std::uint8_t { device, host, nvme };

inline constexpr std::array<Tier, 3> kTiers = {Tier::device, Tier::host, Tier::nvme};

/// Returns "device", "host" or "nvme".
constexpr std::string_view to_string(Tier tier) noexcept {
  constexpr std::array<std::string_view, 3> kNames = {"device", "host", "nvme"};
  return kNames[static_cast<std::size_t>(tier)];
}

}  // namespace ballast
