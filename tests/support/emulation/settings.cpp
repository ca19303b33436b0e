#include "tests/support/emulation/settings.h"

#include <atomic>
#include <charconv>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <mutex>
#include <set>
#include <string_view>
#include <tuple>

#include "tests/support/emulation/grid.h"

// Patch areas of all functions of this program that have one: kernels with launch bounds
// (kernel_language.h). The linker defines these names if there are any.
extern "C" {
[[gnu::weak]] extern const std::uintptr_t __start___patchable_function_entries[];
[[gnu::weak]] extern const std::uintptr_t __stop___patchable_function_entries[];
}

namespace ballast::test::emulation {
namespace {

constexpr unsigned kDefaultGpu = 89;
constexpr std::size_t kKibi = 1024;

std::uint64_t number_in(std::string_view text, const char* variable) {
  std::uint64_t number = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (error == std::errc() && end == text.data() + text.size()) return number;
  std::fprintf(stderr, "%s: \"%.*s\" is not a number\n", variable, static_cast<int>(text.size()),
               text.data());
  std::abort();
}

Seeds first_seeds() {
  constexpr const char* kName = "BALLAST_EMULATION_SEED";
  const char* const given = std::getenv(kName);
  if (given == nullptr) return {};
  const std::string_view text = given;
  for (const bool timing : {true, false}) {
    const std::string_view start = timing ? "timing=" : "arithmetic=";
    if (!text.starts_with(start)) continue;
    const std::uint64_t seed = number_in(text.substr(start.size()), kName);
    return timing ? Seeds{.timing = seed} : Seeds{.arithmetic = seed};
  }
  const std::uint64_t seed = number_in(text, kName);
  return {.timing = seed, .arithmetic = seed};
}

unsigned first_gpu() {
  constexpr const char* kName = "BALLAST_EMULATION_GPU";
  const char* const given = std::getenv(kName);
  return given == nullptr ? kDefaultGpu : static_cast<unsigned>(number_in(given, kName));
}

cudaError_t refused(cudaError_t code, const void* kernel, const std::string& reason) {
  std::fprintf(stderr, "emulated launch of %s: %s\n", function_name(kernel).c_str(),
               reason.c_str());
  return code;
}

/// Appends a line for each new kernel, number of threads and size of shared memory to the file of
/// the environment variable BALLAST_EMULATION_LAUNCHES, from which tools/dev/kernel_table.py makes
/// its table.
void note_launch(const void* kernel, unsigned threads, std::size_t shared_bytes) {
  static const char* const path = std::getenv("BALLAST_EMULATION_LAUNCHES");
  if (path == nullptr) return;
  static std::mutex mutex;
  static std::set<std::tuple<const void*, unsigned, std::size_t>> noted;
  const std::scoped_lock lock(mutex);
  if (!noted.emplace(kernel, threads, shared_bytes).second) return;
  std::ofstream(path, std::ios::app)
      << threads << ' ' << shared_bytes << ' ' << function_name(kernel) << '\n';
}

}  // namespace

namespace settings {
std::atomic<std::uint64_t> timing = first_seeds().timing;
std::atomic<std::uint64_t> arithmetic = first_seeds().arithmetic;
std::atomic<unsigned> gpu = first_gpu();
}  // namespace settings

void set_seeds(const Seeds& seeds) {
  settings::timing = seeds.timing;
  settings::arithmetic = seeds.arithmetic;
}

void set_capability(unsigned times_ten) {
  settings::gpu = times_ten;
}
bool has_warpgroup_products() {
  return capability() == 90;
}
void set_warpgroup_products(bool has) {
  set_capability(has ? 90 : kDefaultGpu);
}

std::size_t most_shared_memory() {
  switch (capability()) {
    case 75:
      return 64 * kKibi;
    case 80:
      return 163 * kKibi;
    case 90:
      return 227 * kKibi;
    default:
      return 99 * kKibi;  // 8.6 and 8.9
  }
}

unsigned launch_bound(const void* kernel) {
  const auto entry = reinterpret_cast<std::uintptr_t>(kernel);
  constexpr std::uintptr_t kMax = 1024 / 32;
  std::uintptr_t area = 0;
  for (const std::uintptr_t* at = __start___patchable_function_entries;
       at != __stop___patchable_function_entries; ++at) {
    if (*at < entry && entry - *at <= kMax && *at > area) area = *at;
  }
  if (area == 0) return 0;
  // A function without bounds may follow a short one with bounds, which is more than an area.
  constexpr unsigned char kNop = 0x90;
  for (std::uintptr_t at = area; at < entry; ++at) {
    if (*reinterpret_cast<const unsigned char*>(at) != kNop) return 0;
  }
  return static_cast<unsigned>(entry - area) * 32;
}

cudaError_t check_launch(const void* kernel, const Dim3& blocks, unsigned threads,
                         std::size_t shared_bytes, std::size_t arguments) {
  const auto text = [](auto number) { return std::to_string(number); };
  if (blocks.x == 0 || blocks.y == 0 || blocks.z == 0) return cudaErrorInvalidConfiguration;
  if (blocks.x > 0x7fffffffU || blocks.y > 65535 || blocks.z > 65535) {
    return refused(cudaErrorInvalidConfiguration, kernel,
                   "a grid of " + text(blocks.x) + " x " + text(blocks.y) + " x " + text(blocks.z) +
                       " blocks; the most are 2147483647 x 65535 x 65535");
  }
  if (threads == 0 || threads > 1024) {
    return refused(cudaErrorInvalidConfiguration, kernel,
                   "blocks of " + text(threads) + " threads");
  }
  if (const unsigned bound = launch_bound(kernel); bound != 0 && threads > bound) {
    return refused(
        cudaErrorLaunchFailure, kernel,
        "blocks of " + text(threads) + " threads; its launch bounds allow " + text(bound));
  }
  if (shared_bytes > most_shared_memory()) {
    return refused(cudaErrorInvalidValue, kernel,
                   text(shared_bytes) + " bytes of shared memory; compute capability " +
                       text(capability() / 10) + "." + text(capability() % 10) + " has " +
                       text(most_shared_memory()));
  }
  constexpr std::size_t kMaxArguments = 4 * kKibi;
  if (arguments > kMaxArguments) {
    return refused(cudaErrorInvalidValue, kernel,
                   text(arguments) + " bytes of arguments; the most are " + text(kMaxArguments));
  }
  note_launch(kernel, threads, shared_bytes);
  return cudaSuccess;
}

}  // namespace ballast::test::emulation
