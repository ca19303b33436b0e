#pragma once

#include <atomic>
#include <cstdint>
#include <string>
#include <vector>

#include "ballast/config/config.h"
#include "ballast/model/product_check.h"

namespace ballast::calibrate {

/// Comparison of the result of one kernel, or of one pass of a block, with a reference.
struct KernelComparison {
  std::string name;  ///< "backward of layer 0", "product [64, 4096, 1024] of bf16, ..."
  std::string port;  ///< the result that differs most: "gradient"; "" for a product
  model::Difference difference;
  bool compared = false;  ///< false: there was no memory for it
  bool agrees = false;    ///< the difference is that of rounding and of another order of sums
};

/// Runs every kind of pass of a training step of `config`'s model, with all widths of the model but
/// few layers, on the CUDA device and on the host device, for one sequence of at most 64 tokens.
/// Each pass starts with equal inputs on both, so that the first kernel that is wrong is named.
/// Takes memory for the weights and gradients of these layers, twice. Throws Error.
std::vector<KernelComparison> compare_with_host(const config::Config& config,
                                                const std::atomic<bool>* interrupted = nullptr);

/// Runs these passes for one sequence of `length` tokens on the CUDA device, with the kernels of
/// the config and with the plain kernels.
std::vector<KernelComparison> compare_with_plain(const config::Config& config, std::uint64_t length,
                                                 const std::atomic<bool>* interrupted = nullptr);

/// Checks the matrix products of these passes: model::check_products(). Empty with plain kernels.
std::vector<KernelComparison> compare_products(const config::Config& config, std::uint64_t length,
                                               const std::atomic<bool>* interrupted = nullptr);

}  // namespace ballast::calibrate
