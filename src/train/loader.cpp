#include "ballast/train/loader.h"

#include <algorithm>
#include <bit>
#include <condition_variable>
#include <deque>
#include <exception>
#include <mutex>
#include <thread>
#include <utility>

#include "ballast/core/error.h"
#include "ballast/core/random.h"

namespace ballast::train {
namespace {

// Random streams: an epoch's order must not repeat the numbers of another use of the same seed.
constexpr std::uint64_t kEpochStream = 0x6261746368;
constexpr std::uint64_t kOffsetStream = 64;
constexpr std::uint64_t kRounds = 8;

/// Position `index` of a permutation of [0, size) that `key` chooses. A Feistel network permutes
/// the next power of 4; values outside are permuted again until they fall inside (Black & Rogaway,
/// "Ciphers with arbitrary finite domains", CT-RSA 2002, method 2). At most 4 tries on average.
std::uint64_t permute(std::uint64_t index, std::uint64_t size, std::uint64_t key) {
  const auto half = std::max(1U, (static_cast<unsigned>(std::bit_width(size - 1)) + 1) / 2);
  const std::uint64_t mask = (std::uint64_t{1} << half) - 1;
  do {
    std::uint64_t left = index >> half;
    std::uint64_t right = index & mask;
    for (std::uint64_t round = 0; round < kRounds; ++round) {
      left ^= random_u64(key, right, round) & mask;
      std::swap(left, right);
    }
    index = (left << half) | right;
  } while (index >= size);
  return index;
}

}  // namespace

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
  const auto key = random_u64(seed_, n / windows_, kEpochStream);
  return random_u64(key, 0, kOffsetStream) % offsets_ + permute(window, windows_, key) * length_;
}

std::uint64_t EvaluationShare::runs(std::uint64_t requested, std::uint64_t available) const {
  return std::max<std::uint64_t>(1, std::min(requested, available) / (together * world));
}

std::uint64_t EvaluationShare::index(std::uint64_t run, std::uint64_t micro,
                                     std::uint64_t available) const {
  return ((run * world + rank) * together + micro) % available;
}

struct Loader::Worker {
  Worker(std::shared_ptr<const TokenSource> tokens, const TokenSplit& parts,
         const LoaderOptions& chosen)
      : source(std::move(tokens)),
        split(parts),
        options(chosen),
        order(split.training.size, options.length, options.shuffle, options.seed) {}

  /// Reads the window of `options.length` + 1 ids at token `first` of the source into sequence
  /// `index` of `batch`.
  void read_window(std::uint64_t first, std::uint64_t index, Batch& batch,
                   std::vector<std::int32_t>& window) const;
  [[nodiscard]] Batch empty_batch(std::uint64_t step, std::uint64_t sequences) const;
  [[nodiscard]] Batch batch(std::uint64_t step) const;
  void run();

  std::shared_ptr<const TokenSource> source;
  TokenSplit split;
  LoaderOptions options;
  SampleOrder order;

  std::mutex mutex;
  std::condition_variable changed;
  std::deque<Batch> ready;
  std::exception_ptr error;
  bool stopping = false;
  std::thread thread;
};

void Loader::Worker::read_window(std::uint64_t first, std::uint64_t index, Batch& batch,
                                 std::vector<std::int32_t>& window) const {
  window.resize(options.length + 1);
  source->read(first, window);
  const auto at = static_cast<std::ptrdiff_t>(index * options.length);
  std::copy(window.begin(), window.end() - 1, batch.tokens.begin() + at);
  std::copy(window.begin() + 1, window.end(), batch.targets.begin() + at);
}

Batch Loader::Worker::empty_batch(std::uint64_t step, std::uint64_t sequences) const {
  Batch batch;
  batch.step = step;
  batch.tokens.resize(sequences * options.length);
  batch.targets.resize(sequences * options.length);
  return batch;
}

Batch Loader::Worker::batch(std::uint64_t step) const {
  expects(step >= 1, "loader: the first step is 1");
  const std::uint64_t mine = options.micro_batches * options.sequences;
  const std::uint64_t first = ((step - 1) * options.world + options.rank) * mine;
  auto batch = empty_batch(step, mine);
  std::vector<std::int32_t> window;
  for (std::uint64_t sequence = 0; sequence < mine; ++sequence) {
    read_window(split.training.first + order.start(first + sequence), sequence, batch, window);
  }
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

Loader::Loader(std::shared_ptr<const TokenSource> source, const TokenSplit& split,
               const LoaderOptions& options) {
  expects(options.length >= 1 && options.micro_batches >= 1 && options.sequences >= 1 &&
              options.rank < options.world && options.prefetch >= 1 && options.first_step >= 1,
          "loader: an option is out of range");
  expects(split.training.first + split.training.size <= source->size() &&
              split.held_out.first + split.held_out.size <= source->size(),
          "loader: the split reaches beyond the data");
  worker_ = std::make_unique<Worker>(std::move(source), split, options);
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

std::uint64_t Loader::evaluation_batches() const {
  const auto tokens = worker_->split.held_out.size;
  if (tokens == 0) return 0;
  return (tokens - 1) / worker_->options.length / worker_->options.sequences;
}

Batch Loader::evaluation_batch(std::uint64_t index) const {
  expects(index < evaluation_batches(), "loader: the held-out data has no such batch");
  const auto& options = worker_->options;
  auto batch = worker_->empty_batch(0, options.sequences);
  std::vector<std::int32_t> window;
  for (std::uint64_t sequence = 0; sequence < options.sequences; ++sequence) {
    const auto sample = index * options.sequences + sequence;
    worker_->read_window(worker_->split.held_out.first + sample * options.length, sequence, batch,
                         window);
  }
  return batch;
}

}  // namespace ballast::train
