#include <algorithm>
#include <cstdint>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "ballast/core/error.h"
#include "ballast/plan/rates.h"
#include "ballast/planner/planner.h"

#include "src/planner/search.h"

namespace ballast::planner {
namespace {

/// Returns the micro-batch sizes of `request` with the least excess when everything open is on
/// NVMe.
std::vector<std::uint64_t> promising_sizes(const PlanRequest& request) {
  constexpr std::size_t kSizes = 4;
  std::vector<std::uint64_t> sizes = micro_batch_sizes(request);
  if (sizes.size() <= kSizes) return sizes;
  std::vector<std::pair<Bytes, std::uint64_t>> found;
  for (const std::uint64_t size : sizes) {
    const BatchChoice choice(request, size);
    const step::Options options =
        with_buffers(request.run, choice.outline.options, BufferLevel::fewest);
    found.emplace_back(choice.filler.excess(choice.filler.fill({}, options), options), size);
  }
  std::sort(found.begin(), found.end());
  sizes.clear();
  for (std::size_t i = 0; i < kSizes; ++i) sizes.push_back(found[i].second);
  return sizes;
}

/// Returns whether a plan for `request` fits and, if its rates are known, can be simulated. Sets
/// `missing` to the message about a rate without which this cannot be told.
bool works(PlanRequest request, Effort effort, std::string& missing) {
  try {
    if (find_closest_miss(request, effort).excess > 0) return false;
    if (request.rates.forward.empty()) return true;
    request.work_limit = 1;
    return try_decide(request).has_value();
  } catch (const plan::MissingRate& error) {
    missing = error.what();
    return false;
  } catch (const Error& error) {
    // The config's rules forbid the change, or the machine lacks something that it needs.
    if (error.category() == ErrorCategory::config) return false;
    if (error.category() == ErrorCategory::memory) return false;  // on its drives
    throw;
  }
}

constexpr std::string_view kOptimizerTier = "zero_optimization.offload_optimizer.device";
constexpr std::string_view kWeightsTier = "zero_optimization.offload_param.device";
constexpr std::string_view kActivations = "ballast.activations";
constexpr std::string_view kGradients = "ballast.gradients";
constexpr const char* kAutoMicroBatch = "train_micro_batch_size_per_gpu=auto";

/// Adds smaller micro-batches, largest first.
void add_micro_batches(const PlanRequest& request, std::vector<Overrides>& changes) {
  const engine::BatchRule& batch = request.run.batch;
  if (batch.automatic) return;
  PlanRequest open = request;
  open.run.batch.automatic = true;
  for (const std::uint64_t size : micro_batch_sizes(open)) {
    if (size >= batch.samples()) continue;
    changes.push_back({fmt::format("train_micro_batch_size_per_gpu={}", size),
                       fmt::format("gradient_accumulation_steps={}",
                                   batch.with_samples(size, request.mesh.data).accumulation)});
  }
}

std::string assign(std::string_view key, std::string_view value) {
  return fmt::format("{}={}", key, value);
}

/// Adds devices that the rank has and does not use.
void add_devices(const PlanRequest& request, std::vector<Overrides>& changes) {
  for (const std::uint32_t count : larger_device_counts(request)) {
    changes.push_back({fmt::format("pipeline.stages={}", count)});
  }
}

/// Everything that the planner can choose, left to it.
Overrides open_placement() {
  return {assign(kWeightsTier, "auto"), assign(kOptimizerTier, "auto"),
          assign(kActivations, "auto"), assign(kGradients, "auto"),
          "ballast.recompute=auto",     "ballast.order=auto"};
}

void add_placements(const engine::RunInputs& run, std::vector<Overrides>& changes) {
  const step::PlacementConstraint& set = run.constraints.placement;
  // Placement rules would override the new tier.
  const auto add = [&](Overrides change) {
    if (!run.constraints.rules.empty()) change.emplace_back("ballast.placement=[]");
    changes.push_back(std::move(change));
  };
  const auto slower = [](std::optional<Tier> now, Tier tier) { return now && *now < tier; };
  if (set.kept.value_or(step::Kept::nothing) != step::Kept::nothing)
    add({"ballast.recompute=auto"});
  for (const Tier tier : {Tier::host, Tier::nvme}) {
    const std::string_view name = tier == Tier::host ? "cpu" : "nvme";
    if (slower(set.activations, tier)) add({assign(kActivations, to_string(tier))});
    if (slower(set.optimizer, tier)) add({assign(kOptimizerTier, name)});
    if (slower(set.weights, tier)) add({assign(kWeightsTier, name)});
    if (slower(set.gradients, tier)) add({assign(kGradients, "auto")});
  }
  const Overrides open = open_placement();
  add(open);
  if (run.batch.automatic) return;
  Overrides all = open;
  all.insert(all.end(), {fmt::format("train_batch_size={}", run.batch.train_batch), kAutoMicroBatch,
                         "gradient_accumulation_steps=auto"});
  add(std::move(all));
}

/// Adds the longest of half, quarter and so on of the sequence length that fits.
void add_shorter_sequence(const PlanRequest& request, std::vector<std::string>& ways,
                          std::string& missing) {
  std::vector<std::uint64_t> lengths;
  for (std::uint64_t length = request.run.batch.shape.whole_length() / 2; length > 0; length /= 2) {
    lengths.push_back(length);
  }
  std::string longest;
  for (; !lengths.empty(); lengths.pop_back()) {
    const std::string change = fmt::format("data.sequence_length={}", lengths.back());
    const std::optional<PlanRequest> other = changed(request, {change});
    if (!other || !works(*other, Effort::quick, missing)) break;
    longest = "--set " + change;
  }
  if (!longest.empty()) ways.push_back(std::move(longest));
}

/// Adds the fewest tiles that fit, alone or with an open placement.
void add_tiles(const PlanRequest& request, std::vector<std::string>& ways) {
  if (!request.run.constraints.rules.empty()) return;
  for (const Overrides& before : {Overrides(), open_placement()}) {
    const std::optional<PlanRequest> other = changed(request, before);
    if (!other) continue;
    Overrides change = find_fitting_tiles(*other, {.vocabulary = true, .layers = true});
    if (change.empty()) continue;
    change.insert(change.end(), before.begin(), before.end());
    ways.push_back(fmt::format("--set {}", fmt::join(change, " --set ")));
    return;
  }
}

/// Rounds up to a size that format_bytes() prints exactly, with three digits.
Bytes round_up_for_people(Bytes bytes) {
  constexpr Bytes kDigits = 100;
  Bytes unit = 1;
  while (bytes / unit >= kGiB / kMiB) unit *= kGiB / kMiB;
  Bytes step = unit;
  while (step > 1 && bytes / step < kDigits) step /= 10;
  return round_up(bytes, std::max<Bytes>(step, 1));
}

/// Formats at least `bytes`, for example as "1.21 GiB".
std::string format_enough(Bytes bytes) {
  Bytes rounded = round_up_for_people(bytes);
  while (parse_bytes(format_bytes(rounded)) < bytes) rounded += std::max<Bytes>(1, rounded / 500);
  return format_bytes(rounded);
}

/// Returns larger budgets with which `request` works: "--set ballast.host_bytes=1.2GiB", or "host
/// memory of 1.2 GiB" if the run does not set the budget. "" if there are none.
std::string larger_budgets(const PlanRequest& request, const memory::Ledger& nearest,
                           std::string& missing) {
  constexpr int kTries = 8;
  PlanRequest larger = request;
  Bytes device = nearest.needed(Tier::device);
  Bytes host = nearest.needed(Tier::host);
  for (int i = 0; i < kTries; ++i, device += device / 10, host += host / 10) {
    std::string text;
    const auto raise = [&](Tier tier, Bytes needed, Bytes now, Bytes named, Bytes& budget) {
      if (needed <= now) return;
      std::string enough = format_enough(needed);
      budget = parse_bytes(enough);
      if (named > 0) std::erase(enough, ' ');
      text +=
          fmt::format(fmt::runtime(named > 0 ? "{}--set ballast.{}_bytes={}" : "{}{} memory of {}"),
                      text.empty()                             ? ""
                      : named > 0 && text.starts_with("--set") ? " "
                                                               : " and ",
                      to_string(tier), enough);
    };
    const memory::Budgets& named = request.run.budgets;
    raise(Tier::device, device, request.budgets.device, named.device, larger.budgets.device);
    raise(Tier::host, host, request.budgets.host, named.host, larger.budgets.host);
    if (works(larger, Effort::thorough, missing)) return text;
  }
  return "";
}

std::string describe_excess(const memory::Budgets& budgets, const memory::Ledger& ledger) {
  const auto above = [&](Tier tier) {
    const Bytes budget = tier == Tier::device ? budgets.device : budgets.host;
    return ledger.needed(tier) > budget ? ledger.needed(tier) - budget : 0;
  };
  const Tier tier = above(Tier::host) > above(Tier::device) ? Tier::host : Tier::device;
  const memory::LedgerLine* const largest = ledger.largest(tier);
  return fmt::format(
      "the {} budget of {} is {} too small{}: the smallest plan needs {}, {} of it for '{}'",
      to_string(tier), format_bytes(tier == Tier::device ? budgets.device : budgets.host),
      format_bytes(above(tier)), ledger.name_device(tier), format_bytes(ledger.needed(tier)),
      format_bytes(largest->bytes), largest->kind);
}

/// Returns the message for a request whose `nearest` plan does not fit.
std::string explain(const PlanRequest& request, const ClosestMiss& nearest) {
  expects(nearest.excess > 0, "planner: a run that fits was refused");
  std::vector<std::string> ways;
  std::string missing_rate;
  if (const Overrides change = find_fitting_change(request, missing_rate); !change.empty()) {
    ways.push_back(fmt::format("--set {}", fmt::join(change, " --set ")));
  }
  if (ways.empty()) add_tiles(request, ways);
  if (ways.empty()) add_shorter_sequence(request, ways, missing_rate);
  if (std::string budgets = larger_budgets(request, nearest.ledger, missing_rate);
      !budgets.empty()) {
    ways.push_back(std::move(budgets));
  }
  const std::string missing = describe_excess(request.budgets, nearest.ledger);
  if (ways.empty() && !missing_rate.empty()) {
    return fmt::format("{}; whether it fits otherwise cannot be told: {}", missing, missing_rate);
  }
  if (ways.empty()) {
    return missing + "; no other placement, micro-batch, sequence or budget that was tried fits";
  }
  return fmt::format("{}; it would fit with {}", missing, fmt::join(ways, ", or with "));
}

/// Returns the closest miss of a request that names the number of devices.
ClosestMiss find_miss_on_devices(const PlanRequest& request, Effort effort) {
  ClosestMiss nearest;
  constexpr std::size_t kPrograms = 12;
  std::vector<PlacementRecipe> recipes = rule_recipes(request.run);
  if (leaves_choices(request.run)) {
    recipes = basic_recipes();
    recipes.resize(std::min(recipes.size(), kPrograms));
    if (effort == Effort::thorough) recipes.push_back({{.kind = TensorClass::all}});
  }
  if (opens_gradients(request.run)) {
    const std::vector<PlacementRecipe> swapping = with_swapped_gradients(recipes);
    recipes.insert(recipes.end(), swapping.begin(), swapping.end());
  }
  const std::vector<step::Order> last = last_orders(request.run);
  std::vector<std::unique_ptr<BatchChoice>> choices;
  for (const std::uint64_t size : promising_sizes(request)) {
    choices.push_back(std::make_unique<BatchChoice>(request, size));
  }
  for (const PlacementRecipe& recipe : recipes) {
    for (const auto& choice : choices) {
      stop_if_interrupted(request);
      step::Options options =
          with_buffers(request.run, choice->outline.options, BufferLevel::fewest);
      std::vector<step::Order> open = orders(request.run, options);
      open.insert(open.end(), last.begin(), last.end());
      for (const step::Order order : open) {
        options.order = order;
        const step::Placement placement = choice->filler.fill(recipe, options);
        const Bytes excess = choice->filler.excess(placement, options);
        if (excess >= nearest.excess) continue;
        nearest = {excess, choice->micro_batch, options, recipe,
                   choice->filler.ledger(placement, options)};
        if (excess == 0) return nearest;
      }
    }
  }
  return nearest;
}

}  // namespace

Overrides find_fitting_change(const PlanRequest& request, std::string& missing_rate) {
  std::vector<Overrides> changes;
  if (request.run.constraints.speculative_updates.value_or(0) > 0)
    changes.push_back({"ballast.speculative_updates=0"});
  add_devices(request, changes);
  add_micro_batches(request, changes);
  add_placements(request.run, changes);
  for (const Overrides& change : changes) {
    const std::optional<PlanRequest> other = changed(request, change);
    if (other && works(*other, Effort::quick, missing_rate)) return change;
  }
  return {};
}

ClosestMiss find_closest_miss(const PlanRequest& request, Effort effort) {
  ClosestMiss nearest;
  for (const std::uint32_t count : device_counts(request)) {
    ClosestMiss found = find_miss_on_devices(on_devices(request, count), effort);
    if (found.excess < nearest.excess) nearest = std::move(found);
    if (nearest.excess == 0) break;
  }
  return nearest;
}

std::string explain_refusal(const PlanRequest& request) {
  return explain(request, find_closest_miss(request, Effort::thorough));
}

void require_fit(const PlanRequest& request) {
  const ClosestMiss nearest = find_closest_miss(request, Effort::thorough);
  if (nearest.excess > 0) throw Error(ErrorCategory::memory, explain(request, nearest));
}

engine::RunInputs measured_run(const PlanRequest& request) {
  if (request.run.constraints.may_swap()) return request.run;
  const auto with_open_on = [&request](Tier tier) {
    PlanRequest changed = request;
    step::PlacementConstraint& set = changed.run.constraints.placement;
    if (!set.activations) set.activations = tier;
    if (!set.gradients) set.gradients = tier;
    return changed;
  };
  const bool fits = find_closest_miss(with_open_on(Tier::host), Effort::quick).excess == 0;
  return fits ? request.run : with_open_on(Tier::nvme).run;
}

namespace {

constexpr const char* kVocabularyTiles = "model.vocabulary_tiles";
constexpr const char* kLayerTiles = "model.layer_tiles";
/// Numbers of tiles are doubled this often.
constexpr int kDoublings = 6;

/// Returns the excess of the closest plan over the budgets.
Bytes excess_of(const PlanRequest& request, Effort effort) {
  try {
    return find_closest_miss(request, effort).excess;
  } catch (const Error& error) {
    // The change breaks a rule that depends on sizes.
    if (error.category() != ErrorCategory::config) throw;
    return std::numeric_limits<Bytes>::max();
  }
}

}  // namespace

std::optional<PlanRequest> changed(const PlanRequest& request, const Overrides& overrides) {
  if (overrides.empty()) return request;
  if (!request.change) return std::nullopt;
  PlanRequest result = request;
  try {
    PlanRequest other = request.change(overrides);
    result.run = std::move(other.run);
    result.change = std::move(other.change);
  } catch (const Error&) {
    return std::nullopt;
  }
  const model::ModelConfig& before = request.run.model.config;
  const model::ModelConfig& now = result.run.model.config;
  if (now.vocabulary_tiles != before.vocabulary_tiles || now.layer_tiles != before.layer_tiles) {
    result.kernels = nullptr;
  }
  return result;
}

Overrides find_fitting_tiles(const PlanRequest& request, const model::OpenTiles& open) {
  const model::ModelConfig& model = request.run.model.config;
  const Bytes now = excess_of(request, Effort::quick);
  for (const auto& [vocabulary, layers] :
       {std::pair{true, false}, std::pair{false, true}, std::pair{true, true}}) {
    if ((vocabulary && !open.vocabulary) || (layers && !open.layers)) continue;
    Bytes before = now;
    for (int doubling = 1; doubling <= kDoublings; ++doubling) {
      Overrides change;
      const auto cut = [&](const char* key, std::uint64_t tiles) {
        change.push_back(fmt::format("{}={}", key, tiles << doubling));
      };
      if (vocabulary) cut(kVocabularyTiles, model.vocabulary_tiles);
      if (layers) cut(kLayerTiles, model.layer_tiles);
      const std::optional<PlanRequest> tried = changed(request, change);
      if (!tried) break;
      const Bytes excess = excess_of(*tried, Effort::quick);
      if (excess == 0) return change;
      if (excess >= before) break;  // something else needs the memory
      before = excess;
    }
  }
  return {};
}

model::ModelConfig fitting_tiles(const PlanRequest& request) {
  const model::ModelConfig& model = request.run.model.config;
  if (!request.run.open_tiles.any()) return model;
  if (excess_of(request, Effort::quick) == 0) return model;
  if (excess_of(request, Effort::thorough) == 0) return model;
  // The refusal names it, and the user decides.
  std::string missing_rate;
  if (!find_fitting_change(request, missing_rate).empty()) return model;
  const Overrides change = find_fitting_tiles(request, request.run.open_tiles);
  const std::optional<PlanRequest> cut = changed(request, change);
  if (change.empty() || !cut) return model;
  log(LogLevel::info,
      fmt::format("planner: \"auto\" takes {}, because nothing fits the budgets with fewer "
                  "tiles. Sums over other tiles are rounded in another order, so the last bits "
                  "of results differ from those of a run with larger budgets; name the key{} to "
                  "have the same bits with all budgets",
                  fmt::join(change, " and "), change.size() > 1 ? "s" : ""));
  return cut->run.model.config;
}

}  // namespace ballast::planner
