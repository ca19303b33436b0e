#include <string>

#include "ballast/core/error.h"
#include "ballast/core/isa_mask.h"
#include "ballast/cpu_adam/updater.h"

#include "cpu_adam/variant.h"

namespace ballast::cpu_adam {

std::vector<Isa> available() {
  std::vector<Isa> found;
  for (const Variant* candidate : kVariants) {
    if (may_run(candidate->isa)) found.push_back(candidate->isa);
  }
  return found;
}

Isa active() {
  return available().back();
}

const Variant& variant(Isa isa) {
  std::string names;
  for (const Isa candidate : available()) {
    names += (names.empty() ? "" : ", ") + std::string(to_string(candidate));
    if (candidate != isa) continue;
    for (const Variant* compiled : kVariants) {
      if (compiled->isa == isa) return *compiled;
    }
  }
  throw Error(ErrorCategory::config, "CPU update: the instruction set " +
                                         std::string(to_string(isa)) +
                                         " is not available here; choose one of: " + names);
}

}  // namespace ballast::cpu_adam
