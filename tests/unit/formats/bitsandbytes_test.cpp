#include <cstring>
#include <filesystem>
#include <fstream>
#include <map>
#include <random>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include "ballast/config/config.h"
#include "ballast/engine/engine.h"
#include "ballast/formats/export.h"
#include "ballast/formats/model_folder.h"
#include "ballast/formats/weight_files.h"
#include "ballast/model/lora.h"
#include "ballast/model/packed_values.h"
#include "ballast/setup/setup.h"

#include "src/formats/quantized_matrices.h"
#include "src/train/initial_weights.h"
#include "tests/support/damaged.h"
#include "tests/support/expect_error.h"
#include "tests/support/fixtures.h"
#include "tests/support/tags.h"
#include "tests/support/temp_dir.h"

// The files are those of tests/data/make_bitsandbytes_fixture.py.

namespace ballast::formats::bitsandbytes_test {
namespace {

namespace fs = std::filesystem;
using model::Quantization;
using nlohmann::json;
using test::expect_error;

const std::vector<std::string> kFolders = {"nf4", "nested", "int8"};
/// Adapters of another program, and the data they are trained on.
const std::vector<std::string> kAdapters = {
    "ballast.train=adapters",
    R"(ballast.adapters={"targets": ["q_proj", "down_proj"], "rank": 4, "alpha": 8})"};

fs::path fixture(const std::string& name) {
  return test::fixture("bitsandbytes") / name;
}

json expected() {
  json values;
  std::ifstream(fixture("expected.json")) >> values;
  return values;
}

std::vector<std::byte> stored(const WeightPlace& place) {
  std::vector<std::byte> bytes(place.tensor->bytes);
  read_stored(place, 0, bytes);
  return bytes;
}

/// Two sequences of 16 tokens on the host device.
config::Config config_of(const fs::path& folder, std::vector<std::string> overrides = {},
                         bool bf16 = true) {
  const json text = {
      {"data", {{"tokens", "none.bin"}, {"sequence_length", 16}}},
      {"bf16", {{"enabled", bf16}}},
      {"model", {{"path", folder.string()}}},
      {"optimizer", {{"type", "AdamW"}, {"params", {{"lr", 0.01}}}}},
      {"train_micro_batch_size_per_gpu", 2},
      {"ballast", {{"device", "host"}, {"device_bytes", "64MiB"}, {"host_bytes", "64MiB"}}}};
  return config::parse(text.dump(), "/", "test", overrides);
}

/// An engine that has started with the weights of its config.
struct Started {
  explicit Started(const config::Config& config) : engine(setup::make_engine(config)) {
    train::start_from_weights(engine, config,
                              [](Bytes done, Bytes total) { EXPECT_LE(done, total); });
  }
  engine::Engine engine;
};

/// The fixture's ids: inputs and the targets that follow them.
struct Batch {
  Batch() {
    const json values = expected();
    for (const auto& row : values["ids"]) {
      const auto ids = row.get<std::vector<std::int32_t>>();
      tokens.insert(tokens.end(), ids.begin(), ids.end() - 1);
      targets.insert(targets.end(), ids.begin() + 1, ids.end());
    }
  }
  [[nodiscard]] engine::TokenBatch view() const { return {tokens, targets}; }
  std::vector<std::int32_t> tokens;
  std::vector<std::int32_t> targets;
};

TAG_TESTS("one_thread", "Bitsandbytes.*");
TEST(Bitsandbytes, FoldersAreReadAsItDecodesThem) {
  const WeightFiles decoded(fixture("expected.safetensors"));
  std::mt19937 random(5);
  for (const std::string& name : kFolders) {
    const config::Config config = config_of(fixture(name));
    train::check_initial_weights(config);
    const model::Architecture model = model::build_architecture(config.model);
    const WeightFiles files(fixture(name));
    WeightReader reader(files, train::reading_order(files, model, DType::bf16));
    for (const model::TensorSpec& tensor : model.blocks[model.first_layer()].tensors) {
      const WeightPlace& place = train::place_of(files, tensor);
      EXPECT_EQ(place.quantized != nullptr, tensor.shape.size() == 2) << tensor.name;
      if (place.quantized == nullptr) continue;
      const auto theirs = stored(*decoded.find(name + "/" + tensor.name));
      for (const Elems first : {Elems{0}, Elems{random() % tensor.size}}) {
        std::vector<std::byte> found((tensor.size - first) * sizeof(Bf16));
        train::read_stored_weights(place, reader, tensor, first, found);
        EXPECT_TRUE(std::equal(found.begin(), found.end(), theirs.end() - found.size()))
            << name << " " << tensor.name << " from " << first;
      }
    }
  }
}

TEST(Bitsandbytes, LossesAreThoseOfTransformers) {
  const Batch batch;
  const json losses = expected()["loss"];
  for (const std::string& name : kFolders) {
    Started run(config_of(fixture(name), {}, false));
    EXPECT_NEAR(run.engine.train_step(batch.view(), 0.0).loss, losses[name], 1e-5) << name;
  }
  const std::vector<std::string> adapters = {
      "ballast.train=adapters", "ballast.adapters.path=" + fixture("adapters").string(),
      "ballast.quantized_base=none"};
  Started run(config_of(fixture("nested"), adapters, false));
  EXPECT_NEAR(run.engine.train_step(batch.view(), 0.0).loss, losses["adapters"], 1e-5);
}

/// The codes of a run's blocks, by the number of the block.
std::map<std::size_t, std::vector<std::byte>> codes_of(engine::Engine& engine) {
  std::map<std::size_t, std::vector<std::byte>> codes;
  engine.snapshot().save([&](const engine::StateRange& range, ConstHostBytes bytes) {
    if (range.kind != engine::StateKind::codes) return;
    auto& to = codes[range.block];
    to.insert(to.end(), bytes.begin(), bytes.end());
  });
  return codes;
}

void expect_bytes(const WeightPlace& place, const std::byte* found, const std::string& what) {
  const std::vector<std::byte> theirs = stored(place);
  EXPECT_EQ(std::memcmp(found, theirs.data(), theirs.size()), 0) << what;
}

/// "auto" keeps the folder's codes, byte for byte.
TEST(Bitsandbytes, ARunHasTheCodesOfTheFolder) {
  for (const bool nested : {false, true}) {
    const fs::path folder = fixture(nested ? "nested" : "nf4");
    const config::Config config = config_of(folder, kAdapters);
    EXPECT_EQ(config.ballast.quantized_base, config::QuantizedBase::nf4);
    EXPECT_EQ(config.ballast.double_quantization, nested);
    Started run(config);
    const WeightFiles files(folder);
    const model::Architecture& model = run.engine.blueprint().model;
    const auto codes = codes_of(run.engine);
    ASSERT_EQ(codes.size(), 2U);
    for (const auto& [number, bytes] : codes) {
      const model::BlockCodes block(model, model.blocks[number]);
      ASSERT_EQ(block.matrices.size(), 7U);
      for (const auto& matrix : block.matrices) {
        const QuantizedWeights& quantized = *files.find(matrix.tensor->name)->quantized;
        const std::byte* const at = bytes.data() + matrix.offset;
        expect_bytes(quantized.codes, at, matrix.tensor->name);
        expect_bytes(quantized.scales, at + matrix.arrays.scales,
                     "scales of " + matrix.tensor->name);
        if (!nested) continue;
        expect_bytes(quantized.nested, at + matrix.arrays.nested,
                     "nested of " + matrix.tensor->name);
        EXPECT_EQ(std::memcmp(at + matrix.arrays.mean, &quantized.mean, sizeof(float)), 0);
      }
    }
  }
}

/// Dequantised.
fs::path exported(const fs::path& from, const fs::path& out,
                  const ExportOptions& options = {.type = DType::f32}) {
  export_model(from, out, options, [](Bytes, Bytes) {});
  EXPECT_FALSE(json::parse(read_small_file(out / "config.json")).contains("quantization_config"));
  return out;
}

/// Expects that losses and states after each step equal those of the same run over dequantised
/// weights.
void expect_equal_runs(const config::Config& one, const config::Config& other, bool same_states) {
  const Batch batch;
  Started quantized(one);
  Started plain(other);
  for (int step = 0; step < 2; ++step) {
    const engine::StepResult left = quantized.engine.train_step(batch.view(), 0.01);
    const engine::StepResult right = plain.engine.train_step(batch.view(), 0.01);
    EXPECT_EQ(left.loss, right.loss) << step;
    EXPECT_EQ(left.grad_norm, right.grad_norm) << step;
  }
  if (same_states) {
    EXPECT_EQ(quantized.engine.snapshot().hash(), plain.engine.snapshot().hash());
  }
}

TEST(Bitsandbytes, TrainingIsThatOverItsDecodedExport) {
  const test::TempDir dir;
  for (const std::string& name : kFolders) {
    const fs::path decoded = exported(fixture(name), dir.path() / name);
    expect_equal_runs(config_of(fixture(name)), config_of(decoded), true);
  }
  for (const char* codes : {"auto", "nf4", "none"}) {
    std::vector<std::string> overrides = {"ballast.train=adapters",
                                          "ballast.adapters.path=" + fixture("adapters").string(),
                                          std::string("ballast.quantized_base=") + codes};
    const config::Config one = config_of(fixture("nested"), overrides);
    overrides.back() = "ballast.quantized_base=none";
    const config::Config other = config_of(dir.path() / "nested", overrides);
    EXPECT_EQ(one.ballast.double_quantization, std::string(codes) == "auto");
    expect_equal_runs(one, other, std::string(codes) == "none");
  }
}

TEST(Bitsandbytes, AdaptersAreMergedIntoDecodedWeights) {
  const test::TempDir dir;
  fs::copy(fixture("adapters"), dir.path() / "adapters");
  json settings = json::parse(read_small_file(dir.path() / "adapters/adapter_config.json"));
  settings["base_model_name_or_path"] = fixture("nested").string();
  dir.write("adapters/adapter_config.json", settings.dump());
  const fs::path out =
      exported(dir.path() / "adapters", dir.path() / "out", {.type = DType::f32, .merged = true});
  const Batch batch;
  Started run(config_of(out, {}, false));
  EXPECT_NEAR(run.engine.train_step(batch.view(), 0.0).loss, expected()["loss"]["adapters"], 1e-5);
}

TEST(Bitsandbytes, OnlyFrozenMatricesAreKeptAsCodes) {
  EXPECT_EQ(config_of(fixture("nested")).ballast.quantized_base, config::QuantizedBase::none);
  EXPECT_EQ(config_of(fixture("int8"), kAdapters).ballast.quantized_base,
            config::QuantizedBase::none);
  const auto trained = [](const std::string& patterns) {
    return config_of(fixture("nested"), {"ballast.train=" + patterns}).ballast.quantized_base;
  };
  EXPECT_EQ(trained(R"(["model.layers.1.*"])"), config::QuantizedBase::nf4);
  EXPECT_EQ(trained(R"(["model.layers.*"])"), config::QuantizedBase::none);
}

/// Tensors as files have them: dtype, shape, bytes.
struct Stored {
  std::string dtype;
  std::vector<std::uint64_t> shape;
  std::string bytes;
};

/// A folder with a modifiable copy of the tensors of one of the fixture's.
class Copy {
 public:
  explicit Copy(const std::string& name) {
    const SafetensorsReader file(fixture(name) / kSingleWeights);
    for (const StoredTensor& tensor : file.tensors()) {
      const auto bytes = stored({&tensor, &file});
      tensors[tensor.name] = {
          tensor.dtype, tensor.shape, {reinterpret_cast<const char*>(bytes.data()), bytes.size()}};
    }
  }
  /// Writes the tensors and opens the file.
  [[nodiscard]] WeightFiles open() const {
    json header = json::object();
    std::string data;
    for (const auto& [name, tensor] : tensors) {
      const std::size_t begin = data.size();
      data += tensor.bytes;
      header[name] = {
          {"dtype", tensor.dtype}, {"shape", tensor.shape}, {"data_offsets", {begin, data.size()}}};
    }
    const std::string text = header.dump();
    std::string length(8, '\0');
    for (std::size_t i = 0; i < 8; ++i) length[i] = static_cast<char>(text.size() >> 8 * i);
    return WeightFiles(dir.write(kSingleWeights, length + text + data));
  }
  void expect_refused(std::initializer_list<std::string_view> parts) const {
    expect_error(ErrorCategory::data, parts, [&] { static_cast<void>(open()); });
    expect_error(ErrorCategory::data, {dir.path().native()}, [&] { static_cast<void>(open()); });
  }

