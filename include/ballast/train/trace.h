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

/// An operation of a timeline.
struct TracedOperation {
  plan::Span span;
  std::uint64_t step = 0;          ///< its training step, from 1 at the beginning; 0: before
  std::vector<std::size_t> after;  ///< operations that it waited for: indices into the result
};

/// The operations of `timeline` by their start, with their edges, those across runs included.
std::vector<TracedOperation> trace_operations(const plan::Timeline& timeline);

/// The rule for traces of `process`, which are replaced by newer ones.
text::OutputRule trace_rule(std::string_view process, bool overwrite,
                            std::vector<std::filesystem::path> inputs);

/// Writes `timeline` as a trace that Perfetto and chrome://tracing read (JSON, "Trace Event
/// Format"): one track per lane, a slice per operation with block, micro-batch, step, bytes and
/// FLOPs, and flow arrows along the edges, those across runs included. `process` names the tracks'
/// group ("ballast train", "simulated"). Steps are counted from the beginning of the timeline.
/// Writes the file atomically. Throws like text::OutputFile.
void write_trace(const std::filesystem::path& file, const text::OutputRule& rule,
                 std::string_view process, const plan::Timeline& timeline,
                 const step::OperationNames& names);

}  // namespace ballast::train
