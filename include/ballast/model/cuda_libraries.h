#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <vector>

namespace ballast::model {

/// A library that the CUDA device loads when first needed.
struct CudaLibrary {
  std::string name;     ///< "cuBLASLt"
  std::string file;     ///< path of the loaded file, or ""
  std::string refusal;  ///< one line with the reason why it was not loaded, or ""
};

/// Loads and returns cuBLASLt and cuDNN. Empty in a build without CUDA.
std::vector<CudaLibrary> cuda_libraries();

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

/// Difference of values from reference values, relative to the root mean square of the reference.
struct Difference {
  double mean = 0.0;  ///< root mean square
  double most = 0.0;  ///< maximum
  bool finite = true;
};

/// Adds up a Difference.
class DifferenceSum {
 public:
  void add(double value, double reference);
  [[nodiscard]] Difference result() const;

 private:
  double squares_ = 0.0;
  double errors_ = 0.0;
  double most_ = 0.0;
  std::size_t count_ = 0;
  bool finite_ = true;
};

/// A product of cuBLASLt compared with the plain kernel (KernelSet::plain).
struct ProductCheck {
  std::string product;  ///< "[64, 4096, 1024] of bf16, ..."
  Difference difference;
  bool wide = false;      ///< the result is fp32
  bool compared = false;  ///< false: there was no device memory for it
};

/// Calls `work` and checks the first product of each shape that the CUDA device computes for this
/// thread meanwhile: its first and its last 64 rows, which are computed once more. Takes device
/// memory for them in addition to ballast.device_bytes. Empty on the host device.
std::vector<ProductCheck> check_products(const std::function<void()>& work);

}  // namespace ballast::model
