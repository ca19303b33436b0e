#pragma once

#include <filesystem>
#include <string_view>

#include "ballast/schedule/timeline.h"

namespace ballast::train {

/// Throws Error(io) naming `file` when no trace can be written there; leaves nothing behind. To be
/// called before the work that is to be traced.
void check_trace_file(const std::filesystem::path& file);

/// Writes `timeline` as a trace that Perfetto and chrome://tracing read (JSON, "Trace Event
/// Format"): one track per lane, a slice per operation with block, micro-batch, step, bytes and
/// FLOPs, and flow arrows along the edges, those across runs included. `process` names the tracks'
/// group ("ballast train", "simulated"). Steps are counted from the beginning of the timeline. The
/// file appears whole or not at all. Throws Error(io) naming it.
void write_trace(const std::filesystem::path& file, std::string_view process,
                 const schedule::Timeline& timeline, const schedule::Workload& workload);

}  // namespace ballast::train
