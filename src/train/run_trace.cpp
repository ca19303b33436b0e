#include "src/train/run_trace.h"

#include <algorithm>

#include <fmt/format.h>

#include "ballast/core/error.h"
#include "ballast/core/log.h"
#include "ballast/train/trace.h"

namespace ballast::train {

void RunTrace::begin(engine::Engine& engine) {
  if (!request_.file.empty()) engine.record(&timeline_);
}

bool RunTrace::ends_after(std::uint64_t step, const RunEnd& end) const {
  return !request_.file.empty() && step == std::min(request_.steps, end.steps());
}

void RunTrace::save(engine::Engine& engine) {
  if (request_.file.empty() || written_) return;
  engine.record(nullptr);
  written_ = true;
  try {
    write_trace(request_.file, rule_, kTracedProcess, timeline_,
                step::OperationNames(engine.blueprint().problem));
    file_ = request_.file;
  } catch (const Error& error) {
    log(LogLevel::warning, fmt::format("there is no trace: {}", error.what()));
  }
  timeline_.spans = {};
}

}  // namespace ballast::train
