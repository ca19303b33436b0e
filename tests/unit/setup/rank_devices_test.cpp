#include <gtest/gtest.h>

#include "ballast/setup/translate.h"

#include "tests/support/tiny_config.h"

namespace ballast::setup::rank_devices_test {
namespace {

using Numbers = std::vector<std::uint32_t>;

config::Config config_with(std::vector<std::string> overrides) {
  overrides.emplace_back("ballast.device=host");
  return test::tiny_config(R"("vocab_size": 131, "hidden_size": 32, "num_layers": 2,
                              "num_heads": 2)",
                           true, "/run", overrides);
}

TEST(RankDeviceInputs, GpusAreConsecutiveUnlessListed) {
  EXPECT_EQ(device_numbers(config_with({}), 3), (Numbers{3}));
  EXPECT_EQ(device_numbers(config_with({"pipeline.stages=2"}), 3), (Numbers{6, 7}));
  const config::Config listed = config_with({"ballast.devices=[5, 5, 1]"});
  EXPECT_EQ(device_numbers(listed, 3), (Numbers{5, 5, 1}));
  EXPECT_EQ(device_options(listed, 3).local_rank, 5U);
}

TEST(RankDeviceInputs, AutoIsOneHostDeviceUnlessMoreAreListed) {
  const auto available = [](const config::Config& config) {
    return engine::available_devices(translate(config).devices);
  };
  EXPECT_EQ(available(config_with({"pipeline.stages=auto"})), 1U);
  const config::Config listed = config_with({"pipeline.stages=auto", "ballast.devices=[0, 0, 0]"});
  EXPECT_EQ(available(listed), 3U);
  EXPECT_EQ(listed.devices(), 1U) << "nothing is chosen yet";
  EXPECT_EQ(resolve_budgets(listed, {}, 300).device, 40U) << "enough for all of them";
  EXPECT_EQ(resolve_budgets(config_with({"pipeline.stages=2"}), {}, 300).device, 60U);
}

TEST(RankDeviceInputs, TheProblemHasTheDevicesOfTheConfig) {
  const config::Config config = config_with({"pipeline.stages=2"});
  const engine::Blueprint blueprint =
      engine::outline(translate(config), {64 * kMiB, 64 * kMiB}, {}, {});
  EXPECT_EQ(blueprint.problem.devices, 2U);
}

}  // namespace
}  // namespace ballast::setup::rank_devices_test
