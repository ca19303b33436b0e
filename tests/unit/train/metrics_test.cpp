#include "ballast/train/metrics.h"

#include <bit>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <limits>
#include <string>

#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include "ballast/core/random.h"

#include "src/train/waiting_file.h"
#include "tests/support/expect_error.h"
#include "tests/support/file_size_limit.h"
#include "tests/support/tags.h"
#include "tests/support/temp_dir.h"

namespace ballast::train::metrics_test {
namespace {

using test::expect_error;

std::string read_text(const std::filesystem::path& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

StepMetrics step(std::uint64_t number) {
  StepMetrics metrics;
  metrics.step = number;
  metrics.loss = 4.25;
  return metrics;
}

TAG_TESTS("one_thread", "Metrics.*");
TEST(Metrics, HaveTheFieldsThatToolsRelyOn) {
  auto metrics = step(3);
  metrics.lr = 1e-3;
  metrics.grad_norm = 1.5;
  metrics.tokens = 4096;
  metrics.step_seconds = 0.5;
  metrics.tokens_per_second = 8192;
  metrics.busy_seconds = {{"compute", 0.25}, {"fetch", 0.125}};
  metrics.bytes = {{"fetch", 1'000'000'000'000}};
  metrics.peak_bytes = {{"device", 1}, {"host", 2}, {"nvme", 3}};
  metrics.nvme_bytes_written = 77;
  metrics.rolled_back = true;
  EXPECT_EQ(
      to_json_line(metrics),
      R"({"step":3,"loss":4.25,"lr":0.001,"grad_norm":1.5,"tokens":4096,"step_seconds":0.5,)"
      R"("tokens_per_second":8192.0,"skipped":false,"rolled_back":true,)"
      R"("lanes":{"compute":{"busy_seconds":0.25},"fetch":{"busy_seconds":0.125}},"bytes":{"fetch":1000000000000},)"
      R"("peak_bytes":{"device":1,"host":2,"nvme":3},"nvme_bytes_written":77})");
  metrics.loss_scale = 2048.0;
  EXPECT_NE(to_json_line(metrics).find(R"("loss_scale":2048.0})"), std::string::npos);
  metrics.skipped_batches = 9;
  EXPECT_NE(to_json_line(metrics).find(R"("skipped_batches":9})"), std::string::npos);
  metrics.eval_loss = 2.5;
  EXPECT_NE(to_json_line(metrics).find(R"("eval_loss":2.5,"eval_perplexity":12.182)"),
            std::string::npos);
}

TEST(Metrics, HaveTheTimesAndTheMemoryOfEachDevice) {
  auto metrics = step(1);
  metrics.devices = {
      {.busy_seconds = {{"compute", 0.25}}, .stalled_seconds = {{"compute", 0.5}}, .peak_bytes = 7},
      {.busy_seconds = {{"pass", 0.125}}, .stalled_seconds = {}, .peak_bytes = 9}};
  EXPECT_NE(
      to_json_line(metrics).find(
          R"("devices":{"0":{"lanes":{"compute":{"busy_seconds":0.25,"stalled_seconds":0.5}},)"
          R"("peak_bytes":7},"1":{"lanes":{"pass":{"busy_seconds":0.125}},"peak_bytes":9}}})"),
      std::string::npos)
      << to_json_line(metrics);
}

TEST(MetricsWriter, KeepsOthersFromItsFile) {
  using enum MetricsWriter::Existing;
  const test::TempDir dir;
  const auto path = dir.path() / "metrics.jsonl";
  {
    MetricsWriter first(path, refused);
    EXPECT_TRUE(first.lock());
    for (const auto existing : {replaced, continued}) {
      MetricsWriter second(path, existing);
      EXPECT_FALSE(second.lock());
    }
    EXPECT_TRUE(std::filesystem::exists(path));
    first.write(step(1));
  }
  MetricsWriter next(path, continued);
  EXPECT_TRUE(next.lock());
  EXPECT_NE(read_text(path), "");
}

TEST(Metrics, ReadBackBitForBit) {
  for (std::uint64_t i = 0; i < 20'000; ++i) {
    const auto value = std::bit_cast<double>(random_u64(1, i));
    if (!std::isfinite(value)) continue;
    auto metrics = step(1);
    metrics.loss = value;
    metrics.grad_norm = static_cast<double>(std::bit_cast<float>(static_cast<std::uint32_t>(i)));
    const auto line = nlohmann::json::parse(to_json_line(metrics));
    EXPECT_EQ(std::bit_cast<std::uint64_t>(line["loss"].get<double>()),
              std::bit_cast<std::uint64_t>(value));
    EXPECT_EQ(line["grad_norm"].get<double>(), metrics.grad_norm);
  }
}

TEST(Metrics, WriteNonFiniteNumbersAsNull) {
  auto metrics = step(1);
  metrics.loss = std::numeric_limits<double>::quiet_NaN();
  metrics.grad_norm = std::numeric_limits<double>::infinity();
  metrics.skipped = true;
  const auto line = nlohmann::json::parse(to_json_line(metrics));
  EXPECT_TRUE(line["loss"].is_null());
  EXPECT_TRUE(line["grad_norm"].is_null());
  EXPECT_TRUE(line["skipped"].get<bool>());
  EXPECT_FALSE(line.contains("targets"));
}

TEST(Metrics, HaveNoLossWithoutTargets) {
  auto metrics = step(1);
  metrics.loss = std::nullopt;
  const auto line = nlohmann::json::parse(to_json_line(metrics));
  EXPECT_TRUE(line["loss"].is_null());
  EXPECT_EQ(line["targets"].get<int>(), 0);
}

TEST(MetricsWriter, HasEveryLineInTheFileWhenWriteReturns) {
  const test::TempDir dir;
  const auto path = dir.path() / "metrics.jsonl";
  MetricsWriter writer(path);
  writer.write(step(1));
  EXPECT_EQ(read_text(path), to_json_line(step(1)) + "\n");
  writer.write(step(2));
  EXPECT_EQ(read_text(path), to_json_line(step(1)) + "\n" + to_json_line(step(2)) + "\n");
}

TEST(MetricsWriter, ReplacesAnOldFile) {
  const test::TempDir dir;
  const auto path = dir.write("metrics.jsonl", to_json_line(step(1)) + "\n{\"step\":2,\"lo");
  MetricsWriter(path).write(step(1));
  EXPECT_EQ(read_text(path), to_json_line(step(1)) + "\n");
}

TEST(MetricsWriter, KeepsAnotherRunsLinesUntilItsFirst) {
  const test::TempDir dir;
  const auto path = dir.write("metrics.jsonl", "old\n");
  { const MetricsWriter idle(path); }
  EXPECT_EQ(read_text(path), "old\n");
  MetricsWriter writer(path);
  EXPECT_EQ(read_text(path), "old\n");
  writer.write(step(1));
  EXPECT_EQ(read_text(path), to_json_line(step(1)) + "\n");
}

TEST(MetricsWriter, TakesAFileForItselfOnDemand) {
  const test::TempDir dir;
  const auto path = dir.path() / "metrics.jsonl";
  {
    const MetricsWriter first(path, MetricsWriter::Existing::refused);
    expect_error(ErrorCategory::io, {path.string(), "File exists"}, [&] {
      MetricsWriter{path, MetricsWriter::Existing::refused};
    });
    EXPECT_TRUE(std::filesystem::exists(path)) << "the second may not remove the first one's file";
  }
  EXPECT_FALSE(std::filesystem::exists(path)) << "a file without lines is left";
}

TEST(MetricsWriter, ReportsAFullDisk) {
  // Uses a link, because a writer with a defect could remove the device.
  const test::TempDir dir;
  const auto path = dir.path() / "full";
  std::filesystem::create_symlink("/dev/full", path);
  MetricsWriter writer(path);
  writer.write(step(1));
  ASSERT_TRUE(writer.file().failure());
  EXPECT_NE(std::string(writer.file().failure()->what()).find("No space left"), std::string::npos);
  EXPECT_EQ(writer.rows(), 0U);
}

TEST(MetricsWriter, RemovesAPartialLineWhichThenWaits) {
  const test::TempDir dir;
  const auto path = dir.path() / "metrics.jsonl";
  MetricsWriter writer(path);
  writer.write(step(1));
  const auto whole = read_text(path);
  {
    const test::FileSizeLimit limit(whole.size() + 10);
    writer.write(step(2));
    writer.write(step(3));
    EXPECT_EQ(read_text(path), whole);
    const std::string missing = writer.file().missing();
    EXPECT_TRUE(missing.starts_with("2 rows from step 2 on are not in " + path.string() + " ("));
    EXPECT_TRUE(missing.ends_with(path.string() + ": File too large)")) << missing;
  }
  writer.write(step(4));
  const auto all = whole + to_json_line(step(2)) + "\n" + to_json_line(step(3)) + "\n" +
                   to_json_line(step(4)) + "\n";
  EXPECT_EQ(read_text(path), all);
  EXPECT_EQ(writer.file().missing(), "");
  EXPECT_EQ(writer.sync(), all.size());
}

TEST(MetricsWriter, RemovesLaterLinesThatAreNotWrittenYet) {
  const test::TempDir dir;
  const auto path = dir.path() / "metrics.jsonl";
  MetricsWriter writer(path);
  writer.write(step(1));
  writer.write(step(2));
  const auto two = read_text(path);
  {
    const test::FileSizeLimit limit(two.size());
    for (const std::uint64_t number : {3, 4, 5}) writer.write(step(number));
    EXPECT_GT(writer.sync(), two.size()) << "a checkpoint counts the lines that wait";
  }
  writer.continue_after(3);
  writer.write(step(4));
  EXPECT_EQ(read_text(path), two + to_json_line(step(3)) + "\n" + to_json_line(step(4)) + "\n");
  writer.continue_after(1);
  EXPECT_EQ(read_text(path), to_json_line(step(1)) + "\n");
}

TEST(MetricsWriter, DropsTheOldestLinesBeyondItsBound) {
  const test::TempDir dir;
  const auto path = dir.path() / "metrics.jsonl";
  MetricsWriter writer(path);
  writer.write(step(1));
  const std::string row(std::size_t{1} << 20U, 'x');
  {
    const test::FileSizeLimit limit(read_text(path).size());
    for (std::uint64_t number = 2; number < 20; ++number) writer.file().append(number, row);
  }
  EXPECT_EQ(writer.file().dropped(), 2U);
  writer.file().flush();
  EXPECT_EQ(read_text(path).size(), to_json_line(step(1)).size() + 1 + 16 * row.size());
  EXPECT_EQ(writer.file().missing(), "2 rows from step 2 on are not in " + path.string());
}

TEST(MetricsWriter, MakesADeletedFileAgainUnlessAnotherProcessHasIt) {
  const test::TempDir dir;
  const auto path = dir.path() / "run/metrics.jsonl";
  std::filesystem::create_directory(path.parent_path());
  MetricsWriter writer(path);
  EXPECT_TRUE(writer.lock());
  writer.write(step(1));
  std::filesystem::remove_all(path.parent_path());
  EXPECT_TRUE(writer.file().is_deleted());
  writer.write(step(2));
  EXPECT_EQ(read_text(path), to_json_line(step(2)) + "\n");
  std::filesystem::remove(path);
  MetricsWriter other(path);
  EXPECT_TRUE(other.lock());
  other.write(step(1));
  expect_error(ErrorCategory::usage, {path.string(), "another process"},
               [&] { writer.write(step(3)); });
  EXPECT_EQ(read_text(path), to_json_line(step(1)) + "\n");
}

TEST(MetricsWriter, NamesAFolderThatIsNotThere) {
  const test::TempDir dir;
  const auto path = dir.path() / "missing" / "metrics.jsonl";
  expect_error(ErrorCategory::io, {path.string(), "No such file"}, [&] { MetricsWriter{path}; });
}

}  // namespace
}  // namespace ballast::train::metrics_test
