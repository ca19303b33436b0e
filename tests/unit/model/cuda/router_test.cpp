// Kernels of routers on a GPU, compared with the operations of the host.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <tuple>
#include <vector>

#include <gtest/gtest.h>

#include "src/model/cuda/experts/experts.h"
#include "src/model/cuda/rows/rows.h"
#include "tests/support/device_array.h"
#include "tests/support/in_every_order.h"
#include "tests/support/tags.h"
#include "tests/unit/model/cuda/decided.h"
#include "tests/unit/model/cuda/host_ops.h"
#include "tests/unit/model/cuda/values.h"

namespace ballast::model::cuda::router_test {
namespace {

using test::Decided;
using test::DeviceArray;
using test::exact;
using test::expect_close;
using test::host_ops;
using test::in_every_order;
using test::logits_of;
using test::must;
using test::normals_of;
using test::random_logits;
using test::same_bits;
using test::Uploaded;

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kInfinity = std::numeric_limits<float>::infinity();

class CudaRouter : public test::Kernels {};
template <class T>
class CudaRouters : public test::Kernels {};
using Types = testing::Types<float, Bf16>;
TYPED_TEST_SUITE(CudaRouters, Types);

/// Like expect_close(), but a NaN is close to a NaN, and an infinity to itself.
template <class A, class B>
void expect_near(const std::vector<A>& found, const std::vector<B>& expected, double relative,
                 double absolute) {
  ASSERT_EQ(found.size(), expected.size());
  for (std::size_t i = 0; i < found.size(); ++i) {
    const double f = exact(found[i]);
    const double e = exact(expected[i]);
    if (f == e || (std::isnan(f) && std::isnan(e))) continue;
    ASSERT_NEAR(f, e, relative * std::abs(e) + absolute) << "element " << i;
  }
}

/// Scratch memory; the values after its end must not change.
class Scratch {
 public:
  explicit Scratch(const RouterShape& shape)
      : floats_(partial_floats({shape.rows, shape.experts}) + kAfter, kNan) {}
  ~Scratch() {
    const std::vector<float> left = floats_.get();
    for (std::size_t i = 1; i <= kAfter; ++i) EXPECT_TRUE(std::isnan(left[left.size() - i]));
  }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
  [[nodiscard]] float* data() const { return floats_.data(); }

