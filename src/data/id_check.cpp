#include <algorithm>
#include <chrono>
#include <span>
#include <string>
#include <unordered_map>
#include <utility>

#include <fmt/format.h>
#include <pthread.h>
#include <sched.h>

#include "ballast/core/error.h"

#include "src/data/training_data.h"

namespace ballast::data {
namespace {

constexpr std::uint64_t kAllAtOnce = std::uint64_t{1} << 24U;
constexpr std::uint64_t kSamples = 256;
constexpr std::uint64_t kSampleLength = std::uint64_t{1} << 14U;
constexpr std::uint64_t kEndLength = std::uint64_t{1} << 10U;
constexpr std::size_t kMaxEnds = 256;
constexpr std::uint64_t kPieceLength = std::uint64_t{1} << 18U;
/// Odd, so that ids at even and at odd places are counted.
constexpr std::size_t kStride = 31;

/// Reads ids and records whether they are all the same.
class Sampler {
 public:
  explicit Sampler(const TokenSource& source) : source_(source) {}

  /// Reads [first, first + count), up to the end of the stream.
  void read(std::uint64_t first, std::uint64_t count) {
    ids_.resize(std::min(count, source_.size() - std::min(first, source_.size())));
    if (ids_.empty()) return;
    source_.read(first, ids_);
    if (read_ == 0) first_ = ids_.front();
    read_ += ids_.size();
    constant_ = constant_ && std::all_of(ids_.begin(), ids_.end(),
                                         [this](std::int32_t id) { return id == first_; });
    for (std::size_t i = 0; i < ids_.size(); i += kStride) ++counts_[ids_[i]];
  }

  /// Warns if nearly all ids are the same.
  void warn_about_one_id() const {
    constexpr std::uint64_t kLong = 4096;
    constexpr double kMax = 0.4;
    if (read_ < kLong) return;
    const auto most =
        std::max_element(counts_.begin(), counts_.end(),
                         [](const auto& a, const auto& b) { return a.second < b.second; });
    std::uint64_t all = 0;
    for (const auto& [id, count] : counts_) all += count;
    const double share = static_cast<double>(most->second) / static_cast<double>(all);
    const std::string file = source_.files().front().string();
    if (constant_) {
      log(LogLevel::warning,
          fmt::format("data: all {} tokens sampled from {} are id {}: is the file complete?", read_,
                      file, first_));
    } else if (share > kMax) {
      log(LogLevel::warning,
          fmt::format("data: {:.0f}% of the tokens sampled from {} are id {}: if this is padding, "
                      "the model is trained on it; tools/prepare.py makes documents without it",
                      100.0 * share, file, most->first));
    }
  }

 private:
  const TokenSource& source_;
  std::vector<std::int32_t> ids_;
  std::uint64_t read_ = 0;
  std::int32_t first_ = 0;
  bool constant_ = true;
  std::unordered_map<std::int32_t, std::uint64_t> counts_;  ///< of every kStride-th id
};

/// Makes the kernel run the thread only on idle CPUs. Best effort.
void take_lowest_priority() {
  const sched_param parameters = {};
  static_cast<void>(pthread_setschedparam(pthread_self(), SCHED_IDLE, &parameters));
}

}  // namespace

bool check_sample(const TokenSource& source) {
  const std::uint64_t size = source.size();
  Sampler sampler(source);
  if (size <= kAllAtOnce) {
    for (std::uint64_t at = 0; at < size; at += kPieceLength) sampler.read(at, kPieceLength);
    sampler.warn_about_one_id();
    return true;
  }
  auto starts = source.starts();
  starts.resize(std::min(starts.size(), kMaxEnds));
  for (const std::uint64_t start : starts) {
    sampler.read(start - std::min(start, kEndLength), 2 * kEndLength);
  }
  for (std::uint64_t i = 0; i < kSamples; ++i) {
    sampler.read((size - kSampleLength) / (kSamples - 1) * i, kSampleLength);
  }
  sampler.read(size - kEndLength, kEndLength);
  sampler.warn_about_one_id();
  return false;
}

IdCheck::IdCheck(std::vector<UncheckedTokens> unchecked, std::uint64_t rank, std::uint64_t world)
    : unchecked_(std::move(unchecked)), rank_(rank), world_(world) {
  if (!unchecked_.empty()) thread_ = std::thread([this] { run(); });
}

IdCheck::~IdCheck() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  changed_.notify_all();
  if (thread_.joinable()) thread_.join();
}

void IdCheck::rethrow() {
  const std::lock_guard lock(mutex_);
  if (found_) std::rethrow_exception(found_);
}

void IdCheck::wait() {
  {
    const std::lock_guard lock(mutex_);
    waiting_ = true;
  }
  changed_.notify_all();
  if (thread_.joinable()) thread_.join();
}

bool IdCheck::pause(double seconds) {
  std::unique_lock lock(mutex_);
  changed_.wait_for(lock, std::chrono::duration<double>(seconds),
                    [this] { return stopping_ || waiting_; });
  return !stopping_;
}

bool IdCheck::check(const TokenSource& source) {
  constexpr double kPausesPerRead = 9.0;
  constexpr double kLongestPause = 1.0;
  std::vector<std::int32_t> ids;
  const std::uint64_t step = kPieceLength * world_;
  for (std::uint64_t at = kPieceLength * rank_; at < source.size(); at += step) {
    const auto start = std::chrono::steady_clock::now();
    ids.resize(std::min(kPieceLength, source.size() - at));
    source.read(at, ids);
    const std::chrono::duration<double> spent = std::chrono::steady_clock::now() - start;
    if (!pause(std::min(kPausesPerRead * spent.count(), kLongestPause))) return false;
  }
  return true;
}

void IdCheck::run() {
  take_lowest_priority();
  for (const auto& [key, source] : unchecked_) {
    try {
      if (!check(*source)) return;
    } catch (const Error& error) {
      // Data that cannot be read now may never be needed by the run.
      if (error.category() != ErrorCategory::data) {
        log(LogLevel::warning,
            fmt::format("data.{}: the check of all ids has stopped: {}", key, error.what()));
        continue;
      }
      const std::lock_guard lock(mutex_);
      found_ = std::make_exception_ptr(error.with_context(fmt::format("data.{}", key)));
      return;
    } catch (...) {
      const std::lock_guard lock(mutex_);
      found_ = std::current_exception();
      return;
    }
  }
}

}  // namespace ballast::data
