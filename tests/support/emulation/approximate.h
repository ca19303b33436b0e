#pragma once

#include "tests/support/emulation/settings.h"

namespace ballast::test::emulation {

// Arithmetic of a GPU that has a documented error instead of documented bits. Without a seed
// (Seeds::arithmetic) the results are those of the host. With a seed they differ from exact ones by
// up to the documented error, deterministically for each argument. While a kernel runs, this also
// applies to expf, exp2f, logf, log1pf, erff, exp, log, log1p, sin and cos.

/// ex2.approx.ftz.f32: relative error up to 2^-22, results below 2^-126 are 0. Source: NVIDIA, "PTX
/// ISA 8.8", section 9.7.3.21.
float power_of_two(float x);
/// __expf: up to 2 + floor(abs(1.173 x)) ulp. Source: NVIDIA, "CUDA C++ Programming Guide", table
/// of intrinsic functions.
float quick_exponential(float x);
/// __fdividef: up to 2 ulp for a divisor of 2^-126 to 2^126. For greater ones the result is 0, or
/// NaN if the dividend is infinite. Source: as above.
float quick_quotient(float x, float y);

/// Adds the products of 16 pairs of bf16, which are exact in fp32, to `sum`, as tensor cores do: in
/// any order, with at least the precision of fp32 and any rounding. Source: NVIDIA, "PTX ISA 8.8",
/// section 9.7.14.5.14 (mma).
float sum_in_some_order(float sum, const float (&products)[16]);
/// `product(k)`: the k-th product.
template <class Product>
float sum_of_products(float sum, const Product& product) {
  if (seeds().arithmetic == 0) {
    for (int k = 0; k < 16; ++k) sum += product(k);
    return sum;
  }
  float products[16];
  for (int k = 0; k < 16; ++k) products[k] = product(k);
  return sum_in_some_order(sum, products);
}

/// Exists while this OS thread runs a kernel.
class InKernel {
 public:
  InKernel();
  ~InKernel();
  InKernel(const InKernel&) = delete;
  InKernel& operator=(const InKernel&) = delete;
};

}  // namespace ballast::test::emulation
