#include "src/train/run_inputs.h"

#include <algorithm>
#include <array>
#include <cstdlib>
#include <filesystem>
#include <optional>
#include <span>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

#include <fcntl.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include "ballast/checkpoint/checkpoints.h"
#include "ballast/comm/agreement.h"
#include "ballast/config/adapter_folder.h"
#include "ballast/config/hugging_face_config.h"
#include "ballast/config/key_effects.h"
#include "ballast/core/error.h"
#include "ballast/core/machine.h"
#include "ballast/core/memory.h"
#include "ballast/core/units.h"
#include "ballast/setup/translate.h"
#include "ballast/state/checksum.h"
#include "ballast/text/files.h"
#include "ballast/train/trace.h"

#include "src/data/training_data.h"
#include "src/formats/adapter_files.h"
#include "src/train/initial_weights.h"
#include "src/train/run_directory.h"

namespace ballast::train {

namespace {

namespace fs = std::filesystem;

/// Variables that change what this program, oneDNN or cuBLAS compute. Ranks on other machines get
/// them only if the launcher passes them on.
constexpr std::array kVariables = {"BALLAST_ISA_MASK",         "ONEDNN_MAX_CPU_ISA",
                                   "DNNL_MAX_CPU_ISA",         "ONEDNN_DEFAULT_FPMATH_MODE",
                                   "DNNL_DEFAULT_FPMATH_MODE", "NVIDIA_TF32_OVERRIDE"};

constexpr Bytes kAlwaysWhole = 4 * kMiB;
constexpr Bytes kWholeTogether = 256 * kMiB;
constexpr Bytes kPiece = 64 * kKiB;
constexpr std::uint64_t kPieces = 64;
constexpr Bytes kOfTensor = 4 * kKiB;
constexpr std::size_t kTensors = 512;

/// Hashes parts of one file.
class FileHash {
 public:
  explicit FileHash(fs::path path)
      : path_(std::move(path)),
        file_(text::open_file(path_, O_RDONLY | O_NONBLOCK, ErrorCategory::data)),
        bytes_(text::regular_file_size(file_, path_, ErrorCategory::data)) {}

  [[nodiscard]] Bytes bytes() const { return bytes_; }

  void add(Bytes begin, Bytes count) {
    const Bytes end = std::min(begin + count, bytes_);
    while (begin < end) {
      buffer_.resize(std::min(kMiB, end - begin));
      text::read_fully(file_, path_, begin, buffer_);
      hash_.add(buffer_);
      begin += buffer_.size();
    }
  }
  void add_spread_pieces() {
    const Bytes last = bytes_ - std::min(kPiece, bytes_);
    for (std::uint64_t p = 0; p < kPieces; ++p) add(last / (kPieces - 1) * p, kPiece);
    add(last, kPiece);
  }
  [[nodiscard]] std::string describe() const {
    return fmt::format("{} with XXH3 {:016x}", format_bytes(bytes_), hash_.digest());
  }

 private:
  fs::path path_;
  Descriptor file_;
  Bytes bytes_;
  state::RunningChecksum hash_;
  std::vector<std::byte> buffer_;
};

class InputList {
 public:
  void add_file(const std::string& name, const fs::path& path) {
    FileHash hash(path);
    if (takes_whole(hash.bytes())) {
      hash.add(0, hash.bytes());
    } else {
      hash.add_spread_pieces();
    }
    add(name, path, hash);
  }
  void add_weights(const std::string& key, const formats::WeightFiles& files) {
    if (files.files().size() != 1 || files.path() != files.files().front().path()) {
      add_file(name_of(key, files.path()), files.path());
    }
    for (const formats::SafetensorsReader& file : files.files()) {
      FileHash hash(file.path());
      if (takes_whole(hash.bytes())) {
        hash.add(0, hash.bytes());
      } else {
        add_samples(hash, file.tensors());
      }
      add(name_of(key, file.path()), file.path(), hash);
    }
  }
  void add_existing(const std::string& key, const fs::path& path) {
    std::error_code ignored;
    if (fs::exists(path, ignored)) add_file(name_of(key, path), path);
  }
  void add(comm::Identity identity) { list_.push_back(std::move(identity)); }
  std::vector<comm::Identity> take() { return std::move(list_); }

