#include <pybind11/pybind11.h>

#include "memory.h"
#include "storage.h"
#include "streams.h"

namespace py = pybind11;
using namespace second_device;  // NOLINT

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.def("register_operators", &register_operators);
  m.def("allow_data_of_other_device", &allow_data_of_other_device);
  m.def("set_delays", &set_delays, py::arg("kernel"), py::arg("copy"));
  m.def("set_budget", &set_budget);
  m.def("budget", [] { return memory_stats().budget; });
  m.def("synchronize", &synchronize_all, py::call_guard<py::gil_scoped_release>());
  m.def("register_pinned", [](std::uintptr_t address, std::size_t bytes) {
    register_pinned(reinterpret_cast<void*>(address), bytes);
  });
  m.def("unregister_pinned",
        [](std::uintptr_t address) { unregister_pinned(reinterpret_cast<void*>(address)); });
}
