#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <string>

#include "ballast/config/config.h"
#include "ballast/model/compute.h"
#include "ballast/model/product_choices.h"

namespace ballast::calibrate {

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

/// Options from ballast.kernels, ballast.gpu_checks, ballast.attention and
/// ballast.product_algorithms. `one_machine`: whether all ranks can use the same file.
model::KernelOptions kernel_options(const config::Config& config, bool one_machine = true);

}  // namespace ballast::calibrate
