#include <algorithm>
#include <array>
#include <filesystem>
#include <optional>
#include <system_error>

#include <fmt/format.h>

#include "ballast/config/hugging_face_config.h"
#include "ballast/core/error.h"
#include "ballast/text/files.h"
#include "ballast/text/json.h"

#include "src/train/run_inputs.h"
#include "src/train/step_rules.h"

namespace ballast::train {
namespace {

namespace fs = std::filesystem;
using text::Json;
using Lines = std::vector<std::string>;

double number_or_0(const Json& object, const char* key) {
  const Json* const found = object.find(key);
  return found != nullptr && found->is_number() ? found->number() : 0.0;
}

/// Returns the sequence length that the model in the folder of `weights` was trained for, including
/// its rope scaling; 0 if unknown.
double trained_length(const fs::path& weights) {
  std::error_code ignored;
  const fs::path folder = fs::is_directory(weights, ignored) ? weights : weights.parent_path();
  const fs::path file = folder / config::kCheckpointConfig;
  if (weights.empty() || !fs::exists(file, ignored)) return 0.0;
  const Json whole =
      text::parse_json(text::read_settings(file, "config of a model"), file.string());
  if (!whole.is_object()) return 0.0;
  const Json json = config::text_model_of(whole, file);
  double longest =
      std::max(number_or_0(json, "max_position_embeddings"), number_or_0(json, "n_positions"));
  for (const char* key : {"rope_scaling", "rope_parameters"}) {
    const Json* const scaling = json.find(key);
    if (scaling == nullptr || !scaling->is_object()) continue;
    const double original = number_or_0(*scaling, "original_max_position_embeddings");
    const double factor = number_or_0(*scaling, "factor");
    longest = std::max(longest, factor * (original > 0.0 ? original : longest));
  }
  return longest;
}

void doubt_length(const config::Config& config, const data::TrainingData& data, Lines& lines) {
  const double trained = trained_length(config.initial_weights);
  const std::uint64_t length = config.data.sequence_length;
  const bool documents = data.longest_document > 0;
  // Positions restart at each document.
  const std::uint64_t seen = documents ? std::min(length, data.longest_document) : length;
  if (trained <= 0.0 || static_cast<double>(seen) <= trained) return;
  lines.push_back(fmt::format(
      "data.sequence_length is {}{}, but the model in {} was trained for at most {:.0f} tokens: "
      "longer positions are new to it; set data.sequence_length to {:.0f}, or rope_scaling in its "
      "config.json",
      length,
      documents ? fmt::format(" and the longest document has {} tokens", data.longest_document)
                : "",
      config.initial_weights.string(), trained, trained));
}

/// Number of sequences in the units of the batch size.
std::uint64_t samples_of(const config::Config& config, const data::TrainingData& data) {
  return data.training->size() / config.data.sequences_per_sample();
}

void doubt_batch(const config::Config& config, const data::TrainingData& data, Lines& lines) {
  const std::uint64_t have = samples_of(config, data);
  const std::uint64_t batch = config.batch.train_batch;
  const std::string what = config.data.pairs.empty() ? "sequence" : "pair";
  if (have == 0) return;
  if (have < batch) {
    lines.push_back(fmt::format(
        "train_batch_size is {}, but data.{} has {} {}{} of {} tokens to train on, so each step "
        "repeats them: set train_batch_size to {}, or data.sequence_length to less, or give "
        "more data",
        batch, config.data.kind(), have, what, have == 1 ? "" : "s", config.data.sequence_length,
        have == 1 ? "1" : fmt::format("{} or less", have)));
    return;
  }
  constexpr double kMany = 20.0;
  const double epochs = static_cast<double>(config.ballast.steps) * static_cast<double>(batch) /
                        static_cast<double>(have);
  if (config.initial_weights.empty() || epochs < kMany) return;
  lines.push_back(fmt::format(
      "ballast.steps {} goes {:.0f} times through the {} {}s of data.{}; one time is {} steps",
      config.ballast.steps, epochs, have, what, config.data.kind(), (have + batch - 1) / batch));
}

void doubt_padding(const config::Config& config, const data::TrainingData& data, Lines& lines) {
  constexpr double kMuch = 0.25;
  const double share = data.summary.padding;
  if (!(share >= kMuch)) return;  // also false without sequences
  const std::string why = config.data.pairs.empty()
                              ? "documents do not fill their sequences"
                              : "each completion has a sequence, and pairs are not packed";
  std::string advice;
  if (data.better_length > 0) {
    advice = fmt::format("; with data.sequence_length {} it is {:.0f}%", data.better_length,
                         100.0 * data.better_padding);
  }
  lines.push_back(
      fmt::format("{:.0f}% of the tokens of data.{} are padding, which is computed for "
                  "nothing: {}{}",
                  100.0 * share, config.data.kind(), why, advice));
}

void doubt_vocabulary(const config::Config& config, Lines& lines) {
  constexpr std::uint64_t kBytes = 256;
  constexpr std::uint64_t kMuchLarger = 4 * kBytes;
  const std::uint64_t size = config.model.vocab_size;
  if (config.data.text.empty() || !config.initial_weights.empty() || size <= kMuchLarger) return;
  lines.push_back(fmt::format(
      "model.vocab_size is {}, but data.text is read byte by byte, which has {} values: the other "
      "rows of the embedding are never trained; set model.vocab_size to {}, or give tokens",
      size, kBytes, kBytes));
}

void doubt_rate(const config::Config& config, Lines& lines) {
  const config::OptimizerSection& o = config.optimizer;
  const double most = row_of(o.type).usual_rate;
  const bool of_schedule = config.scheduler.warmup_max_lr.has_value();
  const double rate = of_schedule ? *config.scheduler.warmup_max_lr : o.lr;
  if (rate > most) {
    lines.push_back(fmt::format(
        "{} is {}: rates above {} destroy a model in a few steps; 1e-5 to 1e-3 are usual",
        of_schedule ? "scheduler.params.warmup_max_lr" : "optimizer.params.lr", rate, most));
  }
  if (o.weight_decay > row_of(o.type).usual_decay) {
    lines.push_back(
        fmt::format("optimizer.params.weight_decay is {}; 0 to 0.1 are usual", o.weight_decay));
  }
}

void doubt_schedule(const config::Config& config, Lines& lines) {
  using enum config::SchedulerSection::Type;
  const config::SchedulerSection& s = config.scheduler;
  const std::uint64_t steps = config.ballast.steps;
  if (s.type == constant || steps == 0) return;
  const LrSchedule rates(s, config.optimizer.lr);
  if (s.warmup_num_steps > steps) {
    lines.push_back(fmt::format(
        "scheduler.params.warmup_num_steps is {}, but the run has {} step{}: the learning rate "
        "only reaches {:.3g}; set it to a tenth of the steps or less",
        s.warmup_num_steps, steps, steps == 1 ? "" : "s", rates.at(steps)));
  }
  if (s.type != warmup && s.total_num_steps < steps) {
    lines.push_back(fmt::format(
        "scheduler.params.total_num_steps is {}, but the run has {} steps: the learning rate is "
        "{:.3g} in the last {}; set it to {} or to \"auto\"",
        s.total_num_steps, steps, rates.at(steps), steps - s.total_num_steps, steps));
  }
}

void doubt_evaluation(const config::Config& config, const data::TrainingData& data, Lines& lines) {
  for (const fs::path& file : data.evaluation_files) {
    const bool same = std::any_of(data.files.begin(), data.files.end(), [&](const fs::path& own) {
      std::error_code ignored;
      return fs::equivalent(file, own, ignored);
    });
    if (!same) continue;
    lines.push_back(fmt::format(
        "data.eval: {} is a file of data.{}, too, so its loss says nothing about other data; give "
        "other files, or a share such as 0.05",
        file.string(), config.data.kind()));
    return;
  }
}

}  // namespace

std::vector<std::string> find_doubts(const config::Config& config, const data::TrainingData& data) {
  Lines lines;
  doubt_length(config, data, lines);
  doubt_batch(config, data, lines);
  doubt_padding(config, data, lines);
  doubt_vocabulary(config, lines);
  doubt_rate(config, lines);
  doubt_schedule(config, lines);
  doubt_evaluation(config, data, lines);
  return lines;
}

void warn_of_doubts(const config::Config& config, const data::TrainingData& data) {
  for (const std::string& line : find_doubts(config, data)) log(LogLevel::warning, line);
}

}  // namespace ballast::train
