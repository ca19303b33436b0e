#include "ballast/data/loader.h"

#include <algorithm>
#include <condition_variable>
#include <deque>
#include <exception>
#include <mutex>
#include <numeric>
#include <thread>
#include <utility>

#include "ballast/core/error.h"

namespace ballast::data {

void Batch::append(const Batch& other) {
  tokens.insert(tokens.end(), other.tokens.begin(), other.tokens.end());
  targets.insert(targets.end(), other.targets.begin(), other.targets.end());
  positions.insert(positions.end(), other.positions.begin(), other.positions.end());
  whole_positions.insert(whole_positions.end(), other.whole_positions.begin(),
                         other.whole_positions.end());
  real_tokens += other.real_tokens;
}

namespace {

/// Returns this rank's columns of `ids`, rows of `length`.
std::vector<std::int32_t> columns_of(const std::vector<std::int32_t>& ids, std::uint64_t length,
                                     const SequenceCut& cut) {
  const std::uint64_t wide = length / cut.slices;
  std::vector<std::int32_t> own(ids.size() / cut.slices);
  for (std::uint64_t row = 0; row * length < ids.size(); ++row) {
    std::copy_n(&ids[row * length + cut.slice * wide], wide, &own[row * wide]);
  }
  return own;
}

}  // namespace

void Batch::reduce(std::uint64_t length, const SequenceCut& cut) {
  if (cut.slices == 1) return;
  std::vector<std::int32_t> whole = std::move(positions);
  const bool packed = !whole.empty();
  whole.resize(tokens.size());
  for (std::size_t i = 0; !packed && i < whole.size(); ++i) {
    whole[i] = static_cast<std::int32_t>(i % length);
  }
  tokens = columns_of(tokens, length, cut);
  targets = columns_of(targets, length, cut);
  positions = columns_of(whole, length, cut);
  if (packed) whole_positions = std::move(whole);
}

std::uint64_t EvaluationShare::runs(std::uint64_t requested, std::uint64_t available) const {
  const std::uint64_t all = together * places;
  return (std::min(requested, available) + all - 1) / all;
}

std::uint64_t EvaluationShare::index(std::uint64_t run, std::uint64_t micro,
                                     std::uint64_t requested, std::uint64_t available) const {
  const std::uint64_t number = (run * places + place) * together + micro;
  return number < std::min(requested, available) ? number : available;
}

namespace {

/// Returns the elements of sequence `index` in `batch`.
SequenceSpans spans_of(Batch& batch, std::uint64_t index, std::uint64_t length) {
  const auto part = [&](std::vector<std::int32_t>& all) {
    return all.empty() ? std::span<std::int32_t>() : std::span(all).subspan(index * length, length);
  };
  return {part(batch.tokens), part(batch.targets), part(batch.positions)};
}

Batch empty_batch(std::uint64_t step, std::uint64_t sequences, std::uint64_t length,
                  const SequenceSource& source) {
  Batch batch;
  batch.step = step;
  batch.tokens.resize(sequences * length);
  batch.targets.resize(sequences * length, kIgnoredTarget);
  if (source.packed()) batch.positions.resize(sequences * length);
  return batch;
}

}  // namespace

EvaluationBatches::EvaluationBatches(std::shared_ptr<const SequenceSource> source,
                                     std::uint64_t sequences, std::uint64_t length,
                                     const SequenceCut& cut)
    : source_(std::move(source)), sequences_(sequences), length_(length), cut_(cut) {}

std::uint64_t EvaluationBatches::size() const {
  if (source_ == nullptr) return 0;
  return (source_->size() + sequences_ - 1) / sequences_;
}

Batch EvaluationBatches::batch(std::uint64_t index) const {
  expects(source_ != nullptr, "loader: there are no evaluation data");
  auto batch = empty_batch(0, sequences_, length_, *source_);
  for (std::uint64_t sequence = 0; sequence < sequences_; ++sequence) {
    const auto n = index * sequences_ + sequence;
    const auto spans = spans_of(batch, sequence, length_);
    if (n >= source_->size()) {
      std::fill(spans.targets.begin(), spans.targets.end(), kPaddingTarget);
      std::iota(spans.positions.begin(), spans.positions.end(), 0);
      continue;
    }
    source_->read(n, spans);
    batch.real_tokens += source_->real_tokens(n);
  }
  batch.reduce(length_, cut_);
  return batch;
}

struct Loader::Worker {
  Worker(std::shared_ptr<const SequenceSource> first, std::shared_ptr<const SequenceSource> second,
         const LoaderOptions& chosen)
      : training(std::move(first)),
        evaluation(std::move(second), chosen.sequences, chosen.length, chosen.cut),
        options(chosen) {}

