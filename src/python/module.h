#pragma once

#include <memory>

#include <nanobind/nanobind.h>

#include "ballast/core/memory.h"

namespace ballast::python {

// Functions that each add a part of the package to the extension module.

/// Adds the states and updates of the optimizers.
void bind_optimizer(nanobind::module_& module);
/// Adds files and futures, and ends them at the interpreter's exit.
void bind_aio(nanobind::module_& module);
/// Adds weights of blocks on NVMe, and safetensors files.
void bind_homes(nanobind::module_& module);
/// Adds `python -m ballast`, plan and train.
void bind_program(nanobind::module_& module);

/// Makes ballast::Error the exception of ballast.errors for its category. Python errors keep their
/// types.
void bind_errors(nanobind::module_& module);

/// Records that this process has threads of Ballast from now on.
void note_threads();

/// True in a child of fork() whose parent had called note_threads(). Its threads do not exist here,
/// and locks may be held forever.
bool lost_threads() noexcept;

/// Throws Error(state) if lost_threads(). Call it before using threads or locks.
void refuse_after_fork();

enum class BufferUse { read, write };

/// The memory of a Python object, which does not change during the lifetime of `owner`.
struct PythonBuffer {
  HostBytes bytes;
  std::shared_ptr<void> owner;  ///< may be released on any thread, with or without the GIL
};

/// The memory of a contiguous CPU tensor or array (DLPack), or of an object with the buffer
/// protocol. Use::write needs a writable one. `name`: the argument, for errors. Needs the GIL.
/// Throws nanobind::type_error for other objects, Error(usage) for memory that cannot be used.
PythonBuffer take_buffer(nanobind::object object, BufferUse use, const char* name);

/// Releases the objects whose owners have been released without the GIL. Needs the GIL. This would
/// also happen soon without the call.
void release_buffers();

/// Collects the log lines of the libraries during its lifetime, then passes them to Python's logger
/// "ballast". Construct and destroy with the GIL.
class LogScope {
 public:
  LogScope();
  ~LogScope();
  LogScope(const LogScope&) = delete;
  LogScope& operator=(const LogScope&) = delete;
};

/// Passes on the collected lines. Needs the GIL. Python prints errors of the logger.
void pass_on_log_lines() noexcept;

}  // namespace ballast::python
