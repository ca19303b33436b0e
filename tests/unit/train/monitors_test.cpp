#include "src/train/monitors.h"

#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>

#include <gtest/gtest.h>

#include "tests/support/expect_error.h"
#include "tests/support/file_size_limit.h"
#include "tests/support/temp_dir.h"

namespace ballast::train::monitors_test {
namespace {

namespace fs = std::filesystem;
using test::expect_error;

config::Config config_of(const fs::path& out) {
  config::Config config;
  config.ballast.out = out;
  config.batch.train_batch = 8;
  config.tensorboard.enabled = true;
  return config;
}

StepMetrics step(std::uint64_t number) {
  StepMetrics metrics;
  metrics.step = number;
  metrics.loss = 2.5;
  return metrics;
}

/// The only file in `folder`.
fs::path only_file(const fs::path& folder) {
  fs::path found;
  for (const auto& entry : fs::directory_iterator(folder)) {
    EXPECT_TRUE(found.empty());
    found = entry.path();
  }
  return found;
}

std::string read(const fs::path& file) {
  std::ifstream in(file, std::ios::binary);
  return {std::istreambuf_iterator<char>(in), {}};
}

TEST(Monitors, LeaveNothingWithoutARow) {
  const test::TempDir dir;
  const fs::path folder = dir.path() / "run" / "DeepSpeedJobName";
  {
    const Monitors monitors(config_of(dir.path() / "run"), RunDirectory::fresh);
    EXPECT_TRUE(fs::is_directory(folder));
  }
  EXPECT_FALSE(fs::exists(dir.path() / "run"));
}

TEST(Monitors, RemoveAPartialRecordWhichThenWaits) {
  const test::TempDir dir;
  Monitors monitors(config_of(dir.path()), RunDirectory::fresh);
  monitors.write(step(1));
  const fs::path file = only_file(dir.path() / "DeepSpeedJobName");
  const std::string whole = read(file);
  {
    const test::FileSizeLimit limit(whole.size() + 10);
    monitors.write(step(2));
    ASSERT_NE(monitors.waiting(), nullptr);
    EXPECT_NE(std::string(monitors.waiting()->failure()->what()).find("File too large"),
              std::string::npos);
    EXPECT_EQ(monitors.missing().size(), 1U);
    EXPECT_EQ(read(file), whole);
  }
  monitors.flush();
  EXPECT_EQ(monitors.waiting(), nullptr);
  EXPECT_TRUE(read(file).starts_with(whole));
  EXPECT_GT(read(file).size(), whole.size());
}

TEST(Monitors, KeepCsvRowsInOrderWhenTheDiskIsFull) {
  const test::TempDir dir;
  config::Config config = config_of(dir.path());
  config.tensorboard.enabled = false;
  config.csv_monitor.enabled = true;
  Monitors monitors(config, RunDirectory::fresh);
  monitors.write(step(1));
  const fs::path file = dir.path() / "DeepSpeedJobName" / "Train_Samples_train_loss.csv";
  EXPECT_EQ(read(file), "step,train_loss\n8,2.5\n");
  {
    const test::FileSizeLimit limit(read(file).size() + 2);
    monitors.write(step(2));
    EXPECT_NE(monitors.waiting(), nullptr);
  }
  EXPECT_EQ(read(file), "step,train_loss\n8,2.5\n");
  monitors.write(step(3));
  EXPECT_EQ(read(file), "step,train_loss\n8,2.5\n16,2.5\n24,2.5\n");
  // Deleted files are made again. Those of a renamed directory are followed.
  fs::remove_all(file.parent_path());
  monitors.write(step(4));
  EXPECT_EQ(read(file), "step,train_loss\n32,2.5\n");
  fs::create_directory(dir.path() / "new");
  fs::rename(file.parent_path(), dir.path() / "new/DeepSpeedJobName");
  monitors.moved(dir.path(), dir.path() / "new");
  monitors.go_back();
  monitors.write(step(4));
  EXPECT_EQ(read(dir.path() / "new/DeepSpeedJobName" / file.filename()),
            "step,train_loss\n32,2.5\n");
  EXPECT_FALSE(fs::exists(file.parent_path()));
}

TEST(Monitors, HaveNoLossOfAStepWithoutTargets) {
  const test::TempDir dir;
  config::Config config = config_of(dir.path());
  config.csv_monitor.enabled = true;
  config.csv_monitor.output_path = dir.path() / "csv";
  Monitors monitors(config, RunDirectory::fresh);
  StepMetrics without = step(2);
  without.loss = std::nullopt;
  for (const formats::Scalar& scalar : scalars_of(without)) {
    EXPECT_NE(scalar.name, "Train/Samples/train_loss");
  }
  monitors.write(step(1));
  monitors.write(without);
  monitors.write(step(3));
  const fs::path folder = dir.path() / "csv/DeepSpeedJobName";
  EXPECT_EQ(read(folder / "Train_Samples_train_loss.csv"), "step,train_loss\n8,2.5\n16,\n24,2.5\n");
  EXPECT_EQ(read(folder / "Train_Samples_lr.csv"), "step,lr\n8,0\n16,0\n24,0\n");
}

TEST(Monitors, DropLaterAndUnfinishedRows) {
  const test::TempDir dir;
  config::Config config = config_of(dir.path());
  config.tensorboard.enabled = false;
  config.csv_monitor.enabled = true;
  const fs::path folder = dir.path() / "DeepSpeedJobName";
  fs::create_directories(folder);
  const fs::path file = dir.write("DeepSpeedJobName/Train_Samples_train_loss.csv",
                                  "step,train_loss\n8,1\n16,2\n24,3\n32,4");
  const fs::path other =
      dir.write("DeepSpeedJobName/Train_Samples_eval_loss.csv", "step,eval_loss\n8,1\n24,3\n");
  Monitors(config, RunDirectory::continued).write(step(3));
  EXPECT_EQ(read(file), "step,train_loss\n8,1\n16,2\n24,2.5\n");
  EXPECT_EQ(read(other), "step,eval_loss\n8,1\n");
  Monitors(config, RunDirectory::continued).write(step(9));
  EXPECT_EQ(read(file), "step,train_loss\n8,1\n16,2\n24,2.5\n72,2.5\n");
  Monitors(config, RunDirectory::overwritten).write(step(2));
  EXPECT_EQ(read(file), "step,train_loss\n16,2.5\n");
  expect_error(ErrorCategory::usage, {"exists", "--overwrite"},
               [&] { Monitors(config, RunDirectory::fresh); });
  fs::rename(other, dir.path() / "mine");
  fs::create_symlink(dir.path() / "mine", other);
  const std::string mine = read(other);
  expect_error(ErrorCategory::usage, {other.string(), "is a symbolic link"},
               [&] { Monitors(config, RunDirectory::overwritten); });
  EXPECT_EQ(read(dir.path() / "mine"), mine);
}

}  // namespace
}  // namespace ballast::train::monitors_test
