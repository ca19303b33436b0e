#include "src/train/run_trace.h"

#include <algorithm>

#include "ballast/core/error.h"
#include "ballast/core/log.h"
#include "ballast/train/trace.h"

namespace ballast::train {

void RunTrace::begin(engine::Engine& engine) {
  if (!request_.file.empty()) engine.record(&timeline_);
}

bool RunTrace::ends_after(std::uint64_t step, std::uint64_t steps) const {
  return !request_.file.empty() && step == std::min(request_.steps, steps);
}

void RunTrace::write(engine::Engine& engine) {
  if (request_.file.empty() || written_) return;
  engine.record(nullptr);
  written_ = true;
  write_trace(request_.file, "ballast train", timeline_, engine.blueprint().workload);
  timeline_.spans = {};
}

void RunTrace::save(engine::Engine& engine) {
  try {
    write(engine);
  } catch (const Error& error) {
    log(LogLevel::warning, error.what());
  }
}

}  // namespace ballast::train
