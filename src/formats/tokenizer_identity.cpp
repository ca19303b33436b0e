#include "src/formats/tokenizer_identity.h"

#include <algorithm>
#include <array>
#include <cstdint>
#include <system_error>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include "ballast/core/error.h"
#include "ballast/formats/model_folder.h"
#include "ballast/text/json.h"

#include "src/formats/sha256.h"

namespace ballast::formats {
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

}  // namespace ballast::formats
