#include <algorithm>
#include <array>
#include <cmath>
#include <limits>

#include "ballast/core/error.h"

#include "tools/io_load/tune.h"

namespace ballast::tools {
namespace {

constexpr std::array<Bytes, 5> kBlocks = {256 * kKiB, 512 * kKiB, kMiB, 2 * kMiB, 4 * kMiB};
constexpr std::array<unsigned, 5> kDepths = {4, 8, 16, 32, 64};
/// Default of aio.in_flight_bytes.
constexpr Bytes kMaxInFlight = 64 * kMiB;
constexpr double kTolerance = 0.03;
constexpr std::size_t kLeastFinalists = 3;
constexpr int kTurnsOfRates = 3;
constexpr double kShortestTurn = 0.01;

/// Measures for about `seconds`.
IoResult take_turn(const IoSetting& setting, IoPattern pattern, std::span<IoRegion> regions,
                   double seconds, std::string_view task, const std::atomic<bool>& interrupted) {
  IoLoad load;
  load.pattern = pattern;
  load.block = setting.block;
  load.depth = setting.depth;
  load.backend = setting.backend;
  load.seconds = std::max(seconds, kShortestTurn);
  return run_load(load, regions, task, interrupted);
}

double median_of(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  const std::size_t half = values.size() / 2;
  return values.size() % 2 == 1 ? values[half] : 0.5 * (values[half - 1] + values[half]);
}

/// Distance from a setting that suits most disks, in powers of two. Near settings are tried first.
double strangeness(const IoSetting& setting) {
  return std::abs(std::log2(static_cast<double>(setting.block) / static_cast<double>(kMiB))) +
         std::abs(std::log2(static_cast<double>(setting.depth) / 16.0));
}

/// Rates from few turns are uncertain, so the tolerance is larger.
double tolerance(const std::vector<IoTrial*>& trials) {
  std::size_t turns = std::numeric_limits<std::size_t>::max();
  for (const IoTrial* trial : trials) turns = std::min(turns, trial->rates.size());
  return kTolerance + 0.1 / std::sqrt(static_cast<double>(std::max<std::size_t>(turns, 1)));
}

/// Keeps half of the trials: the fastest few, then those within the tolerance with the least
/// memory, then the others by rate.
void drop_losers(std::vector<IoTrial*>& trials) {
  const std::size_t kept = std::max(kLeastFinalists, (trials.size() + 1) / 2);
  const double reach = 1.0 - tolerance(trials);
  std::stable_sort(trials.begin(), trials.end(),
                   [](const IoTrial* a, const IoTrial* b) { return a->median() > b->median(); });
  const double best = trials.front()->median();
  const auto fastest =
      trials.begin() + std::min<std::ptrdiff_t>(kLeastFinalists, std::ssize(trials));
  const auto tied = std::stable_partition(
      fastest, trials.end(), [&](const IoTrial* trial) { return trial->median() >= reach * best; });
  std::stable_sort(fastest, tied, [](const IoTrial* a, const IoTrial* b) {
    return a->setting.in_flight() < b->setting.in_flight();
  });
  if (trials.size() > kept) trials.resize(kept);
}

}  // namespace

double IoTrial::median() const {
  return rates.empty() ? 0.0 : median_of(rates);
}

std::vector<IoSetting> settings_to_try(const std::vector<std::string>& backends) {
  std::vector<IoSetting> settings;
  for (const std::string& backend : backends) {
    const auto first = static_cast<std::ptrdiff_t>(settings.size());
    for (const Bytes block : kBlocks) {
      for (const unsigned depth : kDepths) {
        IoSetting setting{block, depth, backend};
        const bool coarse = backend != backends.front();
        if (setting.in_flight() > kMaxInFlight || (coarse && strangeness(setting) > 1.5)) continue;
        settings.push_back(std::move(setting));
      }
    }
    std::stable_sort(
        settings.begin() + first, settings.end(),
        [](const IoSetting& a, const IoSetting& b) { return strangeness(a) < strangeness(b); });
  }
  return settings;
}

std::vector<IoTrial> search(const std::vector<IoSetting>& settings, IoRegion& region,
                            double seconds, std::string_view task,
                            const std::atomic<bool>& interrupted) {
  std::vector<IoTrial> trials;
  trials.reserve(settings.size());
  for (const IoSetting& setting : settings) trials.push_back({setting, {}});
  std::vector<IoTrial*> running;
  running.reserve(trials.size());
  for (IoTrial& trial : trials) running.push_back(&trial);
  const double rounds =
      1.0 + std::ceil(std::log2(static_cast<double>(trials.size()) / kLeastFinalists));
  const double turn = seconds / rounds / static_cast<double>(trials.size());
  double spent = 0.0;
  for (double round = 1.0; spent < seconds; ++round) {
    const double until = std::min(seconds, seconds * round / rounds);
    do {
      for (IoTrial* trial : running) {
        if (spent >= seconds) break;
        const IoResult result =
            take_turn(trial->setting, IoPattern::mixed, {&region, 1}, turn, task, interrupted);
        trial->rates.push_back(result.gb_per_second());
        spent += result.seconds;
      }
    } while (spent < until);
    std::erase_if(running, [](const IoTrial* trial) { return trial->rates.empty(); });
    drop_losers(running);
  }
  return trials;
}

std::vector<IoScore> scores_of(const std::vector<IoTrial>& trials) {
  std::vector<IoScore> scores;
  double best = 0.0;
  for (const IoTrial& trial : trials) {
    if (trial.rates.empty()) continue;
    scores.push_back({trial.setting, trial.median()});
    best = std::max(best, trial.median());
  }
  for (IoScore& score : scores) score.share = best > 0.0 ? score.share / best : 1.0;
  return scores;
}

std::optional<std::size_t> doubtful(const std::vector<IoTrial>& trials,
                                    const std::vector<std::string>& backends) {
  const std::vector<IoScore> scores = scores_of(trials);
  if (scores.empty()) return std::nullopt;
  std::size_t enough = 1;
  for (const IoTrial& trial : trials) enough = std::max(enough, (trial.rates.size() + 1) / 2);
  const auto fastest =
      std::max_element(scores.begin(), scores.end(),
                       [](const IoScore& a, const IoScore& b) { return a.share < b.share; });
  for (const IoSetting& deciding : {fastest->setting, choose(scores, backends)}) {
    const auto trial = std::find_if(trials.begin(), trials.end(), [&](const IoTrial& other) {
      return other.setting == deciding;
    });
    if (trial->rates.size() < enough) return static_cast<std::size_t>(trial - trials.begin());
  }
  return std::nullopt;
}

void confirm(std::vector<IoTrial>& trials, const std::vector<std::string>& backends,
             IoRegion& region, double seconds, std::string_view task,
             const std::atomic<bool>& interrupted) {
  const double turn = seconds / static_cast<double>(trials.size());
  double spent = 0.0;
  while (spent < seconds) {
    const auto next = doubtful(trials, backends);
    if (!next) return;
    IoTrial& trial = trials[*next];
    const IoResult result =
        take_turn(trial.setting, IoPattern::mixed, {&region, 1}, turn, task, interrupted);
    trial.rates.push_back(result.gb_per_second());
    spent += result.seconds;
  }
}

std::vector<IoScore> common_scores(const std::vector<std::vector<IoTrial>>& trials_by_path) {
  std::vector<IoScore> common = scores_of(trials_by_path.front());
  for (std::size_t i = 1; i < trials_by_path.size(); ++i) {
    const std::vector<IoScore> scores = scores_of(trials_by_path[i]);
    std::erase_if(common, [&](IoScore& score) {
      const auto found = std::find_if(scores.begin(), scores.end(), [&](const IoScore& other) {
        return other.setting == score.setting;
      });
      if (found == scores.end()) return true;
      score.share = std::min(score.share, found->share);
      return false;
    });
  }
  return common;
}

IoSetting choose(const std::vector<IoScore>& scores, const std::vector<std::string>& backends) {
  expects(!scores.empty(), "choose needs at least one tried setting");
  double best = 0.0;
  for (const IoScore& score : scores) best = std::max(best, score.share);
  const auto rank = [&](const IoScore& score) {
    return std::find(backends.begin(), backends.end(), score.setting.backend) - backends.begin();
  };
  const IoScore* chosen = nullptr;
  const auto better = [&](const IoScore& a, const IoScore& b) {
    if (a.setting.in_flight() != b.setting.in_flight()) {
      return a.setting.in_flight() < b.setting.in_flight();
    }
    if (rank(a) != rank(b)) return rank(a) < rank(b);
    return a.share > b.share;
  };
  for (const IoScore& score : scores) {
    if (score.share < (1.0 - kTolerance) * best) continue;
    if (chosen == nullptr || better(score, *chosen)) chosen = &score;
  }
  return chosen->setting;
}

IoRates measure_rates(const IoSetting& setting, std::span<IoRegion> regions, double seconds,
                      std::string_view task, const std::atomic<bool>& interrupted) {
  constexpr std::array<IoPattern, 3> kPatterns = {IoPattern::read, IoPattern::write,
                                                  IoPattern::mixed};
  std::array<std::vector<double>, kPatterns.size()> rates;
  const double turn = seconds / (kTurnsOfRates * kPatterns.size());
  for (int i = 0; i < kTurnsOfRates; ++i) {
    for (std::size_t pattern = 0; pattern < kPatterns.size(); ++pattern) {
      rates[pattern].push_back(
          take_turn(setting, kPatterns[pattern], regions, turn, task, interrupted).gb_per_second());
    }
  }
  return {median_of(rates[0]), median_of(rates[1]), median_of(rates[2])};
}

}  // namespace ballast::tools
