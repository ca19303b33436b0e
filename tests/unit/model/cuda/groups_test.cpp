// Copies and sums of groups of columns on a GPU.
#include <cstddef>
#include <vector>

#include <gtest/gtest.h>

#include "src/model/cuda/rows/rows.h"
#include "tests/support/device_array.h"
#include "tests/support/in_every_order.h"
#include "tests/unit/model/cuda/values.h"

namespace ballast::model::cuda::groups_test {
namespace {

using test::DeviceArray;
using test::exact;
using test::expect_close;
using test::in_every_order;
using test::must;
using test::normals_of;

class CudaGroups : public test::Kernels {};

template <class T>
void check_groups(std::size_t rows, std::size_t count, std::size_t width, std::size_t zeros) {
  SCOPED_TRACE(testing::Message() << rows << " x " << count << " x " << width);
  const StepsOfGroups from_steps = {.row = count * (width + 3) + 1, .group = width + 3};
  const StepsOfGroups to_steps = {.row = count * (width + zeros + 2), .group = width + zeros + 2};
  const std::vector<T> x = normals_of<T>(rows * from_steps.row, 1);
  const std::vector<T> before = normals_of<T>(rows * to_steps.row, 2);
  const DeviceArray<T> from(x);
  const std::vector<T> copied = in_every_order([&] {
    const DeviceArray<T> to(before);
    must(copy_groups<T>(nullptr, {rows, count, width, zeros}, from.data(), from_steps, to.data(),
                        to_steps));
    return to.get();
  });
  const std::vector<T> added = in_every_order([&] {
    const DeviceArray<T> to(before);
    must(sum_groups<T>(nullptr, {rows, count, width, 0}, from.data(), from_steps, to.data(),
                       to_steps.row));
    return to.get();
  });
  std::vector<T> expected = before;
  std::vector<double> sums = exact(before);
  for (std::size_t row = 0; row < rows; ++row) {
    for (std::size_t column = 0; column < width; ++column) sums[row * to_steps.row + column] = 0.0;
    for (std::size_t group = 0; group < count; ++group) {
      for (std::size_t column = 0; column < width + zeros; ++column) {
        const std::size_t at = row * from_steps.row + group * from_steps.group + column;
        const std::size_t to = row * to_steps.row + group * to_steps.group + column;
        expected[to] = column < width ? x[at] : T{};
        if (column < width) sums[row * to_steps.row + column] += exact(std::vector<T>{x[at]})[0];
      }
    }
  }
  EXPECT_EQ(copied, expected);
  expect_close(added, sums, 1e-6);
}

TEST_F(CudaGroups, AreCopiedAndSummedInPlaceOfOthers) {
  check_groups<float>(3, 5, 7, 2);
  check_groups<Bf16>(4, 1, 600, 0);
  check_groups<F16>(2, 40, 24, 8);
}

}  // namespace
}  // namespace ballast::model::cuda::groups_test
