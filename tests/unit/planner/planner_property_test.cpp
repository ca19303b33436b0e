// Random small runs and budgets. An accepted plan is within its budgets, also when its config is
// read back. A refused run fits in no placement, and fits with each change that the refusal
// suggests. BALLAST_TEST_PLANNER_CASES sets the number of runs, BALLAST_TEST_PLANNER_SEED the
// first.

#include <algorithm>
#include <cstdlib>
#include <optional>
#include <regex>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include <fmt/format.h>
#include <gtest/gtest.h>

#include "ballast/core/error.h"
#include "ballast/setup/setup.h"
#include "ballast/setup/translate.h"

#include "src/planner/filling.h"
#include "src/planner/search.h"
#include "tests/support/random_run.h"
#include "tests/support/sanitizers.h"

namespace ballast::planner::planner_property_test {
namespace {

using step::BlockPlacement;
using step::Placement;

std::uint64_t number_from(const char* variable, std::uint64_t standard) {
  const char* const text = std::getenv(variable);
  return text == nullptr ? standard : std::stoull(text);
}

/// Memory of made-up kernels.
model::KernelSizes kernels(const model::Architecture& model, model::MicroBatchShape shape) {
  return {.workspace = shape.tokens() * 512,
          .intermediates = std::vector<Bytes>(model.blocks.size(), shape.tokens() * 1024),
          .rows = shape.tokens() * 128};
}

/// A request for `config`. A budget that the config names replaces that of `budgets`.
PlanRequest request_for(const config::Config& config, memory::Budgets budgets,
                        std::uint32_t world) {
  if (config.ballast.device_bytes > 0) budgets.device = config.ballast.device_bytes;
  if (config.ballast.host_bytes > 0) budgets.host = config.ballast.host_bytes;
  PlanRequest request = setup::plan_request(config, world);
  request.budgets = budgets;
  request.rates = test::quick_machine();
  request.kernels = [model = request.run.model](model::MicroBatchShape shape) {
    return kernels(model, shape);
  };
  request.work_limit = 20'000;
  return request;
}

struct Outcome {
  std::optional<Decision> decision;
  std::string refusal;  ///< "" if there is a decision
};

Outcome ask(const PlanRequest& request) {
  try {
    return {decide(request), ""};
  } catch (const Error& error) {
    EXPECT_EQ(error.category(), ErrorCategory::memory) << error.what();
    return {std::nullopt, error.what()};
  }
}

/// The blueprint that a rank draws from a config without choices.
std::optional<engine::Blueprint> draw(const PlanRequest& request) {
  try {
    return draw_blueprint(request.run, request.budgets, request.kernels(request.run.batch.shape),
                          request.mesh);
  } catch (const Error& error) {
    EXPECT_EQ(error.category(), ErrorCategory::memory) << error.what();
    return std::nullopt;
  }
}

/// Every tier that a config leaves open, as a number of choices.
class OpenPlacements {
 public:
  explicit OpenPlacements(const PlanRequest& request)
      : constraints_(read_constraints(request.run)) {
    for (std::size_t b = 0; b < constraints_.size(); ++b) {
      const bool layer = model::is_layer(request.run.model.config, b);
      add(b, &BlockPlacement::weights, constraints_[b].weights);
      add(b, &BlockPlacement::optimizer, constraints_[b].optimizer);
      if (layer) add(b, &BlockPlacement::activations, constraints_[b].activations);
      // Has no effect if the states are on the device.
      add(b, &BlockPlacement::gradients, constraints_[b].gradients);
      // Kept intermediates only need more memory.
      start_.blocks[b].kept = constraints_[b].kept.value_or(step::Kept::nothing);
    }
  }

  [[nodiscard]] std::uint64_t count() const {
    std::uint64_t product = 1;
    for (std::size_t i = 0; i < open_.size() && product < kVeryMany; ++i) product *= kTiers.size();
    return product;
  }
  [[nodiscard]] Placement at(std::uint64_t number) const {
    Placement placement = start_;
    for (const auto& [block, kind] : open_) {
      placement.blocks[block].*kind = kTiers.at(number % kTiers.size());
      number /= kTiers.size();
    }
    return placement;
  }
  /// Most blocks equal the previous one.
  [[nodiscard]] Placement draw(test::Dice& dice) const {
    Placement placement = start_;
    for (const auto& [block, kind] : open_) {
      placement.blocks[block].*kind = block > 0 && dice.chance(60)
                                          ? placement.blocks[block - 1].*kind
                                          : kTiers.at(dice.below(kTiers.size()));
    }
    return placement;
  }

