#include "ballast/train/trace.h"

#include <algorithm>
#include <cmath>
#include <fstream>
#include <map>
#include <set>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include "tests/support/expect_error.h"
#include "tests/support/file_size_limit.h"
#include "tests/support/random_problem.h"
#include "tests/support/tags.h"
#include "tests/support/temp_dir.h"
#include "tests/unit/step/fake_run.h"

namespace ballast::train::trace_test {
namespace {

using nlohmann::json;
using plan::OpId;
using plan::Span;

/// A random run of a random model, in the form that the executor records.
struct Recorded {
  step::BuildArguments placed;
  plan::Schedule schedule;
  step::RunSequence sequence;
  plan::Timeline timeline;

  explicit Recorded(std::uint64_t seed, bool devices = false)
      : placed(step::random_problem(seed, {.devices = devices})),
        schedule(build(placed)),
        sequence(random_runs(placed, schedule, seed, 4)) {
    for (Span span : step::fake_spans(sequence.runs, seed, true)) {
      span.start = 0.25 + span.start * 1e-6;
      span.end = 0.25 + span.end * 1e-6;
      timeline.spans.push_back(span);
    }
    std::sort(timeline.spans.begin(), timeline.spans.end(),
              [](const Span& a, const Span& b) { return a.end < b.end; });
  }

