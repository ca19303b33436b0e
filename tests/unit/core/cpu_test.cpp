#include <chrono>
#include <thread>
#include <vector>

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include "ballast/core/error.h"
#include "ballast/core/machine.h"

namespace ballast::cpu_test {
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

/// Uses the CPU time of all usable CPUs for a while.
void burn() {
  const auto end = std::chrono::steady_clock::now() + std::chrono::milliseconds(400);
  std::vector<std::thread> threads;
  for (int i = 0; i < usable_cpus(); ++i) {
    threads.emplace_back([end] {
      while (std::chrono::steady_clock::now() < end) {
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
}

TEST(CpuWatch, SeesTheWorkOfOtherProcesses) {
  const CpuWatch watch;
  const pid_t other = fork();
  if (other == 0) {
    burn();
    _exit(0);
  }
  burn();
  EXPECT_GT(watch.others_share(), 0.2);
  waitpid(other, nullptr, 0);
}

}  // namespace
}  // namespace ballast::cpu_test
