#include "src/data/training_data.h"

#include <algorithm>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <fcntl.h>
#include <fmt/format.h>

#include "ballast/core/error.h"
#include "ballast/core/memory.h"
#include "ballast/core/units.h"
#include "ballast/formats/file_formats.h"
#include "ballast/state/checksum.h"
#include "ballast/text/files.h"
#include "ballast/text/json.h"

#include "src/data/documents.h"
#include "src/formats/data_files.h"

namespace ballast::data {

namespace {

/// Calls `open` and adds the key to its errors.
template <class Open>
auto naming(std::string_view key, const Open& open) {
  try {
    return open();
  } catch (const Error& error) {
    if (error.category() == ErrorCategory::config) throw;  // has the keys already
    throw error.with_context(fmt::format("data.{}", key));
  }
}

/// Returns the folder of the model's weights, which may have its tokenizer; "" if there is none.
std::filesystem::path folder_of(const config::Config& config) {
  std::error_code ignored;
  const std::filesystem::path& weights = config.initial_weights;
  return std::filesystem::is_directory(weights, ignored) ? weights : weights.parent_path();
}

/// Text is read byte by byte, which suits only models without a tokenizer. Refuses it if the folder
/// of the weights has one, and warns if the model probably has one.
void check_text_for_model(const config::Config& config, const std::string& file) {
  const std::filesystem::path folder = folder_of(config);
  if (config.data.as_is || folder.empty() || config.model.vocab_size <= kLargestByteVocabulary) {
    return;
  }
  const std::string tokenizer = formats::tokenizer_file_of(folder);
  if (tokenizer.empty()) {
    constexpr std::uint64_t kUsualForBytes = 1024;
    if (config.model.vocab_size <= kUsualForBytes) return;
    return log(LogLevel::warning,
               fmt::format("{} is read byte by byte, but a model with {} token ids usually has a "
                           "tokenizer; {} has none",
                           file, config.model.vocab_size, folder.string()));
  }
  throw Error(
      ErrorCategory::data,
      fmt::format(
          "{} would be read byte by byte, but the model has a tokenizer ({}): write each "
          "text as a line {{\"text\": \"...\"}} of a jsonl file and make documents of it ({}), "
          "or set data.as_is to true to read bytes",
          file, (folder / tokenizer).string(),
          formats::preparing_command("texts.jsonl", {.key = "text", .model = folder})));
}

/// Returns the matrix besides the embedding that tokens index, if the model has one.
std::optional<TokenTable> table_of(const config::Config& config) {
  constexpr const char* kRows = "vocab_size_per_layer_input";
  const auto& details = config.model.details;
  const auto width = details.find("hidden_size_per_layer_input");
  const auto rows = details.find(kRows);
  if (width == details.end() || rows == details.end()) return std::nullopt;
  if (width->second.whole().value_or(0) == 0) return std::nullopt;
  return TokenTable{fmt::format("model.{}", kRows), rows->second.whole().value_or(0)};
}

std::shared_ptr<const TokenSource> open_tokens(const config::Config& config,
                                               const config::DataSection& section) {
  auto source = std::make_shared<const TokenSource>(
      TokenSource::open(section, config.model.vocab_size, folder_of(config), table_of(config)));
  if (!section.text.empty()) check_text_for_model(config, source->files().front().string());
  return source;
}

/// Compares the tokenizer of the documents with that of the model's folder.
void check_tokenizer(const config::Config& config, const DocumentFiles& files) {
  const std::filesystem::path folder = folder_of(config);
  if (config.data.as_is || folder.empty() || files.tokenizer().serialised.empty()) return;
  const formats::TokenizerDifference difference =
      formats::compare(files.tokenizer(), formats::identify_tokenizer(folder));
  if (difference == formats::TokenizerDifference::none) return;
  const std::string again = fmt::format(
      "prepare the data with tools/prepare.py --model {}, or set data.as_is to true to keep its "
      "ids",
      folder.string());
  const std::string made = fmt::format(
      "{} was made with the tokenizer of '{}' (tokenizer_sha256 {:.12})",
      files.files().front().string(), files.tokenizer().name, files.tokenizer().serialised);
  const std::string own = (folder / "tokenizer.json").string();
  switch (difference) {
    case formats::TokenizerDifference::none:
      return;
    case formats::TokenizerDifference::unclear:
      return log(LogLevel::warning,
                 fmt::format("{}, and {} seems to be another one: {}", made, own, again));
    case formats::TokenizerDifference::added_tokens:
      return log(LogLevel::warning,
                 fmt::format("{}; {} has other added tokens: {}", made, own, again));
    case formats::TokenizerDifference::vocabulary:
      throw Error(ErrorCategory::data,
                  fmt::format("{}, but {} has another vocabulary: {}", made, own, again));
  }
}

std::shared_ptr<const DocumentFiles> open_files(const config::Config& config,
                                                const std::vector<std::string>& patterns) {
  auto files = std::make_shared<const DocumentFiles>(
      DocumentFiles::open(patterns, config.model.vocab_size, !config.data.pairs.empty(),
                          folder_of(config), table_of(config)));
  check_tokenizer(config, *files);
  return files;
}

/// All tokens of the files, in order.
std::shared_ptr<const SequenceSource> in_order(std::shared_ptr<const TokenSource> source,
                                               std::uint64_t length) {
  const TokenRange all = {0, source->size()};
  return windows_of(std::move(source), all, length, false, 0);
}
/// The documents of `range` as sequences, paired or packed.
std::shared_ptr<const SequenceSource> sequences_of(const config::Config& config,
                                                   std::shared_ptr<const DocumentFiles> files,
                                                   DocumentRange range, bool shuffle) {
  const std::uint64_t length = config.data.sequence_length;
  const std::uint64_t seed = config.ballast.seed;
  if (config.data.pairs.empty()) return packed(std::move(files), range, length, shuffle, seed);
  return paired(std::move(files), range, length, shuffle, seed, config.has_positions());
}
std::shared_ptr<const SequenceSource> in_order(const config::Config& config,
                                               std::shared_ptr<const DocumentFiles> files) {
  const DocumentRange all = {0, files->offsets().size() - 1};
  return sequences_of(config, std::move(files), all, false);
}

TrainingData open_stream(const config::Config& config) {
  const config::DataSection& section = config.data;
  TrainingData data;
  const auto source = naming(section.kind(), [&] { return open_tokens(config, section); });
  const auto check = [&](std::string_view key, const std::shared_ptr<const TokenSource>& read) {
    // Every byte of text is a valid id.
    const bool all = !section.text.empty() || naming(key, [&] { return check_sample(*read); });
    if (!all) data.unchecked.push_back({std::string(key), read});
  };
  check(section.kind(), source);
  const TokenSplit split = naming(section.kind(), [&] {
    return split_tokens(source->size(), section.held_out, section.sequence_length);
  });
  const auto evaluation = section.eval.empty() ? source : naming("eval", [&] {
    return open_tokens(config, section.evaluation());
  });
  if (evaluation != source) check("eval", evaluation);
  if (evaluation != source) data.evaluation_files = evaluation->files();
  const TokenRange range =
      section.eval.empty() ? split.held_out : TokenRange{0, evaluation->size()};
  data.training = windows_of(source, split.training, section.sequence_length, section.shuffle,
                             config.ballast.seed);
  data.evaluation = windows_of(evaluation, range, section.sequence_length, false, 0);
  data.files = source->files();
  data.tokens = source->size();
  data.summary.files = data.files.size();
  data.summary.training_tokens = split.training.size;
  data.summary.evaluation_tokens = range.size;
  return data;
}

/// Lengths of the training documents in tokens, ascending.
std::vector<std::uint64_t> lengths_of(const DocumentFiles& files, std::uint64_t documents) {
  const auto offsets = files.offsets();
  std::vector<std::uint64_t> lengths(documents);
  for (std::uint64_t i = 0; i < documents; ++i) lengths[i] = offsets[i + 1] - offsets[i];
  std::sort(lengths.begin(), lengths.end());
  return lengths;
}

/// Share of padding in the tokens of an epoch.
double padding_of(const SequenceSource& source, std::uint64_t length) {
  std::uint64_t real = 0;
  for (std::uint64_t n = 0; n < source.size(); ++n) real += source.real_tokens(n);
  return 1.0 - static_cast<double>(real) /
                   (static_cast<double>(source.size()) * static_cast<double>(length));
}

void summarize(const DocumentFiles& files, std::uint64_t documents, std::uint64_t length,
               TrainingData& data) {
  DataSummary& summary = data.summary;
  summary.files = files.files().size();
  summary.training_tokens = files.offsets()[documents];
  summary.documents = documents;
  summary.sequences = data.training->size();
  summary.padding = padding_of(*data.training, length);
  const std::vector<std::uint64_t> lengths = lengths_of(files, documents);
  if (!lengths.empty()) data.longest_document = lengths.back();
}

/// Finds a sequence length with less padding: the longest document, or most pairs.
void find_better_length(const config::Config& config,
                        const std::shared_ptr<const DocumentFiles>& files, DocumentRange range,
                        TrainingData& data) {
  constexpr double kMuch = 0.25;
  constexpr double kMuchLess = 0.6;
  constexpr std::uint64_t kMultiple = 64;
  if (range.end == 0 || !(data.summary.padding >= kMuch)) return;
  const std::vector<std::uint64_t> lengths = lengths_of(*files, range.end);
  std::vector<std::uint64_t> lengths_to_try = {lengths.back()};
  if (!config.data.pairs.empty()) lengths_to_try.push_back(lengths[lengths.size() * 19 / 20]);
  for (const std::uint64_t length : lengths_to_try) {
    config::Config changed = config;
    changed.data.sequence_length = round_up(std::max<std::uint64_t>(length, 1), kMultiple);
    if (changed.data.sequence_length >= config.data.sequence_length) continue;
    const auto sequences = sequences_of(changed, files, range, false);
    if (sequences->size() == 0) continue;
    const double padding = padding_of(*sequences, changed.data.sequence_length);
    if (padding > kMuchLess * data.summary.padding) continue;
    data.better_length = changed.data.sequence_length;
    data.better_padding = padding;
    return;
  }
}

bool has_documents(const config::DataSection& data) {
  return !data.documents.empty() || !data.pairs.empty();
}

/// Warns about pairs in `documents` that are skipped.
void check_pairs(const config::Config& config, std::uint64_t documents,
                 const SequenceSource& training) {
  if (config.data.pairs.empty()) return;
  const std::uint64_t left_out = (documents - training.size()) / 2;
  const std::string why =
      fmt::format("the prompt fills data.sequence_length {}", config.data.sequence_length);
  if (training.size() == 0) {
    throw Error(ErrorCategory::data, fmt::format("data.pairs: {} of every pair: give a larger one, "
                                                 "or shorter prompts",
                                                 why));
  }
  if (left_out == 0) return;
  log(LogLevel::warning, fmt::format("data.pairs: {} of {} pairs are skipped, because {}", left_out,
                                     documents / 2, why));
}

/// Checks that the training part and the held-out part have targets.
void check_targets(const config::Config& config, const DocumentFiles& files,
                   std::uint64_t documents) {
  if (documents > 0 && files.first_trained() >= documents) {
    throw Error(ErrorCategory::data,
                fmt::format("data.{}: no token of the documents to train on is a target; all "
                            "targets are in the part that is held out: set data.held_out to 0",
                            config.data.kind()));
  }
  const bool held_out = documents + 1 < files.offsets().size();
  if (held_out && files.last_trained() < documents) {
    log(LogLevel::warning, fmt::format("data.{}: there will be no held-out loss, because no token "
                                       "of the documents that are held out is trained on",
                                       config.data.kind()));
  }
}

TrainingData open_documents(const config::Config& config) {
  const config::DataSection& section = config.data;
  const std::uint64_t length = section.sequence_length;
  TrainingData data;
  const auto files = naming(section.kind(), [&] { return open_files(config, section.files()); });
  std::uint64_t documents = training_documents(files->offsets(), section.held_out);
  if (!section.pairs.empty()) documents += documents % 2;
  data.training = sequences_of(config, files, {0, documents}, section.shuffle);
  check_pairs(config, documents, *data.training);
  data.files = files->files();
  data.tokens = files->offsets().back();
  summarize(*files, documents, length, data);
  find_better_length(config, files, {0, documents}, data);
  check_targets(config, *files, documents);
  if (section.eval.empty()) {
    const std::uint64_t end = files->offsets().size() - 1;
    data.evaluation = sequences_of(config, files, {documents, end}, false);
    data.summary.evaluation_tokens = files->offsets().back() - data.summary.training_tokens;
    return data;
  }
  const auto evaluation = naming("eval", [&] { return open_files(config, section.eval); });
  if (formats::differ(evaluation->tokenizer(), files->tokenizer())) {
    throw Error(ErrorCategory::data,
                fmt::format("data.eval: {} was made with another tokenizer than {} of "
                            "data.{}",
                            evaluation->files().front().string(), files->files().front().string(),
                            section.kind()));
  }
  data.evaluation = in_order(config, evaluation);
  data.evaluation_files = evaluation->files();
  data.summary.evaluation_tokens = evaluation->offsets().back();
  return data;
}

}  // namespace

TrainingData open_training_data(const config::Config& config) {
  return has_documents(config.data) ? open_documents(config) : open_stream(config);
}

std::shared_ptr<const SequenceSource> open_evaluation_data(const config::Config& config) {
  const config::DataSection& section = config.data;
  if (section.eval.empty()) return open_training_data(config).evaluation;
  return naming("eval", [&]() -> std::shared_ptr<const SequenceSource> {
    if (has_documents(section)) return in_order(config, open_files(config, section.eval));
    auto tokens = open_tokens(config, section.evaluation());
    if (section.text.empty()) check_sample(*tokens);
    return in_order(std::move(tokens), section.sequence_length);
  });
}

void warn_without_evaluation(const config::Config& config, const TrainingData& data,
                             std::uint64_t batches) {
  const double share = config.data.held_out;
  const bool files = !config.data.eval.empty();
  if (batches > 0 || (share == 0.0 && !files)) return;
  if (has_documents(config.data)) {
    log(LogLevel::warning,
        fmt::format("there will be no held-out loss: no document is as short as data.held_out {} "
                    "of the tokens; give more documents, a larger share or data.eval",
                    share));
    return;
  }
  const std::uint64_t needed = config.data.sequence_length + 1;
  const std::uint64_t held = data.summary.evaluation_tokens;
  const std::uint64_t total = data.summary.training_tokens + held;
  const bool share_helps = !files && total / 2 >= needed;  // the maximum share is 0.5
  const std::string data_text =
      files ? fmt::format("the files of data.eval have {} tokens", held)
            : fmt::format("data.held_out {} of {} tokens is {}", share, total,
                          static_cast<std::uint64_t>(share * static_cast<double>(total)));
  log(LogLevel::warning,
      fmt::format("there will be no held-out loss: {}, but an evaluation needs {} "
                  "(data.sequence_length {} + 1); give more data{} or a smaller sequence_length",
                  data_text, needed, config.data.sequence_length,
                  share_helps ? ", a larger share" : ""));
}

namespace {

namespace fs = std::filesystem;

constexpr Bytes kSample = 64 * kKiB;
constexpr std::uint64_t kMaxSamples = 256;

/// The files concatenated.
class JoinedFiles {
 public:
  explicit JoinedFiles(const std::vector<fs::path>& files) : files_(files) {
    for (const fs::path& path : files) {
      const Descriptor file = text::open_file(path, O_RDONLY, ErrorCategory::data);
      sizes_.push_back(text::regular_file_size(file, path, ErrorCategory::data));
      bytes_ += sizes_.back();
    }
  }

