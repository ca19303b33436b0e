#include "src/train/training_data.h"

#include <fmt/format.h>

#include "ballast/core/error.h"
#include "ballast/core/log.h"

namespace ballast::train {

TrainingData open_training_data(const config::Config& config) {
  try {
    TrainingData data;
    data.source = std::make_shared<const TokenSource>(
        TokenSource::open(config.data, config.model.vocab_size));
    data.split =
        split_tokens(data.source->size(), config.data.held_out, config.data.sequence_length);
    return data;
  } catch (const Error& error) {
    if (error.category() == ErrorCategory::config) throw;  // it names the keys
    throw error.with_context(config.data.text.empty() ? "data.tokens" : "data.text");
  }
}

void warn_without_evaluation(const config::Config& config, const TrainingData& data,
                             std::uint64_t batches) {
  const double share = config.data.held_out;
  if (share == 0.0 || batches > 0) return;
  const std::uint64_t total = data.source->size();
  const std::uint64_t needed = config.batch.micro_batch * config.data.sequence_length + 1;
  const bool share_helps = total / 2 >= needed;  // the share is at most 0.5
  log(LogLevel::warning,
      fmt::format("there will be no held-out loss: data.held_out {} of {} tokens is {}, but an "
                  "evaluation needs {} (train_micro_batch_size_per_gpu {} x data.sequence_length "
                  "{} + 1); give more data{} or a smaller sequence_length",
                  share, total, static_cast<std::uint64_t>(share * static_cast<double>(total)),
                  needed, config.batch.micro_batch, config.data.sequence_length,
                  share_helps ? ", a larger share" : ""));
}

}  // namespace ballast::train
