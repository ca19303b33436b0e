#include "ballast/core/isa_mask.h"

#include <cstdlib>

#include "ballast/core/error.h"

namespace ballast {

bool may_run(Isa isa) {
  const char* const name = std::getenv("BALLAST_ISA_MASK");
  if (name == nullptr || *name == '\0') return cpu_supports(isa);
  try {
    return isa <= parse_isa(name) && cpu_supports(isa);
  } catch (const Error& error) {
    throw error.with_context("BALLAST_ISA_MASK");
  }
}

}  // namespace ballast
