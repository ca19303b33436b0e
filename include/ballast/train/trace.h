#pragma once

#include <filesystem>
#include <string_view>

#include "ballast/schedule/timeline.h"

namespace ballast::train {

/// Throws Error(io) naming `file` if a trace cannot be written there; leaves no file. Call before
/// the traced work.
void check_trace_file(const std::filesystem::path& file);

/// Writes `timeline` as a trace that Perfetto and chrome://tracing read (JSON, "Trace Event
/// Format"): one track per lane, a slice per operation with block, micro-batch, step, bytes and
/// FLOPs, and flow arrows along the edges, those across runs included. `process` names the tracks'
/// group ("ballast train", "simulated"). Steps are counted from the beginning of the timeline.
/// Writes the file atomically. Throws Error(io) naming it.
void write_trace(const std::filesystem::path& file, std::string_view process,
                 const schedule::Timeline& timeline, const schedule::Workload& workload);

}  // namespace ballast::train
