#include <string>
#include <utility>
#include <vector>

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "ballast/core/build_info.h"

#include "src/python/bindings.h"
#include "tools/program.h"

namespace ballast::python {
namespace {

namespace nb = nanobind;

int run_program(std::vector<std::string> arguments, const std::vector<std::string>& name) {
  std::vector<char*> words;
  words.reserve(arguments.size() + 2);
  std::string own = "ballast";
  words.push_back(own.data());
  for (std::string& argument : arguments) words.push_back(argument.data());
  words.push_back(nullptr);
  return tools::main_program(static_cast<int>(arguments.size()) + 1, words.data(), name);
}

}  // namespace

void bind_program(nb::module_& module) {
  module.def("run_program", &run_program, nb::arg("arguments"), nb::arg("name"),
             nb::call_guard<nb::gil_scoped_release>(),
             "Runs the program with these arguments and returns its exit status.");
}

}  // namespace ballast::python