  [[nodiscard]] Batch batch(std::uint64_t step) const;
  void run();

  std::shared_ptr<const SequenceSource> training;
  EvaluationBatches evaluation;
  LoaderOptions options;

  std::mutex mutex;
  std::condition_variable changed;
  std::deque<Batch> ready;
  std::exception_ptr error;
  bool stopping = false;
  std::thread thread;
};

Batch Loader::Worker::batch(std::uint64_t step) const {
  expects(step >= 1, "loader: the first step is 1");
  const std::uint64_t mine = options.micro_batches * options.sequences;
  const std::uint64_t all = mine * options.places;
  const std::uint64_t first = (step - 1 + options.skipped) * all;
  auto batch = empty_batch(step, mine, options.length, *training);
  for (std::uint64_t sequence = 0; sequence < mine; ++sequence) {
    training->read(first + options.place * mine + sequence,
                   spans_of(batch, sequence, options.length));
  }
  for (std::uint64_t sequence = 0; sequence < all; ++sequence) {
    batch.real_tokens += training->real_tokens(first + sequence);
  }
  batch.reduce(options.length, options.cut);
  return batch;
}

void Loader::Worker::run() {
  try {
    for (auto step = options.first_step;; ++step) {
      auto next = batch(step);
      std::unique_lock lock(mutex);
      changed.wait(lock, [this] { return stopping || ready.size() < options.prefetch; });
      if (stopping) return;
      ready.push_back(std::move(next));
      changed.notify_all();
    }
  } catch (...) {
    const std::lock_guard lock(mutex);
    error = std::current_exception();
    changed.notify_all();
  }
}

Loader::Loader(std::shared_ptr<const SequenceSource> training,
               std::shared_ptr<const SequenceSource> evaluation, const LoaderOptions& options) {
  expects(options.length >= 1 && options.micro_batches >= 1 && options.sequences >= 1 &&
              options.place < options.places && options.prefetch >= 1 && options.first_step >= 1 &&
              options.cut.slice < options.cut.slices && options.length % options.cut.slices == 0,
          "loader: an option is out of range");
  expects(training->size() > 0, "loader: there is no sequence");
  worker_ = std::make_unique<Worker>(std::move(training), std::move(evaluation), options);
  worker_->thread = std::thread([worker = worker_.get()] { worker->run(); });
}

Loader::~Loader() {
  {
    const std::lock_guard lock(worker_->mutex);
    worker_->stopping = true;
  }
  worker_->changed.notify_all();
  worker_->thread.join();
}

Batch Loader::next() {
  std::unique_lock lock(worker_->mutex);
  worker_->changed.wait(lock, [this] { return !worker_->ready.empty() || worker_->error; });
  if (worker_->ready.empty()) std::rethrow_exception(worker_->error);
  auto batch = std::move(worker_->ready.front());
  worker_->ready.pop_front();
  worker_->changed.notify_all();
  return batch;
}

Batch Loader::batch(std::uint64_t step) const {
  return worker_->batch(step);
}

const EvaluationBatches& Loader::evaluation() const {
  return worker_->evaluation;
}

}  // namespace ballast::data
