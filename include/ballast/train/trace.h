#pragma once

#include <filesystem>
#include <string_view>

#include "ballast/schedule/timeline.h"

namespace ballast::train {

/// Writes `timeline` as a trace that Perfetto and chrome://tracing read (JSON, "Trace Event
/// Format"): one track per lane, a slice per operation with block, micro-batch, step, bytes and
/// FLOPs, and flow arrows along the edges, those across runs included. `process` names the tracks'
/// group ("ballast train", "simulated"). Throws Error(io).
void write_trace(const std::filesystem::path& file, std::string_view process,
                 const schedule::Timeline& timeline, const schedule::Workload& workload);

}  // namespace ballast::train
