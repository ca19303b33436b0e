// Updates on a device, compared with the same updates on the host, bit for bit.
#include "ballast/update/device_update.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "ballast/core/error.h"
#include "ballast/device/streams.h"

#include "tests/support/device_array.h"
#include "tests/support/in_every_order.h"
#include "tests/support/tags.h"
#include "tests/unit/cpu_adam/states.h"

namespace ballast::update::device_update_test {
namespace {

using cpu_adam::Codes;
using cpu_adam::Hyper;
using cpu_adam::Moments;
using cpu_adam::Optimizer;
using cpu_adam::Shard;
using cpu_adam::Weights;
using cpu_adam::test::Array;
using cpu_adam::test::hyper_at;
using cpu_adam::test::Layout;
using cpu_adam::test::Numbers;
using cpu_adam::test::States;

/// An array in device memory, between guard bytes that must not change.
class Copy {
 public:
  /// `offset`: bytes from an address aligned to 256 bytes to the first element.
  Copy(const Array& array, std::size_t offset)
      : start_(kGuarded + offset), bytes_(array.bytes()), memory_(guarded(array)) {}

  [[nodiscard]] std::byte* data() const {
    return bytes_ == 0 ? nullptr : reinterpret_cast<std::byte*>(memory_.data()) + start_;
  }
  /// Whether the guard bytes are unchanged.
  [[nodiscard]] bool fetch(Array& array) const {
    const std::vector<unsigned char> all = memory_.get();
    if (bytes_ != 0) std::memcpy(array.as<unsigned char>(), all.data() + start_, bytes_);
    return all == guarded(array);
  }

 private:
  static constexpr std::size_t kGuarded = 256;
  [[nodiscard]] std::vector<unsigned char> guarded(const Array& array) const {
    std::vector<unsigned char> all(start_ + bytes_ + kGuarded, 0xa5);
    if (bytes_ != 0) std::memcpy(all.data() + start_, array.as<unsigned char>(), bytes_);
    return all;
  }

  std::size_t start_;
  std::size_t bytes_;
  test::DeviceArray<unsigned char> memory_;
};

/// The arrays of States in device memory; `offset`: elements after an aligned address.
class DeviceStates {
 public:
  DeviceStates(const States& states, std::size_t offset)
      : layout_(states.layout),
        size_(states.size),
        first_element_(states.first_element),
        main_(states.main, offset * (layout_.weights == Weights::Format::split ? 2 : 4)),
        remainder_or_copy_(states.remainder_or_copy, offset * 2),
        first_(states.first, offset * width_of_first()),
        second_(states.second, offset * (coded() ? 1 : 4)),
        first_exponents_(states.first_exponents, offset),
        second_exponents_(states.second_exponents, offset),
        gradient_(states.gradient, offset * size_of(layout_.gradient)) {}

  [[nodiscard]] Shard shard() const {
    return {weights(), moments(), gradient(), size_, first_element_};
  }
  /// Whether no byte around the arrays was written.
  [[nodiscard]] bool fetch(States& states) const {
    bool intact = main_.fetch(states.main);
    intact = remainder_or_copy_.fetch(states.remainder_or_copy) && intact;
    intact = first_.fetch(states.first) && intact;
    intact = second_.fetch(states.second) && intact;
    intact = first_exponents_.fetch(states.first_exponents) && intact;
    intact = second_exponents_.fetch(states.second_exponents) && intact;
    return gradient_.fetch(states.gradient) && intact;
  }

