#include "ballast/engine/state_range.h"

#include <algorithm>
#include <array>

namespace ballast::engine {
namespace {

constexpr std::array<std::string_view, 8> kNames = {
    "weights",        "remainders",      "masters",          "first_moments",
    "second_moments", "first_exponents", "second_exponents", "codes"};

}  // namespace

std::string_view to_string(StateKind kind) noexcept {
  return kNames[static_cast<std::size_t>(kind)];
}

std::optional<StateKind> state_kind(std::string_view name) noexcept {
  const auto* const found = std::find(kNames.begin(), kNames.end(), name);
  if (found == kNames.end()) return std::nullopt;
  return static_cast<StateKind>(found - kNames.begin());
}

}  // namespace ballast::engine
