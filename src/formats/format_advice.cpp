#include <algorithm>
#include <array>
#include <cstdint>
#include <fstream>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include <fmt/format.h>

#include "ballast/core/error.h"
#include "ballast/formats/file_formats.h"
#include "ballast/text/files.h"
#include "ballast/text/json.h"

namespace ballast::formats {

namespace {

// Advice with the arguments of filled_in().
constexpr std::string_view kAsTokens = "name it as data.tokens";
constexpr std::string_view kToJsonLines =
    "write its texts or conversations to a jsonl file for tools/prepare.py";
constexpr std::string_view kToNumpy =
    "read it with the library that wrote it, save the ids with numpy.save and name that file as "
    "data.tokens, or write texts or conversations to a jsonl file for tools/prepare.py";
constexpr std::string_view kOtherData = "name the data to train on instead";
constexpr std::string_view kToRows = "'{prepare}' makes a file for data.{rows}";
constexpr std::string_view kPackedRows =
    "'{prepare}' makes a file for data.{rows} of rows with messages or texts";
constexpr std::string_view kTexts =
    "{or_text}write each text as a line {{\"text\": \"...\"}} of a jsonl file and make documents "
    "of it ({prepare_texts})";

/// Texts of messages about a format.
struct KnownFormat {
  FileFormat format;
  std::string_view name;         ///< for "FILE is ..."
  std::string_view advice;       ///< after "unpack it first" if it begins with a bracket
  std::string_view reader = {};  ///< key of the section data that reads it
};

constexpr auto kFormats = std::to_array<KnownFormat>({
    {FileFormat::unknown, "of an unknown format", kToJsonLines},
    {FileFormat::numpy, "a NumPy array (.npy)", kAsTokens, "tokens"},
    {FileFormat::llmc, "a token file of llm.c", kAsTokens, "tokens"},
    {FileFormat::megatron_index, "an index of Megatron",
     "name the .bin file next to it{as_tokens}"},
    {FileFormat::documents, "a file of documents", "name it as data.documents", "documents"},
    {FileFormat::pairs, "a file of pairs", "name it as data.pairs", "pairs"},
    {FileFormat::text, "text", kTexts, "text"},
    {FileFormat::utf16_text, "text in UTF-16", "convert it (iconv -f UTF-16 -t UTF-8 {file})"},
    {FileFormat::json_lines, "JSON Lines", kToRows},
    {FileFormat::json_array, "a JSON array", kToRows},
    {FileFormat::json, "JSON", kTexts, "text"},
    {FileFormat::html, "an HTML page, perhaps of a download that failed",
     "download the file again"},
    {FileFormat::git_lfs, "a pointer of git-lfs", "get the file itself with 'git lfs pull'"},
    {FileFormat::safetensors, "a safetensors file without documents, as of weights", kOtherData,
     "documents"},
    {FileFormat::numpy_archive, "a NumPy archive (.npz)",
     "save its array of ids with numpy.save and name that file as data.tokens"},
    {FileFormat::litgpt, "a packed file of lit-gpt (LITPKDS)",
     "its tokens begin at byte 24: 'tail -c +25 FILE > tokens.bin' makes a file for data.tokens, "
     "if they are uint16"},
    {FileFormat::litdata, "a shard of LitData", kToNumpy},
    {FileFormat::mosaic, "a shard of MosaicML (MDS)", kToNumpy},
    {FileFormat::tfrecord, "a TFRecord file", kToNumpy},
    {FileFormat::fairseq_index, "an index of fairseq",
     "save the ids with numpy.save and name that file as data.tokens"},
    {FileFormat::llmc_weights, "a checkpoint or tokenizer of llm.c", kOtherData},
    {FileFormat::gguf, "a GGUF file, the weights of a model", kOtherData},
    {FileFormat::torch, "a file of torch.save",
     "if it holds token ids, save them with numpy.save('tokens.npy', tensor.numpy()) and name that "
     "file as data.tokens"},
    {FileFormat::pickle, "a Python pickle", kToNumpy},
    {FileFormat::parquet, "a Parquet file", kPackedRows},
    {FileFormat::arrow, "an Arrow file", kToJsonLines},
    {FileFormat::hdf5, "an HDF5 file", kToNumpy},
    {FileFormat::sqlite, "an SQLite database", kToJsonLines},
    {FileFormat::pdf, "a PDF file", kToJsonLines},
    {FileFormat::image, "an image", kToJsonLines},
    {FileFormat::gzip, "compressed with gzip", "(gzip -dk {file})"},
    {FileFormat::zstd, "compressed with zstd", "(zstd -d {file})"},
    {FileFormat::bzip2, "compressed with bzip2", "(bzip2 -dk {file})"},
    {FileFormat::xz, "compressed with xz", "(xz -dk {file})"},
    {FileFormat::lz4, "compressed with lz4", "(lz4 -d {file})"},
    {FileFormat::zip, "a ZIP archive", "(unzip {file})"},
    {FileFormat::seven_zip, "a 7-Zip archive", "(7z x {file})"},
    {FileFormat::rar, "a RAR archive", "(unrar x {file})"},
    {FileFormat::tar, "a tar archive, perhaps a shard of WebDataset", "(tar -xf {file})"},
});

const KnownFormat& known(FileFormat format) {
  return *std::find_if(kFormats.begin(), kFormats.end(),
                       [format](const KnownFormat& one) { return one.format == format; });
}

bool reads_documents(std::string_view key) {
  return key == "documents" || key == "pairs";
}

std::string advice(const std::filesystem::path& path, FileFormat format, const FileUse& use) {
  const bool rows =
      format == FileFormat::gzip && path.stem().extension().string().starts_with(".json");
  const std::string_view text = rows ? kPackedRows : known(format).advice;
  return (text.starts_with('(') ? "unpack it first " : "") +
         fmt::format(fmt::runtime(text), fmt::arg("file", path.string()),
                     fmt::arg("prepare", preparing_command(path, use)),
                     fmt::arg("prepare_texts", preparing_command("texts.jsonl", use)),
                     fmt::arg("rows", use.key == "pairs" ? "pairs" : "documents"),
                     fmt::arg("as_tokens", use.key == "tokens" ? "" : " as data.tokens"),
                     fmt::arg("or_text", use.key == "tokens"
                                             ? "name it as data.text to read it byte by byte, or "
                                             : ""));
}

std::string_view expected_by(std::string_view key) {
  if (key == "text") return "plain text";
  if (key == "tokens") return "token ids";
  return key == "pairs" ? "a file of pairs" : "a file of documents";
}

/// Quotes a word for a shell's command line.
std::string quoted(const std::string& word) {
  const bool plain = word.find_first_of(" '\"\\$*?&;()<>|") == std::string::npos;
  return plain ? word : fmt::format("\"{}\"", word);
}

/// Text in a damaged file of weights begins with the length of its header.
bool begins_in_ascii(const std::filesystem::path& path) {
  std::array<char, sizeof(std::uint64_t)> start = {};
  std::ifstream(path, std::ios::binary).read(start.data(), start.size());
  return std::all_of(start.begin(), start.end(), [](char c) { return (c & 0x80) == 0; });
}

}  // namespace

std::string preparing_command(const std::filesystem::path& file, const FileUse& use) {
  std::filesystem::path made = file.filename();
  if (made.extension() == ".gz") made.replace_extension();
  made.replace_extension(".safetensors");
  return fmt::format("tools/prepare.py {}{} --model {} --out {}",
                     use.key == "pairs" ? "--pairs " : "", quoted(file.string()),
                     use.model.empty() ? "DIR" : quoted(use.model.string()), quoted(made.string()));
}

std::string_view reader_of(FileFormat format) {
  return known(format).reader;
}

std::string_view describe(FileFormat format) {
  return known(format).name;
}

std::string advice_for(const std::filesystem::path& path, FileFormat format) {
  return advice(path, format, {.key = "documents", .model = ""});
}

std::string explain_not_safetensors(const std::filesystem::path& path) {
  const FileFormat format = recognise(path);
  const std::string_view reader = reader_of(format);
  if (format == FileFormat::unknown || format == FileFormat::json || reads_documents(reader) ||
      (format == FileFormat::text && !begins_in_ascii(path))) {
    return "";
  }
  const bool is_data = !reader.empty() || format == FileFormat::megatron_index;
  return fmt::format(
      "is {}, not safetensors: {}", describe(format),
      is_data ? "it can be data of a config, not weights" : advice_for(path, format));
}

void refuse_other_format(const std::filesystem::path& path, FileFormat format, const FileUse& use) {
  const std::string_view reader = reader_of(format);
  // The reader of documents and pairs compares these two itself.
  const bool is_read = use.key == reader || (reads_documents(use.key) && reads_documents(reader));
  if (is_read || format == FileFormat::unknown) return;
  throw Error(ErrorCategory::data,
              fmt::format("{} is {}, not {}: {}", path.string(), describe(format),
                          expected_by(use.key), advice(path, format, use)));
}

namespace {

/// A kind of JSON file, recognised by its top-level keys.
struct JsonKind {
  std::vector<std::string_view> keys;  ///< all of which it has
  std::string_view kind;
  std::string_view advice;
};

const std::vector<JsonKind> kJsonKinds = {
    {{"upload_gbps"}, "a file of rates", "it is for ballast plan CONFIG --rates FILE"},
    {{"traceEvents"}, "a timeline", "ui.perfetto.dev and ballast report --trace show it"},
    {{"weight_map"}, "an index of weights", "name its folder as model.path of a config"},
    {{"base_model_name_or_path"},
     "the adapter_config.json of PEFT",
     "name its folder as ballast.adapters.path of a config"},
    {{"architectures"}, "the config.json of a model", "name its folder as model.path of a config"},
    {{"model_type"}, "the config.json of a model", "name its folder as model.path of a config"},
    {{"step", "loss"}, "the metrics of a run", "ballast report draws them"},
    {{"command", "version"}, "the record of a run", "its config is config.json next to it"},
    {{"zero_optimization"},
     "a config",
     "rates are measured, or in a file like those in configs/rates"},
    {{"model", "data"},
     "a config",
     "rates are measured, or in a file like those in configs/rates"}};

/// `text` as JSON, even with mistakes that a reader of configs reports; nothing if it is not JSON.
std::optional<text::Json> lenient(std::string_view text) {
  try {
    return text::parse_json(text, "", {.comments = true, .non_finite = true, .repeated = true});
  } catch (const Error&) {
    return {};
  }
}

/// The first JSON object of the file, or null.
text::Json first_object(const std::filesystem::path& path) {
  try {
    const std::string text = text::read_settings(path, "JSON");
    if (auto whole = lenient(text)) return *std::move(whole);
    if (auto line = lenient(text.substr(0, text.find('\n')))) return *std::move(line);
  } catch (const Error&) {
    // Its reader has reported what is wrong.
  }
  return {};
}

/// A config may have the keys of a row of data in its sections.
bool is_config(const text::Json& json) {
  constexpr std::array kSections = {"model",     "data",    "optimizer", "zero_optimization",
                                    "scheduler", "ballast", "aio",       "train_batch_size"};
  return std::any_of(kSections.begin(), kSections.end(),
                     [&](const char* key) { return json.find(key) != nullptr; });
}

std::string explain_json(const std::filesystem::path& path, const text::Json& json,
                         std::string_view wanted) {
  for (const JsonKind& one : kJsonKinds) {
    const bool all = std::all_of(one.keys.begin(), one.keys.end(),
                                 [&](std::string_view key) { return json.find(key) != nullptr; });
    if (all && one.kind != wanted) {
      return fmt::format("{} is {}, not {}: {}", path.string(), one.kind, wanted, one.advice);
    }
  }
  return "";
}

/// Whether the text begins like JSON, or like a comment before it.
bool begins_like_json(const std::filesystem::path& path) {
  try {
    const std::string text = text::read_settings(path, "JSON");
    const std::size_t at = text.find_first_not_of(" \t\r\n\xef\xbb\xbf");
    return at == std::string::npos || std::string_view("{[/#").find(text[at]) != std::string::npos;
  } catch (const Error&) {
    return true;
  }
}

/// Describes text in a format that people write configs in, by the file's extension, or other text.
std::string explain_text(const std::filesystem::path& path, std::string_view wanted) {
  constexpr std::array kEnds = {".yaml", ".yml", ".toml", ".ini", ".py", ".md", ".sh"};
  const std::string end = path.extension().string();
  if (std::find(kEnds.begin(), kEnds.end(), end) == kEnds.end()) {
    if (begins_like_json(path)) return "";
    return fmt::format("{} is text, not {} in JSON", path.string(), wanted);
  }
  return fmt::format("{} is not JSON ({}); write {} in JSON", path.string(), end, wanted);
}

}  // namespace

std::string explain_other_settings(const std::filesystem::path& path, Settings wanted) {
  const std::string_view name = wanted == Settings::config ? "a config" : "a file of rates";
  const text::Json json = first_object(path);
  if (wanted == Settings::config && is_config(json)) return "";
  const FileFormat format = recognise(path);
  const bool packed_json = format == FileFormat::gzip && path.stem().extension() == ".json";
  if (packed_json) {
    return fmt::format("{0} is compressed with gzip; unpack it first (gzip -dk {0})",
                       path.string());
  }
  if (format == FileFormat::json) return explain_json(path, json, name);
  if (format == FileFormat::unknown || format == FileFormat::text) return explain_text(path, name);
  return fmt::format("{} is {}, not {}: {}", path.string(), describe(format), name,
                     reader_of(format).empty()
                         ? advice_for(path, format)
                         : "a config in JSON names files of data and of weights");
}

}  // namespace ballast::formats