  [[nodiscard]] Bytes bytes() const { return bytes_; }
  [[nodiscard]] const std::vector<Bytes>& sizes() const { return sizes_; }

  void read(Bytes offset, HostBytes out) const {
    for (std::size_t f = 0; f < files_.size() && !out.empty(); ++f) {
      if (offset >= sizes_[f]) {
        offset -= sizes_[f];
        continue;
      }
      const Bytes count = std::min<Bytes>(out.size(), sizes_[f] - offset);
      const Descriptor file = text::open_file(files_[f], O_RDONLY, ErrorCategory::data);
      text::read_fully(file, files_[f], offset, out.first(count));
      out = out.subspan(count);
      offset = 0;
    }
  }

 private:
  const std::vector<fs::path>& files_;
  std::vector<Bytes> sizes_;
  Bytes bytes_ = 0;
};

}  // namespace

std::string describe_content(const std::vector<fs::path>& files, std::uint64_t tokens) {
  const JoinedFiles data(files);
  state::RunningChecksum hash;
  hash.add(std::as_bytes(std::span(data.sizes())));
  std::vector<std::byte> piece;
  const bool whole = data.bytes() <= kMaxSamples * kSample;
  const std::uint64_t pieces = whole ? (data.bytes() + kSample - 1) / kSample : kMaxSamples;
  for (std::uint64_t p = 0; p < pieces; ++p) {
    // Each piece begins at p / 255 of the last beginning. The form avoids overflow for large files.
    const Bytes last = data.bytes() - std::min(kSample, data.bytes());
    const Bytes spread =
        last / (kMaxSamples - 1) * p + last % (kMaxSamples - 1) * p / (kMaxSamples - 1);
    const Bytes begin = whole ? p * kSample : spread;
    piece.resize(std::min(kSample, data.bytes() - begin));
    data.read(begin, piece);
    hash.add(piece);
  }
  return fmt::format("{} file{}, {}, {} tokens, XXH3 {:016x}", files.size(),
                     files.size() == 1 ? "" : "s", format_bytes(data.bytes()), tokens,
                     hash.digest());
}

config::Settings settings_of_run(const config::Config& config, const std::vector<fs::path>& files,
                                 std::uint64_t tokens) {
  config::Settings settings = config::settings_of(config);
  settings[fmt::format("data.{}", config.data.kind())] =
      text::Json(describe_content(files, tokens)).compact();
  return settings;
}

}  // namespace ballast::data
