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

struct NamedFormat {
  FileFormat format;
  std::string_view name;  ///< in "FILE is ..."
};

constexpr auto kNames = std::to_array<NamedFormat>({
    {FileFormat::numpy, "a NumPy array (.npy)"},
    {FileFormat::llmc, "a token file of llm.c"},
    {FileFormat::megatron_index, "an index of Megatron"},
    {FileFormat::documents, "a file of documents"},
    {FileFormat::pairs, "a file of pairs"},
    {FileFormat::text, "text"},
    {FileFormat::utf16_text, "text in UTF-16"},
    {FileFormat::json_lines, "JSON Lines"},
    {FileFormat::json_array, "a JSON array"},
    {FileFormat::json, "JSON"},
    {FileFormat::html, "an HTML page, perhaps of a download that failed"},
    {FileFormat::git_lfs, "a pointer of git-lfs"},
    {FileFormat::safetensors, "a safetensors file without documents, as of weights"},
    {FileFormat::numpy_archive, "a NumPy archive (.npz)"},
    {FileFormat::litgpt, "a packed file of lit-gpt (LITPKDS)"},
    {FileFormat::litdata, "a shard of LitData"},
    {FileFormat::mosaic, "a shard of MosaicML (MDS)"},
    {FileFormat::tfrecord, "a TFRecord file"},
    {FileFormat::fairseq_index, "an index of fairseq"},
    {FileFormat::llmc_weights, "a checkpoint or tokenizer of llm.c"},
    {FileFormat::gguf, "a GGUF file, the weights of a model"},
    {FileFormat::torch, "a file of torch.save"},
    {FileFormat::pickle, "a Python pickle"},
    {FileFormat::parquet, "a Parquet file"},
    {FileFormat::arrow, "an Arrow file"},
    {FileFormat::hdf5, "an HDF5 file"},
    {FileFormat::sqlite, "an SQLite database"},
    {FileFormat::pdf, "a PDF file"},
    {FileFormat::image, "an image"},
    {FileFormat::gzip, "compressed with gzip"},
    {FileFormat::zstd, "compressed with zstd"},
    {FileFormat::bzip2, "compressed with bzip2"},
    {FileFormat::xz, "compressed with xz"},
    {FileFormat::lz4, "compressed with lz4"},
    {FileFormat::zip, "a ZIP archive"},
    {FileFormat::seven_zip, "a 7-Zip archive"},
    {FileFormat::rar, "a RAR archive"},
    {FileFormat::tar, "a tar archive, perhaps a shard of WebDataset"},
});

std::string_view name_of(FileFormat format) {
  const auto* const found =
      std::find_if(kNames.begin(), kNames.end(),
                   [format](const NamedFormat& one) { return one.format == format; });
  return found == kNames.end() ? "of an unknown format" : found->name;
}

bool reads_documents(std::string_view key) {
  return key == "documents" || key == "pairs";
}

bool is_read_by(std::string_view key, FileFormat format) {
  switch (format) {
    case FileFormat::unknown:
      return true;
    case FileFormat::numpy:
    case FileFormat::llmc:
      return key == "tokens";
    case FileFormat::documents:
    case FileFormat::pairs:
    case FileFormat::safetensors:
      return reads_documents(key);  // its reader compares the kinds
    case FileFormat::text:
    case FileFormat::json:
      return key == "text";
    default:
      return false;
  }
}

/// The key that reads the format; "" if there is none.
std::string_view key_of(FileFormat format) {
  switch (format) {
    case FileFormat::numpy:
    case FileFormat::llmc:
      return "tokens";
    case FileFormat::documents:
      return "documents";
    case FileFormat::pairs:
      return "pairs";
    default:
      return "";
  }
}

/// The command that unpacks the file; "" if it is not packed.
std::string unpacking_command(const std::filesystem::path& path, FileFormat format) {
  const std::string file = path.string();
  switch (format) {
    case FileFormat::gzip:
      return "gzip -dk " + file;
    case FileFormat::zstd:
      return "zstd -d " + file;
    case FileFormat::bzip2:
      return "bzip2 -dk " + file;
    case FileFormat::xz:
      return "xz -dk " + file;
    case FileFormat::lz4:
      return "lz4 -d " + file;
    case FileFormat::zip:
      return "unzip " + file;
    case FileFormat::seven_zip:
      return "7z x " + file;
    case FileFormat::rar:
      return "unrar x " + file;
    case FileFormat::tar:
      return "tar -xf " + file;
    default:
      return "";
  }
}

