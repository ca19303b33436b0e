#include "ballast/memory/ledger.h"

#include <algorithm>
#include <optional>
#include <utility>

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

void Ledger::add(Tier tier, std::string_view kind, Bytes bytes, std::uint8_t device) {
  if (bytes == 0) return;
  for (LedgerLine& line : lines_) {
    if (line.tier == tier && line.device == device && line.kind == kind) {
      line.bytes += bytes;
      return;
    }
  }
  const auto next = std::find_if(lines_.begin(), lines_.end(), [&](const LedgerLine& line) {
    return std::pair(line.tier, line.device) > std::pair(tier, device);
  });
  lines_.insert(next, {tier, std::string(kind), bytes, device});
}

std::uint32_t Ledger::devices() const {
  std::uint32_t last = 0;
  for (const LedgerLine& line : lines_) last = std::max<std::uint32_t>(last, line.device);
  return last + 1;
}

Bytes Ledger::total(Tier tier) const {
  Bytes sum = 0;
  for (const LedgerLine& line : lines_) {
    if (line.tier == tier) sum += line.bytes;
  }
  return sum;
}

Bytes Ledger::device_total(std::uint8_t device) const {
  Bytes sum = 0;
  for (const LedgerLine& line : lines_) {
    if (line.tier == Tier::device && line.device == device) sum += line.bytes;
  }
  return sum;
}

std::uint8_t Ledger::fullest_device() const {
  std::uint8_t fullest = 0;
  for (std::uint8_t device = 1; device < devices(); ++device) {
    if (device_total(device) > device_total(fullest)) fullest = device;
  }
  return fullest;
}

Bytes Ledger::needed(Tier tier) const {
  return tier == Tier::device ? device_total(fullest_device()) : total(tier);
}

const LedgerLine* Ledger::largest(Tier tier) const {
  const std::uint8_t device = tier == Tier::device ? fullest_device() : 0;
  const LedgerLine* found = nullptr;
  for (const LedgerLine& line : lines_) {
    if (line.tier != tier || line.device != device) continue;
    if (found == nullptr || line.bytes > found->bytes) found = &line;
  }
  return found;
}

Bytes Ledger::excess(const Budgets& budgets) const {
  const auto above = [](Bytes needed, Bytes budget) {
    return needed > budget ? needed - budget : 0;
  };
  Bytes sum = above(total(Tier::host), budgets.host);
  for (std::uint8_t device = 0; device < devices(); ++device) {
    sum += above(device_total(device), budgets.device);
  }
  return sum;
}

std::string Ledger::name_device(Tier tier) const {
  const std::uint32_t all = devices();
  if (tier != Tier::device || all == 1) return "";
  return fmt::format(" for device {} (one of {})", fullest_device(), all);
}

void Ledger::require_fit(const Budgets& budgets) const {
  for (const Tier tier : {Tier::device, Tier::host}) {
    const Bytes budget = *budget_of(tier, budgets);
    const Bytes need = needed(tier);
    if (need <= budget) continue;
    const LedgerLine* const most = largest(tier);
    const std::string device = name_device(tier);
    throw Error(
        ErrorCategory::memory,
        fmt::format("the {0} budget of {1} is {2} too small{3}: the run needs {4}; the largest "
                    "part is '{5}' ({6}); ballast.{0}_bytes sets the budget{7}",
                    to_string(tier), format_bytes(budget), format_bytes(need - budget), device,
                    format_bytes(need), most->kind, format_bytes(most->bytes),
                    device.empty() ? "" : " of each device"));
  }
}

std::vector<LedgerLine> Ledger::lines_of(Tier tier, std::uint8_t device) const {
  std::vector<LedgerLine> found;
  for (const LedgerLine& line : lines_) {
    if (line.tier == tier && line.device == device) found.push_back(line);
  }
  return found;
}

/// Compares sizes as they are printed.
bool Ledger::has_equal_devices() const {
  const auto equal = [](const LedgerLine& one, const LedgerLine& other) {
    return one.kind == other.kind && format_bytes(one.bytes) == format_bytes(other.bytes);
  };
  const std::vector<LedgerLine> first = lines_of(Tier::device, 0);
  for (std::uint8_t device = 1; device < devices(); ++device) {
    const std::vector<LedgerLine> other = lines_of(Tier::device, device);
    if (!std::equal(first.begin(), first.end(), other.begin(), other.end(), equal)) return false;
  }
  return true;
}

std::vector<std::string> Ledger::table(const Budgets& budgets) const {
  std::vector<std::string> rows;
  const auto add_part = [&](Tier tier, std::uint8_t device, const std::string& name,
                            std::string_view ending) {
    Bytes sum = 0;
    for (const LedgerLine& line : lines_of(tier, device)) {
      rows.push_back(fmt::format("{:<8} {:<18} {:>10}", name, line.kind, format_bytes(line.bytes)));
      sum += line.bytes;
    }
    if (sum == 0) return;
    const auto budget = budget_of(tier, budgets);
    const std::string limit = budget ? fmt::format("  of {}", format_bytes(*budget)) : "";
    rows.push_back(
        fmt::format("{:<8} {:<18} {:>10}{}{}", name, "total", format_bytes(sum), limit, ending));
  };
  const std::uint32_t all = devices();
  const std::string each = all > 1 ? fmt::format(" on each of {} devices", all) : "";
  const bool equal = has_equal_devices();
  for (const Tier tier : kTiers) {
    if (tier != Tier::device || equal) {
      add_part(tier, 0, std::string(to_string(tier)), tier == Tier::device ? each : "");
      continue;
    }
    for (std::uint8_t device = 0; device < all; ++device) {
      add_part(tier, device, fmt::format("device {}", device), "");
    }
  }
  return rows;
}

HostPool::HostPool(Bytes bytes) : mapping_(bytes, "host memory (ballast.host_bytes)") {}

HostBytes HostPool::allocate(Bytes bytes, std::string_view what) {
  const Bytes size = round_up(bytes, kPage);
  if (size > capacity() - allocated_) {
    throw Error(ErrorCategory::memory,
                fmt::format("host memory: {} needs {}, but {} of {} are left; raise "
                            "ballast.host_bytes",
                            what, format_bytes(size), format_bytes(capacity() - allocated_),
                            format_bytes(capacity())));
  }
  const HostBytes piece = mapping_.bytes().subspan(allocated_, bytes);
  allocated_ += size;
  return piece;
}

}  // namespace ballast::memory
