#include "src/python/errors.h"

#include <exception>

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

}  // namespace ballast::python
