#include "ballast/planning/machine_rates.h"

#include <cstdlib>
#include <fstream>
#include <optional>

#include <gtest/gtest.h>

#include "ballast/engine/blueprint.h"
#include "ballast/planning/calibrate.h"
#include "ballast/planning/rates_file.h"

#include "tests/support/captured_log.h"
#include "tests/support/temp_dir.h"
#include "tests/support/tiny_config.h"

namespace ballast::planning {
namespace {

/// An environment variable set for as long as this lives; null: not set.
class Variable {
 public:
  Variable(const char* name, const char* value) : name_(name) {
    if (const char* before = std::getenv(name)) before_ = before;
    set(value);
  }
  ~Variable() { set(before_ ? before_->c_str() : nullptr); }
  Variable(const Variable&) = delete;
  Variable& operator=(const Variable&) = delete;

 private:
  void set(const char* value) {
    if (value == nullptr) {
      unsetenv(name_);
    } else {
      setenv(name_, value, 1);
    }
  }
  const char* name_;
  std::optional<std::string> before_;
};

class MachineRates : public testing::Test {
 protected:
  MachineRates()
      : cache_("XDG_CACHE_HOME", directory_.path().c_str()),
        config_(test::tiny_config(
            R"("vocab_size": 131, "hidden_size": 32, "num_layers": 2, "num_heads": 2)", true,
            directory_.path())),
        model_(engine::make_architecture(config_)),
        key_(calibration_key(config_, model_)) {}

  schedule::Rates rates(bool recalibrate = false) {
    return machine_rates(config_, model_, recalibrate);
  }
  [[nodiscard]] bool measured() const { return log_.text().find("measuring") != std::string::npos; }

  test::TempDir directory_;
  Variable cache_;
  config::Config config_;
  model::Architecture model_;
  std::string key_;
  test::CapturedLog log_;
};

TEST_F(MachineRates, AreMeasuredOnce) {
  const schedule::Rates first = rates();
  EXPECT_TRUE(measured());
  EXPECT_EQ(first.name, "this machine");
  EXPECT_FALSE(first.forward.empty());
  const auto file = rates_cache_file(key_);
  EXPECT_EQ(file.parent_path(), directory_.path() / "ballast");
  EXPECT_EQ(rates(), first);
  const std::string log = log_.text();
  EXPECT_EQ(log.find("measuring"), log.rfind("measuring")) << log;
}

TEST_F(MachineRates, AreTakenFromTheFile) {
  schedule::Rates known;
  known.name = key_;
  known.forward = {{1.0, 2.0}};
  known.update_per_second = 5e9;
  std::filesystem::create_directories(directory_.path() / "ballast");
  save_rates(rates_cache_file(key_), known);
  known.name = "this machine";
  EXPECT_EQ(rates(), known);
  EXPECT_FALSE(measured());
  EXPECT_FALSE(rates(true) == known);
  EXPECT_TRUE(measured());
}

TEST_F(MachineRates, AreMeasuredAnewWhenTheFileIsOfNoUse) {
  const auto file = rates_cache_file(key_);
  directory_.write("ballast/" + file.filename().string(), "{\"nam");
  const schedule::Rates measured_now = rates();
  EXPECT_TRUE(measured());
  EXPECT_EQ(rates(), measured_now);  // mended
}

TEST_F(MachineRates, AreMeasuredAnewForAnotherKey) {
  schedule::Rates other;
  other.name = "another machine";
  other.forward = {{1.0, 2.0}};
  std::filesystem::create_directories(directory_.path() / "ballast");
  save_rates(rates_cache_file(key_), other);
  EXPECT_NE(rates().forward, other.forward);
  EXPECT_TRUE(measured());
}

TEST_F(MachineRates, DoWithoutACache) {
  directory_.write("file", "");
  const Variable nowhere("XDG_CACHE_HOME", (directory_.path() / "file").c_str());
  EXPECT_FALSE(rates().forward.empty());
  EXPECT_NE(log_.text().find("not kept"), std::string::npos) << log_.text();
}

TEST(RatesCacheFile, FollowsTheEnvironment) {
  const Variable no_cache("XDG_CACHE_HOME", nullptr);
  {
    const Variable home("HOME", "/someone");
    EXPECT_EQ(rates_cache_file("a").parent_path(), "/someone/.cache/ballast");
    EXPECT_NE(rates_cache_file("a"), rates_cache_file("b"));
  }
  const Variable no_home("HOME", nullptr);
  EXPECT_TRUE(rates_cache_file("a").empty());
}

}  // namespace
}  // namespace ballast::planning
