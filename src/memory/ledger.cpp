#include "ballast/memory/ledger.h"

#include <algorithm>
#include <optional>

#include <fmt/format.h>

#include "ballast/core/error.h"

namespace ballast::memory {
namespace {

/// Returns the budget of `tier`; NVMe has none (plan_swap checks the disk's free space).
std::optional<Bytes> budget_of(Tier tier, const Budgets& budgets) {
  if (tier == Tier::device) return budgets.device;
  if (tier == Tier::host) return budgets.host;
  return std::nullopt;
}

}  // namespace

void Ledger::add(Tier tier, std::string_view kind, Bytes bytes) {
  if (bytes == 0) return;
  for (LedgerLine& line : lines_) {
    if (line.tier == tier && line.kind == kind) {
      line.bytes += bytes;
      return;
    }
  }
  const auto next_tier = std::find_if(lines_.begin(), lines_.end(),
                                      [&](const LedgerLine& line) { return line.tier > tier; });
  lines_.insert(next_tier, {tier, std::string(kind), bytes});
}

Bytes Ledger::total(Tier tier) const {
  Bytes sum = 0;
  for (const LedgerLine& line : lines_) {
    if (line.tier == tier) sum += line.bytes;
  }
  return sum;
}

const LedgerLine* Ledger::largest(Tier tier) const {
  const LedgerLine* found = nullptr;
  for (const LedgerLine& line : lines_) {
    if (line.tier == tier && (found == nullptr || line.bytes > found->bytes)) found = &line;
  }
  return found;
}

bool Ledger::fits(const Budgets& budgets) const {
  return total(Tier::device) <= budgets.device && total(Tier::host) <= budgets.host;
}

void Ledger::require_fit(const Budgets& budgets) const {
  for (const Tier tier : {Tier::device, Tier::host}) {
    const Bytes budget = *budget_of(tier, budgets);
    const Bytes needed = total(tier);
    if (needed <= budget) continue;
    const LedgerLine* const most = largest(tier);
    throw Error(
        ErrorCategory::memory,
        fmt::format("the {0} budget of {1} is {2} too small: the run needs {3}; the largest "
                    "part is '{4}' ({5}); ballast.{0}_bytes sets the budget",
                    to_string(tier), format_bytes(budget), format_bytes(needed - budget),
                    format_bytes(needed), most->kind, format_bytes(most->bytes)));
  }
}

std::vector<std::string> Ledger::table(const Budgets& budgets) const {
  std::vector<std::string> rows;
  for (const Tier tier : kTiers) {
    if (total(tier) == 0) continue;
    for (const LedgerLine& line : lines_) {
      if (line.tier != tier) continue;
      rows.push_back(
          fmt::format("{:<8} {:<18} {:>10}", to_string(tier), line.kind, format_bytes(line.bytes)));
    }
    const auto budget = budget_of(tier, budgets);
    const std::string limit = budget ? fmt::format("  of {}", format_bytes(*budget)) : "";
    rows.push_back(fmt::format("{:<8} {:<18} {:>10}{}", to_string(tier), "total",
                               format_bytes(total(tier)), limit));
  }
  return rows;
}

}  // namespace ballast::memory
