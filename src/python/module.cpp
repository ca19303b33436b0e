#include <nanobind/nanobind.h>

#include "src/python/bindings.h"
#include "src/python/errors.h"

NB_MODULE(_ballast, module) {
  module.doc() = "The compiled part of the package ballast. BufferUse ballast and its modules.";
  ballast::python::bind_errors(module);
  ballast::python::bind_optimizer(module);
  ballast::python::bind_aio(module);
  ballast::python::bind_program(module);
}
