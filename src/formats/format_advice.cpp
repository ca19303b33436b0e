#include "src/formats/format_advice.h"

#include <algorithm>
#include <array>
#include <cstdint>
#include <fstream>
#include <string_view>

#include <fmt/format.h>

#include "ballast/core/error.h"

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

}  // namespace ballast::formats
