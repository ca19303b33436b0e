#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <fmt/format.h>
#include <nanobind/nanobind.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>
#include <unistd.h>

#include "ballast/core/error.h"

#include "src/offload/optimizer.h"
#include "src/offload/state_file.h"
#include "src/offload/state_values.h"
#include "src/python/bindings.h"

namespace nb = nanobind;

namespace ballast::python {
namespace {

using cpu_adam::Gradient;
using cpu_adam::Moments;
using offload::Layout;
using offload::Notes;
using offload::OffloadedOptimizer;
using offload::Parameter;
using offload::Place;
using offload::StateValues;
using offload::Update;
using Unlocked = nb::call_guard<nb::gil_scoped_release>;
/// Addresses of arrays that the Python code keeps alive: torch's data_ptr().
using Address = std::uintptr_t;

template <class T = void>
T* pointer(Address address) {
  return reinterpret_cast<T*>(address);  // NOLINT(performance-no-int-to-ptr)
}

DType parse_type(const std::string& name) {
  for (const DType type : {DType::f32, DType::bf16, DType::f16}) {
    if (to_string(type) == name) return type;
  }
  throw Error(ErrorCategory::usage, fmt::format("dtype: {} is not f32, bf16 or f16", name));
}

Gradient gradient_at(Address address, DType type) {
  if (type == DType::bf16) return Gradient(pointer<const Bf16>(address));
  if (type == DType::f16) return Gradient(pointer<const F16>(address));
  return Gradient(pointer<const float>(address));
}

Moments::Format parse_moments(const std::string& name) {
  if (name == "fp32") return Moments::Format::f32;
  if (name == "bf16_first") return Moments::Format::bf16_first;
  if (name == "8bit") return Moments::Format::blockwise8;
  throw Error(ErrorCategory::usage,
              fmt::format("optimizer_states: \"{}\" is not fp32, bf16_first or 8bit", name));
}

std::span<float> floats(Address address, Elems count) {
  return address == 0 ? std::span<float>() : std::span(pointer<float>(address), count);
}

/// Owns the states, and refuses to work in a process that fork() has made: threads stay behind.
class States {
 public:
  States(const std::string& optimizer, const std::string& moments,
         const std::vector<std::pair<Elems, std::string>>& parameters, Elems sub_group,
         const std::vector<std::string>& paths, std::optional<Bytes> host_bytes,
         bool any_file_system, int threads)
      : states_(new OffloadedOptimizer(layout(optimizer, moments, parameters, sub_group),
                                       place(paths, host_bytes, any_file_system), threads)) {}
  ~States() {
    // Threads and requests are those of the process that has made them.
    if (getpid() != owner_) static_cast<void>(states_.release());
  }
  States(const States&) = delete;
  States& operator=(const States&) = delete;

  OffloadedOptimizer& get() {
    if (getpid() != owner_) {
      throw Error(ErrorCategory::state,
                  "the optimizer was made before fork(): make it in the process that uses it");
    }
    return *states_;
  }

 private:
  static Layout layout(const std::string& optimizer, const std::string& moments,
                       const std::vector<std::pair<Elems, std::string>>& parameters,
                       Elems sub_group) {
    std::vector<Parameter> all;
    for (const auto& [elements, type] : parameters) all.push_back({elements, parse_type(type)});
    return {cpu_adam::parse_optimizer(optimizer), parse_moments(moments), all, sub_group};
  }
  static Place place(const std::vector<std::string>& paths, std::optional<Bytes> host_bytes,
                     bool any_file_system) {
    if (paths.empty()) return {};
    state::SwapOptions options;
    for (const std::string& path : paths)
      options.paths.push_back({.directory = path, .key = "path"});
    options.any_file_system = any_file_system;
    return {options, host_bytes};
  }

