#include "tools/bench_device.h"

#include <algorithm>
#include <array>

#include <fmt/format.h>

#include "ballast/core/error.h"
#include "ballast/core/suggest.h"
#include "ballast/device/device.h"

namespace ballast::tools {

std::string bench_device(const std::string& command, const std::string& asked) {
  static const std::array<std::string, 3> choices = {"auto", "host", "cuda"};
  if (std::find(choices.begin(), choices.end(), asked) == choices.end()) {
    throw Error(ErrorCategory::usage,
                fmt::format("{}: --device: '{}' is no device; choose auto, host or cuda{}", command,
                            asked, did_you_mean(asked, choices)));
  }
  if (asked == "host") return asked;
  const std::string refusal = device::cuda_refusal();
  if (refusal.empty()) return "cuda";
  if (asked == "auto") return "host";
  throw Error(ErrorCategory::device,
              fmt::format("{}: --device cuda: {}; use --device host", command, refusal));
}

}  // namespace ballast::tools
