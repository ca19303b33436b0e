#pragma once

#include <nanobind/nanobind.h>

namespace ballast::python {

// Each adds a part of the package to the extension module.

/// The states and updates behind the optimizers.
void bind_optimizer(nanobind::module_& module);
/// Files and futures; at the interpreter's exit, their end.
void bind_aio(nanobind::module_& module);
/// python -m ballast, plan, train.
void bind_program(nanobind::module_& module);

}  // namespace ballast::python
