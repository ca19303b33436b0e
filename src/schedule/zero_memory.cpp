#include "ballast/schedule/zero_memory.h"

#include <fmt/format.h>

#include "ballast/core/error.h"

namespace ballast::schedule {

StateBytes zero_memory(double parameters, std::uint64_t world, int stage,
                       const StateBytes& per_parameter) {
  if (world == 0) throw Error(ErrorCategory::config, "zero_memory: there must be a rank");
  if (stage < 0 || stage > 3) {
    throw Error(ErrorCategory::config,
                fmt::format("zero_memory: ZeRO has the stages 0 to 3, got {}", stage));
  }
  const auto share = [&](double bytes, int split_from) {
    const double whole = parameters * bytes;
    return stage >= split_from ? whole / static_cast<double>(world) : whole;
  };
  return {.weights = share(per_parameter.weights, 3),
          .gradients = share(per_parameter.gradients, 2),
          .optimizer = share(per_parameter.optimizer, 1)};
}

}  // namespace ballast::schedule
