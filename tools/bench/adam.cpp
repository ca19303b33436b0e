#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <limits>
#include <memory>
#include <numeric>
#include <optional>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include "ballast/core/clocks.h"
#include "ballast/core/error.h"
#include "ballast/core/machine.h"
#include "ballast/core/random.h"
#include "ballast/cpu_adam/updater.h"
#include "ballast/memory/machine.h"
#include "ballast/text/json.h"

#include "tools/bench/adam_data.h"
#include "tools/bench/bench.h"
#include "tools/command_line.h"
#include "tools/signals.h"

namespace ballast::tools {
namespace {

struct BenchAdamArguments {
  std::vector<std::string> params = {"64Mi"};
  std::vector<std::string> variants = {"adamw-bf16", "adamw-fp32", "adamw-master-bf16",
                                       "adamw-bf16-m16", "adamw-bf16-8bit"};
  std::vector<std::string> isas;
  std::vector<int> threads;
  std::uint64_t repeats = 7;
  double seconds = 1.0;
  std::optional<int> numa_node;
  bool no_check = false;
  bool json = false;
  PageFile html;
};

struct AdamCase {
  const AdamVariant* variant = nullptr;
  Elems params = 0;
  Isa isa = Isa::scalar;
  int threads = 1;
};

struct AdamResult {
  AdamCase subject;
  std::uint64_t repeats = 0;
  double median_seconds = 0.0;
  double min_seconds = 0.0;
  double p99_seconds = 0.0;
  double ceiling_seconds = 0.0;   ///< median over the rounds of the fastest way
  double share_of_ceiling = 0.0;  ///< median over the rounds
  bool checked = false;
  std::string mistake;  ///< result of a failed check

