#include "src/python/module.h"

#include <atomic>
#include <exception>
#include <mutex>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <fmt/format.h>
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>
#include <sys/types.h>
#include <unistd.h>

#include "ballast/core/error.h"

namespace ballast::python {

namespace {

namespace nb = nanobind;

const char* class_of(ErrorCategory category) {
  switch (category) {
    case ErrorCategory::usage:
      return "UsageError";
    case ErrorCategory::config:
      return "ConfigError";
    case ErrorCategory::io:
      return "FileError";
    case ErrorCategory::memory:
      return "OutOfMemoryError";
    default:
      return "Error";
  }
}

void raise(const Error& error) {
  try {
    const nb::object type = nb::module_::import_("ballast.errors").attr(class_of(error.category()));
    nb::object instance = type(error.what());
    instance.attr("category") = nb::str(to_string(error.category()).data());
    if (error.error_number() != 0) instance.attr("errno") = error.error_number();
    PyErr_SetObject(type.ptr(), instance.ptr());
  } catch (nb::python_error& failure) {
    failure.restore();
  }
}

}  // namespace

void bind_errors(nb::module_& /*module*/) {
  nb::register_exception_translator([](const std::exception_ptr& exception, void* /*payload*/) {
    try {
      std::rethrow_exception(exception);
    } catch (const Error& error) {
      raise(error);
    }
  });
}

namespace {

/// The process that has the threads; 0 if none.
std::atomic<pid_t> owner = 0;

}  // namespace

void note_threads() {
  refuse_after_fork();
  owner.store(getpid());
}

bool lost_threads() noexcept {
  const pid_t process = owner.load();
  return process != 0 && process != getpid();
}

void refuse_after_fork() {
  if (!lost_threads()) return;
  throw Error(
      ErrorCategory::state,
      "this process was forked after its parent had begun to use Ballast, whose threads are "
      "not in the child; start it with multiprocessing's method 'spawn' or 'forkserver', or "
      "fork before the first use");
}

namespace {

namespace nb = nanobind;

using Writable = nb::ndarray<>;
using ReadOnly = nb::ndarray<nb::ro>;

struct HeldObject {
  nb::object object;
  ReadOnly array;
};

/// Objects to be released under the GIL.
struct ReleaseQueue {
  std::mutex mutex;
  std::vector<std::unique_ptr<HeldObject>> objects;
  bool scheduled = false;
};

ReleaseQueue& released() {
  static auto* const all = new ReleaseQueue;  // threads may use it until the process ends
  return *all;
}

int release_scheduled(void* /*unused*/) {
  release_buffers();
  return 0;
}

void release_later(HeldObject* held) {
  // In a forked child the lock may be held forever.
  if (lost_threads()) return;
  const std::scoped_lock lock(released().mutex);
  released().objects.emplace_back(held);
  // Needs no GIL. If too many calls are pending, the next release_buffers() does it.
  if (!released().scheduled)
    released().scheduled = Py_AddPendingCall(release_scheduled, nullptr) == 0;
}

std::string type_of(const nb::object& object) {
  return nb::cast<std::string>(nb::str(nb::type_name(object.type())));
}

[[noreturn]] void refuse(const char* name, const std::string& why) {
  throw Error(ErrorCategory::usage, fmt::format("{}: {}", name, why));
}

[[noreturn]] void refuse_type(const char* name, const nb::object& object) {
  const std::string message = fmt::format(
      "{}: must be a CPU tensor, an array or an object with the buffer protocol, not {}", name,
      type_of(object));
  throw nb::type_error(message.c_str());
}

bool is_contiguous(const ReadOnly& array) {
  if (array.stride_ptr() == nullptr) return true;
  std::int64_t expected = 1;
  for (std::size_t i = array.ndim(); i-- > 0;) {
    if (array.shape(i) == 0) return true;
    if (array.shape(i) != 1 && array.stride(i) != expected) return false;
    expected *= static_cast<std::int64_t>(array.shape(i));
  }
  return true;
}

void check(const ReadOnly& array, const char* name) {
  const int device = array.device_type();
  if (device != nb::device::cpu::value && device != nb::device::cuda_host::value) {
    refuse(name, fmt::format("must be in CPU memory, but is on a device (DLPack type {})", device));
  }
  if (!is_contiguous(array)) refuse(name, "must be contiguous; use contiguous() or a copy");
  if (array.dtype().bits % 8 != 0 || array.dtype().lanes != 1) {
    refuse(name, "must have elements of whole bytes");
  }
}

/// PyTorch exports no tensor that requires a gradient. The result has the same memory.
nb::object without_gradient(nb::object object) {
  const bool tensor = nb::hasattr(object, "requires_grad") && nb::hasattr(object, "detach");
  if (tensor && nb::cast<bool>(nb::bool_(object.attr("requires_grad"))))
    return object.attr("detach")();
  return object;
}

}  // namespace

PythonBuffer take_buffer(nb::object given, BufferUse use, const char* name) {
  nb::object object = without_gradient(std::move(given));
  ReadOnly array;
  if (!nb::try_cast(object, array, false)) {
    PyErr_Clear();
    refuse_type(name, object);
  }
  check(array, name);
  if (use == BufferUse::write) {
    Writable writable;
    if (!nb::try_cast(object, writable, false)) {
      PyErr_Clear();
      refuse(name, "is read-only");
    }
  }
  auto* const data = static_cast<std::byte*>(const_cast<void*>(array.data()));
  const HostBytes bytes(data, array.nbytes());
  auto* const held = new HeldObject{std::move(object), std::move(array)};
  return {bytes, std::shared_ptr<void>(
                     held, [](void* memory) { release_later(static_cast<HeldObject*>(memory)); })};
}

void release_buffers() {
  if (lost_threads()) return;
  std::vector<std::unique_ptr<HeldObject>> objects;
  {
    const std::scoped_lock lock(released().mutex);
    objects.swap(released().objects);
    released().scheduled = false;
  }
}

namespace {

namespace nb = nanobind;

struct Lines {
  std::mutex mutex;
  std::vector<std::pair<LogLevel, std::string>> all;
};

Lines& lines() {
  static auto* const collected = new Lines;  // threads may log until the process ends
  return *collected;
}

const char* method_of(LogLevel level) {
  switch (level) {
    case LogLevel::debug:
      return "debug";
    case LogLevel::info:
      return "info";
    case LogLevel::warning:
      return "warning";
  }
  return "info";
}

}  // namespace

LogScope::LogScope() {
  set_log_sink([](LogLevel level, std::string_view line) {
    const std::scoped_lock lock(lines().mutex);
    lines().all.emplace_back(level, line);
  });
}

LogScope::~LogScope() {
  set_log_sink({});
  pass_on_log_lines();
}

void pass_on_log_lines() noexcept {
  std::vector<std::pair<LogLevel, std::string>> passed;
  {
    const std::scoped_lock lock(lines().mutex);
    passed.swap(lines().all);
  }
  if (passed.empty()) return;
  const nb::error_scope pending;
  try {
    const nb::object logger = nb::module_::import_("logging").attr("getLogger")("ballast");
    for (const auto& [level, line] : passed) {
      logger.attr(method_of(level))("%s", nb::str(line.data(), line.size()));
    }
  } catch (nb::python_error& error) {
    error.discard_as_unraisable("ballast: log lines");
  }
}

}  // namespace ballast::python

NB_MODULE(_ballast, module) {
  module.doc() = "The compiled part of the package ballast. BufferUse ballast and its modules.";
  ballast::python::bind_errors(module);
  ballast::python::bind_optimizer(module);
  ballast::python::bind_aio(module);
  ballast::python::bind_homes(module);
  ballast::python::bind_program(module);
}
