#include <fstream>
#include <random>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "ballast/train/tokens.h"

#include "tests/support/damaged.h"
#include "tests/support/fuzz_inputs.h"
#include "tests/support/temp_dir.h"
#include "tests/unit/train/documents_file.h"
#include "tests/unit/train/expect_error.h"

namespace ballast::train::token_formats_test {
namespace {

namespace fs = std::filesystem;
using test::bytes_of;
using test::expect_error;
using Ids = std::vector<std::int32_t>;

config::DataSection section(const std::string& path, const std::string& type = "auto") {
  config::DataSection data;
  data.tokens = {path};
  data.token_type = type;
  return data;
}

Ids read_all(const config::DataSection& data, std::uint64_t vocab_size = 65536) {
  const auto source = TokenSource::open(data, vocab_size);
  Ids ids(source.size());
  source.read(0, ids);
  return ids;
}

/// Megatron's index of sequences of these lengths.
std::string index_of(std::uint8_t code, std::size_t width, const std::vector<std::int32_t>& lengths,
                     const std::vector<std::int64_t>& documents, std::uint64_t version = 1) {
  std::vector<std::int64_t> offsets;
  std::int64_t at = 0;
  for (const auto length : lengths) {
    offsets.push_back(at);
    at += static_cast<std::int64_t>(width) * length;
  }
  return std::string("MMIDIDX\0\0", 9) + bytes_of(std::vector<std::uint64_t>{version}) +
         bytes_of(std::vector<std::uint8_t>{code}) +
         bytes_of(std::vector<std::uint64_t>{lengths.size(), documents.size()}) +
         bytes_of(lengths) + bytes_of(offsets) + bytes_of(documents);
}

/// llm.c's file.
std::string llmc_of(std::uint32_t magic, std::uint32_t version, std::uint32_t count,
                    const std::string& tokens) {
  std::vector<std::uint32_t> header(256);
  header[0] = magic;
  header[1] = version;
  header[2] = count;
  return bytes_of(header) + tokens;
}

TEST(TokenFormats, ReadMegatronsFilesOfEveryType) {
  const test::TempDir dir;
  const std::string path = dir.path() / "m_text_document.bin";
  const auto put = [&](std::uint8_t code, std::size_t width, const std::string& tokens) {
    dir.write("m_text_document.bin", tokens);
    dir.write("m_text_document.idx", index_of(code, width, {2, 0, 1}, {0, 2, 3}));
    return section(path);
  };
  EXPECT_EQ(read_all(put(8, 2, bytes_of(std::vector<std::uint16_t>{7, 65535, 0}))),
            (Ids{7, 65535, 0}));
  EXPECT_EQ(read_all(put(4, 4, bytes_of(Ids{7, 65536, 0})), 65537), (Ids{7, 65536, 0}));
  EXPECT_EQ(read_all(put(1, 1, bytes_of(std::vector<std::uint8_t>{7, 255, 0}))), (Ids{7, 255, 0}));
  // One byte for every sequence of a multimodal index.
  put(8, 2, bytes_of(std::vector<std::uint16_t>{7, 8, 9}));
  dir.write("m_text_document.idx", index_of(8, 2, {2, 0, 1}, {0, 2, 3}) + std::string(3, '\0'));
  EXPECT_EQ(read_all(section(path)), (Ids{7, 8, 9}));
  // The name of a folder is enough: its index is not a token file.
  EXPECT_EQ(read_all(section(dir.path())), (Ids{7, 8, 9}));
}

TEST(TokenFormats, RefuseAnIndexThatDoesNotFit) {
  const test::TempDir dir;
  const std::string path = dir.write("m.bin", bytes_of(std::vector<std::uint16_t>{1, 2, 3}));
  const std::string index = dir.path() / "m.idx";
  const auto refuse = [&](const std::string& bytes, std::initializer_list<std::string_view> parts,
                          const std::string& type = "auto") {
    dir.write("m.idx", bytes);
    expect_error(ErrorCategory::data, parts, [&] { TokenSource::open(section(path, type), 256); });
  };
  refuse(index_of(8, 2, {3}, {0, 1}, 2), {index, "version 2, not 1"});
  refuse(index_of(7, 4, {3}, {0, 1}), {index, "type code 7"});
  refuse(index_of(8, 2, {2}, {0, 1}), {path, "6 bytes", "m.idx lists 2 tokens of 2 bytes"});
  refuse(index_of(4, 4, {3}, {0, 1}), {path, "6 bytes", "3 tokens of 4 bytes"});
  refuse(index_of(8, 2, {3}, {0, 1}).substr(0, 60), {index, "1 sequences and 2 entries"});
  refuse(index_of(8, 2, {3}, {0, 1}).substr(0, 20), {index, "20 bytes: it is truncated"});
  refuse(index_of(8, 2, {4, -1}, {0, 1}), {index, "sequence 1 has -1 tokens"});
  refuse(index_of(8, 4, {1, 2}, {0, 1}),
         {index, "sequence 1 has 2 tokens from byte 4 on", "ends at byte 2"});
  refuse("something else", {index, "is not an index of Megatron"});
  refuse(index_of(8, 2, {3}, {0, 1}), {path, "m.idx says that tokens have 2 bytes", "is u32"},
         "u32");
  expect_error(ErrorCategory::data, {index, "name the .bin file"},
               [&] { TokenSource::open(section(index), 256); });
}

TEST(TokenFormats, ReadLlmcsFiles) {
  const test::TempDir dir;
  const auto put = [&](const std::string& bytes) { return section(dir.write("l.bin", bytes)); };
  const auto u16 = bytes_of(std::vector<std::uint16_t>{7, 50256, 0});
  const auto u32 = bytes_of(std::vector<std::uint32_t>{7, 128000, 0});
  EXPECT_EQ(read_all(put(llmc_of(20240520, 1, 3, u16))), (Ids{7, 50256, 0}));
  EXPECT_EQ(read_all(put(llmc_of(20240801, 7, 3, u32)), 128256), (Ids{7, 128000, 0}));
  const auto refuse = [&](const std::string& bytes, std::initializer_list<std::string_view> parts,
                          const std::string& type = "auto") {
    const std::string path = dir.write("l.bin", bytes);
    expect_error(ErrorCategory::data, parts,
                 [&] { TokenSource::open(section(path, type), 50257); });
    expect_error(ErrorCategory::data, {path},
                 [&] { TokenSource::open(section(path, type), 50257); });
  };
  refuse(llmc_of(20240520, 2, 3, u16), {"version 2; this program reads version 1"});
  refuse(llmc_of(20240520, 1, 4, u16), {"1030 bytes", "4 tokens of 2 bytes"});
  refuse(llmc_of(20240520, 1, 3, u16), {"the header says that tokens have 2 bytes", "is u32"},
         "u32");
  // An error of reading names the byte in the file.
  const auto source = put(llmc_of(20240520, 1, 3, u16));
  expect_error(ErrorCategory::data, {"id 50256 at byte 1026"}, [&] { read_all(source, 50256); });
}

TEST(TokenFormats, ChooseTheTypeOfTokensAloneByTheVocabulary) {
  const test::TempDir dir;
  const auto small = dir.write("s.bin", bytes_of(std::vector<std::uint16_t>{1, 2, 3, 4}));
  EXPECT_EQ(read_all(section(small)), (Ids{1, 2, 3, 4}));
  EXPECT_EQ(read_all(section(small, "u32"), 1U << 20U), (Ids{0x20001, 0x40003}));
  const auto large = dir.write("l.bin", bytes_of(std::vector<std::uint32_t>{1, 70000}));
  EXPECT_EQ(read_all(section(large), 70001), (Ids{1, 70000}));
  std::vector<std::uint32_t> ids(16);
  ids[3] = 5;
  const std::string narrow = dir.write("n.bin", bytes_of(ids));
  expect_error(ErrorCategory::data, {narrow, "set data.token_type to u32"},
               [&] { TokenSource::open(section(narrow), 256); });
  EXPECT_EQ(read_all(section(narrow, "u16")).size(), 32U);
  EXPECT_EQ(read_all(section(narrow, "u32")).size(), 16U);
}

/// Damages token files and indices, and reads whatever is accepted.
TEST(TokenFormats, OfDamagedFilesAreRefusedOrRead) {
  const test::TempDir dir;
  std::mt19937_64 random(3);
  std::vector<std::uint16_t> ids(40);
  for (auto& id : ids) id = static_cast<std::uint16_t>(random() % 256);
  const std::string tokens = bytes_of(ids);
  const std::string index = index_of(8, 2, {10, 0, 25, 5}, {0, 1, 4});
  const std::string llmc = llmc_of(20240520, 1, 40, tokens);
  const std::size_t inputs = test::fuzz_inputs(12000);
  std::size_t refused = 0;
  std::size_t accepted = 0;
  for (std::size_t i = 0; i < inputs; ++i) {
    const fs::path folder = dir.path();
    for (const char* name : {"t.bin", "t.idx"}) fs::remove(folder / name);
    const auto put = [&](const char* name, const std::string& bytes) {
      std::ofstream(folder / name, std::ios::binary) << bytes;
    };
    put("t.bin", i % 3 == 0   ? test::damaged(llmc.substr(0, 12), random) + llmc.substr(12)
                 : i % 3 == 1 ? test::damaged(tokens, random)
                              : tokens);
    if (i % 3 != 0) put("t.idx", i % 3 == 1 ? index : test::damaged(index, random));
    try {
      for (const auto id : read_all(section(folder / "t.bin"), 256)) ASSERT_LT(id, 256);
      ++accepted;
    } catch (const Error& error) {
      const std::string message = error.what();
      EXPECT_EQ(error.category(), ErrorCategory::data) << message;
      EXPECT_NE(message.find((folder / "t.").native()), std::string::npos) << message;
      EXPECT_EQ(message.find('\n'), std::string::npos) << message;
      ++refused;
    }
  }
  EXPECT_GT(refused, inputs / 2);
  EXPECT_GT(accepted, inputs / 120);
}

}  // namespace
}  // namespace ballast::train::token_formats_test