  [[nodiscard]] double gparams_per_second() const {
    return static_cast<double>(subject.params) / median_seconds * 1e-9;
  }
  [[nodiscard]] double bytes() const {
    return static_cast<double>(subject.params) *
           static_cast<double>(subject.variant->traffic.bytes_per_element());
  }
  [[nodiscard]] double gb_per_second() const { return bytes() / median_seconds * 1e-9; }
  [[nodiscard]] double ceiling_gb_per_second() const { return bytes() / ceiling_seconds * 1e-9; }
};

constexpr Elems kFewestParams = cpu_adam::Codes::kBlock;
constexpr Elems kCheckedElements = 4096;
constexpr int kWarmUps = 2;
/// Numbers of ways to move the bytes that the rounds measure, and of elements and tries per way
/// when these are selected.
constexpr std::size_t kFinalists = 5;
constexpr Elems kScreenedElements = Elems{32} * 1024 * 1024;
constexpr int kScreenings = 5;
/// Elements per slice. A round alternates between the update and the ways after each slice, since
/// the bandwidth of a shared machine changes by half from one second to the next. A slice has many
/// times the bytes of a last-level cache, so what the previous one left there to be written back
/// hardly counts.
constexpr Elems kSliceElements = Elems{16} * 1024 * 1024;

void stop_if_interrupted() {
  if (interrupted()) throw Error(ErrorCategory::interrupted, "interrupted");
}

/// The vector instruction sets; the scalar one is slow and only for comparing results.
std::vector<Isa> default_isas() {
  std::vector<Isa> isas = cpu_adam::available();
  if (isas.size() > 1) std::erase(isas, Isa::scalar);
  return isas;
}

void require_memory(const AdamCase& subject, Bytes available) {
  const Bytes needed = AdamArrays::bytes_needed(*subject.variant, subject.params);
  if (needed <= available) return;
  const Elems fitting = AdamArrays::elements_in(*subject.variant, available);
  const std::string size =
      fitting >= kMiB ? fmt::format("{}Mi", fitting / kMiB) : fmt::format("{}", fitting);
  throw Error(ErrorCategory::memory,
              fmt::format("bench adam: {} with {} parameters needs {} of memory and {} is free; "
                          "--params {} would fit",
                          subject.variant->name, subject.params, format_bytes(needed),
                          format_bytes(available), size));
}

Elems parse_params(const std::string& text) {
  try {
    return parse_count(text);
  } catch (const Error& error) {
    throw Error(error.category(), fmt::format("bench adam: --params: {}", error.what()));
  }
}

/// The sweep. Checked before anything is allocated. Throws Error.
std::vector<AdamCase> make_cases(const BenchAdamArguments& arguments) {
  std::vector<Isa> isas;
  for (const auto& name : arguments.isas) isas.push_back(parse_isa(name));
  if (isas.empty()) isas = default_isas();
  std::vector<int> threads = arguments.threads;
  if (threads.empty()) threads = {0};
  for (int& count : threads) {
    for (const Isa isa : isas) {
      count = cpu_adam::Updater({count, isa, arguments.numa_node}).threads();
    }
  }
  const Bytes available = memory::available_memory();
  std::vector<AdamCase> cases;
  for (const auto& name : arguments.variants) {
    const AdamVariant& variant = find_adam_variant(name);
    for (const auto& text : arguments.params) {
      const Elems params = parse_params(text);
      if (params < kFewestParams) {
        throw Error(ErrorCategory::usage,
                    fmt::format("bench adam: --params {}: give at least {}", text, kFewestParams));
      }
      for (const int count : threads) {
        for (const Isa isa : isas) cases.push_back({&variant, params, isa, count});
      }
      require_memory(cases.back(), available);
    }
  }
  return cases;
}

/// Hyperparameters of a run with clipping: weight decay, and a scale that is not a power of two.
cpu_adam::Hyper hyper_of(cpu_adam::Optimizer optimizer, std::int64_t step) {
  cpu_adam::Hyper hyper;
  hyper.optimizer = optimizer;
  hyper.learning_rate = 1e-4;
  hyper.weight_decay = 0.1;
  hyper.gradient_scale = 0.37F;
  hyper.step = step;
  return hyper;
}

/// The first element, the last one, and one from each of equal parts between them.
std::vector<Elems> sample(Elems size) {
  const Elems parts = std::min(size, kCheckedElements) - 1;
  std::vector<Elems> indices = {0};
  for (Elems part = 0; part + 1 < parts; ++part) {
    const Elems start = size / parts * part;
    indices.push_back(start + random_u64(2, part) % (size / parts));
  }
  indices.push_back(size - 1);
  return indices;
}

bool finite(const cpu_adam::Element& element) {
  return std::isfinite(element.weight) && std::isfinite(element.first) &&
         std::isfinite(element.second);
}

/// Compares one more step with a reference in double precision. Returns "" if all elements are
/// correct.
std::string check_step(const cpu_adam::Updater& updater, const AdamArrays& arrays,
                       const cpu_adam::Hyper& hyper) {
  const cpu_adam::Shard& shard = arrays.shard();
  const std::vector<Elems> indices = sample(shard.size);
  std::vector<cpu_adam::Element> before;
  before.reserve(indices.size());
  for (const Elems index : indices) {
    before.push_back(cpu_adam::read_element(hyper.optimizer, shard, index));
  }
  updater.step(hyper, shard);
  std::size_t changed = 0;
  for (std::size_t i = 0; i < indices.size(); ++i) {
    const auto after = cpu_adam::read_element(hyper.optimizer, shard, indices[i]);
    const double error = cpu_adam::reference_error(hyper, shard.moments.format, before[i], after);
    if (!(error <= 1.0)) {
      return fmt::format("element {} is {:.3g} times as far from the double reference as allowed",
                         indices[i], error);
    }
    if (!finite(after)) return fmt::format("element {} is not finite", indices[i]);
    if (!arrays.copy_is_right(indices[i])) {
      return fmt::format("the 16-bit copy of element {} is not its rounded master weight",
                         indices[i]);
    }
    changed += after.weight != before[i].weight ? 1 : 0;
  }
  if (changed < indices.size() / 2) {
    return fmt::format("only {} of {} weights changed", changed, indices.size());
  }
  return "";
}

/// Memory bandwidth ceiling of an update. It moves the same bytes in several ways without
/// arithmetic. The fastest way is the ceiling, or the update itself if it is faster.
class Ceiling {
 public:
  Ceiling(const AdamCase& subject, std::optional<int> numa_node, const cpu_adam::Shard& shard)
      : optimizer_(subject.variant->optimizer), shard_(shard) {
    std::vector<Isa> isas = {subject.isa};
    for (const Isa isa : default_isas()) {
      if (isa != subject.isa) isas.push_back(isa);
    }
    for (const int threads : {subject.threads, subject.threads / 2}) {
      if (threads == 0) continue;
      for (const Isa isa : isas) {
        const auto updater = std::make_shared<const cpu_adam::Updater>(
            cpu_adam::UpdaterOptions{threads, isa, numa_node});
        for (const cpu_adam::TouchWay& way : cpu_adam::touch_ways()) {
          ways_.push_back({updater, way});
        }
      }
    }
    keep_the_fastest();
  }

