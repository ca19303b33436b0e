#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "ballast/data/sequences.h"

namespace ballast::data {

/// One rank's tokens of one step. `tokens`, `targets` and, of a packed source, `positions` have
/// [micro_batches][sequences][length] elements; see SequenceSpans.
struct Batch {
  std::uint64_t step = 0;  ///< from 1; 0 for an evaluation batch
  std::vector<std::int32_t> tokens;
  std::vector<std::int32_t> targets;
  std::vector<std::int32_t> positions;  ///< empty: every sequence is one document
  /// Tokens of the step that are not padding, of all ranks; those of this batch for an evaluation.
  std::uint64_t real_tokens = 0;

  /// Adds the sequences of `other` behind those of this batch.
  void append(const Batch& other);
};

struct LoaderOptions {
  std::uint64_t micro_batches = 1;
  std::uint64_t sequences = 1;   ///< per micro-batch and rank
  std::uint64_t length = 0;      ///< tokens per sequence
  std::uint64_t first_step = 1;  ///< step of the first batch of next(); larger for a resumed run
  std::uint64_t skipped = 0;     ///< batches that are left out: step k takes batch k + skipped
  std::uint64_t prefetch = 2;    ///< batches kept ready, at least 1
  std::uint64_t rank = 0;
  std::uint64_t world = 1;
};

/// Assigns held-out micro-batches to a rank. All ranks together take each of them once, in order;
/// what is missing to a whole run of the evaluation plan is padding, which has no targets. So the
/// result is the mean over the same targets for every number of ranks and every accumulation.
struct EvaluationShare {
  std::uint64_t together = 1;  ///< micro-batches of a rank in one run of the evaluation plan
  std::uint64_t rank = 0;
  std::uint64_t world = 1;

  /// Runs of the evaluation plan for `requested` of the `available` micro-batches.
  [[nodiscard]] std::uint64_t runs(std::uint64_t requested, std::uint64_t available) const;
  /// The held-out micro-batch that is number `micro` of this rank in run `run`, or `available` for
  /// padding after the last requested one.
  [[nodiscard]] std::uint64_t index(std::uint64_t run, std::uint64_t micro, std::uint64_t requested,
                                    std::uint64_t available) const;
};

/// The micro-batches of an evaluation, in the order of their source.
class EvaluationBatches {
 public:
  /// Micro-batches of `sequences` sequences of `length` tokens; `source` may be null. A last one
  /// with fewer sequences is filled with padding.
  EvaluationBatches(std::shared_ptr<const SequenceSource> source, std::uint64_t sequences,
                    std::uint64_t length);

  [[nodiscard]] std::uint64_t size() const;
  /// Micro-batch `index`: [sequences][length]. It is all padding, without targets, from size() on.
  [[nodiscard]] Batch batch(std::uint64_t index) const;

 private:
  std::shared_ptr<const SequenceSource> source_;
  std::uint64_t sequences_;
  std::uint64_t length_;
};

/// Batches of a run. A step of all ranks has B = world * micro_batches * sequences sequences, in
/// the order of the source for every number of ranks: step k starts at sequence (k - 1 + skipped) *
/// B. Rank r takes the r-th of `world` equal parts, micro-batch by micro-batch. The batch is a pure
/// function of (source, options, k), and so a resumed run sees the same batches.
class Loader {
 public:
  /// Starts a thread that reads `training` (not empty) and keeps `prefetch` batches ready.
  /// `evaluation` may be null.
  Loader(std::shared_ptr<const SequenceSource> training,
         std::shared_ptr<const SequenceSource> evaluation, const LoaderOptions& options);
  /// Stops the thread; waits at most the time of reading one batch.
  ~Loader();
  Loader(const Loader&) = delete;
  Loader& operator=(const Loader&) = delete;

  /// The batch of the next step; waits until it is ready. Rethrows an error of reading, on this and
  /// every later call. Not thread-safe.
  Batch next();

  /// The batch of any step (from 1), read on the calling thread.
  [[nodiscard]] Batch batch(std::uint64_t step) const;

  /// Those of the evaluation data.
  [[nodiscard]] const EvaluationBatches& evaluation() const;

 private:
  struct Worker;
  std::unique_ptr<Worker> worker_;
};

}  // namespace ballast::data
