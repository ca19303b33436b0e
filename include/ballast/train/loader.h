#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "ballast/train/tokens.h"

namespace ballast::train {

/// One rank's tokens of one step. `tokens` and `targets` both have
/// [micro_batches][sequences][length] ids; targets are the tokens one position further.
struct Batch {
  std::uint64_t step = 0;  ///< from 1; 0 for an evaluation batch
  std::vector<std::int32_t> tokens;
  std::vector<std::int32_t> targets;
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

  /// First token of sample `n`, from 0: the window is [start(n), start(n) + length + 1).
  [[nodiscard]] std::uint64_t start(std::uint64_t n) const;
  [[nodiscard]] std::uint64_t windows() const { return windows_; }

 private:
  std::uint64_t length_;
  std::uint64_t windows_;  ///< samples in one epoch
  std::uint64_t offsets_;  ///< number of possible offsets
  bool shuffle_;
  std::uint64_t seed_;
};

struct LoaderOptions {
  std::uint64_t micro_batches = 1;
  std::uint64_t sequences = 1;  ///< per micro-batch and rank
  std::uint64_t length = 0;     ///< tokens per sequence
  bool shuffle = true;
  std::uint64_t seed = 0;
  std::uint64_t first_step = 1;  ///< step of the first batch of next(); larger for a resumed run
  std::uint64_t prefetch = 2;    ///< batches kept ready, at least 1
  std::uint64_t rank = 0;
  std::uint64_t world = 1;
};

/// Assigns held-out micro-batches to a rank. All ranks together take them in order, so the result
/// does not depend on the number of ranks if they share them evenly.
struct EvaluationShare {
  std::uint64_t together = 1;  ///< micro-batches of a rank in one run of the evaluation plan
  std::uint64_t rank = 0;
  std::uint64_t world = 1;

  /// Runs of the evaluation plan for `requested` of the `available` micro-batches, at least one.
  [[nodiscard]] std::uint64_t runs(std::uint64_t requested, std::uint64_t available) const;
  /// The held-out micro-batch that is number `micro` of this rank in run `run`. Repeats held-out
  /// data that is too short (`available`, at least 1).
  [[nodiscard]] std::uint64_t index(std::uint64_t run, std::uint64_t micro,
                                    std::uint64_t available) const;
};

/// Batches of a run. A step of all ranks has B = world * micro_batches * sequences sequences, in
/// the order of the training part's SampleOrder for every number of ranks: step k starts at sample
/// (k - 1) * B. Rank r takes the r-th of `world` equal parts, micro-batch by micro-batch. The batch
/// is a pure function of (source, split, options, k), and so a resumed run sees the same batches.
class Loader {
 public:
  /// Starts a thread that reads `source` and keeps `prefetch` batches ready.
  Loader(std::shared_ptr<const TokenSource> source, const TokenSplit& split,
         const LoaderOptions& options);
  /// Stops the thread; waits at most the time of reading one batch.
  ~Loader();
  Loader(const Loader&) = delete;
  Loader& operator=(const Loader&) = delete;

  /// The batch of the next step; waits until it is ready. Rethrows an error of reading, on this and
  /// every later call. Not thread-safe.
  Batch next();

  /// The batch of any step (from 1), read on the calling thread.
  [[nodiscard]] Batch batch(std::uint64_t step) const;

  /// Number of whole micro-batches in the held-out part.
  [[nodiscard]] std::uint64_t evaluation_batches() const;
  /// Micro-batch `index` (below evaluation_batches()) of the held-out part, in the order of the
  /// files: [sequences][length].
  [[nodiscard]] Batch evaluation_batch(std::uint64_t index) const;

 private:
  struct Worker;
  std::unique_ptr<Worker> worker_;
};

}  // namespace ballast::train
