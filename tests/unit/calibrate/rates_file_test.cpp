#include <cmath>
#include <fstream>
#include <iterator>
#include <random>
#include <string>

#include <gtest/gtest.h>

#include "ballast/calibrate/machine_rates.h"
#include "ballast/plan/simulator.h"
#include "ballast/text/json.h"

#include "tests/support/expect_error.h"
#include "tests/support/random_problem.h"
#include "tests/support/temp_dir.h"

namespace ballast::calibrate::rates_file_test {
namespace {

using plan::Rates;
using test::expect_error;
using test::TempDir;

Rates load(const std::string& text) {
  const TempDir dir;
  return load_rates(dir.write("machine.json", text));
}

void expect_refusal(const std::string& text, std::initializer_list<std::string_view> parts) {
  const TempDir dir;
  const auto file = dir.write("machine.json", text);
  expect_error(ErrorCategory::config, {file.string()}, [&] { load_rates(file); });
  expect_error(ErrorCategory::config, parts, [&] { load_rates(file); });
}

std::string text_of(const std::filesystem::path& file) {
  std::ifstream stream(file);
  return {std::istreambuf_iterator<char>(stream), {}};
}

TEST(RatesFile, KeysHaveTheUnitsOfTheirNames) {
  const Rates rates = load(R"({
    // a comment
    "name": "a machine",
    "forward": [{"tokens": 512, "tflops": 90}, {"tokens": 2048, "tflops": 110.5}],
    "backward": [{"tokens": 512, "tflops": 80}],
    "head": [{"tokens": 512, "tflops": 70}],
    "attention_forward_tflops": 600, "attention_backward_tflops": 350.5,
    "recurrence_forward_tflops": 15, "recurrence_backward_tflops": 11.5, "adapter_gbps": 850,
    "device_memory_gbps": 900, "launch_us": 10, "update_gbps": 60, "host_memory_gbps": 75,
    "upload_gbps": 24.5, "offload_gbps": 25, "peer_gbps": 50,
    "read_gbps": 14, "write_gbps": 12, "mixed_gbps": 13, "io_latency_us": 80,
    "fabric_gbps": 360, "network_gbps": 340, "ranks_per_node": 8,
    "shared_cores": 4, "compute_threads": 3, "update_threads": 2,
    "link_cores": 0.5, "io_cores": 0.25,
    "compute_beside_copy": 0.5, "compute_beside_io": 0.75, "update_beside_io": 0.625,
    "io_beside_compute": 0.875, "io_beside_update": 0.375, "corrections": 3,
    "other_work": 0.25, "spread": 0.125, "measured_at_s": 1795651200.5,
    "device_memory": "24GiB", "host_memory": "128 GB", "nvme_space": 4000000000000,
    "drive_writes_tb": 2400
  })");
  EXPECT_EQ(rates.name, "a machine");
  ASSERT_EQ(rates.forward.size(), 2U);
  EXPECT_EQ(rates.forward[1], (plan::CurvePoint{2048.0, 110.5e12}));
  EXPECT_EQ(rates.of(AttentionClass::heads_128),
            (plan::AttentionRate{.forward = 600e12, .backward = 350.5e12}));
  EXPECT_EQ(rates.of(AttentionClass::recurrence),
            (plan::AttentionRate{.forward = 15e12, .backward = 11.5e12}));
  EXPECT_EQ(rates.adapter_per_second, 850e9);
  EXPECT_EQ(rates.device_memory_per_second, 900e9);
  EXPECT_EQ(rates.launch_seconds, 10e-6);
  EXPECT_EQ(rates.update_per_second, 60e9);
  EXPECT_EQ(rates.host_memory_per_second, 75e9);
  EXPECT_EQ(rates.upload_per_second, 24.5e9);
  EXPECT_EQ(rates.peer_per_second, 50e9);
  EXPECT_EQ(rates.mixed_per_second, 13e9);
  EXPECT_EQ(rates.io_latency_seconds, 80e-6);
  EXPECT_EQ(rates.network_per_second, 340e9);
  EXPECT_EQ(rates.ranks_per_node, 8U);
  EXPECT_EQ(rates.shared_cores, 4U);
  EXPECT_EQ(rates.compute_threads, 3U);
  EXPECT_EQ(rates.update_threads, 2U);
  EXPECT_EQ(rates.link_cores, 0.5);
  EXPECT_EQ(rates.io_cores, 0.25);
  EXPECT_EQ(rates.compute_beside_copy, 0.5);
  EXPECT_EQ(rates.compute_beside_io, 0.75);
  EXPECT_EQ(rates.update_beside_io, 0.625);
  EXPECT_EQ(rates.io_beside_compute, 0.875);
  EXPECT_EQ(rates.io_beside_update, 0.375);
  EXPECT_EQ(rates.corrections, 3U);
  EXPECT_EQ(rates.other_work, 0.25);
  EXPECT_EQ(rates.spread, 0.125);
  EXPECT_EQ(rates.measured_at, 1795651200.5);
  EXPECT_EQ(rates.device_bytes, 24 * kGiB);
  EXPECT_EQ(rates.host_bytes, 128'000'000'000U);
  EXPECT_EQ(rates.nvme_bytes, 4'000'000'000'000U);
  EXPECT_EQ(rates.drive_writes_bytes, 2400e12);
}

TEST(RatesFile, MissingKeysAreNotWritten) {
  const Rates rates = load("{}");
  Rates none;
  none.name = "machine";  // like the file
  EXPECT_EQ(rates, none);
}

TEST(RatesFile, WhatIsSavedIsLoadedBitForBit) {
  const TempDir dir;
  const auto file = dir.path() / "rates.json";
  std::mt19937_64 random(1);
  for (int i = 0; i < 100; ++i) {
    const auto any = [&] {
      // All magnitudes, and all 52 bits of the mantissa.
      return std::ldexp(1.0 + static_cast<double>(random() >> 12) * 0x1p-52,
                        static_cast<int>(random() % 160) - 80);
    };
    Rates rates;
    rates.name = "quotes \" and \\ and \n lines";
    rates.forward = {{1.0, any()}, {any() * 0x1p90, any()}};
    rates.backward = {{any(), any()}};
    for (plan::AttentionRate& rate : rates.attention) rate = {any(), any()};
    rates.adapter_per_second = any();
    rates.device_memory_per_second = any();
    rates.launch_seconds = any();
    rates.update_per_second = any();
    rates.host_memory_per_second = any();
    rates.peer_per_second = any();
    rates.upload_per_second = any();
    rates.offload_per_second = any();
    rates.read_per_second = any();
    rates.write_per_second = any();
    rates.mixed_per_second = any();
    rates.mixed_read_share = std::ldexp(static_cast<double>(random() >> 12) + 1.0, -53);
    rates.io_latency_seconds = any();
    rates.fabric_per_second = any();
    rates.network_per_second = any();
    rates.ranks_per_node = 8;
    rates.shared_cores = 2;
    rates.compute_threads = 2;
    rates.update_threads = 1;
    rates.link_cores = any();
    rates.io_cores = any();
    rates.compute_beside_copy = any();
    rates.compute_beside_io = any();
    rates.update_beside_io = any();
    rates.io_beside_compute = any();
    rates.io_beside_update = any();
    rates.corrections = 7;
    rates.measured_at = 1795651200.123456;
    rates.device_bytes = random() >> 2;
    rates.host_bytes = random() >> 2;
    rates.nvme_bytes = random() >> 2;
    rates.drive_writes_bytes = any();
    save_rates(file, rates);
    ASSERT_EQ(load_rates(file), rates) << text_of(file);
  }
}

TEST(RatesFile, NumbersAreWrittenInShortForm) {
  const TempDir dir;
  const auto file = dir.path() / "rates.json";
  Rates rates;
  rates.name = "x";
  rates.head = {{2048.0, 105e12}};
  rates.read_per_second = 7.2e9;
  rates.launch_seconds = 5e-6;
  save_rates(file, rates);
  EXPECT_EQ(text_of(file),
            "{\n  \"name\": \"x\",\n  \"head\": [{\"tokens\": 2048, \"tflops\": 105}],\n"
            "  \"launch_us\": 5,\n  \"read_gbps\": 7.2\n}\n");
}

TEST(RatesFile, MistakesAreNamedWithFileAndKey) {
  expect_refusal(R"({"reed_gbps": 3})", {"reed_gbps: unknown key (did you mean 'read_gbps'?)"});
  expect_refusal(R"({"forward": [{"tokens": 1, "flops": 3}]})",
                 {"forward[0].flops: unknown key (did you mean 'tflops'?)"});
  expect_refusal(R"({"read_gbps": "fast"})", {"read_gbps: expected a number, got the string"});
  expect_refusal(R"({"read_gbps": -1})", {"read_gbps: must be at least 0, got -1"});
  expect_refusal(R"({"read_gbps": 1e305})", {"read_gbps: too large: 1e305"});
  expect_refusal(R"({"read_gbps": null})", {"read_gbps: expected a number, got null"});
  expect_refusal(R"({"read_gbps": 1, "read_gbps": 2})", {"read_gbps: given twice"});
  expect_refusal(R"({"mixed_read_share": 1})",
                 {"mixed_read_share: must be above 0 and below 1, got 1"});
  expect_refusal(R"({"ranks_per_node": 0})", {"ranks_per_node: must be at least 1"});
  expect_refusal(R"({"ranks_per_node": 1.5})", {"expected a whole number, got 1.5"});
  expect_refusal(R"({"shared_cores": 99999999999})", {"must be at most 16777216"});
  expect_refusal(R"({"device_memory": "24 gallons"})", {"device_memory: expected a size"});
  expect_refusal(R"({"device_memory": []})", {"device_memory: expected a size", "got an array"});
  expect_refusal(R"({"device_memory": -5})", {"device_memory: must be at least 0"});
  expect_refusal(R"({"forward": 5})", {"forward: expected an array of points, got 5"});
  expect_refusal(R"({"forward": [5]})", {"forward[0]: expected an object with tokens and tflops"});
  expect_refusal(R"({"forward": [{"tokens": 5}]})", {"forward[0]: tflops must be above 0"});
  expect_refusal(R"({"forward": [{"tokens": 5, "tflops": 1}, {"tokens": 5, "tflops": 2}]})",
                 {"forward[1]: points must be in ascending order of tokens"});
  expect_refusal(R"({"name": 5})", {"name: expected a string, got 5"});
}

TEST(RatesFile, OtherFilesAreRefused) {
  expect_refusal("{\n  \"name\": \"x\",\n}", {"machine.json:3:1: not valid JSON"});
  expect_refusal("", {"not valid JSON"});
  expect_refusal("[]", {"expected an object of rates, got an array"});
  expect_refusal("{} {}", {"not valid JSON"});
  expect_refusal("{\"name\": \"\xff\"}", {"machine.json:1:11: not UTF-8"});
  std::string deep = "{\"name\": ";
  for (int i = 0; i < 100'000; ++i) deep += "[";
  expect_refusal(deep, {"nested deeper than"});
  const TempDir dir;
  const auto load = [&](const char* name) {
    return [&dir, name] { load_rates(dir.path() / name); };
  };
  expect_error(ErrorCategory::config, {"cannot open", "none.json"}, load("none.json"));
  expect_error(ErrorCategory::config, {"is a directory; give a rates file"}, load("."));
  dir.write("large.json", std::string(2 * kMiB, ' '));
  expect_error(ErrorCategory::config, {"large.json: too long for a rates file: above 1 MiB"},
               load("large.json"));
}

TEST(RatesFile, AFileThatCannotBeWrittenLeavesNothingBehind) {
  const TempDir dir;
  expect_error(ErrorCategory::io, {"cannot write"},
               [&] { save_rates(dir.path() / "none" / "rates.json", {}); });
  std::filesystem::create_directories(dir.path() / "taken" / "inside");
  expect_error(ErrorCategory::io, {"cannot write", "taken"},
               [&] { save_rates(dir.path() / "taken", {}); });
  EXPECT_EQ(std::distance(std::filesystem::directory_iterator(dir.path()), {}), 1);
}

/// Has more ranks than a node, and weights and states below the device, down to `lowest`, so that
/// every lane has work.
plan::Schedule demanding_schedule(std::uint32_t ranks, Tier lowest) {
  const std::vector<step::SimpleBlock> blocks(4, {.elements = 1 << 19, .flops = 1e9});
  step::BuildArguments placed = step::simple_problem(blocks, 2, kMiB);
  placed.problem.micro_batch_tokens = 512;
  placed.problem.sharers = ranks;
  placed.problem.stage = 3;
  placed.placement.blocks.assign(4, {lowest, lowest, lowest});
  placed.placement.blocks[1] = {Tier::host, Tier::host, Tier::host};
  placed.placement.blocks[2] = {Tier::device, Tier::device, Tier::device};
  return build(placed);
}

TEST(RatesFile, TheMachinesThatComeWithItHaveWhatEveryPlanNeeds) {
  const std::filesystem::path folder = std::filesystem::path(BALLAST_CONFIGS) / "rates";
  std::size_t files = 0;
  for (const auto& entry : std::filesystem::directory_iterator(folder)) {
    if (entry.path().extension() != ".json") continue;
    ++files;
    const Rates rates = load_rates(entry.path());
    EXPECT_NE(rates.name, entry.path().stem().string());
    EXPECT_GT(rates.device_bytes, 0U) << entry;
    EXPECT_GT(rates.host_bytes, rates.device_bytes) << entry;
    const bool drives = rates.read_per_second > 0.0;
    EXPECT_TRUE(drives || entry.path().filename() == "dgx2.json") << entry;
    if (drives) {
      EXPECT_GT(rates.nvme_bytes, rates.host_bytes) << entry;
      EXPECT_GT(rates.drive_writes_bytes, static_cast<double>(rates.nvme_bytes)) << entry;
    }
    const Tier lowest = drives ? Tier::nvme : Tier::host;
    const std::uint32_t ranks =
        rates.network_per_second > 0.0 ? 8 * rates.ranks_per_node : rates.ranks_per_node;
    const auto schedule = demanding_schedule(ranks, lowest);
    EXPECT_GT(simulate(schedule, rates).step_seconds, 0.0) << entry;
    // Needs the network only with one more node.
    if (rates.network_per_second > 0.0) continue;
    const auto larger = demanding_schedule(2 * ranks, lowest);
    expect_error(ErrorCategory::config, {rates.name, "network_gbps is missing"},
                 [&] { simulate(larger, rates); });
  }
  EXPECT_EQ(files, 8U);
}

TEST(RatesFile, EveryKeyIsInTheReadme) {
  const TempDir dir;
  Rates rates;  // no key has its default, so that every key is written
  rates.forward = rates.backward = rates.head = {{1.0, 1.0}};
  rates.device_memory_per_second = rates.launch_seconds = rates.update_per_second = 1.0;
  rates.upload_per_second = rates.offload_per_second = 1.0;
  rates.read_per_second = rates.write_per_second = rates.mixed_per_second = 1.0;
  rates.mixed_read_share = 0.25;
  rates.io_latency_seconds = rates.fabric_per_second = rates.network_per_second = 1.0;
  rates.ranks_per_node = rates.shared_cores = 2;
  rates.compute_threads = rates.update_threads = 2;
  rates.link_cores = rates.io_cores = rates.drive_writes_bytes = 1.0;
  rates.compute_beside_copy = rates.compute_beside_io = rates.update_beside_io = 1.0;
  rates.io_beside_compute = rates.io_beside_update = 1.0;
  rates.corrections = 1;
  rates.other_work = rates.spread = rates.measured_at = 1.0;
  rates.device_bytes = rates.host_bytes = rates.nvme_bytes = 1;
  save_rates(dir.path() / "rates.json", rates);
  const std::string readme =
      text_of(std::filesystem::path(BALLAST_CONFIGS) / "rates" / "README.md");
  const auto written = text::parse_json(text_of(dir.path() / "rates.json"), "rates");
  EXPECT_EQ(written.members().size(), 35U);
  for (const auto& member : written.members()) {
    EXPECT_NE(readme.find("`" + member.key + "`"), std::string::npos) << member.key;
  }
}

}  // namespace
}  // namespace ballast::calibrate::rates_file_test
