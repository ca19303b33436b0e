#include <gtest/gtest.h>

#include "ballast/core/error.h"

#include "src/model/compute/factories.h"
#include "tests/support/fake_cublaslt.h"
#include "tests/support/fake_cuda.h"

namespace ballast::model::cuda::gemm_peak_test {
namespace {

TEST(CudaGemmPeak, IsMeasuredBesideTheBudget) {
  const auto device = device::make_device({.kind = "cuda", .budget = kMiB});
  for (const DType type : {DType::f32, DType::bf16}) {
    const double rate = measure_cuda_gemm_peak(*device, type, 0.02, KernelSet::best);
    EXPECT_GT(rate, 1e6);
    EXPECT_LT(rate, 1e17);
  }
  EXPECT_EQ(device->allocated(), 0U);
}

TEST(CudaGemmPeak, WithLittleMemoryOnlySmallMatricesAreMeasured) {
  const auto device = device::make_device({.kind = "cuda", .budget = kMiB});
  const int before = test::FakeCublasLt::searches;
  test::FakeCuda::most_at_once = 33 * kMiB;
  EXPECT_GT(measure_cuda_gemm_peak(*device, DType::f32, 0.8, KernelSet::best), 1e6);
  EXPECT_EQ(test::FakeCublasLt::searches, before + 1);
  test::FakeCuda::most_at_once = kMiB;
  try {
    measure_cuda_gemm_peak(*device, DType::f32, 0.01, KernelSet::best);
    ADD_FAILURE() << "nothing was thrown";
  } catch (const Error& error) {
    EXPECT_EQ(error.category(), ErrorCategory::memory) << error.what();
  }
  test::FakeCuda::most_at_once = SIZE_MAX;
}

TEST(CudaGemmPeak, OfPlainKernelsNeedsNoLibrary) {
  const auto device = device::make_device({.kind = "cuda", .budget = kMiB});
  const int before = test::FakeCublasLt::searches;
  test::FakeCuda::most_at_once = 33 * kMiB;
  EXPECT_GT(measure_cuda_gemm_peak(*device, DType::bf16, 0.001, KernelSet::plain), 1e3);
  test::FakeCuda::most_at_once = SIZE_MAX;
  EXPECT_EQ(test::FakeCublasLt::searches, before);
}

TEST(CudaGemmPeak, IsThatOfACudaDevice) {
  const auto host = device::make_device({.kind = "host", .budget = kMiB, .compute_threads = 1});
  EXPECT_THROW(measure_cuda_gemm_peak(*host, DType::f32, 0.01, KernelSet::best), Error);
}

}  // namespace
}  // namespace ballast::model::cuda::gemm_peak_test
