#pragma once

#include <cstdint>
#include <memory>
#include <span>

#include "ballast/data/tokens.h"
#include "ballast/model/kernels.h"

namespace ballast::data {

using model::kIgnoredTarget;
using model::kPaddingTarget;

/// Output arrays for one sequence, with `length` elements each.
struct SequenceSpans {
  std::span<std::int32_t> tokens;
  std::span<std::int32_t> targets;  ///< the next token, kIgnoredTarget or kPaddingTarget
  /// Position of each token in its document, from 0; empty if the source is not packed.
  std::span<std::int32_t> positions;
};

/// The sequences of a run or an evaluation. Const members may be called from several threads.
class SequenceSource {
 public:
  virtual ~SequenceSource() = default;

  /// Sequences per epoch; may be 0 for an evaluation.
  [[nodiscard]] virtual std::uint64_t size() const = 0;
  /// Returns whether sequences have positions, so that each may have several documents and padding.
  [[nodiscard]] virtual bool packed() const = 0;
  /// Returns whether sequences 2 i and 2 i + 1 are a pair, each padded to `length`.
  [[nodiscard]] virtual bool paired() const { return false; }
  /// Tokens of the n-th sequence of the run without padding, computed without reading it.
  [[nodiscard]] virtual std::uint64_t real_tokens(std::uint64_t n) const = 0;
  /// Reads the n-th sequence of the run. Epochs follow each other. Throws like TokenSource::read().
  virtual void read(std::uint64_t n, const SequenceSpans& out) const = 0;
};

/// Maps the n-th sample of a run to a window of `length` inputs plus one target. A pure function
/// of its arguments, in constant memory.
///
/// In order (no shuffle): sample n starts at token (n mod W) * length, W = (tokens - 1) / length.
/// Shuffled: each epoch cuts the tokens into windows anew, from a random offset below
/// length + remainder, which leaves W - 1 windows (W if W is 1), and visits each of them once, in
/// the order of a Feistel permutation over Philox with cycle walking, keyed by (seed, epoch).
class SampleOrder {
 public:
  /// `tokens` >= length + 1 >= 2, else Error(state).
  SampleOrder(std::uint64_t tokens, std::uint64_t length, bool shuffle, std::uint64_t seed);

  /// Returns the first token of sample `n`, from 0: the window is [start(n), start(n) + length +
  /// 1).
  [[nodiscard]] std::uint64_t start(std::uint64_t n) const;
  [[nodiscard]] std::uint64_t windows() const { return windows_; }

 private:
  std::uint64_t length_;
  std::uint64_t windows_;  ///< samples per epoch
  std::uint64_t offsets_;  ///< number of possible offsets
  bool shuffle_;
  std::uint64_t seed_;
};

/// Returns the windows of `range` in a stream of tokens, in the order of SampleOrder; empty if the
/// range is too short for one. Throws Error(state) for a range beyond the tokens.
std::shared_ptr<const SequenceSource> windows_of(std::shared_ptr<const TokenSource> tokens,
                                                 TokenRange range, std::uint64_t length,
                                                 bool shuffle, std::uint64_t seed);

/// Returns the key for the order of epoch `epoch`, distinct from all other uses of `seed`.
std::uint64_t epoch_key(std::uint64_t seed, std::uint64_t epoch);

}  // namespace ballast::data