 private:
  using Kind = Tier BlockPlacement::*;
  static constexpr std::uint64_t kVeryMany = std::uint64_t{1} << 60;

  void add(std::size_t block, Kind kind, std::optional<Tier> named) {
    start_.blocks.resize(constraints_.size());
    if (named) start_.blocks[block].*kind = *named;
    if (!named) open_.emplace_back(block, kind);
  }

  std::vector<PlacementConstraint> constraints_;
  Placement start_;
  std::vector<std::pair<std::size_t, Kind>> open_;
};

std::vector<step::Order> open_orders(const engine::RunInputs& run) {
  using enum step::Order;
  if (run.devices.count > 1) return {layer_major};
  if (run.constraints.order) return {*run.constraints.order};
  return {layer_major, micro_batch_major, micro_batch_major_offload};
}

engine::Blueprint sized(const PlanRequest& request, std::uint64_t size, step::Order order) {
  const engine::BatchRule batch = request.run.batch.with_samples(size, request.mesh.data);
  engine::Blueprint blueprint = engine::outline(request.run, batch, request.budgets,
                                                request.kernels(batch.shape), request.mesh);
  blueprint.options.order = order;
  return blueprint;
}

memory::Ledger ledger_of(const engine::Blueprint& sizes, const Placement& placement) {
  return engine::make_ledger(step::list_buffers(sizes.problem, placement, sizes.options));
}

/// A plan of `request` within its budgets, found by trying all; "" if there is none.
std::string find_by_trying_all(const PlanRequest& request) {
  const OpenPlacements placements(request);
  for (const std::uint64_t size : micro_batch_sizes(request)) {
    for (const step::Order order : open_orders(request.run)) {
      engine::Blueprint sizes = sized(request, size, order);
      sizes.options = with_buffers(request.run, sizes.options, BufferLevel::fewest);
      for (std::uint64_t i = 0; i < placements.count(); ++i) {
        sizes.placement = placements.at(i);
        if (!ledger_of(sizes, sizes.placement).fits(request.budgets)) continue;
        return fmt::format("micro-batches of {}, order {}, {}", size, static_cast<int>(order),
                           fmt::join(engine::describe_placement(sizes), "; "));
      }
    }
  }
  return "";
}

/// One run with budgets near those of a plan drawn at random.
struct Case {
  test::RandomRun run;
  memory::Budgets budgets;
  bool must_fit = false;  ///< the budgets are those of the drawn plan, or larger