  pid_t owner_ = getpid();
  std::unique_ptr<OffloadedOptimizer> states_;
};

/// One parameter of a step: number, weights, gradient, its type, number of its update, and index of
/// the hyper-parameters.
using StepEntry = std::tuple<std::size_t, Address, Address, std::string, std::int64_t, std::size_t>;

void begin(States& states, const std::vector<StepEntry>& entries,
           const std::vector<cpu_adam::Hyper>& hypers) {
  std::vector<Update> updates;
  for (const auto& [parameter, weights, gradient, type, step, hyper] : entries) {
    updates.push_back(
        {parameter, pointer(weights), gradient_at(gradient, parse_type(type)), hypers.at(hyper)});
    updates.back().hyper.step = step;
  }
  states.get().begin(std::move(updates));
}

/// Sum of squares and number of infinities and NaNs of gradients: address, elements, type.
std::pair<double, std::uint64_t> gradient_stats(
    States& states, const std::vector<std::tuple<Address, Elems, std::string>>& gradients) {
  OffloadedOptimizer& own = states.get();
  own.finish();
  cpu_adam::GradientStats sum;
  for (const auto& [address, elements, type] : gradients) {
    const auto one = own.updater().gradient_stats(gradient_at(address, parse_type(type)), elements);
    sum.sum_of_squares += one.sum_of_squares;
    sum.non_finite += one.non_finite;
  }
  return {sum.sum_of_squares, sum.non_finite};
}

StateValues values_at(States& states, std::size_t parameter, Address master, Address first,
                      Address second) {
  const Elems elements = states.get().layout().parameters().at(parameter).elements;
  return {floats(master, elements), floats(first, elements), floats(second, elements)};
}

void read(States& states, std::size_t parameter, Address weights, Address master, Address first,
          Address second) {
  offload::read_values(states.get(), parameter, pointer(weights),
                       values_at(states, parameter, master, first, second));
}

void write(States& states, std::size_t parameter, Address weights, Address master, Address first,
           Address second) {
  offload::write_values(states.get(), parameter, pointer(weights),
                        values_at(states, parameter, master, first, second));
}

std::vector<void*> pointers(const std::vector<Address>& addresses) {
  std::vector<void*> all;
  for (const Address address : addresses) all.push_back(pointer(address));
  return all;
}

void save(States& states, const std::vector<Address>& weights, const std::string& file,
          const Notes& notes) {
  offload::save_states(states.get(), pointers(weights), file, notes);
}

Notes load(States& states, const std::vector<Address>& weights, const std::string& file) {
  return offload::load_states(states.get(), pointers(weights), file);
}

void bind_hyper(nb::module_& module) {
  nb::class_<cpu_adam::Hyper>(module, "Hyper", "Hyper-parameters of one update.")
      .def(
          "__init__",
          [](cpu_adam::Hyper* self, const std::string& optimizer, double lr, double beta1,
             double beta2, double eps, double momentum, bool nesterov, double weight_decay,
             float gradient_scale) {
            new (self) cpu_adam::Hyper{.optimizer = cpu_adam::parse_optimizer(optimizer),
                                       .learning_rate = lr,
                                       .beta1 = beta1,
                                       .beta2 = beta2,
                                       .epsilon = eps,
                                       .momentum = momentum,
                                       .nesterov = nesterov,
                                       .weight_decay = weight_decay,
                                       .gradient_scale = gradient_scale};
          },
          nb::kw_only(), nb::arg("optimizer"), nb::arg("lr"), nb::arg("beta1") = 0.9,
          nb::arg("beta2") = 0.999, nb::arg("eps") = 1e-8, nb::arg("momentum") = 0.0,
          nb::arg("nesterov") = false, nb::arg("weight_decay") = 0.0,
          nb::arg("gradient_scale") = 1.0F);
}

}  // namespace

void bind_optimizer(nb::module_& module) {
  bind_hyper(module);
  nb::class_<States>(module, "OptimizerStates",
                     "Optimizer states of parameters, and their updates on a thread of its own. "
                     "The caller keeps all arrays alive until finish() or wait() returns.")
      .def(nb::init<const std::string&, const std::string&,
                    const std::vector<std::pair<Elems, std::string>>&, Elems,
                    const std::vector<std::string>&, std::optional<Bytes>, bool, int>(),
           nb::arg("optimizer"), nb::arg("moments"), nb::arg("parameters"), nb::kw_only(),
           nb::arg("sub_group"), nb::arg("paths"), nb::arg("host_bytes").none(),
           nb::arg("any_file_system"), nb::arg("threads"), Unlocked())
      .def("begin", &begin, nb::arg("updates"), nb::arg("hypers"), Unlocked(),
           "Starts a step; parameters are updated in ascending order.")
      .def(
          "wait", [](States& s, std::size_t parameter) { s.get().wait(parameter); },
          nb::arg("parameter"), Unlocked(), "Blocks until the parameter is updated.")
      .def(
          "finish", [](States& s) { s.get().finish(); }, Unlocked(),
          "Blocks until no step is running.")
      .def(
          "forget_master",
          [](States& s, std::size_t parameter) { s.get().forget_master(parameter); },
          nb::arg("parameter"), Unlocked(),
          "Takes the weights as the master at the parameter's next update.")
      .def("gradient_stats", &gradient_stats, nb::arg("gradients"), Unlocked(),
           "Sum of squares and number of non-finite values of (address, elements, dtype)...")
      .def("read", &read, nb::arg("parameter"), nb::arg("weights"), nb::arg("master"),
           nb::arg("first"), nb::arg("second"), Unlocked(),
           "Copies states to fp32 arrays; an address of 0: not this one.")
      .def("write", &write, nb::arg("parameter"), nb::arg("weights"), nb::arg("master"),
           nb::arg("first"), nb::arg("second"), Unlocked(), "Copies states from fp32 arrays.")
      .def("save", &save, nb::arg("weights"), nb::arg("file"), nb::arg("notes"), Unlocked(),
           "Writes all states to a safetensors file.")
      .def("load", &load, nb::arg("weights"), nb::arg("file"), Unlocked(),
           "Reads them, sets 16-bit weights from their masters; returns the notes.")
      .def_prop_ro("host_bytes", [](States& s) { return s.get().homes().host_bytes(); })
      .def_prop_ro("nvme_bytes", [](States& s) { return s.get().homes().nvme_bytes(); })
      .def_prop_ro("io_backend",
                   [](States& s) { return std::string(s.get().homes().io_backend()); })
      .def_prop_ro("isa",
                   [](States& s) { return std::string(to_string(s.get().updater().isa())); });
  module.def(
      "read_optimizer_notes", [](const std::string& file) { return offload::read_notes(file); },
      nb::arg("file"), Unlocked());
}

}  // namespace ballast::python
