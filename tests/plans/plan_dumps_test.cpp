// Compares the plans of many runs of small models with those of the commit that wrote
// tests/data/plan_dumps.txt, by one hash for each part of a dump. A refactoring leaves all of them
// as they are.
//
//     plan_dumps                      compare
//     plan_dumps --write              write the hashes anew, after an intended change of plans
//     plan_dumps --hashes             print the hashes
//     plan_dumps --list               the runs
//     plan_dumps --dump 07/2 [steady] the text behind the hashes
//     plan_dumps --random 0 1000      print the hashes of random problems, without placements;
//                                     --dump random/17 prints the texts of one
//     plan_dumps --count              operations of all dumps by action, role and condition
//
// tools/dev/compare_plans.sh compares the texts of two commits.

#include <algorithm>
#include <cstdint>
#include <fstream>
#include <functional>
#include <iostream>
#include <map>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <gtest/gtest.h>

#include "tests/plans/plan_names.h"
#include "tests/plans/plan_text.h"
#include "tests/plans/planned_runs.h"
#include "tests/plans/small_runs.h"
#include "tests/support/fixtures.h"
#include "tests/support/random_problem.h"

namespace ballast::plans {
namespace {

/// A run whose plans are dumped.
struct Dumped {
  std::string name;  ///< "07/2"
  std::string description;
  std::function<std::vector<PlanSection>()> dump;
  std::function<AllPlans()> build;
};

Dumped from_blueprint(std::string name, std::string description,
                      const std::function<engine::Blueprint()>& make) {
  return {.name = std::move(name),
          .description = std::move(description),
          .dump = [make] { return dump_plans(make(), machines()); },
          .build =
              [make] {
                const engine::Blueprint blueprint = make();
                return build_plans(blueprint.problem, blueprint.placement, blueprint.options);
              }};
}

Dumped random_dumped(std::uint64_t seed) {
  return {.name = fmt::format("random/{}", seed),
          .description = "a problem of tests/support/random_problem.h",
          .dump =
              [seed] {
                const step::BuildArguments placed = step::any_problem(seed);
                return dump_plans(placed.problem, placed.placement, placed.options,
                                  {machines()[1]});
              },
          .build =
              [seed] {
                const step::BuildArguments placed = step::any_problem(seed);
                return build_plans(placed.problem, placed.placement, placed.options);
              }};
}

std::vector<Dumped> all_dumped() {
  std::vector<Dumped> all;
  for (const SmallRun& run : small_runs()) {
    for (std::uint64_t seed = 0; seed < kPlacements; ++seed) {
      all.push_back(from_blueprint(fmt::format("{}/{}", run.name, seed), run.describe(),
                                   [&run, seed] { return outline_of(run, seed); }));
    }
  }
  // One in eight runs, with each style of placement in turn.
  for (std::size_t i = 0; i < small_runs().size(); i += 8) {
    const SmallRun& run = small_runs()[i];
    const std::uint64_t seed = i / 8 % kPlacements;
    if (!outline_with_attention(run, seed)) continue;
    all.push_back(from_blueprint(run.name + "/attention", run.describe(),
                                 [&run, seed] { return *outline_with_attention(run, seed); }));
  }
  for (const PlannedRun& run : planned_runs()) {
    all.push_back(from_blueprint(run.name, run.description, run.decide));
  }
  return all;
}

std::filesystem::path golden_file() {
  return test::fixture("plan_dumps.txt");
}

std::string header() {
  return fmt::format("run {}", fmt::join(section_names(), " "));
}

std::string hashes(const Dumped& dumped) {
  std::vector<std::string> line = {dumped.name};
  for (const PlanSection& section : dumped.dump()) line.push_back(hash_of(section.text));
  return fmt::format("{}", fmt::join(line, " "));
}

std::vector<std::string> words(const std::string& line) {
  std::vector<std::string> found;
  std::size_t begin = 0;
  while (begin < line.size()) {
    const std::size_t end = std::min(line.find(' ', begin), line.size());
    found.push_back(line.substr(begin, end - begin));
    begin = end + 1;
  }
  return found;
}

/// Lines of the file by run.
std::map<std::string, std::string> read_golden() {
  std::map<std::string, std::string> lines;
  std::ifstream file(golden_file());
  for (std::string line; std::getline(file, line);) lines[words(line).at(0)] = line;
  return lines;
}

TEST(PlanDumps, HaveTheHashesOfTheFile) {
  const auto golden = read_golden();
  const auto all = all_dumped();
  ASSERT_EQ(golden.size(), all.size() + 1) << "plan_dumps --write writes the file anew";
  ASSERT_EQ(golden.at("run"), header());
  const auto names = words(header());
  for (const Dumped& dumped : all) {
    const std::string line = hashes(dumped);
    const auto expected = golden.find(dumped.name);
    ASSERT_NE(expected, golden.end()) << dumped.name;
    if (line == expected->second) continue;
    const auto now = words(line);
    const auto before = words(expected->second);
    std::vector<std::string> differing;
    for (std::size_t i = 1; i < names.size(); ++i) {
      if (now.at(i) != before.at(i)) differing.push_back(names[i]);
    }
    ADD_FAILURE() << fmt::format(
        "run {} ({}) differs in: {}. tools/dev/compare_plans.sh COMMIT {} shows the first "
        "differing "
        "line, where COMMIT has the plans of tests/data/plan_dumps.txt",
        dumped.name, dumped.description, fmt::join(differing, ", "), dumped.name);
  }
}

TEST(SmallRuns, CoverPairsOfChoices) {
  EXPECT_EQ(uncovered_pairs(), std::vector<std::string>{});
}

void print_hashes(std::ostream& out) {
  out << header() << "\n";
  for (const Dumped& dumped : all_dumped()) out << hashes(dumped) << "\n";
}

int write_golden() {
  std::ofstream file(golden_file());
  print_hashes(file);
  file.close();
  return file ? 0 : 1;
}

int print_dump(const std::string& name, const std::string& section_name) {
  constexpr std::string_view kRandom = "random/";
  std::vector<Dumped> all = all_dumped();
  if (name.starts_with(kRandom)) {
    all.push_back(random_dumped(std::stoull(name.substr(kRandom.size()))));
  }
  for (const Dumped& dumped : all) {
    if (dumped.name != name) continue;
    fmt::print("{}\n", dumped.description);
    for (const PlanSection& section : dumped.dump()) {
      if (!section_name.empty() && section.name != section_name) continue;
      fmt::print("== {} {}\n{}", section.name, hash_of(section.text), section.text);
    }
    return 0;
  }
  fmt::print(stderr, "there is no run {}\n", name);
  return 2;
}

int print_random_hashes(std::uint64_t first, std::uint64_t count) {
  for (std::uint64_t seed = first; seed < first + count; ++seed) {
    fmt::print("{}\n", hashes(random_dumped(seed)));
  }
  return 0;
}

int print_list() {
  for (const Dumped& dumped : all_dumped()) fmt::print("{} {}\n", dumped.name, dumped.description);
  return 0;
}

int print_counts() {
  std::map<std::string, std::size_t> counts;
  for (const Dumped& dumped : all_dumped()) {
    const AllPlans all = dumped.build();
    for (const AllPlans::Named& named : all.plans) {
      for (const plan::Operation& operation : named.plan.operations) {
        const std::string action(action_name(operation));
        ++counts["action " + action];
        if (!operation.condition.always()) {
          ++counts["condition " + action + " " + condition_name(operation.condition)];
        }
        if (operation.unless)
          ++counts["unless " + action + " " + condition_name(*operation.unless)];
        for (const plan::Use& use : operation.uses) {
          ++counts[fmt::format("role {} {}{}", action, role_name(operation, use),
                               use.shard ? " shard" : "")];
        }
      }
    }
  }
  for (const auto& [what, count] : counts) fmt::print("{} {}\n", what, count);
  return 0;
}

}  // namespace
}  // namespace ballast::plans

int main(int argc, char** argv) {
  using namespace ballast::plans;
  const std::string option = argc > 1 ? argv[1] : "";
  if (option == "--write") return write_golden();
  if (option == "--hashes") return print_hashes(std::cout), 0;
  if (option == "--list") return print_list();
  if (option == "--count") return print_counts();
  if (option == "--random" && argc > 3) {
    return print_random_hashes(std::stoull(argv[2]), std::stoull(argv[3]));
  }
  if (option == "--dump" && argc > 2) return print_dump(argv[2], argc > 3 ? argv[3] : "");
  testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
