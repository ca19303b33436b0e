#pragma once

#include <filesystem>
#include <memory>
#include <string>

#include "ballast/config/config.h"
#include "ballast/model/compute.h"
#include "ballast/model/product_choices.h"

namespace ballast::calibrate {

/// Choices in a file of this machine, one per GPU model and cuBLASLt version. The first process
/// that needs a choice times it while it holds the file's lock; the others wait and use the same
/// choice. An unreadable file causes one warning and is replaced. If choices cannot be stored, this
/// also causes one warning, and they last as long as the object. Thread-safe.
std::shared_ptr<model::ProductChoices> kept_product_choices();

/// Returns their file for `library` (model::ProductChoices):
/// $XDG_CACHE_HOME/ballast/products-HASH.json, or the same below ~/.cache. Empty if neither
/// variable is set.
std::filesystem::path product_choices_file(const std::string& library);

/// Options from ballast.kernels, ballast.gpu_checks, ballast.attention and
/// ballast.product_algorithms.
model::KernelOptions kernel_options(const config::Config& config);

}  // namespace ballast::calibrate
