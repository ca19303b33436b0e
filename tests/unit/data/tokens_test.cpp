#include "ballast/data/tokens.h"

#include <cstdint>
#include <filesystem>
#include <fstream>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include <gtest/gtest.h>
#include <unistd.h>

#include "ballast/core/error.h"

#include "src/data/training_data.h"
#include "tests/support/expect_error.h"
#include "tests/support/temp_dir.h"

namespace ballast::data::tokens_test {
namespace {

namespace fs = std::filesystem;
using test::expect_error;

config::DataSection text(std::vector<std::string> paths) {
  config::DataSection data;
  data.text = std::move(paths);
  return data;
}

config::DataSection tokens(std::vector<std::string> paths,
                           config::TokenType type = config::TokenType::u16) {
  config::DataSection data;
  data.tokens = std::move(paths);
  data.token_type = type;
  return data;
}

std::string read_all(const TokenSource& source) {
  std::vector<std::int32_t> ids(source.size());
  source.read(0, ids);
  return {ids.begin(), ids.end()};
}

TEST(TokenSource, ReadsLittleEndianU16AcrossFiles) {
  const test::TempDir dir;
  const auto a = dir.write("a.bin", std::string("\x01\x00\x02\x01", 4));
  const auto empty = dir.write("b.bin", "");
  const auto c = dir.write("c.bin", std::string("\xff\xff\x04\x00", 4));
  const auto source = TokenSource::open(tokens({a, empty, c}), 65536);
  ASSERT_EQ(source.size(), 4U);
  std::vector<std::int32_t> ids(3);
  source.read(1, ids);
  EXPECT_EQ(ids, (std::vector<std::int32_t>{258, 65535, 4}));
  source.read(2, std::span(ids).first(1));
  EXPECT_EQ(ids[0], 65535);
  EXPECT_THROW(source.read(2, ids), Error);
}

TEST(TokenSource, ReadsLittleEndianU32) {
  const test::TempDir dir;
  const auto file = dir.write("a.bin", std::string("\x01\x02\x03\x00\x05\x00\x00\x00", 8));
  const auto source = TokenSource::open(tokens({file}, config::TokenType::u32), 1U << 20U);
  std::vector<std::int32_t> ids(2);
  source.read(0, ids);
  EXPECT_EQ(ids, (std::vector<std::int32_t>{0x030201, 5}));
}

TEST(TokenSource, RefusesAnIdBeyondTheVocabularyAndReportsItsByte) {
  const test::TempDir dir;
  const auto a = dir.write("a.bin", std::string("\x01\x00", 2));
  const auto b = dir.write("b.bin", std::string("\x09\x00\x83\x00", 4));
  const auto source = TokenSource::open(tokens({a, b}), 131);
  std::vector<std::int32_t> ids(3);
  source.read(0, std::span(ids).first(2));
  expect_error(ErrorCategory::data, {b.string(), "id 131", "byte 2", "vocab_size is 131"},
               [&] { source.read(0, ids); });
  const auto wide = dir.write("wide.bin", std::string("\xff\xff\xff\xff", 4));
  const auto negative =
      TokenSource::open(tokens({wide}, config::TokenType::u32), ~std::uint64_t{0});
  expect_error(ErrorCategory::data, {"4294967295"},
               [&] { negative.read(0, std::span(ids).first(1)); });
}

TEST(TokenSource, RefusesIdsWithoutARowInATable) {
  const test::TempDir dir;
  const auto file = dir.write("a.bin", std::string("\5\0\xff\0\4\1", 6));  // 5, 255, 260
  const TokenTable table = {.key = "model.small", .rows = 256};
  const auto ids = [&](std::uint64_t vocab_size, const std::optional<TokenTable>& rows) {
    std::vector<std::int32_t> read(3);
    TokenSource::open(tokens({file}), vocab_size, {}, rows).read(0, read);
    return read;
  };
  expect_error(ErrorCategory::data,
               {file.string(), "token id 260", "token 2", "model.small is 256", "have no row"},
               [&] { ids(300, table); });
  expect_error(ErrorCategory::data, {"token id 255", "model.vocab_size is 200"},
               [&] { ids(200, TokenTable{.key = "model.small", .rows = 250}); });
  EXPECT_EQ(ids(300, TokenTable{.key = "model.small", .rows = 261}).back(), 260);
  EXPECT_EQ(ids(300, std::nullopt).back(), 260);
}

TEST(TokenSource, RefusesASizeThatIsNoMultipleOfTheToken) {
  const test::TempDir dir;
  const auto file = dir.write("a.bin", "abc");
  expect_error(ErrorCategory::data, {file.string(), "3 bytes", "2 bytes", "data.token_type"},
               [&] { TokenSource::open(tokens({file}), 300); });
}

TEST(TokenSource, NamesAFileThatIsNotThere) {
  const test::TempDir dir;
  const auto path = (dir.path() / "missing.txt").string();
  expect_error(ErrorCategory::data, {path, "No such file"},
               [&] { TokenSource::open(text({path}), 256); });
}

TEST(TokenSource, NamesAFileThatMayNotBeRead) {
  if (::geteuid() == 0) GTEST_SKIP() << "root may read every file";
  const test::TempDir dir;
  const auto path = dir.write("secret.txt", "secret");
  fs::permissions(path, fs::perms::none);
  expect_error(ErrorCategory::data, {path.string(), "Permission denied"},
               [&] { TokenSource::open(text({path}), 256); });
}

TEST(TokenSource, NamesALinkThatLeadsToItself) {
  const test::TempDir dir;
  const auto link = dir.path() / "loop.txt";
  fs::create_symlink(link, link);
  expect_error(ErrorCategory::data, {link.string(), "symbolic links"},
               [&] { TokenSource::open(text({link}), 256); });
}

TEST(TokenSource, NamesAGlobWithoutMatches) {
  const test::TempDir dir;
  const auto pattern = (dir.path() / "*.txt").string();
  expect_error(ErrorCategory::data, {"no text file matches", pattern},
               [&] { TokenSource::open(text({pattern}), 256); });
}

TEST(TokenSource, RefusesAFolderWithoutTokenFiles) {
  const test::TempDir dir;
  dir.write("notes.txt", "notes");
  expect_error(ErrorCategory::data, {"no token file (.bin or .npy) matches", dir.path().string()},
               [&] { TokenSource::open(tokens({dir.path()}), 256); });
}

TEST(TokenSource, WantsExactlyOneOfTextAndTokens) {
  const test::TempDir dir;
  const auto file = dir.write("a.bin", "ab");
  expect_error(ErrorCategory::config, {"exactly one"}, [&] { TokenSource::open({}, 256); });
  auto both = text({file});
  both.tokens = {file};
  expect_error(ErrorCategory::config, {"exactly one"}, [&] { TokenSource::open(both, 256); });
}

TEST(TokenSource, WalksAFolderInSortedOrderWithoutBinariesAndBuilds) {
  const test::TempDir dir;
  dir.write("corpus/b/2.txt", "3");
  dir.write("corpus/b/1.txt", "2");
  dir.write("corpus/a.txt", "1");
  dir.write("corpus/c.txt", "4");
  dir.write("corpus/B.txt", "0");  // upper case comes first in every locale
  dir.write("corpus/image.png", std::string("x\0y", 3));
  dir.write("corpus/.git/config", "x");
  dir.write("corpus/build/log", "x");
  dir.write("corpus/b/build-clang/log", "x");
  fs::create_directory_symlink(dir.path() / "corpus", dir.path() / "corpus/b/loop");
  fs::create_symlink(dir.path() / "nowhere", dir.path() / "corpus/dangling");
  const auto source = TokenSource::open(text({dir.path() / "corpus"}), 256);
  EXPECT_EQ(read_all(source), "01234");
  EXPECT_EQ(source.files().size(), 5U);
}

TEST(TokenSource, TakesANamedFileEvenIfItHoldsNul) {
  const test::TempDir dir;
  const auto file = dir.write("data", std::string("a\0b", 3));
  EXPECT_EQ(TokenSource::open(text({file}), 256).size(), 3U);
}

TEST(TokenSource, SortsTheMatchesOfAGlobAndKeepsTheOrderOfPatterns) {
  const test::TempDir dir;
  dir.write("x3.txt", "b");
  dir.write("x1.txt", "a");
  dir.write("x2/inner.txt", "+");
  dir.write("first.txt", "!");
  const auto source = TokenSource::open(text({dir.path() / "first.txt", dir.path() / "x*"}), 256);
  EXPECT_EQ(read_all(source), "!a+b");
}

TEST(TokenSource, TakesAPathThatOnlyLooksLikeAGlob) {
  const test::TempDir dir;
  const auto file = dir.write("notes[1].txt", "bracketed");
  EXPECT_EQ(read_all(TokenSource::open(text({file}), 256)), "bracketed");
}

TEST(TokenSource, ReadsMoreFilesThanItHoldsOpen) {
  const test::TempDir dir;
  std::string expected;
  for (int i = 0; i < 200; ++i) {
    const auto line = std::to_string(1000 + i);
    dir.write(line, line);
    expected += line;
  }
  EXPECT_EQ(read_all(TokenSource::open(text({dir.path()}), 256)), expected);
}

TEST(TokenSource, NoticesAFileThatShrinksWhileInUse) {
  const test::TempDir dir;
  const auto file = dir.write("a.txt", "0123456789");
  const auto source = TokenSource::open(text({file}), 256);
  fs::resize_file(file, 4);
  std::vector<std::int32_t> ids(10);
  expect_error(ErrorCategory::data, {file.string(), "10 bytes", "4 now"},
               [&] { source.read(0, ids); });
}

TEST(TokenSource, RefusesTextBeyondASmallVocabulary) {
  const test::TempDir dir;
  const auto file = dir.write("a.txt", "abc\xc3\xa4");
  const auto source = TokenSource::open(text({file}), 128);
  std::vector<std::int32_t> ids(5);
  expect_error(ErrorCategory::data, {"id 195", "byte 3"}, [&] { source.read(0, ids); });
}

TEST(TokenSource, RefusesBinaryFilesGivenAsText) {
  const test::TempDir dir;
  const auto refuse = [&](const std::string& name, const std::string& bytes,
                          std::initializer_list<std::string_view> parts) {
    const std::string path = dir.write(name, bytes);
    expect_error(ErrorCategory::data, parts, [&] { TokenSource::open(text({path}), 50257, "m"); });
    expect_error(ErrorCategory::data, {path, "not "},
                 [&] { TokenSource::open(text({path}), 50257); });
    auto as_is = text({path});
    as_is.as_is = true;
    EXPECT_EQ(TokenSource::open(as_is, 50257).size(), bytes.size());
  };
  const std::string json = R"({"text": "a document of some length"})";
  refuse("c.jsonl", json + '\n', {"c.jsonl", "--model m --out c.safetensors"});
  refuse("c.json", "[" + json + "]", {"JSON array", "prepare.py"});
  refuse("t.gz", std::string("\x1f\x8b\x08\x00", 4) + std::string(40, '\0'), {"gzip"});
  refuse("t.npy", "\x93NUMPY" + std::string(40, '\0'), {"name it as data.tokens"});
  refuse("t.bin", std::string(40, '\0'), {"data.tokens", "data.as_is"});
  refuse("t.txt", "<html><body>404 not found</body></html>", {"HTML"});
  // A model of bytes may read JSON. A page is text because of its name. A folder may contain code.
  EXPECT_EQ(TokenSource::open(text({dir.path() / "c.jsonl"}), 256).size(), json.size() + 1);
  const auto page = dir.write("page.html", "<html><body>a page</body></html>");
  EXPECT_EQ(TokenSource::open(text({page}), 50257).size(), 32U);
  dir.write("code/c.jsonl", json + '\n');
  expect_error(ErrorCategory::data, {"c.jsonl", "JSON Lines"},
               [&] { TokenSource::open(text({dir.path() / "code"}), 50257); });
  dir.write("code/d.cpp", "int main() {}");
  EXPECT_EQ(TokenSource::open(text({dir.path() / "code"}), 50257).size(), json.size() + 14);
}

TEST(TokenSource, RefusesEmptyFiles) {
  const test::TempDir dir;
  const std::string path = dir.write("a.bin", "");
  expect_error(ErrorCategory::data, {path, "is empty"},
               [&] { TokenSource::open(tokens({path}), 256); });
  expect_error(ErrorCategory::data, {path, "all other files are empty"}, [&] {
    TokenSource::open(tokens({path, path}), 256);
  });
}

TEST(IdCheck, FindsInShortStreamsAllAtOnce) {
  const test::TempDir dir;
  const std::string path = dir.write("a.bin", std::string(99998, '\0') + "\x05\x01");
  EXPECT_TRUE(check_sample(TokenSource::open(tokens({path}), 262)));
  expect_error(ErrorCategory::data, {path, "id 261", "(token 49999)", "vocab_size is 261"},
               [&] { check_sample(TokenSource::open(tokens({path}), 261)); });
}

TEST(IdCheck, SamplesALongStreamAndFindsTheRestWhileTheRunTrains) {
  constexpr std::uint64_t kBytes = (std::uint64_t{17} << 20U) + 7;
  const test::TempDir dir;
  const std::string path = dir.path() / "long";
  const auto bad_at = [&](std::uint64_t index) {
    dir.write("long", "");
    fs::resize_file(path, index);
    std::ofstream(path, std::ios::binary | std::ios::app) << '\xff';
    fs::resize_file(path, kBytes);
    return std::make_shared<const TokenSource>(TokenSource::open(text({path}), 255));
  };
  for (const std::uint64_t index : {std::uint64_t{0}, kBytes - 1}) {
    expect_error(ErrorCategory::data, {path, "id 255"}, [&] { check_sample(*bad_at(index)); });
  }
  const auto source = bad_at(300000);
  EXPECT_FALSE(check_sample(*source));
  IdCheck of_another_rank({{"text", source}}, 0, 2);
  of_another_rank.wait();
  EXPECT_NO_THROW(of_another_rank.rethrow());
  IdCheck check({{"text", source}}, 1, 2);
  check.wait();
  expect_error(ErrorCategory::data, {"data.text: ", path, "(token 300000)"},
               [&] { check.rethrow(); });
}

TEST(IdCheck, WarnsAboutAFileOfOneId) {
  const test::TempDir dir;
  std::string lines;
  set_log_sink([&](LogLevel, std::string_view line) { lines += line; });
  check_sample(TokenSource::open(tokens({dir.write("a.bin", std::string(9000, '\0'))}), 256));
  set_log_sink({});
  EXPECT_NE(lines.find("all 4500 tokens sampled from"), std::string::npos) << lines;
}

TEST(SplitTokens, KeepsTheEndForEvaluation) {
  const auto split = split_tokens(1000, 0.1, 16);
  EXPECT_EQ(split.training.first, 0U);
  EXPECT_EQ(split.training.size, 900U);
  EXPECT_EQ(split.held_out.first, 900U);
  EXPECT_EQ(split.held_out.size, 100U);
}

TEST(SplitTokens, GivesAShareTooSmallForASequenceToTraining) {
  EXPECT_EQ(split_tokens(169, 0.1, 16).held_out.size, 0U);
  EXPECT_EQ(split_tokens(169, 0.1, 16).training.size, 169U);
  EXPECT_EQ(split_tokens(170, 0.1, 16).held_out.size, 17U);
  EXPECT_EQ(split_tokens(1000, 0.0, 16).training.size, 1000U);
}

TEST(SplitTokens, RefusesDataShorterThanASequenceAndItsTarget) {
  EXPECT_EQ(split_tokens(17, 0.0, 16).training.size, 17U);
  expect_error(ErrorCategory::data, {"16 tokens", "needs 17"}, [] { split_tokens(16, 0.0, 16); });
  expect_error(ErrorCategory::data, {"0 tokens", "needs 17"}, [] { split_tokens(0, 0.5, 16); });
}

}  // namespace
}  // namespace ballast::data::tokens_test
