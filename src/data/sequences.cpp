#include "ballast/data/sequences.h"

#include <algorithm>
#include <bit>
#include <optional>
#include <utility>
#include <vector>

#include "ballast/core/error.h"
#include "ballast/core/random.h"

namespace ballast::data {
namespace {

// Random streams.
constexpr std::uint64_t kEpochStream = 0x6261746368;
constexpr std::uint64_t kOffsetStream = 64;

class Windows : public SequenceSource {
 public:
  Windows(std::shared_ptr<const TokenSource> tokens, TokenRange range, std::uint64_t length,
          bool shuffle, std::uint64_t seed)
      : tokens_(std::move(tokens)), range_(range), length_(length) {
    if (range.size > length) order_.emplace(range.size, length, shuffle, seed);
  }

  [[nodiscard]] std::uint64_t size() const override { return order_ ? order_->windows() : 0; }
  [[nodiscard]] bool packed() const override { return false; }
  [[nodiscard]] std::uint64_t real_tokens(std::uint64_t /*n*/) const override { return length_; }

  void read(std::uint64_t n, const SequenceSpans& out) const override {
    expects(order_.has_value(), "windows: there is none");
    std::vector<std::int32_t> window(length_ + 1);
    tokens_->read(range_.first + order_->start(n), window);
    std::copy(window.begin(), window.end() - 1, out.tokens.begin());
    std::copy(window.begin() + 1, window.end(), out.targets.begin());
  }

 private:
  std::shared_ptr<const TokenSource> tokens_;
  TokenRange range_;
  std::uint64_t length_;
  std::optional<SampleOrder> order_;  ///< empty if there is no window
};

}  // namespace

std::uint64_t epoch_key(std::uint64_t seed, std::uint64_t epoch) {
  return random_u64(seed, epoch, kEpochStream);
}

SampleOrder::SampleOrder(std::uint64_t tokens, std::uint64_t length, bool shuffle,
                         std::uint64_t seed)
    : length_(length), windows_(0), offsets_(1), shuffle_(shuffle), seed_(seed) {
  expects(length >= 1 && tokens > length, "sample order: the data is shorter than one sequence");
  windows_ = (tokens - 1) / length;
  if (shuffle) {
    if (windows_ > 1) --windows_;
    offsets_ = tokens - windows_ * length;
  }
}

std::uint64_t SampleOrder::start(std::uint64_t n) const {
  const auto window = n % windows_;
  if (!shuffle_) return window * length_;
  const auto key = epoch_key(seed_, n / windows_);
  return random_u64(key, 0, kOffsetStream) % offsets_ + permute(window, windows_, key) * length_;
}

std::shared_ptr<const SequenceSource> windows_of(std::shared_ptr<const TokenSource> tokens,
                                                 TokenRange range, std::uint64_t length,
                                                 bool shuffle, std::uint64_t seed) {
  expects(
      length >= 1 && range.first <= tokens->size() && range.size <= tokens->size() - range.first,
      "windows: the range reaches beyond the tokens");
  return std::make_shared<const Windows>(std::move(tokens), range, length, shuffle, seed);
}

}  // namespace ballast::data
