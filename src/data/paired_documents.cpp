#include <algorithm>
#include <numeric>
#include <utility>
#include <vector>

#include "ballast/core/error.h"
#include "ballast/core/random.h"
#include "ballast/data/sequences.h"

#include "src/data/documents.h"

namespace ballast::data {
namespace {

class PairedDocuments : public SequenceSource {
 public:
  PairedDocuments(std::shared_ptr<const DocumentFiles> files, DocumentRange range,
                  std::uint64_t length, bool shuffle, std::uint64_t seed, bool packed)
      : files_(std::move(files)), length_(length), shuffle_(shuffle), seed_(seed), packed_(packed) {
    for (std::uint64_t first = range.first; first < range.end; first += 2) {
      if (has_targets(first) && has_targets(first + 1)) pairs_.push_back(first);
    }
  }

  [[nodiscard]] std::uint64_t size() const override { return 2 * pairs_.size(); }
  [[nodiscard]] bool packed() const override { return packed_; }
  [[nodiscard]] bool paired() const override { return true; }
  [[nodiscard]] std::uint64_t real_tokens(std::uint64_t n) const override {
    return tokens_of(document(n));
  }
  void read(std::uint64_t n, const SequenceSpans& out) const override {
    const std::uint64_t document = this->document(n);
    const auto tokens = static_cast<std::ptrdiff_t>(tokens_of(document));
    std::vector<std::uint8_t> trained(tokens_of(document));
    files_->read(files_->offsets()[document], out.tokens.first(trained.size()), trained);
    std::fill(out.tokens.begin() + tokens, out.tokens.end(), 0);
    std::fill(out.targets.begin(), out.targets.begin() + tokens, kIgnoredTarget);
    std::fill(out.targets.begin() + tokens, out.targets.end(), kPaddingTarget);
    for (std::size_t i = 1; i < trained.size(); ++i) {
      if (trained[i] != 0) out.targets[i - 1] = out.tokens[i];
    }
    if (!packed_) return;
    std::iota(out.positions.begin(), out.positions.begin() + tokens, 0);
    std::iota(out.positions.begin() + tokens, out.positions.end(), 0);
  }

 private:
  /// Number of tokens of a document that fit.
  [[nodiscard]] std::uint64_t tokens_of(std::uint64_t document) const {
    return std::min(files_->offsets()[document + 1] - files_->offsets()[document], length_);
  }
  /// Returns whether a token that fits is a target. Documents that fit were checked when they were
  /// opened.
  [[nodiscard]] bool has_targets(std::uint64_t document) const {
    std::vector<std::int32_t> tokens(tokens_of(document));
    if (tokens.size() < length_) return tokens.size() > 1;
    std::vector<std::uint8_t> trained(tokens.size());
    files_->read(files_->offsets()[document], tokens, trained);
    return std::any_of(trained.begin() + 1, trained.end(), [](auto mask) { return mask != 0; });
  }
  /// Returns the document of the n-th sequence of the run.
  [[nodiscard]] std::uint64_t document(std::uint64_t n) const {
    const std::uint64_t pair = n / 2 % pairs_.size();
    const std::uint64_t epoch = n / size();
    return pairs_[shuffle_ ? permute(pair, pairs_.size(), epoch_key(seed_, epoch)) : pair] + n % 2;
  }

  std::shared_ptr<const DocumentFiles> files_;
  std::uint64_t length_;
  bool shuffle_;
  std::uint64_t seed_;
  bool packed_;
  std::vector<std::uint64_t> pairs_;  ///< first document of each pair
};

}  // namespace

std::shared_ptr<const SequenceSource> paired(std::shared_ptr<const DocumentFiles> files,
                                             DocumentRange range, std::uint64_t length,
                                             bool shuffle, std::uint64_t seed, bool packed) {
  expects(length >= 1 && range.first <= range.end && range.end < files->offsets().size() &&
              range.first % 2 == 0 && range.end % 2 == 0,
          "documents: the range reaches beyond the files or cuts a pair");
  return std::make_shared<const PairedDocuments>(std::move(files), range, length, shuffle, seed,
                                                 packed);
}

}  // namespace ballast::data
