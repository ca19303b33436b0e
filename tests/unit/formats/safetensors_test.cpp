#include "ballast/formats/safetensors.h"

#include <bit>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <limits>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "tests/support/expect_error.h"
#include "tests/support/file_size_limit.h"
#include "tests/support/tags.h"
#include "tests/support/temp_dir.h"

namespace ballast::formats::safetensors_test {
namespace {

namespace fs = std::filesystem;
using test::expect_error;

std::string read_text(const fs::path& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

/// The bytes of a file with this header and data.
std::string file_of(const std::string& header, const std::string& data) {
  const std::uint64_t length = header.size();
  std::string prefix(8, '\0');
  std::memcpy(prefix.data(), &length, 8);
  return prefix + header + data;
}

std::string bytes_of(const std::vector<std::uint16_t>& values) {
  std::string bytes(values.size() * 2, '\0');
  if (!values.empty()) std::memcpy(bytes.data(), values.data(), bytes.size());
  return bytes;
}

void expect_refused(const std::string& bytes, std::initializer_list<std::string_view> parts) {
  const test::TempDir dir;
  const auto path = dir.write("model.safetensors", bytes);
  SCOPED_TRACE(bytes);
  expect_error(ErrorCategory::data, parts, [&] { SafetensorsReader reader(path); });
}

TAG_TESTS("one_thread", "Safetensors.*");
TEST(Safetensors, ReadBackWhatWasWritten) {
  const test::TempDir dir;
  const auto path = dir.path() / "model.safetensors";
  const std::vector<float> matrix = {1.0F, -0.0F, 3.14159274F, 1e-42F, -2e30F, 7.0F};
  const std::vector<float> bias = {1.00390625F, -1.01171875F, 65535.0F};
  {
    SafetensorsWriter writer(path,
                             {{"layer.weight", DType::f32, {2, 3}},
                              {"nothing", DType::f32, {0, 4}},
                              {"layer.bias", DType::bf16, {3}},
                              {"half", DType::f16, {3}}},
                             {{"format", "pt"}});
    writer.write("half", bias);
    writer.write("layer.weight", std::span(matrix).subspan(4), 4);
    writer.write("layer.weight", std::span(matrix).first(4));
    writer.write("nothing", {});
    writer.write("layer.bias", bias);
    EXPECT_FALSE(fs::exists(path));
    writer.finish();
  }
  EXPECT_EQ(std::distance(fs::directory_iterator(dir.path()), {}), 1);

  const SafetensorsReader reader(path);
  EXPECT_EQ(reader.metadata().at("format"), "pt");
  ASSERT_EQ(reader.tensors().size(), 4U);
  const auto* const weight = reader.find("layer.weight");
  ASSERT_NE(weight, nullptr);
  EXPECT_EQ(weight->dtype, "F32");
  EXPECT_EQ(weight->shape, (std::vector<std::uint64_t>{2, 3}));
  EXPECT_EQ(weight->offset % 4096, 0U);
  std::vector<float> read(6);
  reader.read("layer.weight", read);
  EXPECT_EQ(std::memcmp(read.data(), matrix.data(), 24), 0);
  reader.read("layer.weight", std::span(read).first(2), 3);
  EXPECT_EQ(read[0], matrix[3]);
  EXPECT_EQ(read[1], matrix[4]);
  reader.read("nothing", {});
  reader.read("layer.bias", std::span(read).first(3));
  EXPECT_EQ(read[0], 1.0F);        // a tie: to even, down
  EXPECT_EQ(read[1], -1.015625F);  // a tie: to even, up
  EXPECT_EQ(read[2], 65536.0F);
  reader.read("half", std::span(read).first(3));
  EXPECT_EQ(read[0], 1.00390625F);
  EXPECT_EQ(read[1], -1.01171875F);
  EXPECT_EQ(read[2], std::numeric_limits<float>::infinity());
}

TEST(Safetensors, ConvertLargeTensorsInPieces) {
  const test::TempDir dir;
  const auto path = dir.path() / "model.safetensors";
  std::vector<float> values(700'001);
  for (std::size_t i = 0; i < values.size(); ++i) values[i] = static_cast<float>(i % 251);
  {
    SafetensorsWriter writer(path, {{"w", DType::bf16, {700'001}}});
    writer.write("w", values);
    writer.finish();
  }
  std::vector<float> read(values.size());
  SafetensorsReader(path).read("w", read);
  EXPECT_EQ(read, values);
}

TEST(Safetensors, ReadHalvesExactly) {
  const test::TempDir dir;
  const auto bytes = bytes_of(
      {0x0000, 0x8000, 0x3c00, 0xc500, 0x7bff, 0x0400, 0x0001, 0x83ff, 0x7c00, 0xfc00, 0x7e00});
  const auto path = dir.write(
      "f16", file_of(R"({"h":{"dtype":"F16","shape":[11],"data_offsets":[0,22]}})", bytes));
  std::vector<float> read(11);
  SafetensorsReader(path).read("h", read);
  const float infinity = std::numeric_limits<float>::infinity();
  EXPECT_EQ(std::vector<float>(read.begin(), read.end() - 1),
            (std::vector<float>{0.0F, -0.0F, 1.0F, -5.0F, 65504.0F, 0x1p-14F, 0x1p-24F, -0x3ffp-24F,
                                infinity, -infinity}));
  EXPECT_TRUE(std::signbit(read[1]));
  EXPECT_TRUE(std::isnan(read[10]));
}

TEST(Safetensors, SuggestTheNearestName) {
  const test::TempDir dir;
  const auto path = dir.write(
      "m", file_of(R"({"wte.weight":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}})", "abcd"));
  const SafetensorsReader reader(path);
  std::vector<float> out(2);
  expect_error(ErrorCategory::data, {path.string(), "'wte.wieght'", "did you mean 'wte.weight'"},
               [&] { reader.read("wte.wieght", out); });
  expect_error(ErrorCategory::data, {"1 elements", "the read ends at 2"},
               [&] { reader.read("wte.weight", out); });
  expect_error(ErrorCategory::data, {"1 elements"}, [&] { reader.read("wte.weight", {}, 2); });
}

TEST(Safetensors, ListButDoNotConvertOtherTypes) {
  const test::TempDir dir;
  const auto path = dir.write(
      "m", file_of(R"({"ids":{"dtype":"I64","shape":[1],"data_offsets":[0,8]}})", "12345678"));
  const SafetensorsReader reader(path);
  EXPECT_EQ(reader.tensors().front().dtype, "I64");
  std::vector<float> out(1);
  expect_error(ErrorCategory::data, {"'ids'", "I64"}, [&] { reader.read("ids", out); });
}

TEST(Safetensors, ReadWholeNumbersOfEveryType) {
  const test::TempDir dir;
  const auto read = [&](const std::string& dtype, std::size_t width) {
    std::string data(3 * width, '\0');
    data[0] = '\x05';
    for (std::size_t i = width; i < 2 * width; ++i) data[i] = '\xff';  // the largest, or -1
    data[2 * width] = '\x07';
    const auto header = R"({"n":{"dtype":")" + dtype + R"(","shape":[3],"data_offsets":[0,)" +
                        std::to_string(data.size()) + "]}}";
    const SafetensorsReader reader(dir.write(dtype, file_of(header, data)));
    std::vector<std::int64_t> out(2);
    reader.read_whole("n", out, 1);
    EXPECT_EQ(out[1], 7) << dtype;
    expect_error(ErrorCategory::data, {"'n'", "3 elements", "ends at 4"},
                 [&] { reader.read_whole("n", out, 2); });
    reader.read_whole("n", out);
    EXPECT_EQ(out[0], 5) << dtype;
    return out[1];
  };
  EXPECT_EQ(read("U8", 1), 255);
  EXPECT_EQ(read("BOOL", 1), 255);
  EXPECT_EQ(read("U16", 2), 65535);
  EXPECT_EQ(read("U32", 4), 4294967295);
  EXPECT_EQ(read("U64", 8), -1);
  for (const auto& [dtype, width] : {std::pair("I8", 1), {"I16", 2}, {"I32", 4}, {"I64", 8}}) {
    EXPECT_EQ(read(dtype, static_cast<std::size_t>(width)), -1);
  }
  const SafetensorsReader reader(
      dir.write("f", file_of(R"({"f":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}})", "abcd")));
  std::vector<std::int64_t> out(1);
  expect_error(ErrorCategory::data, {"'f'", "F32, not whole numbers"},
               [&] { reader.read_whole("f", out); });
}

TEST(Safetensors, RefuseATruncatedFileOfAnyLength) {
  const auto whole =
      file_of(R"({"a":{"dtype":"BF16","shape":[2,2],"data_offsets":[0,8]}})", "12345678");
  const test::TempDir dir;
  for (std::size_t size = 0; size < whole.size(); ++size) {
    const auto path = dir.write("short", whole.substr(0, size));
    expect_error(ErrorCategory::data, {path.string()}, [&] { SafetensorsReader reader(path); });
  }
  expect_refused(whole + "x", {"9 bytes of data", "take 8"});
  EXPECT_EQ(SafetensorsReader(dir.write("whole", whole)).tensors().size(), 1U);
}

TEST(Safetensors, SurviveAnyChangedByteOfTheHeader) {
  const auto whole = file_of(
      R"({"__metadata__":{"k":"v"},"a":{"dtype":"F32","shape":[1,2],"data_offsets":[0,8]}})",
      "12345678");
  const test::TempDir dir;
  int refused = 0;
  int read = 0;
  for (std::size_t at = 0; at < whole.size() - 8; ++at) {
    for (int flip = 1; flip < 256; flip += at < 8 ? 1 : 15) {
      auto changed = whole;
      changed[at] = static_cast<char>(changed[at] ^ flip);
      const auto path = dir.write("changed", changed);
      try {
        const SafetensorsReader reader(path);
        for (const auto& tensor : reader.tensors()) {
          ASSERT_LE(tensor.offset + tensor.bytes, whole.size());
          std::vector<float> out(tensor.elements);
          if (tensor.dtype == "F32") reader.read(tensor.name, out);
        }
        ++read;
      } catch (const Error& error) {
        EXPECT_EQ(error.category(), ErrorCategory::data) << error.what();
        ++refused;
      }
    }
  }
  EXPECT_GT(refused, 1500);
  EXPECT_GT(read, 0);  // a changed name or metadata is a valid file
}

TEST(Safetensors, RefuseAHugeHeaderWithoutReadingIt) {
  std::string bytes(64, '{');
  for (const std::uint64_t length :
       {std::uint64_t{57}, std::uint64_t{100'000'001}, ~std::uint64_t{0}, ~std::uint64_t{7}}) {
    std::memcpy(bytes.data(), &length, 8);
    expect_refused(bytes, {"header length of " + std::to_string(length)});
  }
}

TEST(Safetensors, RefuseHeadersThatBreakTheFormat) {
  const std::string data = "12345678";
  const auto refuse = [&](const std::string& header, std::string_view part) {
    expect_refused(file_of(header, data), {part});
  };
  refuse("[]", "does not start with '{'");
  refuse(" {}", "does not start with '{'");
  refuse("{", "the header:1:2: not valid JSON");
  refuse("{} x", "not valid JSON");
  refuse("{\"\xff\":1}", "found byte 0xff; the file is damaged; download or restore it");
  refuse(R"({"a":1})", "not a JSON object");
  refuse(R"({"a":{}})", "no dtype");
  refuse(R"({"a":{"dtype":"F33","shape":[2],"data_offsets":[0,8]}})", "unknown dtype 'F33'");
  refuse(R"({"a":{"dtype":"F32","shape":2,"data_offsets":[0,8]}})", "no list 'shape'");
  refuse(R"({"a":{"dtype":"F32","shape":[-2],"data_offsets":[0,8]}})", "whole numbers only");
  refuse(R"({"a":{"dtype":"F32","shape":[2.0],"data_offsets":[0,8]}})", "whole numbers only");
  refuse(R"({"a":{"dtype":"F32","shape":[2]}})", "unknown entries");
  refuse(R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8],"x":1}})", "unknown entries");
  refuse(R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[8,0]}})", "reaches beyond");
  refuse(R"({"a":{"dtype":"F32","shape":[3],"data_offsets":[0,12]}})", "truncated");
  refuse(R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0]}})", "reaches beyond");
  refuse(R"({"a":{"dtype":"F32","shape":[3],"data_offsets":[0,8]}})", "does not match F32 [3]");
  refuse(R"({"a":{"dtype":"F32","shape":[4611686018427387906],"data_offsets":[0,8]}})",
         "does not match F32");
  refuse(R"({"a":{"dtype":"F32","shape":[4294967296,4294967296,2],"data_offsets":[0,8]}})",
         "does not match F32");
  refuse(R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},)"
         R"("b":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}})",
         "the one before ends at 8");
  refuse(R"({"a":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}})", "the one before ends at 0");
  refuse(R"({"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}})", "tensors take 4");
  refuse(R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},)"
         R"("a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}})",
         "a: given twice");
  refuse(R"({"a":{"dtype":"F32","shape":[2],"shape":[2],"data_offsets":[0,8]}})",
         "a.shape: given twice");
  refuse(R"({"__metadata__":{"k":1}})", "'k' is not a string");
  refuse(R"({"__metadata__":1})", "__metadata__ is not a JSON object");
  refuse(R"({"a":{"dtype":"F32","shape":[[2]],"data_offsets":[0,8]}})",
         "nested deeper than 3 levels");
  refuse("{\"a\":" + std::string(100'000, '['), "nested deeper than 3 levels");
}

TEST(Safetensors, NameAFileThatIsNotThereOrNoFile) {
  const test::TempDir dir;
  expect_error(ErrorCategory::data, {"missing", "No such file"},
               [&] { SafetensorsReader reader(dir.path() / "missing"); });
  expect_error(ErrorCategory::data, {"not a regular file"},
               [&] { SafetensorsReader reader(dir.path()); });
}

TEST(SafetensorsWriter, LeavesNothingBehindWithoutFinish) {
  const test::TempDir dir;
  const auto path = dir.write("model.safetensors", "the file before");
  {
    SafetensorsWriter writer(path, {{"a", DType::f32, {2}}});
    writer.write("a", std::vector<float>{1.0F}, 1);
    EXPECT_THROW(writer.finish(), Error);
    EXPECT_THROW(writer.write("a", std::vector<float>{1.0F, 2.0F}), Error);
    EXPECT_THROW(writer.write("a", std::vector<float>{1.0F}, 2), Error);
    EXPECT_THROW(writer.write("b", std::vector<float>{1.0F}), Error);
  }
  EXPECT_EQ(read_text(path), "the file before");
  EXPECT_EQ(std::distance(fs::directory_iterator(dir.path()), {}), 1);
}

TEST(SafetensorsWriter, TakesStoredValuesAndChecksThem) {
  const test::TempDir dir;
  const auto path = dir.path() / "model.safetensors";
  SafetensorsWriter writer(path, {{"a", DType::bf16, {3}}, {"b", DType::f32, {1}}});
  const std::vector<std::uint16_t> stored = {0x3f80, 0x7f81, 0xc000};  // 0x7f81: a signalling NaN
  const auto bytes = std::as_bytes(std::span(stored));
  expect_error(ErrorCategory::state, {"do not match"},
               [&] { writer.write_stored("a", bytes, DType::f16); });
  writer.write_stored("a", bytes.first(4), DType::bf16);
  expect_error(ErrorCategory::state, {"too many values"},
               [&] { writer.write_stored("a", bytes.first(4), DType::bf16, 1); });
  expect_error(ErrorCategory::state, {"too many values"},
               [&] { writer.write_stored("a", bytes.last(2), DType::bf16, 3); });
  writer.write_stored("a", bytes.last(2), DType::bf16, 2);
  writer.write("b", std::vector<float>{5.0F});
  writer.finish();
  EXPECT_EQ(read_text(path).substr(4096, 6), std::string("\x80\x3f\x81\x7f\x00\xc0", 6));
  std::vector<float> read(1);
  SafetensorsReader(path).read("b", read);
  EXPECT_EQ(read[0], 5.0F);
}

TEST(SafetensorsWriter, ReplacesTheFileInOneStep) {
  const test::TempDir dir;
  const auto path = dir.write("model.safetensors", "the file before");
  SafetensorsWriter writer(path, {{"a", DType::f32, {1}}});
  writer.write("a", std::vector<float>{5.0F});
  writer.finish();
  std::vector<float> read(1);
  SafetensorsReader(path).read("a", read);
  EXPECT_EQ(read[0], 5.0F);
}

TEST(SafetensorsWriter, ReportsAFileThatMayNotGrowAndCleansUp) {
  const test::TempDir dir;
  const auto path = dir.path() / "model.safetensors";
  {
    const test::FileSizeLimit limit(4096);
    expect_error(ErrorCategory::io, {path.string(), "File too large"}, [&] {
      SafetensorsWriter(path, {{"a", DType::f32, {5000}}});
    });
  }
  EXPECT_TRUE(fs::is_empty(dir.path()));
}

TEST(SafetensorsWriter, NamesAFolderThatIsNotThere) {
  const test::TempDir dir;
  expect_error(ErrorCategory::io, {"missing", "No such file"},
               [&] { SafetensorsWriter(dir.path() / "missing" / "x", {}); });
}

TEST(SafetensorsWriter, RefusesDuplicateNames) {
  const test::TempDir dir;
  const auto path = dir.path() / "x";
  EXPECT_THROW(SafetensorsWriter(path, {{"a", DType::f32, {}}, {"a", DType::f32, {}}}), Error);
  EXPECT_TRUE(fs::is_empty(dir.path()));
}

}  // namespace
}  // namespace ballast::formats::safetensors_test
