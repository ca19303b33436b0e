// Slots of the rows of the embedding on a GPU.
#include <cstdint>
#include <vector>

#include <gtest/gtest.h>

#include "src/model/cuda/tokens/tokens.h"
#include "tests/support/device_array.h"
#include "tests/support/in_every_order.h"
#include "tests/unit/model/cuda/values.h"

namespace ballast::model::cuda::slots_test {
namespace {

using test::DeviceArray;

class CudaSlots : public test::Kernels {};

TEST_F(CudaSlots, AreFoundForTheRowsOfATile) {
  constexpr std::size_t kFirst = 16;
  constexpr std::size_t kRows = 16;
  const auto slot_of = [](std::int32_t token) { return (7 * token + 3) % 16; };
  std::vector<std::int32_t> tokens;
  std::vector<std::int32_t> slots;
  std::vector<std::uint32_t> expected(kRows, kNoSlot);
  for (std::int32_t i = 0; i < 600; ++i) {
    const std::int32_t token = i * i % 41 - 1;
    tokens.push_back(token);
    slots.push_back(slot_of(token));
    const auto row = static_cast<std::size_t>(token) - kFirst;
    if (row < kRows) expected[row] = static_cast<std::uint32_t>(slot_of(token));
  }
  const DeviceArray<std::int32_t> of_tokens(tokens);
  const DeviceArray<std::int32_t> of_slots(slots);
  const Ids ids = {.tokens = of_tokens.data(), .slots = of_slots.data()};
  const auto found = test::in_every_order([&] {
    const DeviceArray<std::uint32_t> rows(kRows, kNoSlot);
    test::must(find_slots(nullptr, ids, tokens.size(), {kFirst, kRows, rows.data()}));
    return rows.get();
  });
  EXPECT_EQ(found, expected);
  test::must(find_slots(nullptr, ids, 0, {}));
}

}  // namespace
}  // namespace ballast::model::cuda::slots_test
