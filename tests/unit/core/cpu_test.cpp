#include "ballast/core/cpu.h"

#include <gtest/gtest.h>

#include "ballast/core/error.h"

namespace ballast {
namespace {

TEST(Isa, NamesReadBack) {
  for (const Isa isa : {Isa::scalar, Isa::avx2, Isa::avx512}) {
    EXPECT_EQ(parse_isa(to_string(isa)), isa);
  }
}

TEST(Isa, MisspeltNameGetsASuggestion) {
  try {
    parse_isa("avx215");
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.category(), ErrorCategory::usage);
    EXPECT_NE(std::string(error.what()).find("did you mean 'avx2'"), std::string::npos);
  }
}

TEST(Cpu, ScalarIsAlwaysThereAndSomeCpuIsUsable) {
  EXPECT_TRUE(cpu_supports(Isa::scalar));
  EXPECT_GE(usable_cpus(), 1);
}

}  // namespace
}  // namespace ballast