 private:
  static std::string name_of(const std::string& key, const fs::path& path) {
    return fmt::format("{} {}", key, path.filename().string());
  }
  bool takes_whole(Bytes bytes) {
    if (bytes <= kAlwaysWhole) return true;
    if (bytes > kWholeTogether - whole_) return false;
    whole_ += bytes;
    return true;
  }
  static void add_samples(FileHash& hash, const std::vector<formats::StoredTensor>& tensors) {
    hash.add_spread_pieces();
    if (tensors.empty()) return;
    hash.add(0, tensors.front().offset);
    const std::size_t stride = (tensors.size() + kTensors - 1) / kTensors;
    for (std::size_t t = 0; t < tensors.size(); t += stride) {
      const Bytes size = tensors[t].bytes;
      hash.add(tensors[t].offset + (size - std::min(size, kOfTensor)) / 2,
               std::min(size, kOfTensor));
    }
  }
  void add(const std::string& name, const fs::path& path, const FileHash& hash) {
    list_.push_back({.name = name,
                     .subject = path.string(),
                     .content = hash.describe(),
                     .remedy = "copy the same files to all nodes"});
  }

  std::vector<comm::Identity> list_;
  Bytes whole_ = 0;  ///< bytes of larger files that were hashed whole
};

void add_program(InputList& list) {
  list.add({.name = "program",
            .subject = "the program",
            .content = build_id().empty()
                           ? fmt::format("ballast {}", version())
                           : fmt::format("ballast {}, build {:.12}", version(), build_id()),
            .remedy = "install the same one on all nodes",
            .category = ErrorCategory::usage});
  for (const char* const name : kVariables) {
    const char* const value = std::getenv(name);
    list.add({.name = name,
              .subject = fmt::format("{} in the environment", name),
              .content = value == nullptr ? "not set" : fmt::format("\"{}\"", value),
              .remedy = fmt::format("set it alike on all ranks (Open MPI: mpirun -x {})", name),
              .category = ErrorCategory::usage});
  }
}

/// Returns the folder of the model's weights; "" if there is none.
fs::path folder_of(const config::Config& config) {
  std::error_code ignored;
  const fs::path& weights = config.initial_weights;
  return fs::is_directory(weights, ignored) ? weights : weights.parent_path();
}

void add_model(const config::Config& config, InputList& list) {
  if (!config.initial_weights.empty()) {
    list.add_existing("model", folder_of(config) / config::kCheckpointConfig);
    list.add_weights("model.weights", formats::WeightFiles(config.initial_weights));
  }
  const auto& adapters = config.ballast.adapters;
  if (adapters && !adapters->path.empty()) {
    list.add_existing("ballast.adapters.path", adapters->path / config::kAdapterConfig);
    list.add_weights("ballast.adapters.path", formats::AdapterFiles(adapters->path).files());
  }
}

void add_data(const config::Config& config, const data::TrainingData& data, InputList& list) {
  const auto add_all = [&](std::string_view key, const std::vector<fs::path>& files) {
    for (std::size_t f = 0; f < files.size(); ++f) {
      const std::string name = fmt::format("data.{}[{}]", key, f);
      list.add_file(name, files[f]);
      if (config.data.tokens.empty() || files[f].extension() != ".bin") continue;
      list.add_existing(name, fs::path(files[f]).replace_extension(".idx"));  // of Megatron
    }
  };
  add_all(config.data.kind(), data.files);
  add_all("eval", data.evaluation_files);
  const bool has_documents = !config.data.documents.empty() || !config.data.pairs.empty();
  if (config.initial_weights.empty() || !has_documents || config.data.as_is) return;
  list.add_existing("tokenizer", folder_of(config) / "tokenizer.json");
}

void add_settings(const config::Config& config, const RunOptions& options, InputList& list) {
  config::Settings settings = config::all_settings(config);
  for (const config::KeyInfo& key : config::key_list()) {
    if (key.names_paths) settings.erase(key.path);
  }
  const fs::path& file = options.trace.config;
  for (const auto& [key, value] : settings) {
    list.add({.name = key,
              .subject = fmt::format("{} of {}", key, file.empty() ? "the config" : file.string()),
              .content = value,
              .remedy = "give all ranks the same config",
              .category = ErrorCategory::config});
  }
  constexpr std::array kKinds = {"not given", "not given, but --overwrite", "given", "auto"};
  const auto add_option = [&](const std::string& name, const std::string& value) {
    list.add({.name = name,
              .subject = name,
              .content = value,
              .remedy = "give all ranks the same options",
              .category = ErrorCategory::usage});
  };
  const auto kind = static_cast<std::size_t>(options.directory);
  add_option("--resume",
             options.resume.empty() ? std::string(kKinds.at(kind)) : "from another directory");
  add_option("--allow-change", fmt::format("{}", fmt::join(options.allowed_changes, " ")));
}

}  // namespace

std::vector<comm::Identity> compared_inputs(const config::Config& config,
                                            const data::TrainingData& data,
                                            const RunOptions& options) {
  InputList list;
  add_program(list);
  add_model(config, list);
  add_data(config, data, list);
  add_settings(config, options, list);
  return list.take();
}

std::vector<comm::Identity> compared_files(const checkpoint::Checkpoint& checkpoint) {
  InputList list;
  for (const fs::path& file : checkpoint.files()) {
    // A swap file also holds states of other checkpoints, which may be written meanwhile.
    if (file.filename().string().find(".swap-") != std::string::npos) continue;
    list.add_file(file.filename().string(), file);
  }
  return list.take();
}

void warn_of_other_arithmetic(const std::string& arithmetic, comm::Ranks* ranks) {
  // Each rank updates its own shards, so all have equal weights nevertheless.
  const comm::Identity own = {
      .name = "arithmetic",
      .subject = "its arithmetic",
      .content = arithmetic,
      .remedy = "losses are close to those of equal machines, but may differ in their last bits"};
  const auto found = comm::find_disagreement(ranks, {own});
  if (found && ranks->rank() == 0) log(LogLevel::warning, found->message);
}

OpenedRun open_inputs(const config::Config& config, const comm::Launch& launch) {
  setup::check_device(config, launch);
  check_initial_weights(config);
  OpenedRun inputs = {.data = data::open_training_data(config)};
  setup::check_swap_paths(config, launch);
  if (launch.first()) warn_of_doubts(config, inputs.data);
  return inputs;
}

void open_outputs(const config::Config& config, const RunOptions& options, OpenedRun& inputs) {
  inputs.files = std::make_unique<RunFiles>(config, options.directory);
  std::vector<std::filesystem::path> read = inputs.data.files;
  read.insert(read.end(), {options.trace.config, config.initial_weights});
  read.insert(read.end(), config.data.eval.begin(), config.data.eval.end());
  for (const std::filesystem::path& file : read) {
    if (options.directory != RunDirectory::overwritten || !inputs.files->owns(file)) continue;
    throw Error(ErrorCategory::usage,
                fmt::format("{} is read by this run, and --overwrite would replace it; choose "
                            "another run directory with --out",
                            file.string()));
  }
  const std::filesystem::path& trace = options.trace.file;
  if (trace.empty()) return;
  inputs.trace = trace_rule(kTracedProcess, options.trace.overwrite, std::move(read));
  if (inputs.files->owns(trace)) {
    throw Error(ErrorCategory::usage,
                fmt::format("{} is a file of the run itself; choose another file for --trace",
                            trace.string()));
  }
  text::check_output(trace, inputs.trace);
}

bool open_run(const config::Config& config, Observer& observer, comm::Ranks* ranks,
              RunOptions& options, OpenedRun& inputs) {
  const bool is_root = ranks == nullptr || ranks->rank() == 0;
  const bool automatic = options.directory == RunDirectory::automatic;
  std::vector<comm::Identity> compared;
  comm::collective_try(ranks, [&] {
    if (!options.resume.empty()) checkpoint::check_names_states(options.resume);
    inputs = open_inputs(config, ranks == nullptr ? comm::Launch{} : ranks->launch());
    if (ranks != nullptr) compared = compared_inputs(config, inputs.data, options);
  });
  comm::require_agreement(ranks, compared);
  std::optional<FinishedRun> finished;  // on rank 0
  comm::collective_try(ranks, [&] {
    if (is_root) open_outputs(config, options, inputs);
    if (!is_root || !automatic) return;
    finished =
        find_finished(config, data::settings_of_run(config, inputs.data.files, inputs.data.tokens));
    if (!finished) options.directory = inputs.files->begin_or_continue(config);
  });
  if (!automatic) return true;
  if (is_root && finished) observer.already_finished(*finished);
  if (comm::decided_by_root(ranks, finished.has_value())) return false;
  const bool continues = options.directory == RunDirectory::continued;
  if (comm::decided_by_root(ranks, continues)) options.directory = RunDirectory::continued;
  return true;
}

}  // namespace ballast::train
