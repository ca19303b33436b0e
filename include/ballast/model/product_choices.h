#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <string>

namespace ballast::model {

/// A cuBLASLt algorithm for one product: the content of a cublasLtMatmulAlgo_t, which may be stored
/// and reused with the same version of the library (cublasLt.h).
using ProductAlgorithm = std::array<std::uint64_t, 8>;

/// Remembers the fastest algorithm of each matrix product, so that all ranks and later runs use the
/// same algorithms and hence compute the same bits.
class ProductChoices {
 public:
  virtual ~ProductChoices() = default;
  ProductChoices() = default;
  ProductChoices(const ProductChoices&) = delete;
  ProductChoices& operator=(const ProductChoices&) = delete;

  /// Returns the index in `candidates` of the algorithm that was chosen earlier for `product`. If
  /// there is none, calls `time`, returns its result and stores that choice; if `time` throws,
  /// stores nothing. `library`: name of the GPU and version of the library.
  virtual std::size_t choose(const std::string& library, const std::string& product,
                             std::span<const ProductAlgorithm> candidates,
                             const std::function<std::size_t()>& time) = 0;
  /// Names the set of choices that the last choose() used, such as "5d2e0f41". Choices of equal
  /// names are equal. "" if it stored nothing, or if choices have no name.
  [[nodiscard]] virtual std::string name() const { return ""; }
};

}  // namespace ballast::model