/// How to get an array of token ids out of the files of other programs.
std::string_view advice_for_arrays(FileFormat format) {
  switch (format) {
    case FileFormat::numpy_archive:
      return "save its array of ids with numpy.save and name that file as data.tokens";
    case FileFormat::litgpt:
      return "its tokens begin at byte 24: 'tail -c +25 FILE > tokens.bin' makes a file for "
             "data.tokens, if they are uint16";
    case FileFormat::torch:
      return "if it holds token ids, save them with numpy.save('tokens.npy', tensor.numpy()) and "
             "name "
             "that file as data.tokens";
    case FileFormat::fairseq_index:
      return "save the ids with numpy.save and name that file as data.tokens";
    case FileFormat::litdata:
    case FileFormat::mosaic:
    case FileFormat::tfrecord:
    case FileFormat::pickle:
    case FileFormat::hdf5:
      return "read it with the library that wrote it, save the ids with numpy.save and name that "
             "file as data.tokens, or write texts or conversations to a jsonl file for "
             "tools/prepare.py";
    case FileFormat::gguf:
    case FileFormat::llmc_weights:
    case FileFormat::safetensors:
      return "name the data to train on instead";
    default:
      return "write its texts or conversations to a jsonl file for tools/prepare.py";
  }
}

std::string advice(const std::filesystem::path& path, FileFormat format, const FileUse& use) {
  if (const auto key = key_of(format); !key.empty()) return fmt::format("name it as data.{}", key);
  const bool rows =
      format == FileFormat::gzip && path.stem().extension().string().starts_with(".json");
  if (rows || format == FileFormat::parquet) {
    return fmt::format("'{}' makes a file for data.{} of rows with messages or texts",
                       preparing_command(path, use), use.key == "pairs" ? "pairs" : "documents");
  }
  if (const auto command = unpacking_command(path, format); !command.empty()) {
    return fmt::format("unpack it first ({})", command);
  }
  switch (format) {
    case FileFormat::json_lines:
    case FileFormat::json_array:
      return fmt::format("'{}' makes a file for data.{}", preparing_command(path, use),
                         use.key == "pairs" ? "pairs" : "documents");
    case FileFormat::text:
    case FileFormat::json:
      return fmt::format(
          "{}write each text as a line {{\"text\": \"...\"}} of a jsonl file and make "
          "documents of it ({})",
          use.key == "tokens" ? "name it as data.text to read it byte by byte, or " : "",
          preparing_command("texts.jsonl", use));
    case FileFormat::utf16_text:
      return fmt::format("convert it (iconv -f UTF-16 -t UTF-8 {})", path.string());
    case FileFormat::html:
      return "download the file again";
    case FileFormat::git_lfs:
      return "get the file itself with 'git lfs pull'";
    case FileFormat::megatron_index:
      return use.key == "tokens" ? "name the .bin file next to it"
                                 : "name the .bin file next to it as data.tokens";
    default:
      return std::string(advice_for_arrays(format));
  }
}

std::string_view expected_by(std::string_view key) {
  if (key == "text") return "plain text";
  if (key == "tokens") return "token ids";
  return key == "pairs" ? "a file of pairs" : "a file of documents";
}

/// A word of a shell's command line.
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

std::string_view describe(FileFormat format) {
  return name_of(format);
}

std::string advice_for(const std::filesystem::path& path, FileFormat format) {
  return advice(path, format, {.key = "documents", .model = ""});
}

std::string explain_not_safetensors(const std::filesystem::path& path) {
  const FileFormat format = recognise(path);
  const std::string what = fmt::format("is {}, not safetensors", name_of(format));
  switch (format) {
    case FileFormat::unknown:
    case FileFormat::json:
    case FileFormat::safetensors:
    case FileFormat::documents:
    case FileFormat::pairs:
      return "";
    case FileFormat::text:
      if (!begins_in_ascii(path)) return "";
      [[fallthrough]];
    case FileFormat::numpy:
    case FileFormat::llmc:
    case FileFormat::megatron_index:
      return fmt::format("{}: it can be data of a config, not weights", what);
    default:
      return fmt::format("{}: {}", what, advice_for(path, format));
  }
}

void refuse_other_format(const std::filesystem::path& path, FileFormat format, const FileUse& use) {
  if (is_read_by(use.key, format)) return;
  throw Error(ErrorCategory::data,
              fmt::format("{} is {}, not {}: {}", path.string(), name_of(format),
                          expected_by(use.key), advice(path, format, use)));
}

}  // namespace ballast::formats
