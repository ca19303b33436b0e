#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <string>

namespace ballast::model {

/// An algorithm of cuBLASLt for one product: the content of a cublasLtMatmulAlgo_t, which may be
/// kept and used again with the same version of the library (cublasLt.h).
using ProductAlgorithm = std::array<std::uint64_t, 8>;

/// Where matrix products look up the algorithms that were the fastest when they were timed, so that
/// all ranks and later runs have the same algorithms and hence the same bits.
class ProductChoices {
 public:
  virtual ~ProductChoices() = default;
  ProductChoices() = default;
  ProductChoices(const ProductChoices&) = delete;
  ProductChoices& operator=(const ProductChoices&) = delete;

  /// The index in `candidates` of the algorithm that was chosen for `product` before. Otherwise
  /// calls `time`, returns its result and keeps that choice. `library`: the GPU's name and the
  /// library's version. Exceptions of `time` pass through, and nothing is kept then.
  virtual std::size_t choose(const std::string& library, const std::string& product,
                             std::span<const ProductAlgorithm> candidates,
                             const std::function<std::size_t()>& time) = 0;
};

}  // namespace ballast::model