 private:
  template <class T>
  static T* of(const Copy& copy) {
    return reinterpret_cast<T*>(copy.data());
  }
  [[nodiscard]] bool coded() const { return layout_.moments == Moments::Format::blockwise8; }
  [[nodiscard]] std::size_t width_of_first() const {
    return coded() ? 1 : layout_.moments == Moments::Format::bf16_first ? 2 : 4;
  }
  [[nodiscard]] Weights weights() const {
    switch (layout_.weights) {
      case Weights::Format::split:
        return {of<Bf16>(main_), of<std::uint16_t>(remainder_or_copy_)};
      case Weights::Format::copy_bf16:
        return {of<float>(main_), of<Bf16>(remainder_or_copy_)};
      case Weights::Format::copy_f16:
        return {of<float>(main_), of<F16>(remainder_or_copy_)};
      default:
        return Weights(of<float>(main_));
    }
  }
  [[nodiscard]] Moments moments() const {
    if (layout_.moments == Moments::Format::bf16_first) {
      return {of<Bf16>(first_), of<float>(second_)};
    }
    if (layout_.moments == Moments::Format::f32) return {of<float>(first_), of<float>(second_)};
    return {Codes{of<std::uint8_t>(first_), of<std::uint8_t>(first_exponents_)},
            Codes{of<std::uint8_t>(second_), of<std::uint8_t>(second_exponents_)}};
  }
  [[nodiscard]] cpu_adam::Gradient gradient() const {
    using cpu_adam::Gradient;
    if (layout_.gradient == DType::bf16) return Gradient(of<const Bf16>(gradient_));
    if (layout_.gradient == DType::f16) return Gradient(of<const F16>(gradient_));
    return Gradient(of<const float>(gradient_));
  }

  Layout layout_;
  std::size_t size_;
  Elems first_element_;
  Copy main_, remainder_or_copy_, first_, second_, first_exponents_, second_exponents_, gradient_;
};

/// Compares with the host, using the scalar kernels, which are the reference, and the fastest ones.
class CudaUpdate : public ballast::test::Kernels {
 protected:
  void SetUp() override {
    ballast::test::Kernels::SetUp();
    if (IsSkipped()) return;
    device_ = device::make_device({.kind = "cuda", .budget = kMiB});
    stream_ = device_->make_stream("test");
    update_ = make_device_update(*device_, scalar_);
  }

  /// Expects that these updates change `states` equally on device and host.
  void compare(const States& states, const std::vector<Hyper>& updates, std::size_t offset = 0) {
    States expected = states;
    for (const Hyper& hyper : updates) scalar_.step(hyper, expected.shard());
    States best = states;
    for (const Hyper& hyper : updates) active_.step(hyper, best.shard());
    ASSERT_EQ(difference(best, expected), "") << describe(states.layout);
    ballast::test::in_every_order([&] {
      const DeviceStates there(states, offset);
      for (const Hyper& hyper : updates) update_->step(*stream_, hyper, there.shard());
      stream_->synchronize();
      States found = states;
      EXPECT_TRUE(there.fetch(found)) << describe(states.layout);
      EXPECT_EQ(difference(found, expected), "")
          << describe(states.layout) << ", " << states.size << " elements, first "
          << states.first_element << ", offset " << offset << ", step " << updates.front().step;
    });
  }
  void compare(const States& states, const Hyper& hyper, std::size_t offset = 0) {
    compare(states, std::vector<Hyper>{hyper}, offset);
  }