  [[nodiscard]] step::OperationNames names() const { return step::OperationNames(placed.problem); }
};

std::string contents(const std::filesystem::path& file) {
  std::stringstream text;
  text << std::ifstream(file, std::ios::binary).rdbuf();
  return text.str();
}

std::vector<json> events(const Recorded& recorded) {
  const test::TempDir directory;
  const auto file = directory.path() / "trace.json";
  write_trace(file, trace_rule("a test", false, {}), "a test", recorded.timeline, recorded.names());
  return json::parse(contents(file)).at("traceEvents").get<std::vector<json>>();
}

std::vector<json> of_phase(const std::vector<json>& all, std::string_view phase) {
  std::vector<json> found;
  std::copy_if(all.begin(), all.end(), std::back_inserter(found),
               [phase](const json& event) { return event.at("ph") == phase; });
  return found;
}

/// Nanoseconds: the file's microseconds have three decimals.
std::int64_t time_of(const json& event, const char* key) {
  return std::llround(event.at(key).get<double>() * 1000.0);
}

TAG_TESTS("one_thread", "Trace.*");
TEST(Trace, HasADescribedSlicePerOperation) {
  for (std::uint64_t seed = 0; seed < 20; ++seed) {
    const Recorded recorded(seed);
    const auto slices = of_phase(events(recorded), "X");
    ASSERT_EQ(slices.size(), recorded.timeline.spans.size());
    std::multiset<std::string> expected;
    std::multiset<std::string> found;
    const step::OperationNames names = recorded.names();
    for (const Span& span : recorded.timeline.spans) {
      const auto& op = span.operation();
      expected.insert(fmt::format("{} {} {} {} {} {}", names(op), op.block, op.micro, op.bytes,
                                  op.flops, span.run));
    }
    for (const json& slice : slices) {
      const json& args = slice.at("args");
      found.insert(fmt::format("{} {} {} {} {} {}", slice.at("name").get<std::string>(),
                               args.at("block").get<int>(), args.at("micro_batch").get<int>(),
                               args.at("bytes").get<Bytes>(), args.at("flops").get<double>(),
                               args.at("run").get<int>()));
    }
    EXPECT_EQ(found, expected);
  }
}

TEST(Trace, HasOneNamedTrackPerLaneInTheOrderOfTheStages) {
  const Recorded recorded(1);
  const auto all = events(recorded);
  std::map<int, std::string> names;
  std::map<int, int> order;
  for (const json& event : of_phase(all, "M")) {
    if (event.at("name") == "thread_name") names[event.at("tid")] = event.at("args").at("name");
    if (event.at("name") == "thread_sort_index") {
      order[event.at("tid")] = event.at("args").at("sort_index");
    }
    if (event.at("name") == "process_name") {
      EXPECT_EQ(event.at("args").at("name"), "a test");
    }
  }
  const std::vector<std::string> stages = {"fetch",  "upload",  "gather", "compute",
                                           "reduce", "offload", "update", "writeback"};
  for (const auto& [track, name] : names) {
    const auto stage = std::find(stages.begin(), stages.end(), name) - stages.begin();
    EXPECT_EQ(order.at(track), stage + 1) << name;
  }
  // The slices of each lane are its spans.
  std::multiset<std::string> expected;
  std::multiset<std::string> found;
  for (const Span& span : recorded.timeline.spans) {
    expected.insert(std::string(to_string(span.operation().lane)));
  }
  for (const json& slice : of_phase(all, "X")) found.insert(names.at(slice.at("tid")));
  EXPECT_EQ(found, expected);
}

TEST(Trace, HasATrackForEachDeviceOfALaneThatDevicesHave) {
  std::set<std::uint32_t> counts;
  for (std::uint64_t seed = 0; seed < 12; ++seed) {
    const Recorded recorded(seed, true);
    const std::uint32_t devices = recorded.placed.problem.devices;
    counts.insert(devices);
    std::vector<std::string> wanted;  // from top to bottom
    for (const std::string lane : {"fetch", "upload", "gather", "compute", "pass", "reduce",
                                   "offload", "update", "writeback"}) {
      const bool shared = lane == "fetch" || lane == "update" || lane == "writeback";
      if (devices == 1 || shared) {
        wanted.push_back(lane);
        continue;
      }
      for (std::uint32_t d = 0; d < devices; ++d) {
        wanted.push_back(fmt::format("{}, device {}", lane, d));
      }
    }
    std::map<int, std::string> names;
    std::map<std::string, int> places;
    const auto all = events(recorded);
    for (const json& event : of_phase(all, "M")) {
      if (event.at("name") == "thread_name") names[event.at("tid")] = event.at("args").at("name");
      if (event.at("name") != "thread_sort_index") continue;
      places[names.at(event.at("tid"))] = event.at("args").at("sort_index");
    }
    int above = 0;
    for (const std::string& name : wanted) {
      const auto found = places.find(name);
      if (found == places.end()) continue;  // without operations
      EXPECT_GT(found->second, above) << name;
      above = found->second;
      places.erase(found);
    }
    EXPECT_TRUE(places.empty()) << places.begin()->first;
    std::multiset<std::string> expected;
    std::multiset<std::string> found;
    for (const Span& span : recorded.timeline.spans) {
      const auto& op = span.operation();
      expected.insert(name_of(plan::StreamId{op.lane, op.device}, devices));
    }
    for (const json& slice : of_phase(all, "X")) found.insert(names.at(slice.at("tid")));
    EXPECT_EQ(found, expected);
  }
  EXPECT_GT(counts.size(), 2U) << "the seeds draw too few numbers of devices";
}

TEST(Trace, KeepsTheSlicesOfATrackApartAndTheirTimesToTheNanosecond) {
  for (std::uint64_t seed = 0; seed < 20; ++seed) {
    const Recorded recorded(seed);
    std::map<int, std::vector<std::pair<std::int64_t, std::int64_t>>> tracks;
    std::int64_t first = std::numeric_limits<std::int64_t>::max();
    std::int64_t last = 0;
    for (const json& slice : of_phase(events(recorded), "X")) {
      const std::int64_t start = time_of(slice, "ts");
      const std::int64_t end = start + time_of(slice, "dur");
      tracks[slice.at("tid")].emplace_back(start, end);
      first = std::min(first, start);
      last = std::max(last, end);
    }
    for (auto& [track, slices] : tracks) {
      std::sort(slices.begin(), slices.end());
      for (std::size_t i = 1; i < slices.size(); ++i) {
        EXPECT_LE(slices[i - 1].second, slices[i].first);
      }
    }
    EXPECT_EQ(first, 0);
    EXPECT_EQ(last, std::llround((recorded.timeline.spans.back().end - 0.25) * 1e9));
  }
}

/// Every edge of the runs, including those across them, as "run operation run operation".
std::multiset<std::string> edges(const std::vector<const plan::Plan*>& runs) {
  std::multiset<std::string> found;
  for (std::size_t r = 0; r < runs.size(); ++r) {
    const auto& operations = runs[r]->operations;
    for (OpId id = 0; id < operations.size(); ++id) {
      for (const OpId from : operations[id].after) {
        found.insert(fmt::format("{} {} {} {}", r + 1, from, r + 1, id));
      }
    }
    if (r == 0) continue;
    const auto joins = seam(*runs[r - 1], *runs[r]);
    for (OpId id = 0; id < joins.size(); ++id) {
      for (const OpId from : joins[id])
        found.insert(fmt::format("{} {} {} {}", r, from, r + 1, id));
    }
  }
  return found;
}

/// Every arrow of a trace as the operations at its ends, in the form of edges().
std::multiset<std::string> arrows(const Recorded& recorded, const std::vector<json>& all) {
  // The operation that a track shows at a time. Names of tracks are in the order of the stages.
  std::map<std::string, int> tracks;
  for (const json& event : of_phase(all, "M")) {
    if (event.at("name") == "thread_name") tracks[event.at("args").at("name")] = event.at("tid");
  }
  const auto at = [&](int track, std::int64_t when) {
    for (const Span& span : recorded.timeline.spans) {
      if (tracks.at(std::string(to_string(span.operation().lane))) != track) continue;
      const std::int64_t start = std::llround((span.start - 0.25) * 1e9);
      const std::int64_t end = std::llround((span.end - 0.25) * 1e9);
      if (start <= when && when < end) return fmt::format("{} {}", span.run, span.op);
    }
    return std::string("nothing");
  };
  std::map<int, json> begins;
  for (const json& event : of_phase(all, "s")) {
    EXPECT_TRUE(begins.emplace(event.at("id").get<int>(), event).second);
  }
  std::multiset<std::string> found;
  const auto ends = of_phase(all, "f");
  EXPECT_EQ(ends.size(), begins.size());
  for (const json& end : ends) {
    const json& begin = begins.at(end.at("id").get<int>());
    EXPECT_EQ(end.at("bp"), "e");
    EXPECT_EQ(end.at("cat"), begin.at("cat"));
    EXPECT_EQ(end.at("name"), begin.at("name"));
    EXPECT_LE(time_of(begin, "ts"), time_of(end, "ts"));
    found.insert(at(begin.at("tid"), time_of(begin, "ts")) + " " +
                 at(end.at("tid"), time_of(end, "ts")));
  }
  return found;
}

TEST(Trace, DrawsAnArrowAlongEveryEdgeAlsoAcrossRuns) {
  for (std::uint64_t seed = 0; seed < 5; ++seed) {
    const Recorded recorded(seed);
    EXPECT_EQ(arrows(recorded, events(recorded)), edges(recorded.sequence.runs)) << seed;
  }
}

TEST(Trace, DrawsNoArrowsToMissingOperations) {
  Recorded recorded(2);
  auto& spans = recorded.timeline.spans;
  // The records of an interrupted run, from the middle on.
  spans = {spans.begin() + static_cast<std::ptrdiff_t>(spans.size() / 3),
           spans.begin() + static_cast<std::ptrdiff_t>(spans.size() / 2)};
  const auto all = events(recorded);
  EXPECT_EQ(of_phase(all, "X").size(), spans.size());
  const auto starts = of_phase(all, "s");
  EXPECT_EQ(starts.size(), of_phase(all, "f").size());
  EXPECT_LT(starts.size(), edges(recorded.sequence.runs).size());
}

TEST(Trace, CountsLateUpdatesToTheStepThatTheyBelongTo) {
  Recorded recorded(4);
  recorded.placed.options.update = step::Update::gated;
  for (auto& block : recorded.placed.placement.blocks) block.speculates = false;
  recorded.schedule = build(recorded.placed);
  const auto& plans = recorded.schedule;
  recorded.sequence.runs = {&plans.first, &plans.steady, &plans.flush, &plans.evaluation,
                            &plans.first};
  recorded.timeline.spans = step::fake_spans(recorded.sequence.runs, 1, true);
  const std::vector<int> step_of_run = {0, 1, 2, 2, 2, 3};
  for (const json& slice : of_phase(events(recorded), "X")) {
    const json& args = slice.at("args");
    const int run = args.at("run");
    const bool updates_before = run == 2 && slice.at("cat").get<std::string>() == "update";
    const bool gate = slice.at("cat") == "gate";
    if (updates_before && !gate) {
      EXPECT_EQ(args.at("step"), 1);
    } else if (slice.at("cat") == "forward") {
      EXPECT_EQ(args.at("step"), step_of_run[static_cast<std::size_t>(run)]);
    } else if (run == 3) {
      EXPECT_EQ(args.at("step"), 2);
    }
  }
}

TEST(Trace, OfNoOperationsIsValid) {
  Recorded recorded(1);
  recorded.timeline.spans.clear();
  EXPECT_EQ(of_phase(events(recorded), "X").size(), 0U);
}

TEST(Trace, TakesAnyNameOfABlock) {
  Recorded recorded(1);
  model::StepProgram program = recorded.placed.problem.program();
  program.blocks[0].name = "a \"quoted\" \\ name\nof two lines, \xff and all";
  recorded.placed.problem.index = std::make_shared<const step::ProgramIndex>(std::move(program));
  EXPECT_EQ(of_phase(events(recorded), "X").size(), recorded.timeline.spans.size());
}

TEST(Trace, FaultsAreOneLineThatNamesTheFileAndLeaveTheOldTraceAlone) {
  const Recorded recorded(1);
  const test::TempDir directory;
  const auto write = [&](const std::filesystem::path& file, std::string_view process) {
    write_trace(file, trace_rule(process, false, {}), process, recorded.timeline, recorded.names());
  };
  const auto old = directory.write("trace.json", "not a trace");
  test::expect_error(ErrorCategory::usage, {old.string(), "not a trace of a test", "--overwrite"},
                     [&] { write(old, "a test"); });
  test::expect_error(ErrorCategory::io, {"below"}, [&] { write(old / "below a file", "a test"); });
  EXPECT_EQ(contents(old), "not a trace");
  std::filesystem::remove(old);
  write(old, "a test");
  const std::string first = contents(old);
  // A simulated trace does not replace a measured one.
  test::expect_error(ErrorCategory::usage, {"not a trace of another"},
                     [&] { write(old, "another"); });
  {
    const test::FileSizeLimit limit(1000);
    test::expect_error(ErrorCategory::io, {old.string(), "File too large"},
                       [&] { write(old, "a test"); });
  }
  EXPECT_EQ(contents(old), first);
  const std::filesystem::directory_iterator left(directory.path());
  EXPECT_EQ(std::distance(begin(left), end(left)), 1);
  write(old, "a test");
  EXPECT_EQ(contents(old), first);
}

}  // namespace
}  // namespace ballast::train::trace_test
