#pragma once

#include <filesystem>
#include <memory>
#include <string>

#include "ballast/config/config.h"
#include "ballast/model/compute.h"
#include "ballast/model/product_choices.h"

namespace ballast::calibrate {

/// Choices in a file of this machine, one file for each GPU model and version of cuBLASLt. The
/// first process that needs a choice times it while it has the lock of the file; all others wait
/// and take the same. A file that cannot be read is one warning and is replaced; if choices cannot
/// be kept, this is one warning too, and they last as long as the caller keeps them. Thread-safe.
std::shared_ptr<model::ProductChoices> kept_product_choices();

/// Their file for `library` (model::ProductChoices): $XDG_CACHE_HOME/ballast/products-HASH.json, or
/// the same below ~/.cache. Empty if neither variable is set.
std::filesystem::path product_choices_file(const std::string& library);

/// ballast.attention and ballast.product_algorithms.
model::KernelOptions kernel_options(const config::Config& config);

}  // namespace ballast::calibrate
