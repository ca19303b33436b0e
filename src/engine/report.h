#pragma once

#include <cstdint>
#include <span>

#include "ballast/core/view.h"
#include "ballast/engine/blueprint.h"

namespace ballast::engine {

// The report of a step: losses in double precision, first the head's for each micro-batch, then the
// routers' for each micro-batch.

/// A part of the report.
struct ReportPart {
  Bytes offset = 0;
  Bytes bytes = 0;
};

/// Returns the part with the head's losses of micro-batch `micro`.
inline ReportPart head_losses_in(const Blueprint& blueprint, std::uint32_t micro) {
  const Bytes bytes = blueprint.head_losses() * sizeof(double);
  return {micro * bytes, bytes};
}

/// Returns the part with the routers' losses of micro-batch `micro`: kRouterLosses.
inline ReportPart router_losses_in(const Blueprint& blueprint, std::uint32_t micro) {
  constexpr Bytes kBytes = kRouterLosses * sizeof(double);
  const Bytes first = blueprint.micro_batches * head_losses_in(blueprint, 0).bytes;
  return {first + micro * kBytes, kBytes};
}

/// Returns the size of the whole report.
inline Bytes report_bytes(const Blueprint& blueprint) {
  const auto micro_batches = static_cast<std::uint32_t>(blueprint.micro_batches);
  const bool routes = blueprint.problem.table->routing_bytes() > 0;
  return routes ? router_losses_in(blueprint, micro_batches).offset
                : head_losses_in(blueprint, micro_batches).offset;
}

/// Returns a part of the report on the host.
template <class T>
std::span<T> reported(HostBytes report, const ReportPart& part) {
  return {reinterpret_cast<T*>(report.data() + part.offset), part.bytes / sizeof(T)};
}

}  // namespace ballast::engine
