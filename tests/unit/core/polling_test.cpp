#include "ballast/core/polling.h"

#include <chrono>

#include <gtest/gtest.h>

namespace ballast::polling_test {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

/// A clock that advances with each reading.
Polling::Duration step;
Polling::TimePoint moment;
Polling::TimePoint stepping_clock() {
  return moment += step;
}

TEST(Polling, CountsLooksAndPauses) {
  step = milliseconds(100);
  Polling polling(&stepping_clock);
  EXPECT_EQ(polling.seconds(), 0.0);
  polling.pause();
  polling.pause();
  EXPECT_NEAR(polling.seconds(), 0.4, 1e-9);
}

TEST(Polling, DoesNotCountATimeInWhichItWasStopped) {
  step = milliseconds(100);
  Polling polling(&stepping_clock);
  polling.pause();
  moment += seconds(3600);
  polling.pause();
  EXPECT_NEAR(polling.seconds(), 0.3, 1e-9);
  polling.pause();
  EXPECT_NEAR(polling.seconds(), 0.5, 1e-9);
}

}  // namespace
}  // namespace ballast::polling_test
