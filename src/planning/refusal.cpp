#include "src/planning/refusal.h"

#include <algorithm>
#include <array>
#include <limits>
#include <optional>
#include <utility>

#include <fmt/format.h>

namespace ballast::planning {
namespace {

/// The smallest excess that was found, and where.
struct Nearest {
  Bytes excess = std::numeric_limits<Bytes>::max();
  memory::Ledger ledger;
};

/// How near to fitting `question` comes with everything that it leaves open.
Nearest come_nearest(const Question& question) {
  Nearest nearest;
  constexpr std::size_t kPrograms = 12;
  std::vector<Program> programs = basic_programs();
  programs.resize(std::min(programs.size(), kPrograms));
  std::vector<std::uint64_t> sizes = micro_batch_sizes(question);
  // The smallest first: they need the least. Layouts of very many micro-batches are slow to add up.
  std::reverse(sizes.begin(), sizes.end());
  constexpr std::size_t kSizes = 4;
  if (sizes.size() > kSizes) sizes.erase(sizes.begin() + kSizes / 2, sizes.end() - kSizes / 2);
  for (const std::uint64_t size : sizes) {
    const Setting setting(question, size);
    const schedule::Options options = smallest_buffers(question.config, setting.outline.options);
    for (const Program& program : programs) {
      const schedule::Placement placement = setting.filler.fill(program, options);
      const Bytes excess = setting.filler.excess(placement, options);
      if (excess >= nearest.excess) continue;
      nearest = {excess, setting.filler.ledger(placement, options)};
      if (excess == 0) return nearest;
    }
  }
  return nearest;
}

/// A change of the config and how to say it.
struct Change {
  std::string words;
  config::Config config;
};

using RuleTier = std::optional<Tier> config::PlacementRule::*;

void open_rules(config::Config& config, RuleTier tier) {
  for (config::PlacementRule& rule : config.ballast.placement) rule.*tier = std::nullopt;
}

void add_micro_batches(const Question& question, std::vector<Change>& changes) {
  if (question.config.batch.automatic) return;
  config::Config open = question.config;
  open.batch.automatic = true;
  for (const std::uint64_t size :
       micro_batch_sizes({open, question.model, question.budgets, question.rates, question.world,
                          question.kernel_memory_of})) {
    if (size >= question.config.batch.micro_batch) continue;
    const config::Config changed = with_micro_batches(question.config, size, question.world);
    changes.push_back({fmt::format("train_micro_batch_size_per_gpu {} (and "
                                   "gradient_accumulation_steps {})",
                                   size, changed.batch.accumulation),
                       changed});
  }
}

void add_tiers(const config::Config& config, std::vector<Change>& changes) {
  const auto slower = [](config::TierChoice now, Tier tier) { return now && *now < tier; };
  for (const Tier tier : {Tier::host, Tier::nvme}) {
    const std::string_view name = tier == Tier::host ? "cpu" : "nvme";
    if (slower(config.ballast.activations, tier)) {
      Change change = {fmt::format("ballast.activations \"{}\"", to_string(tier)), config};
      change.config.ballast.activations = tier;
      open_rules(change.config, &config::PlacementRule::activations);
      changes.push_back(std::move(change));
    }
    if (slower(config.zero.optimizer.tier, tier)) {
      Change change = {fmt::format("offload_optimizer.device \"{}\"", name), config};
      change.config.zero.optimizer.tier = tier;
      open_rules(change.config, &config::PlacementRule::optimizer);
      changes.push_back(std::move(change));
    }
    if (slower(config.zero.parameters.tier, tier)) {
      Change change = {fmt::format("offload_param.device \"{}\"", name), config};
      change.config.zero.parameters.tier = tier;
      open_rules(change.config, &config::PlacementRule::weights);
      changes.push_back(std::move(change));
    }
  }
}

void add_recompute(const config::Config& config, std::vector<Change>& changes) {
  if (config.ballast.recompute.value_or(true)) return;
  Change change = {"ballast.recompute \"auto\"", config};
  change.config.ballast.recompute = std::nullopt;
  for (config::PlacementRule& rule : change.config.ballast.placement) rule.recompute = std::nullopt;
  changes.push_back(std::move(change));
}

void add_everything_open(const config::Config& config, std::vector<Change>& changes) {
  Change change = {
      "\"auto\" for offload_param.device, offload_optimizer.device, ballast.activations and "
      "ballast.recompute",
      config};
  change.config.zero.parameters.tier = std::nullopt;
  change.config.zero.optimizer.tier = std::nullopt;
  change.config.ballast.activations = std::nullopt;
  change.config.ballast.recompute = std::nullopt;
  change.config.ballast.placement.clear();
  changes.push_back(std::move(change));
}

/// The next size up that is written with three digits, so that what a message says is enough.
Bytes round_up_for_people(Bytes bytes) {
  constexpr Bytes kDigits = 100;
  Bytes unit = 1;
  while (bytes / unit >= kGiB / kMiB) unit *= kGiB / kMiB;
  Bytes step = unit;
  while (step > 1 && bytes / step < kDigits) step /= 10;
  return round_up(bytes, std::max<Bytes>(step, 1));
}

/// "1.21 GiB" that is not less than `bytes`.
std::string format_enough(Bytes bytes) {
  Bytes rounded = round_up_for_people(bytes);
  while (parse_bytes(format_bytes(rounded)) < bytes) rounded += std::max<Bytes>(1, rounded / 500);
  return format_bytes(rounded);
}

std::string larger_budgets(const Question& question, const memory::Ledger& ledger) {
  std::string text;
  for (const Tier tier : {Tier::device, Tier::host}) {
    const bool device = tier == Tier::device;
    const Bytes budget = device ? question.budgets.device : question.budgets.host;
    const Bytes needed = ledger.total(tier);
    if (needed <= budget) continue;
    const config::BallastSection& ballast = question.config.ballast;
    const bool named = (device ? ballast.device_bytes : ballast.host_bytes) > 0;
    text += fmt::format(fmt::runtime(named ? "{}ballast.{}_bytes \"{}\"" : "{}{} memory of {}"),
                        text.empty() ? "" : " with ", to_string(tier), format_enough(needed));
  }
  return text;
}

std::string what_is_missing(const memory::Budgets& budgets, const memory::Ledger& ledger) {
  const auto above = [&](Tier tier) {
    const Bytes budget = tier == Tier::device ? budgets.device : budgets.host;
    return ledger.total(tier) > budget ? ledger.total(tier) - budget : 0;
  };
  const Tier tier = above(Tier::host) > above(Tier::device) ? Tier::host : Tier::device;
  const memory::LedgerLine* largest = nullptr;
  for (const memory::LedgerLine& line : ledger.lines()) {
    if (line.tier == tier && (largest == nullptr || line.bytes > largest->bytes)) largest = &line;
  }
  return fmt::format(
      "the {} budget of {} is {} too small: the run needs at least {}, most of it "
      "'{}' ({})",
      to_string(tier), format_bytes(tier == Tier::device ? budgets.device : budgets.host),
      format_bytes(above(tier)), format_bytes(ledger.total(tier)),
      largest == nullptr ? "" : largest->kind,
      format_bytes(largest == nullptr ? 0 : largest->bytes));
}

}  // namespace

std::string explain_refusal(const Question& question) {
  const Nearest nearest = come_nearest(question);
  std::vector<Change> changes;
  add_micro_batches(question, changes);
  add_recompute(question.config, changes);
  add_tiers(question.config, changes);
  add_everything_open(question.config, changes);
  std::string fitting;
  for (const Change& change : changes) {
    const Question changed = {change.config,  question.model, question.budgets,
                              question.rates, question.world, question.kernel_memory_of};
    if (come_nearest(changed).excess > 0) continue;
    fitting = change.words + " would fit, and so would ";
    break;
  }
  return fmt::format("{}; {}{}{}", what_is_missing(question.budgets, nearest.ledger), fitting,
                     larger_budgets(question, nearest.ledger), fitting.empty() ? " would fit" : "");
}

}  // namespace ballast::planning
