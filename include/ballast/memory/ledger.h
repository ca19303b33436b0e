#pragma once

#include <string>
#include <vector>

#include "ballast/core/tier.h"
#include "ballast/core/units.h"
#include "ballast/memory/budget.h"

namespace ballast::memory {

/// Peak bytes of one kind of data on one tier.
struct LedgerLine {
  Tier tier = Tier::device;
  std::string kind;
  Bytes bytes = 0;
};

/// The memory of a run before allocation. It is exact, because it is made from the list of buffers
/// that is then allocated.
class Ledger {
 public:
  /// Adds to the line of (tier, kind).
  void add(Tier tier, std::string_view kind, Bytes bytes);

  /// Lines in tier order, in order of first addition within a tier.
  [[nodiscard]] const std::vector<LedgerLine>& lines() const { return lines_; }
  [[nodiscard]] Bytes total(Tier tier) const;
  /// Returns the largest line of `tier`, the first one on a tie; nullptr if it has none.
  [[nodiscard]] const LedgerLine* largest(Tier tier) const;
  [[nodiscard]] bool fits(const Budgets& budgets) const;

  /// Throws Error(memory) if a tier's total exceeds its budget, with the tier, the excess and the
  /// largest line.
  void require_fit(const Budgets& budgets) const;

  /// Returns a table with one row per line, and each tier's total and budget.
  [[nodiscard]] std::vector<std::string> table(const Budgets& budgets) const;

 private:
  std::vector<LedgerLine> lines_;
};

}  // namespace ballast::memory
