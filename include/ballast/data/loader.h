#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "ballast/data/sequences.h"

namespace ballast::data {

/// The slice of each sequence that a rank reads: one of `slices` equal runs of consecutive tokens.
struct SequenceCut {
  std::uint64_t slices = 1;
  std::uint64_t slice = 0;
};

/// One rank's tokens for one step. `tokens`, `targets` and `positions` have
/// [micro_batches][sequences][length / slices] elements; see SequenceSpans. Targets and positions
/// are those of whole sequences, so the last token of a slice has the next slice's first as its
/// target.
struct Batch {
  std::uint64_t step = 0;  ///< from 1; 0 for an evaluation batch
  std::vector<std::int32_t> tokens;
  std::vector<std::int32_t> targets;
  std::vector<std::int32_t> positions;  ///< empty: whole sequences, each one document
  /// Positions in whole sequences [micro_batches][sequences][length], for slices of packed ones.
  std::vector<std::int32_t> whole_positions;
  /// Tokens of the step without padding, over all ranks. For an evaluation: tokens of this batch.
  std::uint64_t real_tokens = 0;

  /// Appends the sequences of `other`.
  void append(const Batch& other);
  /// Reduces whole sequences of `length` tokens to a slice of each, with positions.
  void reduce(std::uint64_t length, const SequenceCut& cut);
};

struct LoaderOptions {
  std::uint64_t micro_batches = 1;
  std::uint64_t sequences = 1;   ///< per micro-batch and rank
  std::uint64_t length = 0;      ///< tokens per sequence, a multiple of cut.slices
  std::uint64_t first_step = 1;  ///< step of the first batch of next(); larger for a resumed run
  std::uint64_t skipped = 0;     ///< skipped batches: step k takes batch k + skipped
  std::uint64_t prefetch = 2;    ///< batches kept ready, at least 1
  std::uint64_t place = 0;       ///< this rank's, among those with other sequences: Mesh::data
  std::uint64_t places = 1;
  SequenceCut cut;  ///< this rank's slice of the sequences of its place
};

/// Assigns held-out micro-batches to the data places of ranks. All places together take each
/// micro-batch once, in order. The last run of the evaluation plan is filled up with padding, which
/// has no targets. So the result is the mean over the same targets for every number of places and
/// every accumulation.
struct EvaluationShare {
  std::uint64_t together = 1;  ///< micro-batches per rank and run of the evaluation plan
  std::uint64_t place = 0;
  std::uint64_t places = 1;

  /// Number of runs of the evaluation plan for `requested` of the `available` micro-batches.
  [[nodiscard]] std::uint64_t runs(std::uint64_t requested, std::uint64_t available) const;
  /// Index of the held-out micro-batch that this rank takes as its `micro`-th in run `run`, or
  /// `available` for padding after the last requested one.
  [[nodiscard]] std::uint64_t index(std::uint64_t run, std::uint64_t micro, std::uint64_t requested,
                                    std::uint64_t available) const;
};

/// The micro-batches of an evaluation, in the order of their source.
class EvaluationBatches {
 public:
  /// Makes micro-batches of `sequences` sequences of `length` tokens, of which this rank reads a
  /// part; `source` may be null. The last one may be filled up with padding.
  EvaluationBatches(std::shared_ptr<const SequenceSource> source, std::uint64_t sequences,
                    std::uint64_t length, const SequenceCut& cut = {});

  [[nodiscard]] std::uint64_t size() const;
  /// Returns micro-batch `index` [sequences][length / slices]. From size() on it is all padding,
  /// without targets.
  [[nodiscard]] Batch batch(std::uint64_t index) const;

 private:
  std::shared_ptr<const SequenceSource> source_;
  std::uint64_t sequences_;
  std::uint64_t length_;
  SequenceCut cut_;
};

/// The batches of a run. A step of all ranks has B = places * micro_batches * sequences sequences,
/// in the order of the source for every number of places: step k begins at sequence (k - 1 +
/// skipped) * B. Place p takes the p-th of `places` equal parts, micro-batch by micro-batch. A
/// batch is a pure function of (source, options, k), so a resumed run sees the same batches.
class Loader {
 public:
  /// Starts a thread that reads `training` (not empty) and keeps `prefetch` batches ready.
  /// `evaluation` may be null.
  Loader(std::shared_ptr<const SequenceSource> training,
         std::shared_ptr<const SequenceSource> evaluation, const LoaderOptions& options);
  /// Stops the thread. Waits at most until it has read one batch.
  ~Loader();
  Loader(const Loader&) = delete;
  Loader& operator=(const Loader&) = delete;

  /// Returns the batch of the next step; waits until it is ready. Rethrows a reading error, on this
  /// and every later call. Not thread-safe.
  Batch next();

  /// Returns the batch of any step (from 1), read on the calling thread.
  [[nodiscard]] Batch batch(std::uint64_t step) const;

  /// Returns the evaluation batches.
  [[nodiscard]] const EvaluationBatches& evaluation() const;

 private:
  struct Worker;
  std::unique_ptr<Worker> worker_;
};

}  // namespace ballast::data
