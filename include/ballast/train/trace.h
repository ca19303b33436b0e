#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <string_view>
#include <vector>

#include "ballast/plan/timeline.h"
#include "ballast/step/names.h"
#include "ballast/text/output_file.h"

namespace ballast::train {

/// One operation of a timeline.
struct TracedOperation {
  plan::Span span;
  std::uint64_t step = 0;          ///< training step from the beginning on, from 1; 0: before it
  std::vector<std::size_t> after;  ///< operations that it waited for, as indices into the result
};

/// Returns the operations of `timeline` by start time, with their edges, including edges between
/// plans.
std::vector<TracedOperation> trace_operations(const plan::Timeline& timeline);

/// Returns the output rule for traces of `process`: newer ones replace older ones.
text::OutputRule trace_rule(std::string_view process, bool overwrite,
                            std::vector<std::filesystem::path> inputs);

/// Writes `timeline` as a trace for Perfetto and chrome://tracing (JSON, "Trace Event Format"): one
/// track per lane, one slice per operation with block, micro-batch, step, bytes and FLOPs, and flow
/// arrows along the edges, including edges between plans. `process` names the group of tracks
/// ("ballast train", "simulated"). Steps count from the beginning of the timeline. Writes the file
/// atomically. Throws like text::OutputFile.
void write_trace(const std::filesystem::path& file, const text::OutputRule& rule,
                 std::string_view process, const plan::Timeline& timeline,
                 const step::OperationNames& names);

}  // namespace ballast::train
