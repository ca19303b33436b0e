#include "src/formats/data_files.h"

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <system_error>
#include <utility>
#include <vector>

#include <fcntl.h>
#include <fmt/format.h>
#include <glob.h>
#include <openssl/evp.h>
#include <unistd.h>

#include "ballast/core/error.h"
#include "ballast/formats/model_folder.h"
#include "ballast/text/files.h"
#include "ballast/text/json.h"

namespace ballast::formats {

namespace {

namespace fs = std::filesystem;

constexpr std::size_t kProbedBytes = 64 * kKiB;

[[noreturn]] void throw_unreadable(const fs::path& path, const std::error_code& code) {
  throw Error(ErrorCategory::data, fmt::format("cannot read {}", path.string()), code.value());
}

bool holds_nul(const fs::path& path) {
  const auto file = text::open_file(path, O_RDONLY, ErrorCategory::data);
  std::array<char, 4096> buffer;
  for (std::size_t offset = 0; offset < kProbedBytes;) {
    const auto count =
        ::pread(file.number(), buffer.data(), buffer.size(), static_cast<off_t>(offset));
    if (count < 0) {
      if (errno == EINTR) continue;
      throw_unreadable(path, {errno, std::generic_category()});
    }
    if (count == 0) return false;
    if (std::memchr(buffer.data(), 0, static_cast<std::size_t>(count)) != nullptr) return true;
    offset += static_cast<std::size_t>(count);
  }
  return false;
}

/// `extension`: the extension of token files.
bool is_accepted(const fs::path& path, FolderFilter filter, std::string_view extension) {
  switch (filter) {
    case FolderFilter::text:
      break;
    case FolderFilter::token_bin:
      return path.extension() == extension;
    case FolderFilter::documents:
      return path.extension() == ".safetensors";
  }
  return !holds_nul(path);
}

std::string_view name_of(FolderFilter filter) {
  switch (filter) {
    case FolderFilter::text:
      break;
    case FolderFilter::token_bin:
      return "token file (.bin or .npy)";
    case FolderFilter::documents:
      return "file of documents (.safetensors)";
  }
  return "text file";
}

bool is_skipped_folder(const fs::path& path) {
  const auto name = path.filename().string();
  return name.starts_with('.') || name.starts_with("build");
}

void walk(const fs::path& folder, FolderFilter filter, std::string_view extension,
          std::vector<ListedFile>& files) {
  std::error_code code;
  std::vector<fs::directory_entry> entries;
  fs::directory_iterator entry(folder, code);
  for (; !code && entry != fs::directory_iterator(); entry.increment(code)) {
    entries.push_back(*entry);
  }
  if (code) throw_unreadable(folder, code);
  std::sort(entries.begin(), entries.end(), [](const auto& a, const auto& b) {
    return a.path().filename().native() < b.path().filename().native();
  });
  for (const auto& child : entries) {
    std::error_code ignored;  // a dangling link is neither file nor folder
    if (child.is_directory(ignored)) {
      if (!child.is_symlink(ignored) && !is_skipped_folder(child.path())) {
        walk(child.path(), filter, extension, files);
      }
    } else if (child.is_regular_file(ignored) && is_accepted(child.path(), filter, extension)) {
      files.push_back({.path = child.path(), .in_folder = true});
    }
  }
}

void walk(const fs::path& folder, FolderFilter filter, std::vector<ListedFile>& files) {
  const std::size_t before = files.size();
  walk(folder, filter, ".bin", files);
  // Other arrays, such as masks, often lie next to .bin files.
  if (filter == FolderFilter::token_bin && files.size() == before) {
    walk(folder, filter, ".npy", files);
  }
}

std::vector<fs::path> expand_glob(const std::string& pattern) {
  glob_t found = {};
  const int status = ::glob(pattern.c_str(), GLOB_NOSORT | GLOB_ERR, nullptr, &found);
  const int error_number = errno;
  std::vector<fs::path> paths;
  if (status == 0) paths.assign(found.gl_pathv, found.gl_pathv + found.gl_pathc);
  ::globfree(&found);
  if (status != 0 && status != GLOB_NOMATCH) {
    throw Error(ErrorCategory::data, fmt::format("cannot expand {}", pattern), error_number);
  }
  std::sort(paths.begin(), paths.end(),
            [](const auto& a, const auto& b) { return a.native() < b.native(); });
  return paths;
}

void add_pattern(const std::string& pattern, FolderFilter filter, std::vector<ListedFile>& files) {
  std::error_code code;
  const auto status = fs::status(pattern, code);
  if (fs::is_directory(status)) {
    walk(pattern, filter, files);
  } else if (fs::exists(status)) {
    files.push_back({.path = pattern});
  } else if (pattern.find_first_of("*?[") == std::string::npos) {
    throw_unreadable(pattern,
                     code ? code : std::make_error_code(std::errc::no_such_file_or_directory));
  } else {
    for (const auto& path : expand_glob(pattern)) {
      if (fs::is_directory(path, code)) {
        if (!is_skipped_folder(path)) walk(path, filter, files);
      } else if (fs::is_regular_file(path, code) &&
                 (filter != FolderFilter::text || !holds_nul(path))) {
        files.push_back({.path = path});
      }
    }
  }
}

}  // namespace

std::vector<ListedFile> list_files(std::span<const std::string> patterns, FolderFilter filter) {
  std::vector<ListedFile> files;
  for (const auto& pattern : patterns) {
    const auto before = files.size();
    add_pattern(pattern, filter, files);
    if (files.size() == before) {
      throw Error(ErrorCategory::data,
                  fmt::format("no {} matches {}: check the path", name_of(filter), pattern));
    }
  }
  return files;
}

namespace {

namespace fs = std::filesystem;
using text::Json;
using IdsAndTokens = std::vector<std::pair<std::uint64_t, std::string>>;

constexpr const char* kTokenizer = "tokenizer.json";

std::string hash_of(IdsAndTokens tokens) {
  std::sort(tokens.begin(), tokens.end());
  std::string lines;
  for (const auto& [id, token] : tokens) lines += fmt::format("{}\t{}\n", id, token);
  return sha256(lines);
}

/// The tokens by id, from an object of token and id, or, for a unigram model, an array of tokens
/// with their scores.
IdsAndTokens tokens_of(const Json& vocabulary) {
  IdsAndTokens tokens;
  for (const auto& [token, id, at] : vocabulary.members()) {
    tokens.emplace_back(id.whole().value_or(0), token);
  }
  for (const Json& entry : vocabulary.elements()) {
    const bool whole = !entry.elements().empty() && entry.elements().front().is_string();
    tokens.emplace_back(tokens.size(), whole ? entry.elements().front().text() : "");
  }
  return tokens;
}

IdsAndTokens added_tokens_of(const Json& tokenizer) {
  IdsAndTokens tokens;
  const Json* const added = tokenizer.find("added_tokens");
  if (added == nullptr) return tokens;
  for (const Json& entry : added->elements()) {
    const Json* const id = entry.find("id");
    const Json* const content = entry.find("content");
    if (id == nullptr || content == nullptr) continue;
    tokens.emplace_back(id->whole().value_or(0), content->text());
  }
  return tokens;
}

/// Sorts the vocabulary by id and writes merges as pairs, like the tokenizers library.
void arrange(Json& model) {
  Json& vocabulary = model["vocab"];
  if (vocabulary.is_object()) {
    IdsAndTokens tokens = tokens_of(vocabulary);
    std::sort(tokens.begin(), tokens.end());
    vocabulary = Json::object();
    for (auto& [id, token] : tokens) vocabulary.add(std::move(token), id);
  }
  const Json* const merges = model.find("merges");
  if (merges == nullptr || merges->elements().empty() || !merges->elements().front().is_string()) {
    return;
  }
  Json pairs = Json::array();
  for (const Json& merge : merges->elements()) {
    const std::size_t space = std::min(merge.text().find(' '), merge.text().size());
    const std::size_t second = std::min(space + 1, merge.text().size());
    pairs.push_back(Json::array({merge.text().substr(0, space), merge.text().substr(second)}));
  }
  model["merges"] = std::move(pairs);
}

}  // namespace

bool differ(const TokenizerIdentity& a, const TokenizerIdentity& b) {
  if (a.serialised == b.serialised) return false;
  return a.vocabulary.empty() || a.vocabulary != b.vocabulary || a.added_tokens != b.added_tokens;
}

TokenizerDifference compare(const TokenizerIdentity& a, const TokenizerIdentity& b) {
  const auto known = [](const std::string& x, const std::string& y) {
    return !x.empty() && !y.empty();
  };
  if (known(a.serialised, b.serialised) && a.serialised == b.serialised) {
    return TokenizerDifference::none;
  }
  if (known(a.vocabulary, b.vocabulary)) {
    if (a.vocabulary != b.vocabulary) return TokenizerDifference::vocabulary;
    const bool added = known(a.added_tokens, b.added_tokens) && a.added_tokens != b.added_tokens;
    return added ? TokenizerDifference::added_tokens : TokenizerDifference::none;
  }
  return known(a.serialised, b.serialised) ? TokenizerDifference::unclear
                                           : TokenizerDifference::none;
}

TokenizerIdentity identify_tokenizer(const fs::path& folder) {
  const fs::path file = folder / kTokenizer;
  std::error_code ignored;
  if (!fs::exists(file, ignored)) return {};
  Json tokenizer;
  try {
    tokenizer = text::parse_json(read_small_file(file), file.string(),
                                 {.category = ErrorCategory::data, .deepest = 64});
  } catch (const Error& error) {
    if (error.category() == ErrorCategory::io) throw;
    return {};
  }
  Json* const model = tokenizer.find("model");
  const Json* const vocabulary = model == nullptr ? nullptr : model->find("vocab");
  if (vocabulary == nullptr) return {};
  TokenizerIdentity found = {.name = folder.filename().string(),
                             .serialised = {},
                             .vocabulary = hash_of(tokens_of(*vocabulary)),
                             .added_tokens = hash_of(added_tokens_of(tokenizer))};
  arrange(*model);
  found.serialised = sha256(tokenizer.compact());
  return found;
}

std::string tokenizer_file_of(const fs::path& folder) {
  constexpr std::array kFiles = {kTokenizer,   "tokenizer.model", "tokenizer_config.json",
                                 "vocab.json", "vocab.txt",       "spiece.model",
                                 "tekken.json"};
  std::error_code ignored;
  for (const char* name : kFiles) {
    if (fs::exists(folder / name, ignored)) return name;
  }
  return "";
}

std::string sha256(std::string_view bytes) {
  std::array<unsigned char, EVP_MAX_MD_SIZE> digest{};
  unsigned int size = 0;
  // Fails only if the system's policy of libcrypto forbids the algorithm, or without memory.
  if (EVP_Digest(bytes.data(), bytes.size(), digest.data(), &size, EVP_sha256(), nullptr) != 1) {
    throw Error(ErrorCategory::data, "libcrypto cannot compute SHA-256 on this machine");
  }
  std::string text;
  for (unsigned int i = 0; i < size; ++i) text += fmt::format("{:02x}", digest[i]);
  return text;
}

}  // namespace ballast::formats
