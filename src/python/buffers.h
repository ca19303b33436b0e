#pragma once

#include <memory>

#include <nanobind/nanobind.h>

#include "ballast/core/view.h"

namespace ballast::python {

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

}  // namespace ballast::python
