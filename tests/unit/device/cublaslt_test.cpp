// The loading of cuBLASLt. Needs no GPU; tests that need the library are skipped without it.
#include <cstddef>
#include <string>
#include <vector>

#include <fmt/format.h>
#include <gtest/gtest.h>

#include "ballast/core/error.h"
#include "ballast/device/device.h"

#include "src/device/cuda/libraries.h"
#include "src/device/implementations.h"
#include "src/model/cuda/products/products.h"

namespace ballast::device::cublaslt_test {
namespace {

std::string refusal_of(const std::vector<std::string>& names) {
  const LoadedCublasLt loaded = load_cublaslt(names);
  EXPECT_EQ(loaded.functions.matmul, nullptr);
  return loaded.refusal;
}

std::string remedy() {
  const bool old = CUBLAS_VER_MAJOR < 13;
  return fmt::format(
      "; install cuBLAS of CUDA {0} (pip install nvidia-cublas{1}) or add its folder "
      "to LD_LIBRARY_PATH; the bundle of this program for CUDA {2} needs cuBLAS of "
      "CUDA {2}",
      CUBLAS_VER_MAJOR, old ? "-cu12" : "", old ? 13 : 12);
}

TEST(CublasLtLoader, AMissingLibraryIsNamedInOneLine) {
  const std::string refusal = refusal_of({"libthere-is-no-such.so.13", "libnor-this.so"});
  EXPECT_EQ(refusal,
            "libthere-is-no-such.so.13 cannot be loaded: cannot open shared object file: No such "
            "file or directory" +
                remedy());
}

TEST(CublasLtLoader, ALibraryWithoutTheFunctionsIsRefused) {
  const std::string refusal = refusal_of({"libm.so.6"});
  EXPECT_EQ(
      refusal.find("libm.so.6 cannot be loaded: it lacks the function cublasLtGetVersion; install"),
      0U)
      << refusal;
}

TEST(CublasLtLoader, TheFirstThatIsThereIsTaken) {
  if (!cublaslt_refusal().empty()) GTEST_SKIP() << cublaslt_refusal();
  const CublasLt& lt = cublaslt();
  EXPECT_EQ(lt.version() / 10000, std::size_t{CUBLAS_VER_MAJOR});
  EXPECT_STREQ(lt.status_name(CUBLAS_STATUS_NOT_SUPPORTED), "CUBLAS_STATUS_NOT_SUPPORTED");
  // Descriptors need no GPU.
  cublasLtMatrixLayout_t layout = nullptr;
  ASSERT_EQ(lt.create_layout(&layout, CUDA_R_16BF, 8, 16, 8), CUBLAS_STATUS_SUCCESS);
  EXPECT_EQ(lt.destroy_layout(layout), CUBLAS_STATUS_SUCCESS);
}

TEST(CublasLtLoader, WithoutAGpuTheProductSaysSo) {
  if (!cublaslt_refusal().empty()) GTEST_SKIP() << cublaslt_refusal();
  if (cuda_refusal().empty()) GTEST_SKIP() << "there is a GPU";
  const std::vector<float> any(64);
  std::byte workspace = {};
  model::cuda::Products products;
  products.set_workspace(&workspace);
  const model::Matrix square = model::matrix(any.data(), 8);
  try {
    products.multiply(nullptr, {8, 8, 8}, square, square, square);
    ADD_FAILURE() << "nothing was thrown";
  } catch (const Error& error) {
    EXPECT_EQ(error.category(), ErrorCategory::device);
    EXPECT_STREQ(error.what(),
                 "matrix product [8, 8, 8] of f32: cuBLASLt: CUBLAS_STATUS_NOT_INITIALIZED");
  }
}

TEST(CublasLtLoader, DeviceAndProductsGiveTheSameReason) {
  EXPECT_EQ(missing_gpu_library(), cublaslt_refusal());
  EXPECT_EQ(cublaslt_refusal().find('\n'), std::string_view::npos);
  if (cublaslt_refusal().empty()) {
    EXPECT_NO_THROW(model::cuda::Products());
  } else {
    EXPECT_THROW(model::cuda::Products(), Error);
  }
}

}  // namespace
}  // namespace ballast::device::cublaslt_test
