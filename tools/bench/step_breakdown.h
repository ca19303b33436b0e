#pragma once

#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

#include "ballast/core/kernel_times.h"

namespace ballast::tools {

/// One row of a breakdown: all calls of one kernel.
struct KernelRow {
  std::string name;  ///< group, or M x N x K of a product
  std::string_view group;
  std::size_t calls = 0;
  double seconds = 0.0;
  double flops = 0.0;  ///< 2 M N K of a product, otherwise 0
  [[nodiscard]] double flops_per_second() const { return seconds > 0.0 ? flops / seconds : 0.0; }
};

/// Divides the time from `start` to `end` among kernels. A moment belongs to the kernel that began
/// last among those running. An update only has the moments in which nothing else computes. The
/// last row, "rest", has the moments without any kernel. Other rows are sorted by time, products
/// first. Seconds of all rows sum to end - start.
std::vector<KernelRow> break_down(const std::vector<KernelSpan>& spans, KernelTime start,
                                  KernelTime end);

}  // namespace ballast::tools
