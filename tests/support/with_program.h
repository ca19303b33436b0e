#pragma once

#include <utility>

#include "ballast/step/build.h"

#include "tests/unit/step/shape_of_workload.h"

namespace ballast::step {

/// A workload of a test with the passes that its flags and sizes describe.
inline Workload with_program(Workload workload) {
  set_program(workload, model::write_program(shape_of(workload)));
  return workload;
}

}  // namespace ballast::step
