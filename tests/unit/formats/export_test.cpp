#include "ballast/formats/export.h"

#include <filesystem>
#include <fstream>
#include <limits>
#include <string>
#include <vector>

#include <fcntl.h>
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>
#include <sys/file.h>

#include "ballast/core/memory.h"
#include "ballast/formats/model_folder.h"
#include "ballast/formats/weight_files.h"

#include "tests/support/expect_error.h"
#include "tests/support/file_size_limit.h"
#include "tests/support/temp_dir.h"

namespace ballast::formats::export_test {
namespace {

namespace fs = std::filesystem;
using test::expect_error;

std::vector<std::size_t> sizes_of(const std::vector<Elems>& tensors, Bytes largest) {
  std::vector<TensorToStore> list;
  for (const Elems elements : tensors) {
    list.push_back({std::to_string(list.size()), DType::bf16, {elements}});
  }
  std::vector<std::size_t> sizes;
  for (const auto& file : split_into_files(list, largest)) sizes.push_back(file.size());
  return sizes;
}

TEST(SplitIntoFiles, FillsEachFileUpToItsLimit) {
  using Sizes = std::vector<std::size_t>;
  EXPECT_EQ(sizes_of({5, 5, 5}, 30), (Sizes{3}));
  EXPECT_EQ(sizes_of({5, 5, 5}, 29), (Sizes{2, 1}));
  EXPECT_EQ(sizes_of({5, 100, 5, 5}, 20), (Sizes{1, 1, 2}));
  EXPECT_EQ(sizes_of({100, 0, 1}, 0), (Sizes{1, 1, 1}));
  EXPECT_EQ(sizes_of({}, 10), (Sizes{0}));
}

/// A folder of one file with small and whole-page tensors in turn: n0, p0, n1, p1, n2.
struct Folder {
  Folder() {
    std::vector<TensorToStore> tensors;
    Elems total = 0;
    for (int i = 0; i < 5; ++i) {
      const Elems elements = i % 2 == 0 ? 3 : 2048;
      tensors.push_back(
          {(i % 2 == 0 ? "n" : "p") + std::to_string(i / 2), DType::bf16, {elements}});
      total += elements;
    }
    SafetensorsWriter writer(model() / kSingleWeights, tensors);
    std::vector<float> values(total);
    for (std::size_t i = 0; i < total; ++i) values[i] = static_cast<float>(i % 200);
    Elems first = 0;
    for (const TensorToStore& tensor : tensors) {
      writer.write(tensor.name, std::span(values).subspan(first, tensor.shape[0]));
      first += tensor.shape[0];
    }
    writer.finish();
    dir.write("model/config.json", R"({"dtype": "bfloat16",  "x": 1})");
    dir.write("model/vocab.json", "{}");
    dir.write("model/notes.txt", "");
  }
  [[nodiscard]] fs::path model() const {
    fs::create_directories(dir.path() / "model");
    return dir.path() / "model";
  }
  [[nodiscard]] fs::path out() const { return dir.path() / "a/out"; }
  ExportSummary copy(const ExportOptions& options) const {
    return export_model(model(), out(), options, [](Bytes, Bytes) {});
  }
  test::TempDir dir;
};

std::vector<float> values_of(const WeightFiles& files, const std::string& name) {
  std::vector<float> values(files.find(name)->tensor->elements);
  files.read(name, values);
  return values;
}

TEST(Export, PutsTensorsOfWholePagesFirst) {
  const Folder folder;
  const ExportSummary summary = folder.copy({.shard_size = kShardSize});
  EXPECT_EQ(summary.files, 1U);
  EXPECT_EQ(summary.tensors, 5U);
  EXPECT_EQ(summary.aligned, 3U);  // two of whole pages, and the one after them
  EXPECT_EQ(summary.bytes, 2U * 4096 + 3 * 6);
  const WeightFiles from(folder.model());
  const WeightFiles copy(folder.out());
  for (const auto& place : copy.tensors()) {
    const std::string& name = place.tensor->name;
    EXPECT_TRUE(name.starts_with("n") || place.tensor->offset % 4096 == 0) << name;
    EXPECT_EQ(place.tensor->dtype, "BF16");
    EXPECT_EQ(values_of(copy, name), values_of(from, name)) << name;
  }
  EXPECT_TRUE(fs::exists(folder.out() / "vocab.json"));
  EXPECT_FALSE(fs::exists(folder.out() / "notes.txt"));
  EXPECT_EQ(read_small_file(folder.out() / "config.json"), R"({"dtype": "bfloat16",  "x": 1})");
}

TEST(Export, WritesShardsInAnotherType) {
  const Folder folder;
  const ExportSummary summary = folder.copy({.type = DType::f32, .shard_size = 10000});
  EXPECT_EQ(summary.files, 2U);
  EXPECT_EQ(summary.bytes, 2U * (2 * 4096 + 3 * 6));
  const WeightFiles from(folder.model());
  const WeightFiles copy(folder.out());
  EXPECT_EQ(copy.path().filename(), kWeightsIndex);
  for (const auto& place : copy.tensors()) {
    EXPECT_EQ(place.tensor->dtype, "F32");
    EXPECT_EQ(values_of(copy, place.tensor->name), values_of(from, place.tensor->name));
  }
  const auto index = nlohmann::json::parse(read_small_file(copy.path()));
  EXPECT_EQ(index["metadata"]["total_size"], summary.bytes);
  EXPECT_EQ(index["weight_map"]["n0"], "model-00001-of-00002.safetensors");
  EXPECT_EQ(index["weight_map"]["p1"], "model-00002-of-00002.safetensors");
  const auto config = nlohmann::json::parse(read_small_file(folder.out() / "config.json"));
  EXPECT_EQ(config["dtype"], "float32");
  EXPECT_EQ(config["x"], 1);
}

TEST(Export, CopiesAndConvertsInPieces) {
  constexpr Elems kElements = 9'000'001;  // several pieces of every type, and not whole ones
  const test::TempDir dir;
  std::vector<float> values(kElements);
  for (std::size_t i = 0; i < values.size(); ++i) values[i] = static_cast<float>(i % 1021) - 500;
  fs::create_directory(dir.path() / "f16");
  {
    SafetensorsWriter writer(dir.path() / "f16" / kSingleWeights,
                             {{"odd", DType::f16, {1}}, {"w", DType::f16, {kElements}}},
                             {{"format", "pt"}});
    writer.write("odd", std::vector<float>{1});
    writer.write("w", values);
    writer.finish();
  }
  dir.write("f16/config.json", "{}");
  const auto copy = [&](const char* from, const char* to, std::optional<DType> type) {
    export_model(dir.path() / from, dir.path() / to, {.type = type}, [](Bytes, Bytes) {});
    return values_of(WeightFiles(dir.path() / to), "w");
  };
  EXPECT_TRUE(copy("f16", "same", {}) == values);
  EXPECT_TRUE(read_small_file(dir.path() / "same" / kSingleWeights) ==
              read_small_file(dir.path() / "f16" / kSingleWeights));
  EXPECT_TRUE(copy("f16", "f32", DType::f32) == values);
  std::vector<float> rounded = values;
  for (float& value : rounded) value = to_float(to_bf16(value));
  EXPECT_TRUE(copy("f32", "bf16", DType::bf16) == rounded);
  EXPECT_TRUE(copy("bf16", "f32again", DType::f32) == rounded);
}

TEST(Export, AnInterruptedOneLeavesNothing) {
  const Folder folder;
  // Does not leave the parent folder either, which the export made.
  const auto left = [&] {
    return fs::exists(folder.dir.path() / "a")
               ? std::distance(fs::directory_iterator(folder.dir.path() / "a"), {})
               : 0;
  };
  expect_error(ErrorCategory::interrupted, {"stop"}, [&] {
    export_model(folder.model(), folder.out(), {}, [](Bytes done, Bytes total) {
      EXPECT_LT(done, total);
      if (done > 0) throw Error(ErrorCategory::interrupted, "stop");
    });
  });
  EXPECT_EQ(left(), 0);
  {
    const test::FileSizeLimit limit(6000);
    expect_error(ErrorCategory::io, {"out.tmp-", "model.safetensors", "File too large"},
                 [&] { folder.copy({}); });
  }
  EXPECT_FALSE(fs::exists(folder.dir.path() / "a"));
  fs::create_directories(folder.out());  // an empty one may be there
  folder.copy({});
  expect_error(ErrorCategory::usage, {folder.out().native(), "exists"}, [&] { folder.copy({}); });
  EXPECT_EQ(left(), 1);
  // A folder cannot be renamed to a link, which is detected before the work.
  fs::rename(folder.out(), folder.dir.path() / "moved");
  fs::create_directory_symlink(folder.dir.path() / "moved", folder.out());
  expect_error(ErrorCategory::usage, {"is a symbolic link"}, [&] { folder.copy({}); });
}

TEST(Export, RemovesWhatAKilledOneHasLeft) {
  const Folder folder;
  const auto make = [&](const char* suffix) {
    fs::path left = folder.out();
    left += suffix;
    fs::create_directories(left);
    std::ofstream(left / "model.safetensors") << "half";
    return left;
  };
  const fs::path killed = make(".tmp-1");
  const fs::path written = make(".tmp-2");
  const fs::path other = make(".tmp-a");
  const Descriptor held(::open(written.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  ASSERT_EQ(::flock(held.number(), LOCK_EX), 0);
  folder.copy({});
  EXPECT_FALSE(fs::exists(killed));
  EXPECT_TRUE(fs::exists(written / "model.safetensors"));
  EXPECT_TRUE(fs::exists(other / "model.safetensors"));
}

TEST(Export, NamesWhatItCannotExport) {
  const Folder folder;
  SafetensorsWriter(folder.dir.path() / "alone.safetensors", {}).finish();
  expect_error(ErrorCategory::data, {"cannot open", "config.json", "No such file"}, [&] {
    export_model(folder.dir.path() / "alone.safetensors", folder.out(), {}, [](Bytes, Bytes) {});
  });
  SafetensorsWriter codes(
      folder.model() / kSingleWeights,
      {{.name = "n0", .shape = {3}, .copied_dtype = "F8_E4M3", .copied_bytes = 3}});
  codes.write_bytes("n0", std::vector<std::byte>(3), 0);
  codes.finish();
  expect_error(ErrorCategory::data, {"model.safetensors: tensor 'n0' has dtype F8_E4M3"},
               [&] { folder.copy({.type = DType::bf16}); });
  expect_error(ErrorCategory::usage, {"--codes", "--dtype", "give one of them"},
               [&] { folder.copy({.type = DType::bf16, .codes = true}); });
  expect_error(ErrorCategory::usage, {"--codes: ", "was not imported from a folder in MXFP4"},
               [&] { folder.copy({.codes = true}); });
  folder.dir.write("model/run.json", "{}");
  folder.dir.write("model/metrics.jsonl", "");
  expect_error(ErrorCategory::data, {"is a run without weights", "ballast.save_weights"},
               [&] { folder.copy({}); });
  EXPECT_FALSE(fs::exists(folder.out()));
}

TEST(ModelFolder, IsRemovedOnlyIfItContainsAModel) {
  const Folder folder;
  expect_error(ErrorCategory::usage, {"notes.txt is not a file of a model", "--out"},
               [&] { remove_model_folder(folder.model()); });
  EXPECT_TRUE(fs::exists(folder.model() / kSingleWeights));
  fs::remove(folder.model() / "notes.txt");
  remove_model_folder(folder.model());
  EXPECT_FALSE(fs::exists(folder.dir.path() / "model"));
  remove_model_folder(folder.dir.path() / "model");  // nothing to do
}

}  // namespace
}  // namespace ballast::formats::export_test
