// Autocast for the emulated device, with PyTorch's lists of operators and types.

#include <ATen/autocast_mode.h>
#include <torch/library.h>

namespace {

#define LOWER_PRECISION(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, lower_precision_fp)
#define FLOAT(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32)
#define FLOAT_RESULT(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32_set_opt_dtype)
#define WIDEST(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, promote)

TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1,
                   m){AT_FORALL_LOWER_PRECISION_FP(LOWER_PRECISION) AT_FORALL_FP32(FLOAT)
                          AT_FORALL_FP32_SET_OPT_DTYPE(FLOAT_RESULT) AT_FORALL_PROMOTE(WIDEST)}

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFallthrough());
}

}  // namespace
