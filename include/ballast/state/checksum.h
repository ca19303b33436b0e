#pragma once

#include <cstdint>
#include <memory>

#include "ballast/core/memory.h"

namespace ballast::state {

/// XXH3 (64 bits) of `bytes`, to detect damaged data.
std::uint64_t checksum(ConstHostBytes bytes);

/// checksum() of bytes that arrive in parts.
class RunningChecksum {
 public:
  RunningChecksum();
  ~RunningChecksum();
  RunningChecksum(const RunningChecksum&) = delete;
  RunningChecksum& operator=(const RunningChecksum&) = delete;

  void add(ConstHostBytes bytes);
  /// Returns the checksum() of all bytes so far.
  [[nodiscard]] std::uint64_t digest() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace ballast::state
