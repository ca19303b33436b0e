#include <fstream>
#include <iterator>
#include <numeric>
#include <random>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "ballast/data/tokens.h"
#include "ballast/formats/file_formats.h"

#include "tests/support/damaged.h"
#include "tests/support/documents_file.h"
#include "tests/support/expect_error.h"
#include "tests/support/fuzz_inputs.h"
#include "tests/support/tags.h"
#include "tests/support/temp_dir.h"

namespace ballast::data::token_formats_test {
namespace {

namespace fs = std::filesystem;
using test::bytes_of;
using test::expect_error;
using Ids = std::vector<std::int32_t>;

config::DataSection section(const std::string& path,
                            config::TokenType type = config::TokenType::automatic) {
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

/// A file of numpy.save whose header gives `shape`.
template <class T>
std::string numpy_of(const std::string& type, const std::vector<T>& values,
                     const std::string& shape) {
  std::string header =
      "{'descr': '" + type + "', 'fortran_order': False, 'shape': " + shape + ", }";
  header.resize(117, ' ');
  header += '\n';
  return "\x93NUMPY" + std::string("\x01\x00\x76\x00", 4) + header + bytes_of(values);
}

TAG_TESTS("one_thread", "TokenFormats.*");
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
  // The name of a folder suffices. Its index is not a token file.
  EXPECT_EQ(read_all(section(dir.path())), (Ids{7, 8, 9}));
}

TEST(TokenFormats, RefuseAnIndexThatDoesNotFit) {
  const test::TempDir dir;
  const std::string path = dir.write("m.bin", bytes_of(std::vector<std::uint16_t>{1, 2, 3}));
  const std::string index = dir.path() / "m.idx";
  const auto refuse = [&](const std::string& bytes, std::initializer_list<std::string_view> parts,
                          config::TokenType type = config::TokenType::automatic) {
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
         config::TokenType::u32);
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
                          config::TokenType type = config::TokenType::automatic) {
    const std::string path = dir.write("l.bin", bytes);
    expect_error(ErrorCategory::data, parts,
                 [&] { TokenSource::open(section(path, type), 50257); });
    expect_error(ErrorCategory::data, {path},
                 [&] { TokenSource::open(section(path, type), 50257); });
  };
  refuse(llmc_of(20240520, 2, 3, u16), {"version 2; this program reads version 1"});
  refuse(llmc_of(20240520, 1, 4, u16), {"1030 bytes", "4 tokens of 2 bytes"});
  refuse(llmc_of(20240520, 1, 3, u16), {"the header says that tokens have 2 bytes", "is u32"},
         config::TokenType::u32);
  // An error of reading names the byte in the file.
  const auto source = put(llmc_of(20240520, 1, 3, u16));
  expect_error(ErrorCategory::data, {"id 50256 at byte 1026"}, [&] { read_all(source, 50256); });
}

TEST(TokenFormats, ChooseTheTypeOfTokensAloneByTheVocabulary) {
  const test::TempDir dir;
  const auto small = dir.write("s.bin", bytes_of(std::vector<std::uint16_t>{1, 2, 3, 4}));
  EXPECT_EQ(read_all(section(small)), (Ids{1, 2, 3, 4}));
  EXPECT_EQ(read_all(section(small, config::TokenType::u32), 1U << 20U), (Ids{0x20001, 0x40003}));
  const auto large = dir.write("l.bin", bytes_of(std::vector<std::uint32_t>{1, 70000}));
  EXPECT_EQ(read_all(section(large), 70001), (Ids{1, 70000}));
  std::vector<std::uint32_t> ids(16);
  ids[3] = 5;
  const std::string narrow = dir.write("n.bin", bytes_of(ids));
  expect_error(ErrorCategory::data, {narrow, "set data.token_type to u32"},
               [&] { TokenSource::open(section(narrow), 256); });
  EXPECT_EQ(read_all(section(narrow, config::TokenType::u16)).size(), 32U);
  EXPECT_EQ(read_all(section(narrow, config::TokenType::u32)).size(), 16U);
}

TEST(TokenFormats, ReadNumpysIntegers) {
  const test::TempDir dir;
  const auto put = [&](const std::string& bytes) { return section(dir.write("n.npy", bytes)); };
  const Ids ids = {7, 250, 0};
  EXPECT_EQ(read_all(put(numpy_of("|u1", std::vector<std::uint8_t>{7, 250, 0}, "(3,)"))), ids);
  EXPECT_EQ(read_all(put(numpy_of("<u2", std::vector<std::uint16_t>{7, 250, 0}, "(3,)"))), ids);
  EXPECT_EQ(read_all(put(numpy_of("<i4", std::vector<std::int32_t>{7, 250, 0}, "(3,)"))), ids);
  EXPECT_EQ(read_all(put(numpy_of("<i8", std::vector<std::int64_t>{7, 250, 0}, "(3,)"))), ids);
  // A folder without .bin files uses its .npy files.
  EXPECT_EQ(read_all(section(dir.path())), ids);
  dir.write("a.bin", bytes_of(std::vector<std::uint16_t>{9}));
  EXPECT_EQ(read_all(section(dir.path())), Ids{9});
}

TEST(TokenFormats, RefuseNumpysFilesThatAreNoTokenIds) {
  const test::TempDir dir;
  const std::vector<std::uint16_t> ids = {1, 2, 3, 4, 5, 6};
  const std::string path = dir.path() / "n.npy";
  const auto refuse = [&](const std::string& bytes, std::initializer_list<std::string_view> parts,
                          config::TokenType type = config::TokenType::automatic) {
    dir.write("n.npy", bytes);
    expect_error(ErrorCategory::data, parts, [&] { read_all(section(path, type), 256); });
    expect_error(ErrorCategory::data, {path}, [&] { read_all(section(path, type), 256); });
  };
  refuse(numpy_of(">u2", ids, "(6,)"), {"big-endian", "astype('<u2')"});
  refuse(numpy_of("<f2", ids, "(6,)"), {"type <f2", "integers"});
  refuse(numpy_of("<u2", ids, "(2, 3)"), {"2 dimensions", "reshape(-1)"});
  refuse(numpy_of("<u2", ids, "(7,)"), {"7 numbers of 2 bytes", "12 bytes", "truncated"});
  refuse(numpy_of("<u2", ids, "(x,)"), {"shape (x,)", "damaged"});
  refuse(numpy_of("<u2", ids, "(6,)").substr(0, 60), {"60 bytes", "header of 118", "truncated"});
  refuse(numpy_of("<u2", ids, "(6,)"), {"tokens have 2 bytes", "is u32"}, config::TokenType::u32);
  refuse(numpy_of("<i4", std::vector<std::int32_t>{1, -100}, "(2,)"),
         {"token id -100 at byte 132 (token 1)", "labels"});
}

TEST(TokenFormats, NameFilesOfOtherKinds) {
  const test::TempDir dir;
  using namespace std::string_literals;
  const std::string zeros(400, '\0');
  const std::string text = "The quick brown fox jumps over the lazy dog.\n";
  const std::string json = R"({"messages": [{"role": "user", "content": "hello"}]})";
  std::string tar = "texts/1.txt" + zeros;
  tar.replace(257, 5, "ustar");
  std::string utf16 = "\xff\xfe";
  for (const char c : text) utf16 += std::string{c, '\0'};
  const auto shard = [](std::uint32_t first, const std::string& rest) {
    return bytes_of(
               std::vector<std::uint32_t>{1, first, static_cast<std::uint32_t>(12 + rest.size())}) +
           rest;
  };
  const std::string length = bytes_of(std::vector<std::uint64_t>{5});
  const std::pair<std::string, std::string_view> files[] = {
      {json + "\n" + json + "\n", "prepare.py"},
      {"\xef\xbb\xbf" + json + "\n", "JSON Lines"},
      {"[\n  " + json + "\n]", "JSON array"},
      {R"({"vocab_size": 500, "layers": 2})", "JSON"},
      {text, "data.text"},
      {"Gr\xfc\xdf"
       "e aus K\xf6ln, und ein Text in Latin-1, der lang genug ist: abcdefgh",
       "text"},
      {utf16, "iconv"},
      {"<!DOCTYPE html><html><body>404</body></html>", "HTML"},
      {"version https://git-lfs.github.com/spec/v1\noid sha256:00\n", "git lfs pull"},
      {test::documents_of({{1, 2, 3}}), "name it as data.documents"},
      {test::documents_of({{1, 2}, {1, 3}}, {}, test::kDocumentsFormat + R"(,"pairs":"x")"),
       "name it as data.pairs"},
      {test::safetensors_of({{"w", "F32", "[1]", "abcd"}}, ""), "weights"},
      {"LITPKDS"s + zeros, "lit-gpt"},
      {"GGUF\x03\0\0\0"s + zeros, "GGUF"},
      {"PAR1"s + zeros + "PAR1", "Parquet"},
      {"ARROW1\0\0"s + zeros, "Arrow"},
      {"\xff\xff\xff\xff\x40\0\0\0\x10\0\0\0"s + zeros, "Arrow"},
      {"\x1f\x8b\x08\0"s + zeros, "gzip -dk"},
      {"\x28\xb5\x2f\xfd\x04"s + zeros, "zstd -d"},
      {"BZh91AY&SY" + zeros, "bzip2 -dk"},
      {"\xfd"s + "7zXZ\0"s + zeros, "xz -dk"},
      {"PK\x03\x04\x14\0\0\0\x08\0"s + std::string(16, '\0') + "\x05\0\0\0"s + "a.npy" + zeros,
       ".npz"},
      {"PK\x03\x04\x14\0\0\0\x08\0"s + std::string(16, '\0') + "\x0a\0\0\0"s + "x/data.pkl" + zeros,
       "torch.save"},
      {"PK\x03\x04\x14\0\0\0\x08\0"s + std::string(16, '\0') + "\x05\0\0\0"s + "a.txt" + zeros,
       "unzip"},
      {tar, "tar -xf"},
      {"\x80\x04\x95\x20\0\0\0\0\0\0\0]"s + zeros + ".", "pickle"},
      {"\x89HDF\r\n\x1a\n" + zeros, "HDF5"},
      {"%PDF-1.7\n" + zeros, "PDF"},
      {bytes_of(std::vector<std::uint32_t>{20240326, 5}) + zeros, "llm.c"},
      {"TNTIDX\0\0"s + zeros, "fairseq"},
      {"MMIDIDX\0\0"s + zeros, "name the .bin file"},
      {shard(14, "{}" + zeros), "MosaicML"},
      {shard(12, zeros), "LitData"},
      {length + formats::masked_crc(length) + zeros, "TFRecord"},
  };
  for (const auto& [bytes, part] : files) {
    const std::string path = dir.write("t.bin", bytes);
    expect_error(ErrorCategory::data, {path, "not token ids", part},
                 [&] { TokenSource::open(section(path), 65536); });
    auto as_is = section(path, config::TokenType::u16);
    as_is.as_is = true;
    if (bytes.size() % 2 == 0) {
      EXPECT_EQ(TokenSource::open(as_is, 65536).size(), bytes.size() / 2) << part;
    }
  }
  // Damaged files are read as the format that they still look like.
  std::mt19937_64 random(9);
  const std::size_t inputs = test::fuzz_inputs(400);
  for (std::size_t i = 0; i < inputs; ++i) {
    const std::string& whole = files[i % std::size(files)].first;
    EXPECT_NO_THROW(formats::recognise(dir.write("t.bin", test::damaged(whole, random)))) << i;
  }
}

TEST(TokenFormats, AreNotDetectedInTokenIds) {
  const test::TempDir dir;
  std::mt19937_64 random(5);
  const std::size_t inputs = test::fuzz_inputs(200);
  for (std::size_t i = 0; i < inputs; ++i) {
    std::vector<std::uint16_t> ids(16 + random() % 64);
    for (auto& id : ids) id = static_cast<std::uint16_t>(random() % 50257);
    // A signature may occur by chance.
    const std::uint16_t starts[] = {0x8b1f, 0x5089, 0x4b50, 0x8002, 0xfeff, 0xffff, 0x227b, 0x5a42};
    ids[0] = starts[i % 8];
    const std::string path = dir.write("t.bin", bytes_of(ids));
    EXPECT_EQ(formats::recognise(path), formats::FileFormat::unknown) << i;
  }
}

TEST(TokenFormats, SuggestTheTypeThatBringsIdsIntoTheVocabulary) {
  const test::TempDir dir;
  std::vector<std::uint64_t> wide(40, 3);
  wide[7] = 200;
  const std::string path = dir.write("t.bin", bytes_of(wide));
  expect_error(ErrorCategory::data, {path, "64 bits", "numpy.fromfile"},
               [&] { TokenSource::open(section(path), 256); });
  expect_error(ErrorCategory::data, {path, "64 bits"},
               [&] { TokenSource::open(section(path, config::TokenType::u32), 256); });
  std::vector<std::uint16_t> narrow(40);
  std::iota(narrow.begin(), narrow.end(), 100);
  dir.write("t.bin", bytes_of(narrow));
  expect_error(ErrorCategory::data, {path, "(token 0)", "read with data.token_type u16"},
               [&] { read_all(section(path), 100000); });
  std::vector<std::uint32_t> ids(40, 66000);
  ids[0] = 5;
  dir.write("t.bin", bytes_of(ids));
  expect_error(ErrorCategory::data, {path, "id 464 at byte 4 (token 2)", "another model"},
               [&] { read_all(section(path, config::TokenType::u16), 300); });
}

/// Damages token files and indices, and reads them if they are accepted.
TEST(TokenFormats, OfDamagedFilesAreRefusedOrRead) {
  const test::TempDir dir;
  std::mt19937_64 random(3);
  std::vector<std::uint16_t> ids(40);
  for (auto& id : ids) id = static_cast<std::uint16_t>(random() % 256);
  const std::string tokens = bytes_of(ids);
  const std::string index = index_of(8, 2, {10, 0, 25, 5}, {0, 1, 4});
  const std::string llmc = llmc_of(20240520, 1, 40, tokens);
  const std::string numpy = numpy_of("<u2", ids, "(40,)");
  const std::size_t inputs = test::fuzz_inputs(12000);
  std::size_t refused = 0;
  std::size_t accepted = 0;
  for (std::size_t i = 0; i < inputs; ++i) {
    const fs::path folder = dir.path();
    for (const char* name : {"t.bin", "t.idx"}) fs::remove(folder / name);
    const auto put = [&](const char* name, const std::string& bytes) {
      std::ofstream(folder / name, std::ios::binary) << bytes;
    };
    put("t.bin", i % 12 == 0  ? test::damaged(numpy, random)
                 : i % 3 == 0 ? test::damaged(llmc.substr(0, 12), random) + llmc.substr(12)
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
}  // namespace ballast::data::token_formats_test
