#include "tools/bench/bench.h"

#include <algorithm>
#include <array>

#include <fmt/format.h>

#include "ballast/core/error.h"
#include "ballast/core/random.h"
#include "ballast/core/suggest.h"
#include "ballast/device/device.h"

#include "tools/command_line.h"
#include "tools/commands.h"

namespace ballast::tools {

void add_bench(Command program) {
  Command bench = program.add_command("bench", "Measure this machine");
  bench.require_command();
  add_bench_adam(bench);
  add_bench_attention(bench);
  add_bench_io(bench);
  add_bench_link(bench);
  add_bench_plan(bench);
  add_bench_step(bench);
}

std::string bench_device(const std::string& command, const std::string& asked) {
  static const std::array<std::string, 3> choices = {"auto", "host", "cuda"};
  if (std::find(choices.begin(), choices.end(), asked) == choices.end()) {
    throw Error(ErrorCategory::usage,
                fmt::format("{}: --device: '{}' is not a device; choose auto, host or cuda{}",
                            command, asked, did_you_mean(asked, choices)));
  }
  if (asked == "host") return asked;
  const std::string refusal = device::gpu_refusal({});
  if (refusal.empty()) return "cuda";
  if (asked == "auto" && !device::has_unusable_gpu({})) return "host";
  throw Error(ErrorCategory::device,
              fmt::format("{}: --device {}: {}; use --device host", command, asked, refusal));
}

void add_limits(Command command, std::uint64_t& repeats, double& seconds) {
  command.add_option("--repeats", &repeats, "Minimum number of measured rounds",
                     {.range = std::pair(1, 1000000), .show_default = true});
  command.add_option("--seconds", &seconds, "Minimum measured time per row, in seconds",
                     {.range = std::pair(0.0, 3600.0), .show_default = true});
}

std::vector<std::int32_t> random_ids(std::size_t count, std::uint64_t vocab, std::uint64_t stream) {
  std::vector<std::int32_t> ids(count);
  for (std::size_t i = 0; i < count; ++i) {
    ids[i] = static_cast<std::int32_t>(random_u64(1, i, stream) % vocab);
  }
  return ids;
}

}  // namespace ballast::tools
