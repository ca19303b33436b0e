#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <string>
#include <string_view>

#include "ballast/core/error.h"
#include "ballast/core/memory.h"
#include "ballast/engine/run_inputs.h"
#include "ballast/model/compute.h"
#include "ballast/model/cuda_libraries.h"

namespace ballast::calibrate {

// Cached measurements of this machine. An unusable file causes one warning and counts as missing.

/// Returns $XDG_CACHE_HOME/ballast/KIND-HASH.json for the hash of `key`, or the same below
/// ~/.cache. Empty if neither variable is set.
std::filesystem::path machine_file(std::string_view kind, const std::string& key);

/// Returns read(file), or an empty result if the file does not exist or read() throws an Error. The
/// error becomes a warning that begins with `complaint`.
template <class Read>
auto read_kept(const std::filesystem::path& file, std::string_view complaint, const Read& read)
    -> decltype(read(file)) {
  std::error_code ignored;
  if (file.empty() || !std::filesystem::exists(file, ignored)) return {};
  try {
    return read(file);
  } catch (const Error& error) {
    log(LogLevel::warning, std::string(complaint) + ": " + error.what());
    return {};
  }
}

/// Creates the file's folder. Throws Error(io).
void make_machine_folder(const std::filesystem::path& file);

/// Waits for the lock of `file` against other processes and threads. The lock is on a file with the
/// additional ending ".lock", which is not removed. It is held as long as the result exists. Throws
/// Error(io).
Descriptor lock_machine_file(const std::filesystem::path& file);

/// Behaviour if choices cannot be stored in the file of kept_product_choices().
enum class Unkept : std::uint8_t {
  /// One warning. Choices last as long as the plans of products.
  timed,
  /// One line of information. The library's first algorithm is used.
  first,
};
/// Choices in a file of this machine, one per GPU model and cuBLASLt version. The first process
/// that needs a choice times it while it holds the file's lock; the others wait and use the same
/// choice. An unreadable file causes one warning and is replaced. A file has a random name, by
/// which results with other choices are recognised. Thread-safe.
std::shared_ptr<model::ProductChoices> kept_product_choices(Unkept unkept = Unkept::timed);

/// Returns their file for `library` (model::ProductChoices):
/// $XDG_CACHE_HOME/ballast/products-HASH.json, or the same below ~/.cache. Empty if neither
/// variable is set.
std::filesystem::path product_choices_file(const std::string& library);

/// Options with the kept choices of products, if `request` asks for them. `one_machine`: whether
/// all ranks can use the same file.
model::KernelOptions kernel_options(const engine::KernelRequest& request, bool one_machine = true);

}  // namespace ballast::calibrate