  test::TempDir dir;
  std::map<std::string, Stored> tensors;
};

/// The second of two folders has what the first has left over.
void write_description(const fs::path& from, const fs::path& to, const json& quantization) {
  json description = json::parse(read_small_file(from / "config.json"));
  description["quantization_config"] = quantization;
  std::ofstream(to / "config.json") << description.dump();
}

bool has_note(const config::Config& config, std::string_view part) {
  return std::any_of(config.notes.begin(), config.notes.end(),
                     [&](const std::string& note) { return note.find(part) != std::string::npos; });
}

/// A merged 16-bit folder may have kept a quantization_config, even one that Ballast cannot read.
TEST(Bitsandbytes, DenseWeightsAreUsedAsTheyAreWhateverTheirConfigSays) {
  const test::TempDir dir;
  const fs::path plain = exported(fixture("nested"), dir.path() / "plain");
  const fs::path left = exported(fixture("nested"), dir.path() / "left");
  const json theirs = json::parse(read_small_file(fixture("nested") / "config.json"));
  const json fp4 = {
      {"quant_method", "bitsandbytes"}, {"load_in_4bit", true}, {"bnb_4bit_quant_type", "fp4"}};
  for (const json& quantization :
       {theirs["quantization_config"], fp4, json{{"quant_method", "gptq"}, {"bits", 4}}}) {
    write_description(plain, left, quantization);
    const config::Config config = config_of(left, kAdapters);
    EXPECT_EQ(config.ballast.quantized_base, config::QuantizedBase::none);
    EXPECT_TRUE(has_note(config, "quantization_config is a leftover"));
    expect_equal_runs(config, config_of(plain, kAdapters), true);
    fs::remove_all(dir.path() / "again");
    exported(left, dir.path() / "again");
  }
}

TEST(Bitsandbytes, CodesAreRecognisedWithoutTheirConfig) {
  const test::TempDir dir;
  fs::copy(fixture("nested"), dir.path() / "bare");
  write_description(fixture("nested"), dir.path() / "bare", nullptr);
  const config::Config config = config_of(dir.path() / "bare", kAdapters);
  EXPECT_EQ(config.ballast.quantized_base, config::QuantizedBase::nf4);
  EXPECT_TRUE(config.ballast.double_quantization);
  EXPECT_FALSE(has_note(config, "leftover"));
}

const std::string kMatrix = "model.layers.0.mlp.up_proj.weight";
const std::string kState = kMatrix + ".quant_state.bitsandbytes__nf4";

/// Changes one member of the description.
void describe(Copy& copy, const std::string& key, const json& value) {
  json state = json::parse(copy.tensors[kState].bytes);
  state[key] = value;
  std::string& bytes = copy.tensors[kState].bytes;
  bytes = state.dump();
  copy.tensors[kState].shape = {bytes.size()};
}

/// Modules may be left out of the quantisation. "auto" must not encode them.
TEST(Bitsandbytes, MixedFoldersAreDequantised) {
  Copy copy("nested");
  const json state = json::parse(copy.tensors[kState].bytes);
  std::erase_if(copy.tensors, [](const auto& entry) { return entry.first.starts_with(kMatrix); });
  const std::vector<std::uint64_t> shape = state["shape"];
  copy.tensors[kMatrix] = {"BF16", shape, std::string(shape[0] * shape[1] * 2, '\1')};
  static_cast<void>(copy.open());
  fs::copy_file(fixture("nested") / "config.json", copy.dir.path() / "config.json");
  const config::Config config = config_of(copy.dir.path(), kAdapters);
  EXPECT_EQ(config.ballast.quantized_base, config::QuantizedBase::none);
  EXPECT_TRUE(has_note(config, "\"auto\" is \"none\": 13 of 14 frozen matrices"));
}

TEST(Bitsandbytes, TensorsThatDoNotFitAreRefusedInOneLine) {
  const auto without = [](const std::string& suffix, std::string_view message) {
    Copy copy("nested");
    copy.tensors.erase(kMatrix + suffix);
    copy.expect_refused({message});
  };
  without(".absmax", "is a matrix in NF4, but its tensor '");
  without(".quant_map", ".quant_map'");
  without(".nested_quant_map", ".nested_quant_map'");
  without(".nested_absmax", "is U8 [40], but");
  without(".quant_state.bitsandbytes__nf4", "is quantised by bitsandbytes, but its tensor");
  const auto refuse = [](const std::string& key, const json& value, std::string_view message) {
    Copy copy("nested");
    describe(copy, key, value);
    copy.expect_refused({kState, message});
  };
  refuse("quant_type", "fp4", "says that quant_type is \"fp4\", but Ballast reads only \"nf4\"");
  refuse("blocksize", 128, "says that blocksize is 128, but Ballast reads only 64");
  refuse("nested_blocksize", 64, "nested_blocksize is 64");
  refuse("nested_offset", nullptr, "nested_offset is null");
  refuse("dtype", "int8", "dtype is \"int8\"; weights can be");
  refuse("shape", {80, 0}, "shape is [80,0], not that of a matrix");
  refuse("shape", {1ULL << 40U, 1ULL << 40U}, "not that of a matrix");
  Copy other("nested");
  describe(other, "shape", {80, 33});
  other.expect_refused({"has 1280 bytes, but a matrix [80, 33] has 1320 in NF4"});
  Copy table("nested");
  table.tensors[kMatrix + ".quant_map"].bytes[1] ^= 0x40;
  table.expect_refused({".quant_map' differs from the table of values that bitsandbytes uses"});
  Copy fp4("nested");
  fp4.tensors[kMatrix + ".quant_state.bitsandbytes__fp4"] = fp4.tensors[kState];
  fp4.tensors.erase(kState);
  fp4.expect_refused({"is a matrix in FP4, but Ballast reads only NF4"});
  const std::string module = "model.layers.0.mlp.up_proj.";
  Copy scales("int8");
  scales.tensors.erase(module + "SCB");
  scales.expect_refused(
      {"is a matrix in int8, but tensor '" + module + "SCB' with its scales is missing"});
  Copy order("int8");
  order.tensors[module + "weight_format"].bytes = "\1";
  order.expect_refused({"weight_format' is not 0"});
}

/// Damaged descriptions are refused, or are harmless.
TEST(Bitsandbytes, DamagedDescriptionsAreRefusedInOneLine) {
  std::mt19937_64 random(11);
  Copy copy("nested");
  const std::string whole = copy.tensors[kState].bytes;
  std::size_t refused = 0;
  for (int i = 0; i < 100; ++i) {
    std::string& bytes = copy.tensors[kState].bytes;
    bytes = test::damaged(whole, random);
    copy.tensors[kState].shape = {bytes.size()};
    try {
      static_cast<void>(copy.open());
    } catch (const Error& error) {
      EXPECT_EQ(error.category(), ErrorCategory::data) << error.what();
      EXPECT_EQ(std::string(error.what()).find('\n'), std::string::npos) << error.what();
      ++refused;
    }
  }
  EXPECT_GT(refused, 60U);
}

/// A matrix with several scales of scales, whose last ones are not full, read from every start.
TEST(Bitsandbytes, LongMatricesAreReadFromEverywhere) {
  constexpr Elems kRows = 129;
  constexpr Elems kColumns = 321;
  constexpr Elems kElements = kRows * kColumns;
  std::vector<float> values(kElements);
  std::mt19937 random(3);
  for (float& value : values) value = std::normal_distribution<float>()(random);
  const Quantization how = {.double_scales = true};
  const model::QuantizedArrays arrays(how, kElements);
  std::vector<std::byte> quantized(arrays.bytes);
  std::vector<float> scales(arrays.scales_count);
  model::encode(how, values, quantized.data(), scales.data());
  model::store_scales(arrays, scales, quantized.data());
  model::decode(how, arrays, quantized.data(), 0, values);

  Copy copy("nested");
  const auto put = [&](const std::string& suffix, Bytes offset, Bytes width, Elems count) {
    Stored& to = copy.tensors[kMatrix + suffix];
    to.shape = {count};
    to.bytes.assign(reinterpret_cast<const char*>(quantized.data()) + offset, width * count);
  };
  put("", 0, 1, (kElements + 1) / 2);
  put(".absmax", arrays.scales, 1, arrays.scales_count);
  put(".nested_absmax", arrays.nested, sizeof(float), arrays.nested_count);
  describe(copy, "shape", {kRows, kColumns});
  describe(copy, "dtype", "float32");
  float mean = 0.0F;
  std::memcpy(&mean, quantized.data() + arrays.mean, sizeof mean);
  describe(copy, "nested_offset", mean);
  const WeightFiles files = copy.open();
  for (int i = 0; i < 50; ++i) {
    const Elems first = random() % kElements;
    std::vector<float> found(random() % (kElements - first) + 1);
    files.read(kMatrix, found, first);
    ASSERT_TRUE(
        std::equal(found.begin(), found.end(), values.begin() + static_cast<std::ptrdiff_t>(first)))
        << first;
  }
  const auto read_codes = [&](const Quantization& wanted) {
    std::vector<std::byte> out(model::QuantizedArrays(wanted, kElements).bytes);
    bitsandbytes::read_codes(*files.find(kMatrix), wanted, out, nullptr);
    return out;
  };
  EXPECT_EQ(read_codes(how), quantized);
  const Quantization plain = {};
  std::vector<float> found(kElements);
  model::decode(plain, {plain, kElements}, read_codes(plain).data(), 0, found);
  EXPECT_EQ(found, values);
}

}  // namespace
}  // namespace ballast::formats::bitsandbytes_test