 private:
  static constexpr std::size_t kAfter = 16;
  DeviceArray<float> floats_;
};

/// Rows and experts on both sides of warps, of blocks of experts and of rounds of the sum over
/// them; choices of a group of rows on both sides of what a block has in shared memory; one group
/// of rows and several.
constexpr RouterShape kShapes[] = {
    {1, 1, 1, false},
    {5, 3, 1, true},
    {9, 3, 3, true},
    {67, 8, 2, true},
    {33, 40, 40, true},
    {70, 130, 6, false},
    {300, 60, 1, false},
    {40, 70, 70, false},
    {6, 257, 5, true},
    {3, 1027, 9, true},
    {700, 5, 3, false},
    // Sigmoids, without groups and with groups on both sides of a warp.
    {67, 8, 2, true, true},
    {6, 257, 5, false, true, 1, 1, 1.5},
    {9, 12, 5, false, true, 4, 3, 2.5},
    {70, 130, 10, true, true, 13, 1, 0.5},
    {5, 1024, 9, true, true, 128, 8},
    // Softmax with corrections, and with sums of weights on both sides of their lower bound.
    {67, 8, 2, true, false, 1, 1, 1.0, 1e-12},
    {40, 70, 3, true, false, 1, 1, 1.0, 0.2},
};
/// Enough rows that groups have more than the least number of rows.
constexpr RouterShape kManyRows = {8200, 3, 2, false};

/// The device decides like the host, whether or not `starts` are wanted.
void expect_hosts_decisions(const RouterShape& shape, const std::vector<float>& logits,
                            const std::vector<float>& bias = {},
                            const std::vector<std::int32_t>& targets = {}) {
  SCOPED_TRACE(testing::Message() << shape.rows << " rows, " << shape.per_token << " of "
                                  << shape.experts << " experts");
  const DeviceArray<float> bias_there(bias);
  const DeviceArray<std::int32_t> targets_there(targets);
  const Scratch scratch(shape);
  Decided garbage(shape);
  std::fill(garbage.chosen.begin(), garbage.chosen.end(), -1);
  std::fill(garbage.places.begin(), garbage.places.end(), -1);
  const auto decide = [&](bool with_starts) {
    const Uploaded to(garbage);
    const DeviceArray<float> there(logits);
    const DeviceArray<std::int32_t> starts(shape.experts + 2, -7);
    must(route<float>(nullptr, shape, there.data(),
                      test::biases_at(shape, bias.empty() ? nullptr : bias_there.data()),
                      targets.empty() ? nullptr : targets_there.data(), to.routing(),
                      with_starts ? starts.data() : nullptr, scratch.data()));
    return std::tuple{to.probabilities.get(), to.log_sums.get(), to.weights.get(),
                      to.chosen.get(),        to.places.get(),   starts.get()};
  };
  const auto found = in_every_order([&] { return decide(true); });
  Decided expected(shape, logits, bias, targets);
  expected.starts.push_back(-7);
  EXPECT_EQ(std::get<3>(found), expected.chosen);
  EXPECT_EQ(std::get<4>(found), expected.places);
  EXPECT_EQ(std::get<5>(found), expected.starts);
  expect_near(std::get<0>(found), expected.probabilities, 1e-5, 1e-12);
  expect_near(std::get<1>(found), expected.log_sums, 1e-6, 1e-6);
  expect_near(std::get<2>(found), expected.weights, 1e-5, 1e-12);
  EXPECT_EQ(std::get<4>(decide(false)), expected.places);
}

TEST_F(CudaRouter, DecidesAsTheHost) {
  for (const RouterShape& shape : kShapes) expect_hosts_decisions(shape, random_logits(shape));
}

TEST_F(CudaRouter, BiasesAreAddedToLogitsOrScores) {
  for (const RouterShape& shape : kShapes) {
    expect_hosts_decisions(shape, random_logits(shape),
                           normals_of<float>(test::biases_in(shape), 9, 3.0));
  }
}

/// They are copied from host memory, and replace the corrections of the weights.
TEST_F(CudaRouter, MovedCorrectionsAreAddedToScores) {
  for (const RouterShape& shape : kShapes) {
    if (!test::is_corrected(shape)) continue;
    const auto values = normals_of<float>(shape.experts, 9, 3.0);
    std::vector<float> addends(test::biases_in(shape));
    std::copy(values.begin(), values.end(), addends.begin());
    const std::vector<float> logits = random_logits(shape);
    const Decided expected(shape, logits, addends);
    Decided found(shape);
    std::vector<float> own = logits;
    const std::vector<float> others(test::biases_in(shape), 7.0F);
    test::host_ops<float>().routers->route(shape, own.data(),
                                           {.correction = others.data(), .moved = values.data()},
                                           nullptr, found.routing(), found.starts.data());
    EXPECT_EQ(found.chosen, expected.chosen);
    EXPECT_EQ(found.weights, expected.weights);
    const Scratch scratch(shape);
    const DeviceArray<float> others_there(others);
    const auto chosen = in_every_order([&] {
      const Uploaded to(Decided{shape});
      const DeviceArray<float> there(logits);
      const DeviceArray<float> moved(shape.experts + 1, -7.0F);
      must(put_values(nullptr, values, moved.data()));
      must(route<float>(nullptr, shape, there.data(),
                        {.correction = others_there.data(), .moved = moved.data()}, nullptr,
                        to.routing(), nullptr, scratch.data()));
      EXPECT_EQ(moved.get().back(), -7.0F);
      return to.chosen.get();
    });
    EXPECT_EQ(chosen, expected.chosen);
  }
}

/// Every third row is padding. Others have no target, which routers ignore.
std::vector<std::int32_t> some_padding(const RouterShape& shape) {
  std::vector<std::int32_t> targets(shape.rows);
  for (std::size_t row = 0; row < shape.rows; ++row) {
    targets[row] = row % 3 == 1 ? kPaddingTarget : row % 3 == 2 ? kIgnoredTarget : 7;
  }
  return targets;
}

TEST_F(CudaRouter, PaddingIsSentToNoExpert) {
  for (const RouterShape& shape : kShapes) {
    expect_hosts_decisions(shape, random_logits(shape),
                           normals_of<float>(test::biases_in(shape), 9, 3.0), some_padding(shape));
    expect_hosts_decisions(shape, random_logits(shape), {},
                           std::vector<std::int32_t>(shape.rows, kPaddingTarget));
  }
}

/// On the host, decisions, sums, losses and gradients are those of the rows that are not padding.
TEST_F(CudaRouter, OnTheHostPaddingDoesNotAffectOtherRows) {
  const DeviceOps<float> ops = host_ops<float>();
  for (const RouterShape& shape : kShapes) {
    const std::vector<std::int32_t> targets = some_padding(shape);
    const std::vector<float> logits = random_logits(shape);
    RouterShape less = shape;
    std::vector<float> kept;
    less.rows = 0;
    for (std::size_t row = 0; row < shape.rows; ++row) {
      if (targets[row] == kPaddingTarget) continue;
      const auto begin = logits.begin() + static_cast<std::ptrdiff_t>(row * shape.step());
      kept.insert(kept.end(), begin, begin + static_cast<std::ptrdiff_t>(shape.step()));
      ++less.rows;
    }
    Decided with(shape, logits, {}, targets);
    Decided without(less, kept);
    EXPECT_EQ(with.starts, without.starts);
    std::size_t at = 0;
    for (std::size_t i = 0; i < shape.choices(); ++i) {
      if (targets[i / shape.per_token] == kPaddingTarget) continue;
      with.weight_gradients[i] = without.weight_gradients[at++];
    }
    const auto results = [&](const RouterShape& of, Decided& decided) {
      std::vector<double> values(RouterTotals::values(of.experts));
      const RouterTotals totals = RouterTotals::at(values.data(), of.experts);
      ops.routers->add_router_totals(of, decided.routing(), true, totals);
      std::vector<double> losses(2);
      ops.routers->router_losses(of, totals, losses.data());
      std::vector<float> gradients(of.rows * of.step());
      ops.routers->router_gradient(of, decided.routing(), totals, {0.7, 0.3}, gradients.data());
      return std::tuple{values, losses, gradients};
    };
    const auto [values, losses, gradients] = results(shape, with);
    const auto [kept_values, kept_losses, kept_gradients] = results(less, without);
    EXPECT_EQ(values, kept_values);
    EXPECT_EQ(losses, kept_losses);
    std::vector<float> found;
    for (std::size_t i = 0; i < gradients.size(); ++i) {
      const bool padding = targets[i / shape.step()] == kPaddingTarget;
      if (!padding) found.push_back(gradients[i]);
      EXPECT_TRUE(!padding || gradients[i] == 0.0F) << "element " << i;
    }
    EXPECT_EQ(found, kept_gradients);
  }
}

TEST_F(CudaRouter, ChoicesOfManyRowsAreSorted) {
  const RouterShape shape = kManyRows;
  Decided expected(shape, random_logits(shape));
  const Uploaded there(expected);
  const Scratch scratch(shape);
  const auto found = in_every_order([&] {
    const DeviceArray<std::int32_t> places(shape.choices(), -1);
    const DeviceArray<std::int32_t> starts(shape.experts + 1, -1);
    Routing routing = there.routing();
    routing.places = places.data();
    must(sort_choices(nullptr, shape, routing, starts.data(),
                      reinterpret_cast<std::int32_t*>(scratch.data())));
    return std::tuple{places.get(), starts.get()};
  });
  EXPECT_EQ(std::get<0>(found), expected.places);
  EXPECT_EQ(std::get<1>(found), expected.starts);
}

TEST_F(CudaRouter, OfEqualLogitsTheFirstIsChosen) {
  for (const RouterShape& shape : kShapes) {
    std::vector<float> logits = random_logits(shape, 1.0);
    for (float& logit : logits) logit = std::round(logit);  // including zeros of both signs
    expect_hosts_decisions(shape, logits);
  }
  expect_hosts_decisions({7, 70, 5, true},
                         logits_of({7, 70, 5, true}, [](auto...) { return 0.25F; }));
}

TEST_F(CudaRouter, OneExpertMayHaveAllRowsAndOthersNone) {
  for (const RouterShape& shape : kShapes) {
    const std::size_t favourite = shape.experts / 2;
    const auto normals = normals_of<float>(shape.rows * shape.experts, 2);
    expect_hosts_decisions(
        shape, logits_of(shape, [&](std::size_t row, std::size_t expert) {
          const float logit = normals[row * shape.experts + expert];
          return expert == favourite ? logit + 100.0F : expert % 3 == 0 ? logit - 100.0F : logit;
        }));
  }
}

TEST_F(CudaRouter, LogitsThatAreNotNumbersChooseExpertsThatExist) {
  for (const RouterShape& shape : kShapes) {
    const auto normals = normals_of<float>(shape.rows * shape.experts, 3);
    expect_hosts_decisions(shape, logits_of(shape, [&](std::size_t row, std::size_t expert) {
                             const float logit = normals[row * shape.experts + expert];
                             switch (row % 8) {
                               case 0:
                                 return kNan;
                               case 1:
                                 return -kInfinity;
                               case 2:
                                 return kInfinity;
                               case 3:
                                 return expert % 5 == 3 ? kNan : logit;
                               case 4:
                                 return expert % 2 == 0 ? kNan : logit;
                               case 5:
                                 return expert % 4 == 1 ? -kInfinity : logit;
                               case 6:
                                 return expert == shape.experts - 1 ? kInfinity : logit;
                               default:
                                 return logit * 1e37F;
                             }
                           }));
  }
}

/// Totals of two routers with the logits of `shape`, on the host.
std::vector<double> totals_of(const RouterShape& shape, Decided& first, Decided& second) {
  const DeviceOps<float> ops = host_ops<float>();
  std::vector<double> values(RouterTotals::values(shape.experts), -1.0);
  const RouterTotals totals = RouterTotals::at(values.data(), shape.experts);
  ops.routers->add_router_totals(shape, first.routing(), true, totals);
  ops.routers->add_router_totals(shape, second.routing(), false, totals);
  return values;
}

void expect_hosts_totals(const RouterShape& shape, const std::vector<std::int32_t>& targets = {}) {
  SCOPED_TRACE(testing::Message() << shape.rows << " rows of " << shape.experts);
  Decided first(shape, random_logits(shape), {}, targets);
  Decided second(shape, random_logits(shape, 0.2));
  std::vector<double> expected = totals_of(shape, first, second);
  std::vector<double> losses(2);
  host_ops<float>().routers->router_losses(shape, RouterTotals::at(expected.data(), shape.experts),
                                           losses.data());
  const Uploaded one(first);
  const Uploaded other(second);
  const Scratch scratch(shape);
  const auto found = in_every_order([&] {
    const DeviceArray<double> values(expected.size() + 1, std::nan(""));
    const DeviceArray<double> two(3, -1.0);
    const RouterTotals totals = RouterTotals::at(values.data(), shape.experts);
    must(add_router_totals(nullptr, shape, one.routing(), true, totals, scratch.data()));
    must(add_router_totals(nullptr, shape, other.routing(), false, totals, scratch.data()));
    must(router_losses(nullptr, shape, totals, two.data()));
    return std::tuple{values.get(), two.get()};
  });
  expected.push_back(std::nan(""));
  losses.push_back(-1.0);
  expect_near(std::get<0>(found), expected, 1e-12, 1e-12);
  expect_near(std::get<1>(found), losses, 1e-12, 0.0);
}
TEST_F(CudaRouter, TotalsAndLossesAreTheHosts) {
  for (const RouterShape& shape : kShapes) {
    expect_hosts_totals(shape);
    expect_hosts_totals(shape, some_padding(shape));
  }
  expect_hosts_totals(kManyRows);
}

TAG_TESTS("small_shapes", "CudaRouters*");
TYPED_TEST(CudaRouters, GradientsOfLogitsAreTheHosts) {
  using T = TypeParam;
  for (const RouterShape& shape : kShapes) {
    SCOPED_TRACE(testing::Message() << shape.rows << " rows of " << shape.experts);
    Decided decided(shape, random_logits(shape), {}, some_padding(shape));
    Decided second(shape, random_logits(shape, 0.2));
    std::vector<double> values = totals_of(shape, decided, second);
    const Uploaded there(decided);
    const DeviceArray<double> totals_there(values);
    const std::vector<T> before = normals_of<T>(shape.rows * shape.step(), 4);
    for (const bool balances : {true, false}) {
      const RouterLossScales scales = {0.7, 0.3};
      const auto at = [&](double* from) {
        return balances ? RouterTotals::at(from, shape.experts) : RouterTotals();
      };
      std::vector<T> expected = before;
      host_ops<T>().routers->router_gradient(shape, decided.routing(), at(values.data()), scales,
                                             expected.data());
      const std::vector<T> found = in_every_order([&] {
        const DeviceArray<T> gradients(before);
        must(router_gradient<T>(nullptr, shape, there.routing(), at(totals_there.data()), scales,
                                gradients.data()));
        return gradients.get();
      });
      expect_close(found, exact(expected), 1e-9);
    }
  }
}

TEST_F(CudaRouter, WithoutRowsOnlyZerosAreWritten) {
  const RouterShape shape = {0, 5, 2, true};
  const DeviceArray<std::int32_t> starts(6, -1);
  const DeviceArray<double> values(RouterTotals::values(5), -1.0);
  const RouterTotals totals = RouterTotals::at(values.data(), 5);
  EXPECT_EQ(route<float>(nullptr, shape, nullptr, {}, nullptr, {}, starts.data(), nullptr),
            cudaSuccess);
  EXPECT_EQ(route<float>(nullptr, shape, nullptr, {}, nullptr, {}, nullptr, nullptr), cudaSuccess);
  EXPECT_EQ(add_router_totals(nullptr, shape, {}, true, totals, nullptr), cudaSuccess);
  EXPECT_EQ(router_gradient<float>(nullptr, shape, {}, totals, {}, nullptr), cudaSuccess);
  EXPECT_EQ(starts.get(), std::vector<std::int32_t>(6, 0));
  EXPECT_EQ(values.get(), std::vector<double>(values.size(), 0.0));
  const ExpertRows none = {nullptr, 0, 2};
  const DeviceArray<float> y(32, 1.0F);
  EXPECT_EQ(gather_rows<float>(nullptr, none, nullptr, nullptr, nullptr, 0, 8), cudaSuccess);
  EXPECT_EQ(gather_rows<float>(nullptr, none, nullptr, nullptr, y.data(), 4, 8), cudaSuccess);
  EXPECT_EQ(y.get(), std::vector<float>(32, 0.0F));
  EXPECT_EQ(dot_rows<float>(nullptr, none, nullptr, nullptr, nullptr, nullptr, 8), cudaSuccess);
  EXPECT_EQ(dot_bias<float>(nullptr, none, nullptr, nullptr, nullptr, nullptr, 8), cudaSuccess);
  EXPECT_EQ(add_rows(nullptr, none, nullptr, nullptr, nullptr, 8), cudaSuccess);
  EXPECT_EQ(add_bias<float>(nullptr, nullptr, nullptr, 0, 8), cudaSuccess);
  EXPECT_EQ(put_quotients(nullptr, none, nullptr, nullptr, nullptr), cudaSuccess);
}

}  // namespace
}  // namespace ballast::model::cuda::router_test
