#include <algorithm>
#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include <fmt/format.h>

#include "ballast/calibrate/kernel_comparison.h"
#include "ballast/core/error.h"
#include "ballast/core/units.h"
#include "ballast/model/attention.h"
#include "ballast/model/compute.h"
#include "ballast/setup/translate.h"

#include "src/model/compute/layer_shapes.h"
#include "tools/bench/bench.h"
#include "tools/bench/link_copies.h"
#include "tools/commands/doctor.h"
#include "tools/signals.h"

namespace ballast::tools {
namespace {

using calibrate::KernelComparison;
using model::AttentionPass;

/// Speeds below this share of the expected ones are worth a hint.
constexpr double kSlow = 0.6;

/// A disagreement of kernels, and its remedy.
constexpr const char* kWrong =
    "; a kernel is wrong on this GPU: please report it, and train with ballast.kernels=plain";

std::string percent(double share) {
  return fmt::format("{:.2g}%", 100.0 * share);
}

std::string describe_difference(const KernelComparison& one) {
  if (!one.difference.finite) return "values are not finite";
  return fmt::format("difference {}, at most {} of the usual size", percent(one.difference.mean),
                     percent(one.difference.most));
}

std::string name_of_result(const KernelComparison& one) {
  return one.port.empty() ? one.name : fmt::format("{}, {}", one.name, one.port);
}

/// One line if all agree, otherwise one per disagreement.
std::vector<Finding> report_comparisons(const std::string& check, const std::string& what,
                                        const std::vector<KernelComparison>& all) {
  std::vector<Finding> findings;
  std::size_t skipped = 0;
  const KernelComparison* worst = nullptr;
  for (const KernelComparison& one : all) {
    skipped += one.compared ? 0U : 1U;
    if (!one.compared) continue;
    if (!one.agrees) {
      findings.push_back({Severity::fault, check,
                          fmt::format("{}: {} from {}{}", name_of_result(one),
                                      describe_difference(one), what, kWrong)});
    } else if (worst == nullptr || one.difference.mean > worst->difference.mean) {
      worst = &one;
    }
  }
  if (findings.empty() && worst != nullptr) {
    findings.push_back(
        {Severity::good, check,
         fmt::format("{} agree with {}; the largest difference is {} ({})", all.size() - skipped,
                     what, percent(worst->difference.mean), name_of_result(*worst))});
  }
  if (skipped > 0) {
    findings.push_back({Severity::hint, check,
                        fmt::format("{} were not compared for lack of device memory", skipped)});
  }
  return findings;
}

using Comparing = std::function<std::vector<KernelComparison>(std::uint64_t length)>;

/// Compares with sequences of `length` tokens, or with shorter ones if memory is short.
void compare(const std::string& check, const std::string& what, std::uint64_t length,
             const Comparing& comparing, std::vector<Finding>& findings) {
  while (true) {
    try {
      const auto found = report_comparisons(check, what, comparing(length));
      findings.insert(findings.end(), found.begin(), found.end());
      return;
    } catch (const Error& error) {
      if (error.category() == ErrorCategory::interrupted) throw;
      if (error.category() == ErrorCategory::memory && length > 64) {
        length /= 2;
        continue;
      }
      const bool memory = error.category() == ErrorCategory::memory;
      findings.push_back({memory ? Severity::hint : Severity::fault, check, error.what()});
      return;
    }
  }
}

/// Runs a check that returns one finding. Its errors are faults.
void run_check(const std::string& name, const std::function<Finding()>& check,
               std::vector<Finding>& findings) {
  try {
    findings.push_back(check());
  } catch (const Error& error) {
    if (error.category() == ErrorCategory::interrupted) throw;
    findings.push_back({Severity::fault, name, error.what()});
  }
}

const KnownGpu* known(const config::Config& config) {
  const std::string name = device::gpu_name(setup::device_options(config));
  for (const KnownGpu& gpu : known_gpus()) {
    if (name.find(gpu.name) != std::string::npos) return &gpu;
  }
  return nullptr;
}

std::string expected(double value, const KnownGpu* gpu) {
  return gpu == nullptr ? "" : fmt::format(" (expected {:.0f}, {})", value, gpu->rates);
}

Finding check_link(const GpuEffort& effort, const KnownGpu* gpu) {
  using device::CopyWay;
  const Bytes bytes = effort.pinned / 2;
  double pinning = 0.0;
  std::unique_ptr<LinkCopies> link;
  pinning = seconds_of([&] { link = std::make_unique<LinkCopies>("cuda", bytes, "doctor"); });
  const auto gbps = [&](CopyWay way) {
    link->run(way, 1);
    const double once = std::max(seconds_of([&] { link->run(way, 1); }), 1e-9);
    const auto count = static_cast<std::size_t>(std::clamp(effort.seconds / once, 1.0, 1000.0));
    const double all = std::max(seconds_of([&] { link->run(way, count); }), 1e-9);
    return static_cast<double>(bytes) * static_cast<double>(count) / all * 1e-9;
  };
  const double up = gbps(CopyWay::up);
  const double down = gbps(CopyWay::down);
  link->check();
  Finding finding = {
      .name = "link",
      .text = fmt::format("{:.1f} GB/s up{}, {:.1f} GB/s down{}; {} pinned and filled in {:.1f} s",
                          up, expected(gpu == nullptr ? 0.0 : gpu->upload_gbps, gpu), down,
                          expected(gpu == nullptr ? 0.0 : gpu->offload_gbps, gpu),
                          format_bytes(link->pinned()), pinning)};
  if (link->pinned() < effort.pinned) {
    finding.severity = Severity::hint;
    finding.text +=
        "; copies are faster if all host memory may be pinned: ulimit -l unlimited, or in a "
        "container --ulimit memlock=-1";
  } else if (gpu != nullptr &&
             (up < kSlow * gpu->upload_gbps || down < kSlow * gpu->offload_gbps)) {
    finding.severity = Severity::hint;
    finding.text += "; the link is slow: does the GPU have all its PCIe lanes (nvidia-smi -q)?";
  }
  return finding;
}

Finding check_products_peak(const config::Config& config, const GpuEffort& effort,
                            const KnownGpu* gpu) {
  device::DeviceOptions options = setup::device_options(config);
  options.budget = kPage;
  const auto device = device::make_device(options);
  const double tflops = 1e-12 * model::measure_gemm_peak(*device, config.type, effort.seconds,
                                                         config.ballast.kernels);
  Finding finding = {.name = "GEMM peak",
                     .text = fmt::format("{:.1f} TFLOP/s in {}{}", tflops, to_string(config.type),
                                         expected(gpu == nullptr ? 0.0 : gpu->tflops, gpu))};
  const bool usual = config.type == DType::bf16 && config.ballast.kernels == model::KernelSet::best;
  if (gpu != nullptr && usual && tflops < kSlow * gpu->tflops) {
    finding.severity = Severity::hint;
    finding.text += "; products are slow: does other work use the GPU, or is its power limited?";
  }
  return finding;
}

Finding check_attention(const config::Config& config, const model::AttentionShape& shape,
                        const GpuEffort& effort) {
  device::DeviceOptions options = setup::device_options(config);
  options.budget = round_up(model::attention_trial_bytes(shape), kPage);
  const auto device = device::make_device(options);
  const auto trial = model::make_attention_trial(*device, shape);
  const auto tflops = [&](AttentionPass pass) {
    trial->run(pass, 1);
    const double once = std::max(seconds_of([&] { trial->run(pass, 1); }), 1e-9);
    const auto count = static_cast<std::size_t>(std::clamp(effort.seconds / once, 1.0, 1000.0));
    const double all = std::max(seconds_of([&] { trial->run(pass, count); }), 1e-9);
    return 1e-12 * model::attention_flops(shape, pass) * static_cast<double>(count) / all;
  };
  std::string text = fmt::format("forward {:.1f} TFLOP/s", tflops(AttentionPass::own_forward));
  if (trial->cudnn_refusal().empty()) {
    text += fmt::format(", by cuDNN {:.1f}", tflops(AttentionPass::cudnn_forward));
  }
  return {.name = "attention",
          .text = fmt::format("{}, backward {:.1f}; bf16, {} tokens, heads of {}", text,
                              tflops(AttentionPass::own_backward), shape.length, shape.head_dim)};
}

}  // namespace

const std::vector<KnownGpu>& known_gpus() {
  static const std::vector<KnownGpu> all = {
      {"H200", "h200-node.json", 739.0, 56.3, 52.8},
      {"H100", "h100-node.json", 708.0, 56.3, 52.8},
      {"RTX 4090", "rtx4090-1nvme.json", 134.0, 25.0, 25.0},
  };
  return all;
}

std::vector<Finding> examine_gpu(const config::Config& config, const GpuEffort& effort) {
  std::vector<Finding> findings;
  const engine::RunInputs run = setup::translate(config);
  const std::uint64_t length = std::min(config.data.sequence_length, effort.rows);
  compare(
      "passes", "the host device", length,
      [&](std::uint64_t) { return calibrate::compare_with_host(run, &interrupted()); }, findings);
  compare(
      "products", "the plain kernel", length,
      [&](std::uint64_t rows) { return calibrate::compare_products(run, rows, &interrupted()); },
      findings);
  compare(
      "sequence", "the plain kernels", length,
      [&](std::uint64_t rows) { return calibrate::compare_with_plain(run, rows, &interrupted()); },
      findings);
  const KnownGpu* const gpu = known(config);
  run_check(
      "link", [&] { return check_link(effort, gpu); }, findings);
  run_check(
      "GEMM peak", [&] { return check_products_peak(config, effort, gpu); }, findings);
  if (config.type == DType::bf16) {
    for (const model::AttentionShape& shape :
         model::attention_shapes(config.model, {.sequences = 1, .length = length})) {
      run_check(
          "attention", [&] { return check_attention(config, shape, effort); }, findings);
    }
  }
  findings.push_back(
      {Severity::good, "device memory",
       fmt::format("{} free after all libraries were loaded",
                   format_bytes(device::own_memory(setup::device_options(config))))});
  return findings;
}

}  // namespace ballast::tools
