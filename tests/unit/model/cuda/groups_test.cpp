// Copies and sums of groups of columns on a GPU.
#include <algorithm>
#include <cstddef>
#include <vector>

#include <gtest/gtest.h>

#include "src/model/cuda/rows/rows.h"
#include "tests/support/device_array.h"
#include "tests/support/in_every_order.h"
#include "tests/support/tags.h"
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

/// Groups of columns whose starts are `gap` elements further apart than their columns need. All
/// arrays begin `offset` elements after an aligned address.
struct Layout {
  std::size_t rows;
  std::size_t count;
  std::size_t width;
  std::size_t zeros;
  std::size_t gap;
  std::size_t offset = 0;
};

template <class T>
void check_groups(const Layout& layout) {
  const std::size_t rows = layout.rows;
  const std::size_t count = layout.count;
  const std::size_t width = layout.width;
  const std::size_t zeros = layout.zeros;
  const std::size_t gap = layout.gap;
  const std::size_t offset = layout.offset;
  SCOPED_TRACE(testing::Message() << rows << " x " << count << " x " << width << ", gap " << gap
                                  << ", offset " << offset);
  const StepsOfGroups from_steps = {.row = count * (width + gap) + gap, .group = width + gap};
  const StepsOfGroups to_steps = {.row = count * (width + zeros + gap),
                                  .group = width + zeros + gap};
  const std::vector<T> x = normals_of<T>(offset + rows * from_steps.row, 1);
  const std::vector<T> before = normals_of<T>(offset + rows * to_steps.row, 2);
  const DeviceArray<T> from(x);
  const std::vector<T> copied = in_every_order([&] {
    const DeviceArray<T> to(before);
    must(copy_groups<T>(nullptr, {rows, count, width, zeros}, from.data() + offset, from_steps,
                        to.data() + offset, to_steps));
    return to.get();
  });
  const std::vector<T> added = in_every_order([&] {
    const DeviceArray<T> to(before);
    must(sum_groups<T>(nullptr, {rows, count, width, 0}, from.data() + offset, from_steps,
                       to.data() + offset, to_steps.row));
    return to.get();
  });
  std::vector<T> expected = before;
  std::vector<double> sums = exact(before);
  for (std::size_t row = 0; row < rows; ++row) {
    double* const sums_of_row = sums.data() + offset + row * to_steps.row;
    std::fill_n(sums_of_row, width, 0.0);
    for (std::size_t group = 0; group < count; ++group) {
      for (std::size_t column = 0; column < width + zeros; ++column) {
        const std::size_t at = offset + row * from_steps.row + group * from_steps.group + column;
        const std::size_t to = offset + row * to_steps.row + group * to_steps.group + column;
        expected[to] = column < width ? x[at] : T{};
        if (column < width) sums_of_row[column] += exact(std::vector<T>{x[at]})[0];
      }
    }
  }
  EXPECT_EQ(copied, expected);
  expect_close(added, sums, 1e-6);
}

TAG_TESTS("small_shapes", "CudaGroups.*");
TEST_F(CudaGroups, AreCopiedAndSummedInPlaceOfOthers) {
  check_groups<float>({3, 5, 7, 2, 3});
  check_groups<Bf16>({4, 1, 600, 0, 1});
  check_groups<F16>({2, 40, 24, 8, 3});
}

TEST_F(CudaGroups, MoveInPiecesWhereAllAddressesAreAligned) {
  check_groups<float>({9, 3, 12, 4, 4});    // several rows per block, the last block not full
  check_groups<Bf16>({5, 12, 128, 64, 8});  // several blocks per row
  check_groups<Bf16>({130, 1, 8, 0, 0});    // one piece per row
  check_groups<F16>({3, 40, 24, 0, 16});
}

TEST_F(CudaGroups, MoveByElementsWhereOneAddressIsNot) {
  check_groups<Bf16>({3, 4, 24, 8, 8, 1});
  check_groups<Bf16>({3, 4, 24, 4, 8});
  check_groups<float>({3, 4, 6, 4, 2});
  check_groups<F16>({300, 1, 1, 0, 0});
}

}  // namespace
}  // namespace ballast::model::cuda::groups_test
