#include <cstdlib>
#include <string>

#include "ballast/core/error.h"
#include "ballast/cpu_adam/updater.h"

#include "cpu_adam/variant.h"

namespace ballast::cpu_adam {
namespace {

/// The fastest instruction set that BALLAST_ISA_MASK leaves visible.
Isa mask() {
  const char* name = std::getenv("BALLAST_ISA_MASK");
  if (name == nullptr || *name == '\0') return Isa::avx512;
  try {
    return parse_isa(name);
  } catch (const Error& error) {
    throw error.with_context("BALLAST_ISA_MASK");
  }
}

}  // namespace

std::vector<Isa> available() {
  const Isa best = mask();
  std::vector<Isa> found;
  for (const Variant* candidate : kVariants) {
    if (candidate->isa <= best && cpu_supports(candidate->isa)) found.push_back(candidate->isa);
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
