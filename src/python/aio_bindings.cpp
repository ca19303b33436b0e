#include <algorithm>
#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>

#include "ballast/core/error.h"
#include "ballast/core/memory.h"

#include "src/python/module.h"
#include "src/python/transfers.h"

namespace ballast::python {
namespace {

namespace nb = nanobind;

using Seconds = std::chrono::duration<double>;

/// Interval in seconds between checks of Python's signals during a wait.
constexpr double kSlice = 0.1;

/// Waits in slices of time, so that Ctrl-C ends it. `wait` returns whether it has ended. Returns
/// false after `timeout` seconds.
bool wait_with_signals(std::optional<double> timeout, const auto& wait) {
  const auto start = std::chrono::steady_clock::now();
  for (;;) {
    double left = kSlice;
    if (timeout) {
      const Seconds past = std::chrono::steady_clock::now() - start;
      left = std::clamp(*timeout - past.count(), 0.0, kSlice);
    }
    bool ended = false;
    {
      const nb::gil_scoped_release release;
      ended = wait(Seconds(left));
    }
    if (ended || (timeout && left == 0.0)) return ended;
    if (PyErr_CheckSignals() != 0) throw nb::python_error();
  }
}

/// A Wakeup as Python sees it. A shared_ptr from Python would take the GIL when it is released.
struct PythonWakeup {
  std::shared_ptr<Wakeup> wakeup = std::make_shared<Wakeup>();
};

/// A transfer as Python sees it.
class Future {
 public:
  explicit Future(std::shared_ptr<PythonTransfer> transfer) : transfer_(std::move(transfer)) {}

  [[nodiscard]] bool done() const {
    refuse_after_fork();
    release_buffers();
    const Transfers* const running = Transfers::existing();
    return running == nullptr ? transfer_->done : Transfers::get().done(*transfer_);
  }

  /// Returns nothing if the transfer has not ended in time.
  [[nodiscard]] std::optional<std::uint64_t> result(std::optional<double> timeout) const {
    Transfers* const running = Transfers::existing();
    if (running != nullptr && !wait_with_signals(timeout, [&](Seconds most) {
          return running->wait(*transfer_, most);
        })) {
      return std::nullopt;
    }
    release_buffers();
    transfer_->completion.check("aio");
    return transfer_->completion.transferred;
  }

  void notify(const PythonWakeup& wakeup) const {
    Transfers::get().notify(*transfer_, wakeup.wakeup);
  }

 private:
  std::shared_ptr<PythonTransfer> transfer_;
};

SharedFile::Mode mode_of(const std::string& mode) {
  if (mode == "r") return SharedFile::Mode::read;
  if (mode == "r+") return SharedFile::Mode::read_write;
  if (mode == "w") return SharedFile::Mode::create;
  throw Error(ErrorCategory::usage, "mode: must be \"r\", \"r+\" or \"w\", not \"" + mode + "\"");
}

std::shared_ptr<SharedFile> open_file(const std::string& path, const std::string& mode,
                                      std::optional<std::uint64_t> size) {
  const nb::gil_scoped_release release;
  const SharedFile::Mode parsed = mode_of(mode);
  if (size && parsed == SharedFile::Mode::read) {
    throw Error(ErrorCategory::usage,
                "size: a file that is opened for reading has its own; leave it out");
  }
  return std::make_shared<SharedFile>(path, parsed, size);
}

Future start(SharedFile& file, aio::Direction direction, nb::object object, std::uint64_t offset) {
  refuse_after_fork();
  release_buffers();
  const bool reads = direction == aio::Direction::read;
  PythonBuffer buffer =
      take_buffer(std::move(object), reads ? BufferUse::write : BufferUse::read, "buffer");
  const nb::gil_scoped_release release;
  return Future(file.start(direction, offset, buffer.bytes, std::move(buffer.owner)));
}

void close_file(SharedFile& file) {
  file.close();
  if (Transfers* const running = Transfers::existing(); running != nullptr) {
    wait_with_signals(std::nullopt,
                      [&](Seconds most) { return running->wait(file.transfers(), most); });
  }
  file.release();
  release_buffers();
}

auto page_aligned(std::uint64_t bytes) {
  auto* const mapping = new Mapping(bytes, "ballast.aio.empty");
  nb::capsule owner(mapping, [](void* memory) noexcept { delete static_cast<Mapping*>(memory); });
  const std::size_t shape[1] = {bytes};
  return nb::ndarray<nb::memview, std::uint8_t, nb::ndim<1>>(mapping->bytes().data(), 1, shape,
                                                             owner);
}

void end_transfers() {
  {
    const nb::gil_scoped_release release;
    Transfers::end();
  }
  release_buffers();
}

}  // namespace

void bind_aio(nb::module_& module) {
  nb::class_<PythonWakeup>(module, "Wakeup")
      .def(nb::init<>())
      .def("fileno", [](const PythonWakeup& wakeup) { return wakeup.wakeup->descriptor(); });
  nb::class_<Future>(module, "Future")
      .def("done", &Future::done)
      .def("result", &Future::result, nb::arg("timeout").none())
      .def("notify", &Future::notify, nb::arg("wakeup"));
  nb::class_<SharedFile>(module, "File")
      .def(
          "read_into",
          [](SharedFile& file, nb::object buffer, std::uint64_t offset) {
            return start(file, aio::Direction::read, std::move(buffer), offset);
          },
          nb::arg("buffer").none(), nb::arg("offset"))
      .def(
          "write_from",
          [](SharedFile& file, nb::object buffer, std::uint64_t offset) {
            return start(file, aio::Direction::write, std::move(buffer), offset);
          },
          nb::arg("buffer").none(), nb::arg("offset"))
      .def("sync", &SharedFile::sync, nb::call_guard<nb::gil_scoped_release>())
      .def("close", &close_file)
      .def_prop_ro("closed", &SharedFile::closed)
      .def_prop_ro("size", &SharedFile::size)
      .def_prop_ro("direct", &SharedFile::direct);
  module.def("open_file", &open_file, nb::arg("path"), nb::arg("mode"), nb::arg("size").none());
  module.def("empty", &page_aligned, nb::arg("nbytes"));
  nb::module_::import_("atexit").attr("register")(nb::cpp_function(&end_transfers));
}

}  // namespace ballast::python
