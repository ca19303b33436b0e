#include <cmath>
#include <optional>
#include <string>
#include <string_view>
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
#include "src/offload/states.h"
#include "src/python/module.h"

namespace nb = nanobind;

namespace ballast::python {
namespace {

using cpu_adam::Gradient;
using cpu_adam::Moments;
using offload::NewMaster;
using offload::Notes;
using offload::OffloadedOptimizer;
using offload::OffloadLayout;
using offload::Parameter;
using offload::ParameterUpdate;
using offload::StatePlace;
using offload::StateValues;
using Unlocked = nb::call_guard<nb::gil_scoped_release>;
/// Address of an array that the Python code keeps alive (torch's data_ptr()), its number of
/// elements and its type.
using Array = std::tuple<std::uintptr_t, Elems, std::string>;
/// Number of elements, type of the weights, and number of the first element for rounding.
using Described = std::tuple<Elems, std::string, Elems>;

template <class T = void>
T* pointer(const Array& array) {
  return reinterpret_cast<T*>(std::get<0>(array));  // NOLINT(performance-no-int-to-ptr)
}

DType parse_type(const std::string& name) {
  for (const DType type : {DType::f32, DType::bf16, DType::f16}) {
    if (to_string(type) == name) return type;
  }
  throw Error(ErrorCategory::usage, fmt::format("dtype: {} is not f32, bf16 or f16", name));
}

Gradient gradient_of(const Array& array) {
  return {parse_type(std::get<2>(array)), pointer(array)};
}

/// Throws unless the array has the parameter's number of elements.
void check_size(const Array& array, const Parameter& parameter, std::string_view name) {
  const auto& [address, elements, type] = array;
  if (elements != parameter.elements || (address == 0 && elements > 0)) {
    throw Error(ErrorCategory::usage, fmt::format("{}: has {} elements, its states have {}", name,
                                                  elements, parameter.elements));
  }
}

Moments::Format parse_moments(const std::string& name) {
  if (name == "fp32") return Moments::Format::f32;
  if (name == "bf16_first") return Moments::Format::bf16_first;
  if (name == "8bit") return Moments::Format::blockwise8;
  throw Error(ErrorCategory::usage,
              fmt::format("optimizer_states: \"{}\" is not fp32, bf16_first or 8bit", name));
}

std::span<float> floats(const std::optional<Array>& array, const Parameter& parameter) {
  if (!array) return {};
  check_size(*array, parameter, "states");
  if (std::get<2>(*array) != "f32") throw Error(ErrorCategory::usage, "states: must be float32");
  return {pointer<float>(*array), parameter.elements};
}

std::vector<Parameter> parameters_of(const std::vector<Described>& described) {
  std::vector<Parameter> all;
  for (const auto& [elements, type, first] : described) {
    all.push_back({elements, parse_type(type), first});
  }
  return all;
}

/// Owns the states, and the arrays of a running step. Refuses to work in a process made by fork(),
/// which does not have the threads.
class States {
 public:
  States(const std::string& optimizer, const std::string& moments,
         const std::vector<Described>& parameters, Elems sub_group,
         const std::vector<std::string>& paths, std::optional<Bytes> host_bytes,
         bool any_file_system, int threads)
      : states_(std::make_unique<OffloadedOptimizer>(
            OffloadLayout(cpu_adam::parse_optimizer(optimizer), parse_moments(moments),
                          parameters_of(parameters), sub_group),
            place(paths, host_bytes, any_file_system), threads)) {}
  ~States() {
    if (getpid() == owner_) {
      // A running step uses the arrays until it has ended, and may log a line meanwhile.
      const nb::gil_scoped_release unlocked;
      states_.reset();
    } else {
      // Threads and requests belong to the process that has made them.
      static_cast<void>(states_.release());
    }
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
  [[nodiscard]] const Parameter& parameter(std::size_t number) {
    const auto& all = get().layout().parameters();
    if (number < all.size()) return all[number];
    throw Error(ErrorCategory::usage,
                fmt::format("parameter: there is none with number {}", number));
  }
  void* weights(std::size_t number, const Array& array) {
    const Parameter& own = parameter(number);
    check_size(array, own, "weights");
    if (parse_type(std::get<2>(array)) == own.type) return pointer(array);
    throw Error(ErrorCategory::usage, fmt::format("weights: are {}, their states are those of {}",
                                                  std::get<2>(array), to_string(own.type)));
  }

  nb::object in_use;  ///< the arrays of the last step

 private:
  static StatePlace place(const std::vector<std::string>& paths, std::optional<Bytes> host_bytes,
                          bool any_file_system) {
    if (paths.empty()) return {};
    state::SwapOptions options;
    for (const std::string& path : paths)
      options.paths.push_back({.directory = path, .key = "path"});
    options.any_file_system = any_file_system;
    options.any_file_system_key = "any_file_system";
    return {options, host_bytes};
  }

  pid_t owner_ = getpid();
  std::unique_ptr<OffloadedOptimizer> states_;
};

/// Arrays: their addresses, numbers of elements and types. Separate lists of numbers cost Python
/// less than a tuple for each array.
using Arrays =
    std::tuple<std::vector<std::uintptr_t>, std::vector<Elems>, std::vector<std::string>>;

void check_lengths(const Arrays& arrays, std::size_t count) {
  const auto& [addresses, elements, types] = arrays;
  if (addresses.size() == count && elements.size() == count && types.size() == count) return;
  throw Error(ErrorCategory::usage, "optimizer step: lists of different lengths");
}

Array array_at(const Arrays& arrays, std::size_t i) {
  const auto& [addresses, elements, types] = arrays;
  return {addresses[i], elements[i], types[i]};
}

/// Checks all arrays before the first byte is written. `in_use` owns the arrays.
void begin(States& states, const std::vector<std::size_t>& parameters, const Arrays& weights,
           const Arrays& gradients, const std::vector<std::int64_t>& steps,
           const std::vector<std::size_t>& groups, const std::vector<cpu_adam::Hyper>& hypers,
           nb::object in_use) {
  for (const Arrays* arrays : {&weights, &gradients}) check_lengths(*arrays, parameters.size());
  if (steps.size() != parameters.size() || groups.size() != parameters.size()) {
    throw Error(ErrorCategory::usage, "optimizer step: lists of different lengths");
  }
  std::vector<ParameterUpdate> updates;
  updates.reserve(parameters.size());
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    const Array gradient = array_at(gradients, i);
    check_size(gradient, states.parameter(parameters[i]), "gradient");
    updates.push_back({parameters[i], states.weights(parameters[i], array_at(weights, i)),
                       gradient_of(gradient), hypers.at(groups[i])});
    updates.back().hyper.step = steps[i];
  }
  {
    const nb::gil_scoped_release unlocked;
    states.get().finish();
  }
  states.in_use = std::move(in_use);
  const nb::gil_scoped_release unlocked;
  states.get().begin(std::move(updates));
}

/// Blocks until no step is running, then releases its arrays.
void finish(States& states) {
  {
    const nb::gil_scoped_release unlocked;
    states.get().finish();
  }
  states.in_use.reset();
}

/// Sum of squares and number of infinities and NaNs.
std::pair<double, std::uint64_t> gradient_stats(States& states, const Arrays& gradients) {
  const std::vector<Elems>& sizes = std::get<1>(gradients);
  check_lengths(gradients, sizes.size());
  OffloadedOptimizer& own = states.get();
  own.finish();
  std::vector<GradientStats> all(sizes.size());
  own.updater().for_each(sizes, [&](std::size_t i) {
    all[i] = own.updater().gradient_stats(gradient_of(array_at(gradients, i)), sizes[i]);
  });
  GradientStats sum;
  for (const GradientStats& one : all) {
    sum.sum_of_squares += one.sum_of_squares;
    sum.non_finite += one.non_finite;
  }
  return {sum.sum_of_squares, sum.non_finite};
}

StateValues values_at(States& states, std::size_t parameter, const std::optional<Array>& master,
                      const std::optional<Array>& first, const std::optional<Array>& second) {
  const Parameter& own = states.parameter(parameter);
  return {floats(master, own), floats(first, own), floats(second, own)};
}

void read(States& states, std::size_t parameter, const Array& weights,
          const std::optional<Array>& master, const std::optional<Array>& first,
          const std::optional<Array>& second) {
  offload::read_values(states.get(), parameter, states.weights(parameter, weights),
                       values_at(states, parameter, master, first, second));
}

void write(States& states, std::size_t parameter, const Array& weights,
           const std::optional<Array>& master, const std::optional<Array>& first,
           const std::optional<Array>& second, bool sets_weights) {
  offload::write_values(states.get(), parameter, states.weights(parameter, weights),
                        values_at(states, parameter, master, first, second),
                        sets_weights ? NewMaster::sets_weights : NewMaster::awaits_weights);
}

/// A parameter of a file: its name there, states, number, weights.
using FileEntry = std::tuple<std::string, States*, std::size_t, Array>;

std::vector<offload::FiledParameter> filed(const std::vector<FileEntry>& entries) {
  std::vector<offload::FiledParameter> all;
  for (const auto& [name, states, number, weights] : entries) {
    all.push_back({name, &states->get(), number, states->weights(number, weights)});
  }
  return all;
}

nb::object default_of(const cpu_adam::Hyper& hyper, std::string_view parameter) {
  if (parameter == "betas") return nb::make_tuple(hyper.beta1, hyper.beta2);
  if (parameter == "nesterov") return nb::bool_(hyper.nesterov);
  return nb::float_(parameter == "lr"             ? hyper.learning_rate
                    : parameter == "eps"          ? hyper.epsilon
                    : parameter == "momentum"     ? hyper.momentum
                    : parameter == "weight_decay" ? hyper.weight_decay
                                                  : NAN);
}

nb::dict optimizer_rows() {
  const auto text = [](std::string_view view) { return nb::str(view.data(), view.size()); };
  nb::dict rows;
  for (const cpu_adam::OptimizerRow& of : cpu_adam::kOptimizers) {
    nb::dict parameters;
    for (const auto& [name, meaning] : of.parameters) {
      if (name.empty()) continue;
      parameters[text(name)] = nb::make_tuple(default_of(of.defaults, name), text(meaning));
    }
    nb::dict row;
    row["title"] = text(of.title);
    row["summary"] = text(of.summary);
    row["moments"] = nb::make_tuple(text(of.first_moment), text(of.second_moment));
    row["parameters"] = parameters;
    row["decoupled"] = of.meaning_of("weight_decay") == cpu_adam::kDecoupledDecay.meaning;
    row["in_torch"] = of.in_torch;
    row["counts_steps"] = of.counts_steps;
    row["has_states_at_once"] = of.has_states_at_once;
    rows[text(of.name)] = row;
  }
  return rows;
}

void bind_hyper(nb::module_& module) {
  module.def("optimizer_rows", &optimizer_rows, "Properties of all update rules, by name.");
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
                     "Optimizer states of parameters, updated on a separate thread.")
      .def(nb::init<const std::string&, const std::string&, const std::vector<Described>&, Elems,
                    const std::vector<std::string>&, std::optional<Bytes>, bool, int>(),
           nb::arg("optimizer"), nb::arg("moments"), nb::arg("parameters"), nb::kw_only(),
           nb::arg("sub_group"), nb::arg("paths"), nb::arg("host_bytes").none(),
           nb::arg("any_file_system"), nb::arg("threads"), Unlocked())
      .def(
          "add",
          [](States& s, const std::vector<Described>& parameters) {
            return s.get().add(parameters_of(parameters));
          },
          nb::arg("parameters"), Unlocked(),
          "Appends parameters; returns the number of the first one. Nothing changes if it fails.")
      .def("begin", &begin, nb::arg("parameters"), nb::arg("weights"), nb::arg("gradients"),
           nb::arg("steps"), nb::arg("groups"), nb::arg("hypers"), nb::arg("in_use"),
           "Starts a step. Parameters are updated in ascending order. Keeps in_use until then.")
      .def(
          "wait", [](States& s, std::size_t parameter) { s.get().wait(parameter); },
          nb::arg("parameter"), Unlocked(), "Blocks until the parameter is updated.")
      .def("finish", &finish, "Blocks until no step is running.")
      .def(
          "forget_master",
          [](States& s, std::size_t parameter) { s.get().forget_master(parameter); },
          nb::arg("parameter"), Unlocked(),
          "Uses the weights as the master at the parameter's next update.")
      .def("gradient_stats", &gradient_stats, nb::arg("gradients"), Unlocked(),
           "Sum of squares and number of non-finite values.")
      .def("read", &read, nb::arg("parameter"), nb::arg("weights"), nb::arg("master").none(),
           nb::arg("first").none(), nb::arg("second").none(), Unlocked(),
           "Copies states to fp32 arrays; None skips a state.")
      .def("write", &write, nb::arg("parameter"), nb::arg("weights"), nb::arg("master").none(),
           nb::arg("first").none(), nb::arg("second").none(), nb::arg("sets_weights"), Unlocked(),
           "Copies states from fp32 arrays; None keeps a state. The master may set the weights.")
      .def(
          "copy",
          [](States& s, std::size_t parameter, States& to, std::size_t target) {
            offload::copy_states(s.get(), parameter, to.get(), target);
          },
          nb::arg("parameter"), nb::arg("to"), nb::arg("target"), Unlocked(),
          "Copies states of a parameter to other states, the master if both have the same type.")
      .def_prop_ro("host_bytes", [](States& s) { return s.get().homes().host_bytes(); })
      .def_prop_ro("nvme_bytes", [](States& s) { return s.get().homes().nvme_bytes(); })
      .def_prop_ro("io_backend",
                   [](States& s) { return std::string(s.get().homes().io_backend()); })
      .def_prop_ro("isa",
                   [](States& s) { return std::string(to_string(s.get().updater().isa())); });
  module.attr("ROUNDING_BLOCK") = cpu_adam::Codes::kBlock;
  module.def(
      "save_optimizer",
      [](const std::vector<FileEntry>& entries, const std::string& file, const Notes& notes) {
        offload::save_states(filed(entries), file, notes);
      },
      nb::arg("parameters"), nb::arg("file"), nb::arg("notes"), Unlocked());
  module.def(
      "load_optimizer",
      [](const std::vector<FileEntry>& entries, const std::string& file) {
        offload::load_states(filed(entries), file);
      },
      nb::arg("parameters"), nb::arg("file"), Unlocked());
  module.def(
      "read_optimizer_notes", [](const std::string& file) { return offload::read_notes(file); },
      nb::arg("file"), Unlocked());
}

}  // namespace ballast::python
