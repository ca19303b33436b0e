#include <gtest/gtest.h>

#include "ballast/inputs/engine_inputs.h"

#include "tests/support/tiny_config.h"

namespace ballast::inputs::rank_devices_test {
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
  EXPECT_EQ(available_devices(config_with({"pipeline.stages=auto"})), 1U);
  const config::Config listed = config_with({"pipeline.stages=auto", "ballast.devices=[0, 0, 0]"});
  EXPECT_EQ(available_devices(listed), 3U);
  EXPECT_EQ(listed.devices(), 1U) << "nothing is chosen yet";
  EXPECT_EQ(resolve_budgets(listed, {}, 300).device, 40U) << "enough for all of them";
  EXPECT_EQ(resolve_budgets(config_with({"pipeline.stages=2"}), {}, 300).device, 60U);
}

TEST(RankDeviceInputs, TheProblemHasTheDevicesOfTheConfig) {
  const config::Config config = config_with({"pipeline.stages=2"});
  const engine::Blueprint blueprint =
      outline(config, model_of(config), {64 * kMiB, 64 * kMiB}, {}, {});
  EXPECT_EQ(blueprint.problem.devices, 2U);
}

}  // namespace
}  // namespace ballast::inputs::rank_devices_test
