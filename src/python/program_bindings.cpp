#include <csignal>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "ballast/core/machine.h"
#include "ballast/setup/forecast.h"

#include "src/python/module.h"
#include "src/python/run_observer.h"
#include "tools/bench/bench.h"
#include "tools/commands/requests.h"
#include "tools/io_load/tune.h"
#include "tools/program.h"
#include "tools/signals.h"

namespace ballast::python {
namespace {

namespace nb = nanobind;

/// Converts bytes, because a path need not be UTF-8.
std::vector<std::string> strings(const std::vector<nb::bytes>& words) {
  std::vector<std::string> result;
  result.reserve(words.size());
  for (const nb::bytes& word : words) result.emplace_back(word.c_str(), word.size());
  return result;
}

/// Restores the system's actions for signals: Python ignores SIGPIPE and SIGXFSZ and catches
/// SIGINT. A SIGINT that was ignored by the parent process (nohup) stays ignored.
void use_system_signal_actions() {
  std::signal(SIGPIPE, SIG_DFL);
  std::signal(SIGXFSZ, SIG_DFL);
  struct sigaction present = {};
  sigaction(SIGINT, nullptr, &present);
  if (present.sa_handler != SIG_IGN) std::signal(SIGINT, SIG_DFL);
}

int run_program(const std::vector<nb::bytes>& arguments, const std::vector<nb::bytes>& name) {
  std::vector<std::string> texts = strings(arguments);
  const std::vector<std::string> words_of_name = strings(name);
  std::vector<char*> words;
  words.reserve(texts.size() + 2);
  std::string own = "ballast";
  words.push_back(own.data());
  for (std::string& text : texts) words.push_back(text.data());
  words.push_back(nullptr);
  const nb::gil_scoped_release release;
  use_system_signal_actions();
  return tools::main_program(static_cast<int>(texts.size()) + 1, words.data(), words_of_name);
}

/// Calls `work` without the GIL. Signals interrupt it and are passed to Python afterwards. Log
/// lines go to the logger.
auto run_with_signals(const auto& work) {
  refuse_after_fork();
  note_threads();
  const LogScope log;
  std::exception_ptr failure;
  std::optional<decltype(work())> result;
  {
    const nb::gil_scoped_release release;
    try {
      const tools::SignalScope signals;
      result.emplace(work());
    } catch (...) {
      failure = std::current_exception();
    }
  }
  if (PyErr_CheckSignals() != 0) throw nb::python_error();
  if (failure) std::rethrow_exception(failure);
  return std::move(*result);
}

tools::ConfigRequest config_request(const std::string& file, std::optional<std::string> text,
                                    std::vector<std::string> overrides) {
  return {.file = file,
          .text = std::move(text),
          .overrides = std::move(overrides),
          .caller = tools::Caller::python};
}

/// The JSON and the text of a plan.
nb::tuple plan(const std::string& file, std::optional<std::string> text,
               std::vector<std::string> overrides, const std::string& rates, std::uint32_t world) {
  const tools::ForecastRequest request = {
      .config = config_request(file, std::move(text), std::move(overrides)),
      .rates = rates,
      .world = world};
  struct Texts {
    std::string json;
    std::vector<std::string> lines;
  };
  const Texts texts = run_with_signals([&request] {
    const config::Config config = tools::forecast_config(request);
    tools::log_notes(config);
    const setup::Forecast forecast = tools::forecast_of(request, config);
    return Texts{setup::to_json(forecast), setup::describe(forecast)};
  });
  return nb::make_tuple(texts.json, texts.lines);
}

/// The summary of a run as a dict.
nb::dict train(const std::string& file, std::optional<std::string> text,
               std::vector<std::string> overrides, const std::string& out, std::uint64_t steps,
               const std::string& resume, std::vector<std::string> allow_change, bool overwrite,
               std::vector<std::string> command, nb::object callback, nb::object progress) {
  const tools::TrainRequest request = {
      .config = config_request(file, std::move(text), std::move(overrides)),
      .out = out,
      .steps = steps,
      .trace = {},
      .serial = false,
      .overwrite = overwrite,
      .resume = resume,
      .allowed_changes = std::move(allow_change),
      .command = std::move(command)};
  RunObserver observer(std::move(callback), std::move(progress));
  try {
    run_with_signals([&] {
      config::Config config = tools::load_config(request, 1);
      tools::check_run(request, config);
      tools::train_run(request, std::move(config),
                       [&observer](const config::Config& ready) -> train::Observer& {
                         observer.set_directory(ready.ballast.out.string());
                         return observer;
                       });
      return true;
    });
  } catch (const Error& error) {
    observer.throw_error_of_callback();
    const bool asked = error.category() == ErrorCategory::interrupted && observer.stopped();
    if (!asked || !observer.summarized()) throw;
  }
  observer.throw_error_of_callback();
  return observer.result();
}

std::string bench_io(const std::string& path, const std::vector<std::string>& patterns,
                     const std::vector<std::string>& blocks, const std::vector<unsigned>& depths,
                     const std::string& backend, const std::string& size,
                     std::optional<double> seconds) {
  tools::BenchIoArguments arguments;
  arguments.paths = {path};
  arguments.patterns = patterns;
  arguments.blocks = blocks;
  arguments.depths = depths;
  arguments.backends = {backend};
  arguments.size = size;
  arguments.seconds = seconds;
  arguments.json = true;
  return run_with_signals([&arguments] { return tools::bench_io(arguments).pretty(1); });
}

std::string tune_io(const std::string& path, double seconds, const std::string& size) {
  tools::TuneIoArguments arguments;
  arguments.paths = {path};
  arguments.seconds = seconds;
  arguments.size = size;
  arguments.json = true;
  return run_with_signals([&arguments] {
    return tools::to_json(tools::tune_io(arguments), arguments.tflops).pretty(4);
  });
}

}  // namespace

void bind_program(nb::module_& module) {
  module.def("run_program", &run_program, nb::arg("arguments"), nb::arg("name"),
             "Runs the program with these arguments and returns its exit status. Signals keep the "
             "actions that "
             "it installs, so the process ends after it.");
  module.def("version", [] { return std::string(version()); });
  module.def("plan", &plan, nb::arg("file"), nb::arg("text").none(), nb::arg("overrides"),
             nb::arg("rates"), nb::arg("world"));
  module.def("train", &train, nb::arg("file"), nb::arg("text").none(), nb::arg("overrides"),
             nb::arg("out"), nb::arg("steps"), nb::arg("resume"), nb::arg("allow_change"),
             nb::arg("overwrite"), nb::arg("command"), nb::arg("callback").none(),
             nb::arg("progress").none());
  module.def("bench_io", &bench_io, nb::arg("path"), nb::arg("patterns"), nb::arg("blocks"),
             nb::arg("depths"), nb::arg("backend"), nb::arg("size"), nb::arg("seconds").none());
  module.def("tune_io", &tune_io, nb::arg("path"), nb::arg("seconds"), nb::arg("size"));
}

}  // namespace ballast::python
