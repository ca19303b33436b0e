#include "tools/signals.h"

#include <array>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <thread>

#include <gtest/gtest.h>

#include "ballast/core/error.h"

#include "tests/support/expect_error.h"

namespace ballast::tools::process_test {
namespace {

constexpr std::array kEnding = {SIGINT, SIGTERM, SIGHUP};

int passed_on = 0;

extern "C" void note(int number) {
  passed_on = number;
}

/// Handlers of another program, which get the signals after a scope.
class Signals : public ::testing::Test {
 protected:
  void SetUp() override {
    passed_on = 0;
    for (const int number : kEnding) std::signal(number, note);
  }
  void TearDown() override {
    for (const int number : kEnding) std::signal(number, SIG_DFL);
  }
};

TEST_F(Signals, TheFirstOneInterruptsAndCounts) {
  for (const int number : kEnding) {
    {
      const SignalScope scope;
      EXPECT_FALSE(interrupted());
      std::raise(number);
      EXPECT_TRUE(interrupted());
      for (const int later : kEnding) std::raise(later);  // within the grace
      EXPECT_EQ(interrupt_signal(), number);
      EXPECT_EQ(interrupt_status(), 128 + number);
      EXPECT_EQ(passed_on, 0);
    }
    EXPECT_EQ(passed_on, number);
    EXPECT_FALSE(interrupted());
    passed_on = 0;
  }
}

TEST_F(Signals, AnIgnoredHangupStaysIgnored) {
  std::signal(SIGHUP, SIG_IGN);
  const SignalScope scope;
  std::raise(SIGHUP);
  EXPECT_FALSE(interrupted());
}

TEST_F(Signals, AnInterruptWithoutSignalIsAClosedPipe) {
  const SignalScope scope;
  interrupt();
  EXPECT_TRUE(interrupted());
  EXPECT_EQ(interrupt_status(), kClosedPipe);
  set_interrupt_status(kResumable);
  EXPECT_EQ(interrupt_status(), kResumable);
  set_interrupt_status(0);
}

TEST_F(Signals, ASecondRunInTheProcessIsRefused) {
  const SignalScope scope;
  test::expect_error(ErrorCategory::usage, {"another run or measurement"},
                     [] { const SignalScope second; });
}

TEST(SignalsDeathTest, ALaterOneEndsTheProgramAtOnce) {
  EXPECT_EXIT(
      {
        std::signal(SIGHUP, SIG_DFL);  // nohup may ignore it
        install_signal_handlers();
        at_sudden_end([] { std::fputs("restored", stderr); });
        std::raise(SIGTERM);
        std::this_thread::sleep_for(kSignalGrace + std::chrono::milliseconds(50));
        std::raise(SIGHUP);
      },
      ::testing::KilledBySignal(SIGHUP), "restored");
}

}  // namespace
}  // namespace ballast::tools::process_test
