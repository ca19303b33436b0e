#pragma once

#include <cstddef>
#include <cstdlib>
#include <string>

#include "tests/support/sanitizers.h"

namespace ballast::test {

/// Number of damaged inputs that a test makes: BALLAST_TEST_FUZZ_INPUTS if set, otherwise `usual`,
/// and a quarter of it under a sanitizer.
inline std::size_t fuzz_inputs(std::size_t usual) {
  const char* const text = std::getenv("BALLAST_TEST_FUZZ_INPUTS");
  if (text != nullptr) return std::stoull(text);
  return kSanitized ? usual / 4 : usual;
}

}  // namespace ballast::test
