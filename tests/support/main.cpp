#include <gtest/gtest.h>

/// Runs the tests. Exits with 77, which Meson shows as SKIP, if every selected test skipped itself
/// or an environment skipped them all.
int main(int argc, char** argv) {
  testing::InitGoogleTest(&argc, argv);
  const int status = RUN_ALL_TESTS();
  const auto& unit = *testing::UnitTest::GetInstance();
  if (testing::GTEST_FLAG(list_tests)) return status;
  const bool all_skipped =
      unit.test_to_run_count() > 0 && (unit.skipped_test_count() == unit.test_to_run_count() ||
                                       unit.ad_hoc_test_result().Skipped());
  return status == 0 && all_skipped ? 77 : status;
}