  [[nodiscard]] PlanRequest request(const std::vector<std::string>& more = {},
                                    memory::Budgets raised = {}) const {
    return request_for(
        run.config(more),
        {std::max(budgets.device, raised.device), std::max(budgets.host, raised.host)}, run.world);
  }
};

/// Few enough blocks that all placements can be tried.
void limit_blocks(test::RandomRun& run) {
  constexpr std::uint64_t kMax = 6561;
  const auto few = [&run] {
    return OpenPlacements(request_for(run.config(), {}, run.world)).count() <= kMax;
  };
  if (run.config().model.layer_tiles > 1 && !few()) {
    run.overrides.emplace_back("model.layer_tiles=1");
  }
  for (std::uint64_t layers = run.config().model.num_layers; layers > 1; --layers) {
    if (few()) return;
    run.overrides.push_back(fmt::format("model.num_layers={}", layers - 1));
  }
  for (std::uint64_t tiles = run.config().model.vocabulary_tiles; tiles > 1 && !few(); --tiles) {
    run.overrides.push_back(fmt::format("model.vocabulary_tiles={}", tiles - 1));
  }
}

/// Every third run has 2 to 4 devices, if its rules allow them.
void add_devices(test::RandomRun& run, std::uint64_t seed) {
  const config::Config config = run.config();
  const auto order = config.ballast.order.value_or(step::Order::layer_major);
  if (seed % 3 != 0 || order != step::Order::layer_major) return;
  const std::uint64_t devices = std::min(2 + seed / 3 % 3, config.model.num_layers);
  run.overrides.push_back(fmt::format("pipeline.stages={}", devices));
}

memory::Ledger draw_plan(test::Dice& dice, const PlanRequest& request) {
  engine::Blueprint sizes =
      sized(request, dice.pick(micro_batch_sizes(request)), dice.pick(open_orders(request.run)));
  // Sometimes with more buffers: memory must not shrink with them.
  if (dice.chance(60))
    sizes.options = with_buffers(request.run, sizes.options, BufferLevel::fewest);
  return ledger_of(sizes, OpenPlacements(request).draw(dice));
}

Case draw_case(std::uint64_t seed) {
  test::Dice dice(seed);
  Case drawn = {.run = test::draw_run(dice, true)};
  limit_blocks(drawn.run);
  add_devices(drawn.run, seed);
  const memory::Ledger ledger =
      draw_plan(dice, request_for(drawn.run.config(), {}, drawn.run.world));
  drawn.must_fit = true;
  const auto near = [&](Bytes needed) {
    const Bytes bytes = dice.pick<Bytes>({needed, needed, needed, needed - 1, needed - kPage,
                                          needed / 10 * 9, needed / 2, needed / 10, 2 * needed});
    drawn.must_fit = drawn.must_fit && bytes >= needed;
    return std::max<Bytes>(bytes, 1);
  };
  drawn.budgets = {near(ledger.needed(Tier::device)), near(ledger.needed(Tier::host))};
  if (dice.chance(50)) {
    drawn.run.overrides.push_back(fmt::format("ballast.device_bytes={}", drawn.budgets.device));
  }
  if (dice.chance(50)) {
    drawn.run.overrides.push_back(fmt::format("ballast.host_bytes={}", drawn.budgets.host));
  }
  return drawn;
}

void expect_same_totals(const memory::Ledger& ledger, const memory::Ledger& expected) {
  for (const Tier tier : kTiers) EXPECT_EQ(ledger.total(tier), expected.total(tier));
}

/// The decision's config, printed and read back, is a run without choices with the same memory.
void check_decision(const config::Config& asked, const PlanRequest& request,
                    const Decision& decision) {
  const memory::Ledger& ledger = decision.blueprint.ledger;
  EXPECT_TRUE(ledger.fits(request.budgets));
  const config::Config settled =
      config::parse(config::print(setup::settle(asked, decision.blueprint)), "/", "settled", {},
                    request.mesh.data);
  EXPECT_FALSE(setup::leaves_choices(settled));
  EXPECT_EQ(settled.ballast.device_bytes, request.budgets.device);
  EXPECT_EQ(settled.ballast.host_bytes, request.budgets.host);
  const PlanRequest fixed = request_for(settled, {}, request.mesh.data);
  const Outcome again = ask(fixed);
  EXPECT_EQ(again.refusal, "");
  if (again.decision) expect_same_totals(again.decision->blueprint.ledger, ledger);
  const std::optional<engine::Blueprint> drawn = draw(fixed);
  ASSERT_TRUE(drawn.has_value());
  expect_same_totals(drawn->ledger, ledger);
}

/// One way out that a refusal suggests.
struct Way {
  std::vector<std::string> overrides;
  memory::Budgets budgets;
};

/// Reads "--set a=1 --set b=2" and "device memory of 3.00 MiB and host memory of 1.00 MiB".
Way read_way(const std::string& text) {
  Way way;
  std::string rest = text;
  const std::regex memory(R"(^(?: and )?(device|host) memory of ([0-9.]+ [KMGT]?i?B))");
  const std::regex assignment(R"(^(?: | and )?--set (\S+=\S+))");
  for (std::smatch match; !rest.empty(); rest = match.suffix()) {
    if (std::regex_search(rest, match, memory)) {
      (match[1] == "device" ? way.budgets.device : way.budgets.host) = parse_bytes(match[2].str());
    } else if (std::regex_search(rest, match, assignment)) {
      way.overrides.push_back(match[1]);
    } else {
      ADD_FAILURE() << "cannot read the advice '" << text << "'";
      break;
    }
  }
  return way;
}

std::vector<Way> read_ways(const std::string& refusal) {
  const std::string size = "(?!0 B)[0-9.]+ [KMGT]?i?B";
  const std::regex form(
      fmt::format("the (?:device|host) budget of {0} is {0} too small"
                  "(?: for device [0-3] \\(one of [2-4]\\))?: the smallest plan needs {0}, {0} of "
                  "it for '[a-z -]+'; it "
                  "would fit with (.+)",
                  size));
  std::smatch match;
  if (!std::regex_match(refusal, match, form)) {
    ADD_FAILURE() << "not a complete sentence: " << refusal;
    return {};
  }
  std::vector<Way> ways;
  std::string rest = match[1];
  const std::string or_with = ", or with ";
  for (auto end = rest.find(or_with); end != std::string::npos; end = rest.find(or_with)) {
    ways.push_back(read_way(rest.substr(0, end)));
    rest.erase(0, end + or_with.size());
  }
  ways.push_back(read_way(rest));
  return ways;
}

void check_refusal(const Case& drawn, const PlanRequest& request, const std::string& refusal) {
  SCOPED_TRACE(refusal);
  EXPECT_EQ(find_by_trying_all(request), "");
  EXPECT_THROW(require_fit(request), Error);
  for (const Way& way : read_ways(refusal)) {
    PlanRequest changed = drawn.request(way.overrides, way.budgets);
    // Made-up kernels do not fit other tiles, for which refusals ask the real ones.
    const bool cuts = std::ranges::any_of(way.overrides, [](const std::string& change) {
      return change.find("_tiles=") != std::string::npos;
    });
    if (cuts) changed.kernels = nullptr;
    const Outcome followed = ask(changed);
    EXPECT_EQ(followed.refusal, "") << fmt::format("followed {}", fmt::join(way.overrides, " "));
    if (followed.decision && !cuts)
      check_decision(drawn.run.config(way.overrides), changed, *followed.decision);
  }
}

TEST(PlannerProperty, DecisionsSuggestionsAndRefusalsAreCorrect) {
  const std::uint64_t cases = number_from("BALLAST_TEST_PLANNER_CASES", test::kSanitized ? 10 : 60);
  // The runs from here on include some for which only one placement, or fewer buffers, fit.
  const std::uint64_t first = number_from("BALLAST_TEST_PLANNER_SEED", 139);
  std::uint64_t refused = 0;
  for (std::uint64_t seed = first; seed < first + cases; ++seed) {
    const Case drawn = draw_case(seed);
    SCOPED_TRACE(fmt::format("seed {}, budgets {} and {} bytes, {}", seed, drawn.budgets.device,
                             drawn.budgets.host, drawn.run.describe()));
    const PlanRequest request = drawn.request();
    const Outcome outcome = ask(request);
    if (drawn.must_fit) {
      EXPECT_EQ(outcome.refusal, "");
    }
    if (outcome.decision) {
      EXPECT_NO_THROW(require_fit(request));
      check_decision(drawn.run.config(), request, *outcome.decision);
    } else {
      ++refused;
      check_refusal(drawn, request, outcome.refusal);
    }
    if (!leaves_choices(request.run)) {
      EXPECT_EQ(draw(request).has_value(), outcome.decision.has_value());
    }
  }
  if (cases < 20) return;
  EXPECT_GT(refused, cases / 10);
  EXPECT_LT(refused, cases - cases / 10);
}

TEST(PlannerProperty, FindsNearlyAllPlansOfLargerModelsThatBarelyFit) {
  constexpr std::uint64_t kCases = test::kSanitized ? 50 : 1000;
  std::uint64_t missed = 0;
  for (std::uint64_t seed = 0; seed < kCases; ++seed) {
    test::Dice dice(seed);
    Case drawn = {.run = test::draw_run(dice, true)};
    drawn.run.overrides.push_back(fmt::format("model.num_layers={}", 6 + dice.below(6)));
    const memory::Ledger ledger = draw_plan(dice, drawn.request());
    drawn.budgets = {ledger.total(Tier::device), ledger.total(Tier::host)};
    missed += find_closest_miss(drawn.request(), Effort::thorough).excess > 0 ? 1 : 0;
  }
  // They have too many placements to try all.
  EXPECT_LE(missed, 3U);
}

}  // namespace
}  // namespace ballast::planner::planner_property_test