  cpu_adam::Updater scalar_{{.threads = 1, .isa = Isa::scalar}};
  cpu_adam::Updater active_{{.threads = 1}};
  std::unique_ptr<device::Device> device_;
  std::unique_ptr<device::Stream> stream_;
  std::unique_ptr<DeviceUpdate> update_;
};

/// Several blocks of threads and a tile that is not full.
constexpr std::size_t kSeveralBlocks = 2 * 2048 + 3 * 256 + 41;

TAG_TESTS("small_shapes", "CudaUpdate.E*");
TEST_F(CudaUpdate, EveryFormatOfEveryOptimizer) {
  std::int64_t seed = 0;
  for (const Layout& layout : cpu_adam::test::all_layouts()) {
    ++seed;
    const States states = States::random(layout, 256 + 41, static_cast<std::uint64_t>(seed));
    compare(states, hyper_at(layout.optimizer, 1 + seed % 2));
    if (HasFailure()) return;
  }
}

TEST_F(CudaUpdate, EveryLengthAndAlignment) {
  for (const Layout& layout : cpu_adam::test::some_layouts()) {
    for (std::size_t size = 0; size <= 67; ++size) {
      compare(States::random(layout, size, size + 1), hyper_at(layout.optimizer, 3), size % 9);
    }
    for (const std::size_t size : {255U, 256U, 257U, 2047U, 2048U, 2049U}) {
      compare(States::random(layout, size, size), hyper_at(layout.optimizer, 4), 0);
      compare(States::random(layout, size, size), hyper_at(layout.optimizer, 4), 1);
    }
    compare(States::random(layout, kSeveralBlocks, 7), hyper_at(layout.optimizer, 5));
    for (const std::size_t offset : {1U, 4U, 8U}) {
      compare(States::random(layout, 600, 8), hyper_at(layout.optimizer, 6), offset);
    }
    if (HasFailure()) return;
  }
}

TEST_F(CudaUpdate, FiftyStepsInARow) {
  for (const Layout& layout : cpu_adam::test::some_layouts()) {
    std::vector<Hyper> updates;
    for (std::int64_t step = 1; step <= 50; ++step) {
      updates.push_back(hyper_at(layout.optimizer, step));
      updates.back().gradient_scale = step % 3 == 0 ? 1.0F : 0.25F + static_cast<float>(step);
    }
    compare(States::random(layout, 256 + 130, 11), updates);
    if (HasFailure()) return;
  }
}

/// A small beta1 interpolates from the gradient.
TEST_F(CudaUpdate, EveryHyperParameterTakesPart) {
  for (const Layout& layout : cpu_adam::test::some_layouts()) {
    const States states = States::random(layout, 300, 13);
    std::vector<Hyper> variants(9, hyper_at(layout.optimizer, 5));
    variants[1].beta1 = 0.0;
    variants[2].beta1 = 0.3;
    variants[3].beta2 = 0.5;
    variants[4].epsilon = 0.1;
    variants[5].weight_decay = 0.0;
    variants[6].nesterov = true;
    variants[7].momentum = 0.0;
    variants[8].learning_rate = 0.0;
    for (const Hyper& hyper : variants) compare(states, hyper);
    if (HasFailure()) return;
  }
}

/// The random bits of an element depend on its number in the model, past 2^32 too.
TEST_F(CudaUpdate, ElementsKeepTheirNumbers) {
  constexpr Elems kLowerHalf = Elems{1} << 32;
  for (const Layout& layout : cpu_adam::test::some_layouts()) {
    for (const Elems first : {Elems{256}, kLowerHalf - 512, kLowerHalf, 5 * kLowerHalf + 1024}) {
      States states = States::random(layout, 1500, 17);
      states.first_element = first;
      compare(states, hyper_at(layout.optimizer, 9));
    }
    if (layout.moments != Moments::Format::blockwise8) {
      States states = States::random(layout, 700, 19);
      states.first_element = kLowerHalf - 301;
      compare(states, hyper_at(layout.optimizer, 10));
    }
    if (HasFailure()) return;
  }
}

TEST_F(CudaUpdate, ElementsWithoutWeightDecay) {
  const std::vector<ElementRange> ranges = {{512, 544}, {608, 800}, {1'024, 1'280}, {1'312, 9'600}};
  for (const Layout& layout : cpu_adam::test::all_layouts()) {
    States states = States::random(layout, 1500, 37);
    states.first_element = 512;
    const Hyper hyper = hyper_at(layout.optimizer, 3);
    States expected = states;
    Shard shard = expected.shard();
    shard.undecayed = ranges;
    scalar_.step(hyper, shard);
    ballast::test::in_every_order([&] {
      const DeviceStates there(states, 0);
      shard = there.shard();
      shard.undecayed = ranges;
      update_->step(*stream_, hyper, shard);
      stream_->synchronize();
      States found = states;
      EXPECT_TRUE(there.fetch(found)) << describe(layout);
      EXPECT_EQ(difference(found, expected), "") << describe(layout);
    });
    if (HasFailure()) return;
  }
}

/// Every combination of `values` as weight, moments and gradient, in several tiles.
States combinations(const Layout& layout, const std::vector<float>& values) {
  const std::size_t n = values.size();
  States states(layout, n * n * n);
  for (std::size_t i = 0; i < states.size; ++i) {
    const float m = values[i / n % n];
    states.set(i, values[i % n], m, std::fabs(m), values[i / n / n]);
  }
  Numbers numbers(23);
  states.set_random_codes(numbers);
  return states;
}

TEST_F(CudaUpdate, DenormalsAndZerosCount) {
  const std::vector<float> values = {0.0F,        -0.0F,     0x1p-149F,  -0x1p-149F,
                                     0x1.8p-130F, 0x1p-126F, -0x1p-75F,  0x1.6p-64F,
                                     0x1p-24F,    -1.0F,     0x1.fp+63F, 0x1p-133F};
  for (const Layout& layout : cpu_adam::test::some_layouts()) {
    Hyper hyper = hyper_at(layout.optimizer, 2);
    compare(combinations(layout, values), hyper);
    hyper.epsilon = 0.0;
    hyper.gradient_scale = 1.0F;
    hyper.learning_rate = 1e-30;
    compare(combinations(layout, values), hyper);
    if (HasFailure()) return;
  }
}

/// A NaN may be any NaN; everything else has the same bits. With codes, a block with an infinity or
/// a NaN has no other values.
TEST_F(CudaUpdate, InfinitiesAndNaNsEqualTheHosts) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();
  const std::vector<float> values = {0.0F,      1.0F, -kInfinity, 0x1.fffffep+127F,
                                     kInfinity, kNaN, -0x1p+100F};
  for (const Layout& layout : cpu_adam::test::all_layouts()) {
    if (layout.moments == Moments::Format::blockwise8) continue;
    compare(combinations(layout, values), hyper_at(layout.optimizer, 3));
    if (HasFailure()) return;
  }
}

TEST_F(CudaUpdate, ABlockOfCodesWithAnInfinityLeavesItsNeighboursAlone) {
  for (const Layout& layout : cpu_adam::test::all_layouts()) {
    if (layout.moments != Moments::Format::blockwise8) continue;
    States states = States::random(layout, 3 * 256, 29);
    states.set_gradient(300, std::numeric_limits<float>::infinity());
    compare(states, hyper_at(layout.optimizer, 4));
    compare(States(layout, 3 * 256), hyper_at(layout.optimizer, 4));
    if (HasFailure()) return;
  }
}

/// Holds even if all random bits are zero, as they are for one in 2^16.
TEST_F(CudaUpdate, ZerosInCodesStayZeros) {
  const Layout layout{.optimizer = Optimizer::sgd, .moments = Moments::Format::blockwise8};
  compare(States(layout, std::size_t{1} << 18U), hyper_at(layout.optimizer, 1));
}

/// The error that `call` throws.
template <class Call>
std::string error_of(const Call& call) {
  try {
    call();
  } catch (const Error& error) {
    return error.what();
  }
  return "nothing";
}

TEST_F(CudaUpdate, RefusesWhatTheHostRefuses) {
  const Layout layout{.moments = Moments::Format::blockwise8};
  const DeviceStates states(States(layout, 256), 0);
  const auto refusal = [&](std::int64_t step, Elems first_element, bool complete) {
    Shard shard = states.shard();
    shard.first_element = first_element;
    if (!complete) shard.moments.second_exponents = nullptr;
    return error_of([&] { update_->step(*stream_, {.step = step}, shard); });
  };
  EXPECT_NE(refusal(0, 0, true).find("the step must be at least 1"), std::string::npos);
  EXPECT_NE(refusal(1, 128, true).find("multiple of 256"), std::string::npos);
  EXPECT_NE(refusal(1, 0, false).find("null pointer"), std::string::npos);
  EXPECT_EQ(refusal(1, 256, true), "nothing");
}

TEST(HostUpdate, RunsAfterEarlierWorkOfTheStream) {
  const cpu_adam::Updater updater({.threads = 1});
  const auto device = device::make_device({.kind = "host", .budget = kMiB, .compute_threads = 1});
  const auto stream = device->make_stream("test");
  const States before = States::random({}, 1000, 31);
  States expected = before;
  updater.step(hyper_at(Optimizer::adamw, 1), expected.shard());
  States found({}, before.size);
  const Shard shard = found.shard();
  auto& queue = dynamic_cast<device::HostStream&>(*stream);
  queue.enqueue([&] {
    for (auto array : {&States::main, &States::remainder_or_copy, &States::first, &States::second,
                       &States::gradient}) {
      std::memcpy((found.*array).as<char>(), (before.*array).as<char>(), (before.*array).bytes());
    }
  });
  make_device_update(*device, updater)->step(*stream, hyper_at(Optimizer::adamw, 1), shard);
  stream->synchronize();
  EXPECT_EQ(difference(found, expected), "");
}

}  // namespace
}  // namespace ballast::update::device_update_test
