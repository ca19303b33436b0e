#include <chrono>
#include <cstddef>
#include <cstdint>
#include <future>
#include <map>
#include <memory>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include <nanobind/nanobind.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>
#include <unistd.h>

#include "ballast/core/error.h"
#include "ballast/core/memory.h"

#include "src/offload/weights.h"
#include "src/python/module.h"

namespace nb = nanobind;

namespace ballast::python {
namespace {

using offload::WeightHomes;
using offload::WeightsFile;
using Unlocked = nb::call_guard<nb::gil_scoped_release>;

HostBytes memory_at(std::uintptr_t address, Bytes bytes) {
  return {reinterpret_cast<std::byte*>(address), bytes};  // NOLINT(performance-no-int-to-ptr)
}

/// A transfer that has been started. Keeps the object that owns its memory.
class HomeTransfer {
 public:
  HomeTransfer(std::future<void> ended, nb::object owner)
      : ended_(std::move(ended)), owner_(std::move(owner)) {}
  ~HomeTransfer() {
    if (!ended_.valid()) return;
    if (getpid() == process_) {
      const nb::gil_scoped_release unlocked;
      ended_ = {};
    } else {
      // The thread that would end the transfer does not exist in a forked child.
      static_cast<void>(new std::future<void>(std::move(ended_)));
    }
  }
  HomeTransfer(const HomeTransfer&) = delete;
  HomeTransfer& operator=(const HomeTransfer&) = delete;

  [[nodiscard]] bool done() const {
    return !ended_.valid() || ended_.wait_for(std::chrono::seconds(0)) == std::future_status::ready;
  }
  void finish() {
    if (!ended_.valid()) return;
    refuse_after_fork();
    const nb::gil_scoped_release unlocked;
    ended_.get();
  }

 private:
  pid_t process_ = getpid();
  std::future<void> ended_;
  nb::object owner_;
};

/// Refuses to work in a process made by fork(), which does not have the threads.
class NvmeWeights {
 public:
  NvmeWeights(const std::vector<std::string>& paths, const std::vector<Bytes>& extents,
              bool any_file_system) {
    state::SwapOptions options;
    for (const std::string& path : paths)
      options.paths.push_back({.directory = path, .key = "nvme"});
    options.any_file_system = any_file_system;
    options.any_file_system_key = "any_file_system";
    note_threads();
    homes_ = std::make_unique<WeightHomes>(std::move(options), extents);
  }
  ~NvmeWeights() {
    if (getpid() != process_) static_cast<void>(homes_.release());
  }
  NvmeWeights(const NvmeWeights&) = delete;
  NvmeWeights& operator=(const NvmeWeights&) = delete;

  WeightHomes& get() {
    refuse_after_fork();
    return *homes_;
  }
  HomeTransfer* write(std::size_t extent, std::uintptr_t address, nb::object owner) {
    const HostBytes memory = memory_at(address, get().extent_bytes(extent));
    return started([&] { return get().write(extent, memory); }, std::move(owner));
  }
  HomeTransfer* read(std::size_t extent, std::uintptr_t address, bool ahead, nb::object owner) {
    const HostBytes memory = memory_at(address, get().extent_bytes(extent));
    return started([&] { return get().read(extent, memory, ahead); }, std::move(owner));
  }

 private:
  static HomeTransfer* started(const auto& start, nb::object owner) {
    std::future<void> ended;
    {
      const nb::gil_scoped_release unlocked;
      ended = start();
    }
    return new HomeTransfer(std::move(ended), std::move(owner));
  }

  pid_t process_ = getpid();
  std::unique_ptr<WeightHomes> homes_;
};

/// Name, file, type in the file, shape, offset in the file, and bytes.
using Stored =
    std::tuple<std::string, std::string, std::string, std::vector<std::uint64_t>, Bytes, Bytes>;

std::vector<Stored> stored_tensors(const std::string& path) {
  std::vector<Stored> all;
  for (const auto& [file, tensor] : offload::stored_weights(path)) {
    all.emplace_back(tensor.name, file.string(), tensor.dtype, tensor.shape, tensor.offset,
                     tensor.bytes);
  }
  return all;
}

/// Name, type in the file, shape, and bytes.
using ToStore = std::tuple<std::string, std::string, std::vector<std::uint64_t>, Bytes>;

void make_file(WeightsFile* place, const std::string& path, const std::vector<ToStore>& tensors,
               const std::map<std::string, std::string>& metadata) {
  std::vector<formats::StoredTensor> all;
  for (const auto& [name, type, shape, bytes] : tensors) {
    all.push_back({.name = name, .dtype = type, .shape = shape, .bytes = bytes});
  }
  new (place) WeightsFile(path, all, metadata);
}

}  // namespace

void bind_homes(nb::module_& module) {
  nb::class_<HomeTransfer>(module, "HomeTransfer", "A transfer of a block's weights.")
      .def("done", &HomeTransfer::done, "Whether finish() returns at once.")
      .def("finish", &HomeTransfer::finish, "Blocks until it has ended; raises its error once.");
  nb::class_<NvmeWeights>(module, "WeightHomes", "The weights of blocks on NVMe.")
      .def(nb::init<const std::vector<std::string>&, const std::vector<Bytes>&, bool>(),
           nb::arg("paths"), nb::arg("extents"), nb::arg("any_file_system"), Unlocked())
      .def("write", &NvmeWeights::write, nb::arg("extent"), nb::arg("address"), nb::arg("owner"),
           "Starts to write a block from page-aligned memory.")
      .def("read", &NvmeWeights::read, nb::arg("extent"), nb::arg("address"), nb::arg("ahead"),
           nb::arg("owner"), "Starts to read a block into page-aligned memory.")
      .def_prop_ro("nvme_bytes", [](NvmeWeights& homes) { return homes.get().nvme_bytes(); })
      .def_prop_ro("io_backend",
                   [](NvmeWeights& homes) { return std::string(homes.get().io_backend()); });
  nb::class_<WeightsFile>(module, "WeightsWriter", "Writes a safetensors file.")
      .def("__init__", &make_file, nb::arg("path"), nb::arg("tensors"), nb::arg("metadata"))
      .def(
          "write",
          [](WeightsFile& file, const std::string& name, std::uintptr_t address, Bytes bytes) {
            file.write(name, memory_at(address, bytes));
          },
          nb::arg("name"), nb::arg("address"), nb::arg("nbytes"), Unlocked(),
          "Writes a whole tensor.")
      .def("finish", &WeightsFile::finish, Unlocked(),
           "Makes the file durable and gives it its name.");
  module.def("stored_tensors", &stored_tensors, nb::arg("path"), Unlocked(),
             "The tensors of a model's safetensors files: name, file, type, shape, offset, bytes.");
  module.def(
      "checksum",
      [](std::uintptr_t address, Bytes bytes) {
        return offload::checksum_of(memory_at(address, bytes));
      },
      nb::arg("address"), nb::arg("nbytes"), Unlocked(), "XXH3 of memory, 64 bits.");
}

}  // namespace ballast::python
