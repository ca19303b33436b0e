#include "ballast/cpu_adam/optimizer.h"

#include <array>
#include <string>

#include "ballast/core/error.h"
#include "ballast/core/suggest.h"

namespace ballast::cpu_adam {
namespace {

const std::array<std::string, 5>& names() {
  static const std::array<std::string, 5> names = {"adamw", "adam", "adagrad", "lion", "sgd"};
  return names;
}

}  // namespace

std::string_view to_string(Optimizer optimizer) noexcept {
  return names()[static_cast<std::size_t>(optimizer)];
}

Optimizer parse_optimizer(std::string_view name) {
  for (std::size_t i = 0; i < names().size(); ++i) {
    if (names()[i] == name) return static_cast<Optimizer>(i);
  }
  throw Error(ErrorCategory::usage, "unknown optimizer '" + std::string(name) +
                                        "'; choose adamw, adam, adagrad, lion or sgd" +
                                        did_you_mean(name, names()));
}

}  // namespace ballast::cpu_adam
