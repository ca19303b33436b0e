#pragma once

#include <string>
#include <vector>

#include "ballast/core/tier.h"
#include "ballast/core/units.h"
#include "ballast/memory/budget.h"

namespace ballast::memory {

/// How many bytes of what lie where, at peak.
struct LedgerLine {
  Tier tier = Tier::device;
  std::string kind;
  Bytes bytes = 0;
};

/// The memory of a run before it is allocated. Made from the very list of buffers that the
/// allocators then serve, so it is exact by construction.
class Ledger {
 public:
  /// Adds to the line of (tier, kind).
  void add(Tier tier, std::string_view kind, Bytes bytes);

  /// Lines in tier order, in order of first addition within a tier.
  [[nodiscard]] const std::vector<LedgerLine>& lines() const { return lines_; }
  [[nodiscard]] Bytes total(Tier tier) const;
  [[nodiscard]] bool fits(const Budgets& budgets) const;

  /// Throws Error(memory) when a tier's total exceeds its budget: names the tier, the largest line
  /// and by how much.
  void require_fit(const Budgets& budgets) const;

  /// A table for people, one line per entry and a total per tier against its budget.
  [[nodiscard]] std::vector<std::string> table(const Budgets& budgets) const;

 private:
  std::vector<LedgerLine> lines_;
};

}  // namespace ballast::memory
