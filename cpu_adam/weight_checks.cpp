#include "ballast/cpu_adam/weight_checks.h"

#include <array>
#include <cstring>

#include "ballast/cpu_adam/updater.h"

#include "cpu_adam/variant.h"

namespace ballast::cpu_adam {

void compute_checks(const Bf16* weights, Elems count, std::uint16_t* values) {
  static const ChecksKernel checks = variant(active()).checks;
  const Elems blocks = count / WeightChecks::kBlock;
  checks(weights, blocks, values);
  const Elems done = blocks * WeightChecks::kBlock;
  if (done == count) return;
  std::array<Bf16, WeightChecks::kBlock> rest = {};
  std::memcpy(rest.data(), weights + done, (count - done) * sizeof(Bf16));
  checks(rest.data(), 1, values + blocks * WeightChecks::kColumns);
}

}  // namespace ballast::cpu_adam
