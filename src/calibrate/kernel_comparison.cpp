#include "ballast/calibrate/kernel_comparison.h"

#include <algorithm>
#include <optional>
#include <span>
#include <vector>

#include "ballast/calibrate/kept_choices.h"
#include "ballast/core/error.h"
#include "ballast/inputs/engine_inputs.h"
#include "ballast/model/port_numbers.h"

#include "src/calibrate/bound_pass.h"
#include "src/calibrate/step_passes.h"

namespace ballast::calibrate {
namespace {

using model::Difference;
using model::Operand;
using model::Port;

constexpr std::uint64_t kRowsOnHost = 64;

/// Largest differences that rounding and other orders of sums explain, with room for a layer in
/// 16-bit types whose results cancel. A wrong row or column exceeds them.
bool is_rounding(const Difference& difference, bool wide) {
  const double mean = wide ? 1e-3 : 0.05;
  const double most = wide ? 0.05 : 1.0;
  return difference.finite && difference.mean <= mean && difference.most <= most;
}

template <class T>
Difference difference_of(std::span<const std::byte> found, std::span<const std::byte> expected) {
  model::DifferenceSum sum;
  const auto* const a = reinterpret_cast<const T*>(found.data());
  const auto* const b = reinterpret_cast<const T*>(expected.data());
  for (std::size_t i = 0; i < expected.size() / sizeof(T); ++i)
    sum.add(model::to_double(a[i]), model::to_double(b[i]));
  return sum.result();
}

/// Compares the passes of one device with those of another.
class PassComparison {
 public:
  PassComparison(const config::Config& config, StepPasses& found, StepPasses& expected)
      : type_(config.type), found_(found), expected_(expected) {}

  KernelComparison run(model::PassId pass) {
    KernelComparison worst = {.name = found_.name_of(pass), .compared = true, .agrees = true};
    found_.run(pass);
    expected_.run(pass);
    for (const Operand& operand : found_.program().passes[pass].operands) {
      if (operand.access == model::OperandAccess::reads || !is_bound(operand)) continue;
      compare(operand, worst);
    }
    return worst;
  }

 private:
  /// Also copies the expected result to the other device, so that differences do not grow, and that
  /// both dispatch the same rows to experts.
  void compare(const Operand& operand, KernelComparison& worst) {
    const DeviceBytes found = found_.memory_of(operand);
    const DeviceBytes expected = expected_.memory_of(operand);
    if (found.empty() || found.size() != expected.size()) return;
    found_bytes_.resize(found.size());
    expected_bytes_.resize(found.size());
    found_.fetch(found_bytes_, found);
    expected_.fetch(expected_bytes_, expected);
    found_.put(found, expected_bytes_);
    const std::optional<Difference> difference = difference_at(operand.port);
    if (!difference) return;
    worst.agrees = worst.agrees && is_rounding(*difference, type_ == DType::f32);
    if (!worst.port.empty() && difference->finite && difference->mean <= worst.difference.mean) {
      return;
    }
    worst.port = to_string(operand.port);
    worst.difference = *difference;
  }

  [[nodiscard]] std::optional<Difference> difference_at(Port port) const {
    std::optional<Difference> found;
    model::with_numbers(port, type_, [&](auto of_type) {
      found = difference_of<decltype(of_type)>(found_bytes_, expected_bytes_);
    });
    return found;
  }

  DType type_;
  StepPasses& found_;
  StepPasses& expected_;
  std::vector<std::byte> found_bytes_;
  std::vector<std::byte> expected_bytes_;
};

void check_interrupt(const std::atomic<bool>* interrupted) {
  if (interrupted != nullptr && *interrupted)
    throw Error(ErrorCategory::interrupted, "interrupted");
}

/// One kind of device and kernels.
struct KernelsOfSide {
  device::DeviceOptions device;
  model::KernelOptions kernels;
};

std::vector<KernelComparison> compare(const config::Config& config, std::uint64_t length,
                                      const KernelsOfSide& found, const KernelsOfSide& expected,
                                      const std::atomic<bool>* interrupted) {
  const model::Architecture model = few_layers(config);
  const auto passes = [&](const KernelsOfSide& side) {
    return StepPasses(model, config.type, {1, length}, config.has_positions(), side.device,
                      side.kernels);
  };
  StepPasses ours = passes(found);
  StepPasses reference = passes(expected);
  PassComparison comparison(config, ours, reference);
  std::vector<KernelComparison> all;
  for (const model::PassId pass : ours.order()) {
    check_interrupt(interrupted);
    all.push_back(comparison.run(pass));
  }
  return all;
}

KernelsOfSide on_gpu(const config::Config& config) {
  return {inputs::device_options(config), kernel_options(config)};
}

}  // namespace

std::vector<KernelComparison> compare_with_host(const config::Config& config,
                                                const std::atomic<bool>* interrupted) {
  const KernelsOfSide host = {{.kind = "host", .type = config.type}, {}};
  return compare(config, std::min(config.data.sequence_length, kRowsOnHost), on_gpu(config), host,
                 interrupted);
}

std::vector<KernelComparison> compare_with_plain(const config::Config& config, std::uint64_t length,
                                                 const std::atomic<bool>* interrupted) {
  KernelsOfSide plain = on_gpu(config);
  plain.kernels = {.set = model::KernelSet::plain};
  return compare(config, length, on_gpu(config), plain, interrupted);
}

std::vector<KernelComparison> compare_products(const config::Config& config, std::uint64_t length,
                                               const std::atomic<bool>* interrupted) {
  const KernelsOfSide side = on_gpu(config);
  StepPasses passes(few_layers(config), config.type, {1, length}, config.has_positions(),
                    side.device, side.kernels);
  const std::vector<model::ProductCheck> checks = model::check_products([&] {
    for (const model::PassId pass : passes.order()) {
      check_interrupt(interrupted);
      passes.run(pass);
    }
  });
  std::vector<KernelComparison> all;
  all.reserve(checks.size());
  for (const model::ProductCheck& check : checks) {
    all.push_back({.name = "product " + check.product,
                   .difference = check.difference,
                   .compared = check.compared,
                   .agrees = is_rounding(check.difference, check.wide)});
  }
  return all;
}

}  // namespace ballast::calibrate
