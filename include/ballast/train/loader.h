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

/// Which window of `length` inputs plus one target the n-th sample of a run is. A pure function of
/// its arguments, in constant memory.
///
/// In order (no shuffle): sample n starts at token (n mod W) * length, W = (tokens - 1) / length.
/// Shuffled: each epoch cuts the tokens into windows anew, from a random offset below
/// length + remainder, which leaves W - 1 windows (W if that is 1), and visits every one of them
/// once, in an order of its own: a Feistel permutation over Philox with cycle walking, keyed by
/// (seed, epoch).
class SampleOrder {
 public:
  /// `tokens` >= length + 1 >= 2, else Error(state).
  SampleOrder(std::uint64_t tokens, std::uint64_t length, bool shuffle, std::uint64_t seed);

  /// First token of sample `n`, from 0: the window is [start(n), start(n) + length + 1).
  [[nodiscard]] std::uint64_t start(std::uint64_t n) const;
  /// Samples in one epoch.
  [[nodiscard]] std::uint64_t windows() const { return windows_; }

 private:
  std::uint64_t length_;
  std::uint64_t windows_;
  std::uint64_t offsets_;  // number of possible offsets
  bool shuffle_;
  std::uint64_t seed_;
};

struct LoaderOptions {
  std::uint64_t micro_batches = 1;
  std::uint64_t sequences = 1;  ///< per micro-batch and rank
  std::uint64_t length = 0;     ///< tokens of a sequence
  bool shuffle = true;
  std::uint64_t seed = 0;
  std::uint64_t first_step = 1;  ///< what next() returns first; a resumed run gives its next step
  std::uint64_t prefetch = 2;    ///< batches kept ready, at least 1
  std::uint64_t rank = 0;
  std::uint64_t world = 1;
};

/// Which held-out micro-batches a rank takes in an evaluation: all ranks together take them in
/// order, so what is evaluated does not depend on the number of ranks as long as they share it
/// evenly.
struct EvaluationShare {
  std::uint64_t together = 1;  ///< micro-batches of a rank in one run of the evaluation plan
  std::uint64_t rank = 0;
  std::uint64_t world = 1;

  /// Runs that evaluate `wanted` of the micro-batches that are `there`: whole ones, at least one.
  [[nodiscard]] std::uint64_t runs(std::uint64_t wanted, std::uint64_t there) const;
  /// The held-out micro-batch that is number `micro` of this rank in run `run`; a held-out part
  /// that is too short (`there`, at least 1) is repeated.
  [[nodiscard]] std::uint64_t index(std::uint64_t run, std::uint64_t micro,
                                    std::uint64_t there) const;
};

/// Batches of a run. A step of all ranks has B = world * micro_batches * sequences sequences, in
/// the order of the training part's SampleOrder whatever the number of ranks: those from
/// (k - 1) * B on in step k. Rank r takes the r-th of `world` equal parts, micro-batch by
/// micro-batch. So the batch is a pure function of (source, split, options, k), and a resumed run
/// sees the same ones.
class Loader {
 public:
  /// Starts a thread that keeps `prefetch` batches ready. `source` is shared with that thread.
  Loader(std::shared_ptr<const TokenSource> source, const TokenSplit& split,
         const LoaderOptions& options);
  /// Stops the thread and waits for it: at most the time of reading one batch.
  ~Loader();
  Loader(const Loader&) = delete;
  Loader& operator=(const Loader&) = delete;

  /// The batch of the next step; waits until it is ready. Throws what reading it threw, on this and
  /// every later call. Not for several threads at a time.
  Batch next();

  /// The batch of any step (from 1), read on the calling thread.
  [[nodiscard]] Batch batch(std::uint64_t step) const;

  /// Micro-batches in the held-out part: whole ones only, 0 when it is too short for one.
  [[nodiscard]] std::uint64_t evaluation_batches() const;
  /// Micro-batch `index` (below evaluation_batches()) of the held-out part: [sequences][length], in
  /// the order of the files, the same in every run with the same split.
  [[nodiscard]] Batch evaluation_batch(std::uint64_t index) const;

 private:
  struct Worker;
  std::unique_ptr<Worker> worker_;
};

}  // namespace ballast::train
