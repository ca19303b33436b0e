#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "ballast/core/memory.h"
#include "ballast/core/places.h"
#include "ballast/core/units.h"
#include "ballast/memory/machine.h"

namespace ballast::memory {

/// Peak bytes of one kind of data on one tier.
struct LedgerLine {
  Tier tier = Tier::device;
  std::string kind;
  Bytes bytes = 0;
  std::uint8_t device = 0;  ///< for Tier::device: which of the rank's devices
};

/// The memory of a run before allocation. It is exact, because it is made from the list of buffers
/// that is then allocated.
class Ledger {
 public:
  /// Adds to the line of (tier, kind, device). `device`: only for Tier::device.
  void add(Tier tier, std::string_view kind, Bytes bytes, std::uint8_t device = 0);

  /// Lines in tier order, on the device tier in order of devices, then in order of first addition.
  [[nodiscard]] const std::vector<LedgerLine>& lines() const { return lines_; }
  /// Returns the number of devices: 1 more than the largest number of one with a line, at least 1.
  [[nodiscard]] std::uint32_t devices() const;
  /// Returns the bytes of all devices, of the host, or of NVMe.
  [[nodiscard]] Bytes total(Tier tier) const;
  [[nodiscard]] Bytes device_total(std::uint8_t device) const;
  /// Returns the device with the most bytes, the first one on a tie.
  [[nodiscard]] std::uint8_t fullest_device() const;
  /// Returns the bytes that the budget of `tier` must cover: on the device tier, the total of the
  /// fullest device.
  [[nodiscard]] Bytes needed(Tier tier) const;
  /// Returns the largest line of what needed() counts, the first one on a tie; nullptr if it has
  /// none.
  [[nodiscard]] const LedgerLine* largest(Tier tier) const;
  /// Returns the bytes above the budgets: the sum over the host and all devices.
  [[nodiscard]] Bytes excess(const Budgets& budgets) const;
  [[nodiscard]] bool fits(const Budgets& budgets) const { return excess(budgets) == 0; }

  /// Throws Error(memory) if a total exceeds its budget, with the tier (one of several devices),
  /// the excess and the largest line.
  void require_fit(const Budgets& budgets) const;
  /// Returns " for device 1 (one of 2)", the fullest of several devices, for messages about the
  /// budget of `tier`; else "".
  [[nodiscard]] std::string name_device(Tier tier) const;

  /// Returns a table with one row per line, and each tier's total and budget. Devices whose
  /// rows are equal are listed once, others one by one.
  [[nodiscard]] std::vector<std::string> table(const Budgets& budgets) const;

 private:
  [[nodiscard]] std::vector<LedgerLine> lines_of(Tier tier, std::uint8_t device) const;
  [[nodiscard]] bool has_equal_devices() const;

  std::vector<LedgerLine> lines_;
};

/// Host memory of a run: one mapping of exact size (huge pages where the kernel grants them), cut
/// into page-aligned pieces that live as long as the pool. Not thread-safe while pieces are cut.
class HostPool {
 public:
  /// Reserves address space for `bytes`; pages become resident when first written. Throws
  /// Error(memory) if the mapping is refused.
  explicit HostPool(Bytes bytes);
  HostPool(const HostPool&) = delete;
  HostPool& operator=(const HostPool&) = delete;

  /// Returns the next piece, zeroed and aligned to 4 KiB. Throws Error(memory) with `what` if too
  /// little is left.
  HostBytes allocate(Bytes bytes, std::string_view what);

  /// The whole mapping.
  [[nodiscard]] HostBytes memory() const { return mapping_.bytes(); }
  [[nodiscard]] Bytes capacity() const { return mapping_.bytes().size(); }
  [[nodiscard]] Bytes allocated() const { return allocated_; }

 private:
  Mapping mapping_;
  Bytes allocated_ = 0;
};

}  // namespace ballast::memory