  [[nodiscard]] std::size_t ways() const { return ways_.size(); }
  /// Seconds to move the bytes of `part` once.
  [[nodiscard]] double seconds(std::size_t way, const cpu_adam::Shard& part) const {
    return seconds_of(ways_[way], part);
  }

 private:
  struct Way {
    std::shared_ptr<const cpu_adam::Updater> updater;
    cpu_adam::TouchWay way;
  };

  [[nodiscard]] double seconds_of(const Way& way, const cpu_adam::Shard& shard) const {
    stop_if_interrupted();
    return tools::seconds_of([&] { way.updater->touch(optimizer_, shard, way.way); });
  }

  /// Always keeps the first way, which is the update without arithmetic.
  void keep_the_fastest() {
    cpu_adam::Shard part = shard_;
    part.size = std::min(part.size, kScreenedElements);
    std::vector<std::pair<double, std::size_t>> order;
    for (std::size_t i = 0; i < ways_.size(); ++i) {
      double best = seconds_of(ways_[i], part);
      for (int n = 1; n < kScreenings; ++n) best = std::min(best, seconds_of(ways_[i], part));
      order.emplace_back(best, i);
    }
    std::sort(order.begin() + 1, order.end());
    std::vector<Way> kept;
    for (std::size_t i = 0; i < std::min(kFinalists, order.size()); ++i) {
      kept.push_back(ways_[order[i].second]);
    }
    ways_ = std::move(kept);
  }

  cpu_adam::Optimizer optimizer_;
  const cpu_adam::Shard& shard_;
  std::vector<Way> ways_;
};

/// Cuts the shard into slices of about kSliceElements.
std::vector<cpu_adam::Shard> slices_of(const cpu_adam::Shard& shard) {
  std::vector<cpu_adam::Shard> slices;
  for (Elems first = 0; first < shard.size; first += kSliceElements) {
    slices.push_back(part_of(shard, first, std::min(kSliceElements, shard.size - first)));
  }
  return slices;
}

/// Seconds of one update of all elements, and of moving their bytes in each way.
struct Round {
  double step = 0.0;
  std::vector<double> ways;

  [[nodiscard]] double total() const { return std::accumulate(ways.begin(), ways.end(), step); }
};

/// Runs the update and the ways in turn, slice by slice, in random order, because each writes back
/// what the previous one left in the caches. Each gets another slice, so that none finds its bytes
/// in a cache.
Round run_round(const std::vector<cpu_adam::Shard>& slices, const Ceiling& ceiling,
                std::vector<std::size_t>& order, std::mt19937& random, const auto& update) {
  Round round{.ways = std::vector<double>(ceiling.ways())};
  const std::size_t apart = std::max<std::size_t>(1, slices.size() / order.size());
  for (std::size_t slice = 0; slice < slices.size(); ++slice) {
    std::shuffle(order.begin(), order.end(), random);
    for (const std::size_t one : order) {
      stop_if_interrupted();
      const cpu_adam::Shard& part = slices[(slice + one * apart) % slices.size()];
      if (one < ceiling.ways()) {
        round.ways[one] += ceiling.seconds(one, part);
      } else {
        round.step += seconds_of([&] { update(part); });
      }
    }
  }
  return round;
}

AdamResult measure(const AdamCase& subject, const BenchAdamArguments& arguments) {
  const cpu_adam::Updater updater({subject.threads, subject.isa, arguments.numa_node});
  const AdamVariant& variant = *subject.variant;
  stop_if_interrupted();
  const AdamArrays arrays(updater, variant, subject.params);
  std::int64_t steps = 0;
  const auto update = [&](const cpu_adam::Shard& shard) {
    updater.step(hyper_of(variant.optimizer, steps), shard);
  };
  for (int i = 0; i < kWarmUps; ++i) {
    stop_if_interrupted();
    ++steps;
    update(arrays.shard());
  }
  const Ceiling ceiling(subject, arguments.numa_node, arrays.shard());
  const std::vector<cpu_adam::Shard> slices = slices_of(arrays.shard());
  std::vector<std::size_t> order(ceiling.ways() + 1);  // the ways, then the update
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::mt19937 random(1);
  std::vector<double> step_seconds;
  std::vector<std::vector<double>> way_seconds(ceiling.ways());
  double total = 0.0;
  while (step_seconds.size() < arguments.repeats || total < arguments.seconds) {
    ++steps;
    const Round round = run_round(slices, ceiling, order, random, update);
    step_seconds.push_back(round.step);
    for (std::size_t way = 0; way < ceiling.ways(); ++way) {
      way_seconds[way].push_back(round.ways[way]);
    }
    total += round.total();
  }
  AdamResult result;
  result.subject = subject;
  result.repeats = step_seconds.size();
  result.median_seconds = quantile(step_seconds, 0.5);
  result.min_seconds = quantile(step_seconds, 0.0);
  result.p99_seconds = quantile(step_seconds, 0.99);
  result.ceiling_seconds = std::numeric_limits<double>::infinity();
  for (const std::vector<double>& way : way_seconds) {
    std::vector<double> shares;
    for (std::size_t i = 0; i < way.size(); ++i) shares.push_back(way[i] / step_seconds[i]);
    // The faster a way is, the smaller the update's share of it.
    const double share = quantile(shares, 0.5);
    if (result.share_of_ceiling > 0.0 && share >= result.share_of_ceiling) continue;
    result.share_of_ceiling = share;
    result.ceiling_seconds = quantile(way, 0.5);
  }
  // An update that beats all ways proves a higher ceiling.
  result.share_of_ceiling = std::min(result.share_of_ceiling, 1.0);
  result.ceiling_seconds = std::min(result.ceiling_seconds, result.median_seconds);
  if (!arguments.no_check) {
    result.mistake = check_step(updater, arrays, hyper_of(variant.optimizer, ++steps));
    result.checked = result.mistake.empty();
  }
  return result;
}

/// The kernel's setting for transparent huge pages: "madvise", "always" or "never".
std::string huge_pages() {
  std::ifstream file("/sys/kernel/mm/transparent_hugepage/enabled");
  std::string word;
  while (file >> word) {
    if (word.front() == '[') return word.substr(1, word.size() - 2);
  }
  return "unknown";
}

void print_machine() {
  fmt::print("{}\n{}, huge pages: {}\n", cpu_name(), memory::describe(memory::read_topology()),
             huge_pages());
}

void print_variant(const AdamVariant& variant) {
  fmt::print("\n{}: {}\n", variant.name, variant.traffic.formula());
  fmt::print("  {:<6} {:>3} {:>6} {:>8} {:>8} {:>8} {:>6} {:>5} {:>7} {:>6} {:>5}\n", "isa", "thr",
             "params", "median", "min", "p99", "Gpar/s", "GB/s", "ceiling", "share", "check");
  std::fflush(stdout);
}

std::string milliseconds(double seconds) {
  return fmt::format("{:.{}f}ms", seconds * 1e3, seconds < 1.0 ? 2 : 0);
}

void print_row(const AdamResult& result, bool requested_check) {
  const AdamCase& subject = result.subject;
  const bool whole = subject.params % kMiB == 0;
  const std::string params = whole ? fmt::format("{}Mi", subject.params / kMiB)
                                   : format_count(static_cast<double>(subject.params));
  const char* check = !requested_check ? "-" : result.checked ? "ok" : "WRONG";
  fmt::print("  {:<6} {:>3} {:>6} {:>8} {:>8} {:>8} {:>6.3f} {:>5.1f} {:>7.1f} {:>5.1f}% {:>5}\n",
             to_string(subject.isa), subject.threads, params, milliseconds(result.median_seconds),
             milliseconds(result.min_seconds), milliseconds(result.p99_seconds),
             result.gparams_per_second(), result.gb_per_second(), result.ceiling_gb_per_second(),
             100.0 * result.share_of_ceiling, check);
  std::fflush(stdout);
}

text::Json json_of(const AdamResult& result) {
  const AdamCase& subject = result.subject;
  return text::Json::object({{"variant", subject.variant->name},
                             {"isa", to_string(subject.isa)},
                             {"threads", subject.threads},
                             {"params", subject.params},
                             {"bytes_per_param", subject.variant->traffic.bytes_per_element()},
                             {"repeats", result.repeats},
                             {"median_seconds", result.median_seconds},
                             {"min_seconds", result.min_seconds},
                             {"p99_seconds", result.p99_seconds},
                             {"gparams_per_second", result.gparams_per_second()},
                             {"gb_per_second", result.gb_per_second()},
                             {"ceiling_gb_per_second", result.ceiling_gb_per_second()},
                             {"percent_of_ceiling", 100.0 * result.share_of_ceiling},
                             {"checked", result.checked}});
}

void run_bench_adam(const BenchAdamArguments& arguments) {
  const std::vector<AdamCase> cases = make_cases(arguments);
  const BenchPage page("adam", arguments.html);
  if (!arguments.json) print_machine();
  const AdamVariant* shown = nullptr;
  text::Json json = text::Json::array();
  std::string mistake;
  for (const AdamCase& subject : cases) {
    if (!arguments.json && subject.variant != shown) print_variant(*subject.variant);
    shown = subject.variant;
    const AdamResult result = measure(subject, arguments);
    if (!arguments.json) print_row(result, !arguments.no_check);
    json.push_back(json_of(result));
    if (mistake.empty() && !result.mistake.empty()) {
      mistake = fmt::format("bench adam: {} on {}: {}", subject.variant->name,
                            to_string(subject.isa), result.mistake);
    }
  }
  if (arguments.json) fmt::print("{}\n", json.pretty(1));
  if (mistake.empty()) page.write(json, !arguments.json);
  if (!mistake.empty()) throw Error(ErrorCategory::numeric, mistake);
}

}  // namespace

void add_bench_adam(Command bench) {
  auto arguments = std::make_shared<BenchAdamArguments>();
  auto& a = *arguments;
  Command command = bench.add_command("adam",
                                      "CPU optimizer updates as a share of the memory bandwidth "
                                      "(comma-separated lists measure all combinations)");
  command.add_option("--params", &a.params, "Number of parameters, for example 256Mi",
                     {.commas = true, .single_argument = true, .initial = "64Mi"});
  command.add_option("--variant", &a.variants,
                     "Optimizer (" + listed(cpu_adam::optimizer_names()) +
                         ") and layout (bf16, fp32, master-bf16, master-fp16, bf16-m16, "
                         "bf16-8bit), for example adamw-bf16",
                     {.commas = true, .single_argument = true});
  command.add_option(
      "--isa", &a.isas,
      "scalar, neon, avx2 or avx512 (default: all vector instruction sets of this CPU)",
      {.commas = true, .single_argument = true, .values = {"scalar", "neon", "avx2", "avx512"}});
  command.add_option("--threads", &a.threads, "Threads (default: all usable CPUs)",
                     {.commas = true, .single_argument = true, .range = std::pair(1, 4096)});
  add_limits(command, a.repeats, a.seconds);
  command.add_option("--numa-node", &a.numa_node,
                     "Use the CPUs and memory of this NUMA node (from 0)");
  command.add_flag("--no-check", &a.no_check, "Skip the comparison with a reference in double");
  command.add_flag("--json", &a.json, "Print a JSON array");
  BenchPage::add_options(command, a.html);
  command.set_action([arguments] { run_bench_adam(*arguments); });
}

}  // namespace ballast::tools
