#include "ballast/formats/weight_files.h"

#include <filesystem>
#include <fstream>
#include <random>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "tests/support/damaged.h"
#include "tests/support/damaged_json.h"
#include "tests/support/expect_error.h"
#include "tests/support/fuzz_inputs.h"
#include "tests/support/sanitizers.h"
#include "tests/support/tags.h"
#include "tests/support/temp_dir.h"

namespace ballast::formats::weight_files_test {
namespace {

namespace fs = std::filesystem;
using test::expect_error;

constexpr const char* kFirst = "model-00001-of-00002.safetensors";
constexpr const char* kSecond = "model-00002-of-00002.safetensors";

void write_file(const fs::path& path, const std::vector<TensorToStore>& tensors, float from = 0) {
  SafetensorsWriter writer(path, tensors, {{"format", "pt"}});
  for (const TensorToStore& tensor : tensors) {
    std::vector<float> values(1);
    for (const auto count : tensor.shape) values.resize(values.size() * count);
    for (float& value : values) value = from++;
    writer.write(tensor.name, values);
  }
  writer.finish();
}

std::string read_text(const fs::path& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

std::string index_of(const std::string& entries) {
  return R"({"metadata":{"total_size":24},"weight_map":{)" + entries + "}}";
}

const std::string kEntries =
    std::string(R"("a.weight":")") + kFirst + R"(","b":")" + kSecond + R"(","c":")" + kSecond + '"';

/// A sharded model of three tensors: a.weight in the first file, b and c in the second one.
struct Folder {
  Folder() {
    write_file(dir.path() / kFirst, {{"a.weight", DType::f32, {2, 2}}});
    write_file(dir.path() / kSecond, {{"b", DType::bf16, {3}}, {"c", DType::f16, {1}}}, 4);
    write_index(index_of(kEntries));
  }
  void write_index(const std::string& text) const { dir.write(kWeightsIndex, text); }
  void expect_refused(std::initializer_list<std::string_view> parts) const {
    expect_error(ErrorCategory::data, {dir.path().native()},
                 [&] { WeightFiles files(dir.path()); });
    expect_error(ErrorCategory::data, parts, [&] { WeightFiles files(dir.path()); });
  }
  test::TempDir dir;
};

TAG_TESTS("one_thread", "WeightFiles.*");
TEST(WeightFiles, OfAFolderAreOneModel) {
  const Folder folder;
  for (const fs::path& path : {folder.dir.path(), folder.dir.path() / kWeightsIndex}) {
    const WeightFiles files(path);
    EXPECT_EQ(files.path(), folder.dir.path() / kWeightsIndex);
    EXPECT_EQ(files.files().size(), 2U);
    EXPECT_EQ(files.tensors().size(), 3U);
    EXPECT_EQ(files.bytes(), 24U);
    std::vector<float> read(4);
    files.read("a.weight", read);
    EXPECT_EQ(read, (std::vector<float>{0, 1, 2, 3}));
    files.read("b", std::span(read).first(2), 1);
    EXPECT_EQ(read[1], 6.0F);
    files.read("c", std::span(read).first(1));
    EXPECT_EQ(read[0], 7.0F);
    ASSERT_NE(files.find("c"), nullptr);
    EXPECT_EQ(files.find("c")->file->path(), folder.dir.path() / kSecond);
    EXPECT_EQ(files.find("d"), nullptr);
    expect_error(ErrorCategory::data, {kWeightsIndex, "'a.wieght'", "did you mean 'a.weight'"},
                 [&] { files.read("a.wieght", read); });
  }
}

TEST(WeightFiles, MayLackTheFirstPartOfTheirNames) {
  const test::TempDir dir;
  write_file(
      dir.path() / kSingleWeights,
      {{"wte.weight", DType::f32, {1}}, {"m.x.b", DType::f32, {1}}, {"x.b", DType::f32, {1}}}, 5);
  const WeightFiles files(dir.path());
  std::vector<float> read(1);
  files.read("transformer.wte.weight", read);
  EXPECT_EQ(read[0], 5.0F);
  EXPECT_EQ(files.find("m.x.b")->tensor->name, "m.x.b");
  EXPECT_EQ(files.find("n.x.b")->tensor->name, "x.b");
  EXPECT_EQ(files.find("transformer.h.wte.weight"), nullptr);
  EXPECT_EQ(files.find("weight"), nullptr);
}

TEST(WeightFiles, FindMatricesOfExpertsInStacks) {
  const test::TempDir dir;
  const std::string experts = "model.language_model.layers.0.mlp.experts.";
  write_file(dir.path() / kSingleWeights, {{experts + "gate_up_proj", DType::bf16, {2, 4, 3}},
                                           {experts + "down_proj", DType::f32, {2, 3, 2}},
                                           {"x.experts.gate_up_proj", DType::f32, {2, 3, 2}},
                                           {"y.experts.gate_up_proj", DType::f32, {2, 4}},
                                           {"my_experts.down_proj", DType::f32, {1, 1, 1}}});
  const WeightFiles files(dir.path());
  EXPECT_EQ(files.tensors().size(), 5U);
  const std::string up = "model.layers.0.mlp.experts.1.up_proj.weight";
  for (const std::string& name : {up, experts + "1.up_proj.weight"}) {
    const WeightPlace* const place = files.find(name);
    ASSERT_NE(place, nullptr) << name;
    EXPECT_EQ(place->tensor->shape, (std::vector<std::uint64_t>{2, 3}));
    EXPECT_EQ(&place->whole(), files.find(experts + "gate_up_proj"));
    EXPECT_EQ(place->first_in_whole(), 18U);
    std::vector<float> read(2);
    files.read(name, read, 1);
    EXPECT_EQ(read, (std::vector<float>{19, 20}));
  }
  EXPECT_EQ(files.find("model.layers.0.mlp.experts.1.down_proj.weight")->first_in_whole(), 6U);
  for (const char* name :
       {"model.layers.0.mlp.experts.2.up_proj.weight", "x.experts.0.up_proj.weight",
        "y.experts.0.up_proj.weight", "my_experts.0.down_proj.weight"}) {
    EXPECT_EQ(files.find(name), nullptr) << name;
  }
}

TEST(WeightFiles, OfOneFileComeFirst) {
  const Folder folder;
  write_file(folder.dir.path() / kSingleWeights, {{"whole", DType::f32, {1}}});
  const WeightFiles files(folder.dir.path());
  EXPECT_EQ(files.path(), folder.dir.path() / kSingleWeights);
  EXPECT_NE(files.find("whole"), nullptr);
}

TEST(WeightFiles, SayWhatAFolderLacks) {
  const test::TempDir dir;
  expect_error(ErrorCategory::data,
               {dir.path().native(), "neither model.safetensors nor model.safetensors.index.json"},
               [&] { WeightFiles files(dir.path()); });
  dir.write("pytorch_model.bin", "x");
  expect_error(ErrorCategory::data, {"it has pytorch_model.bin: load it with transformers"},
               [&] { WeightFiles files(dir.path()); });
  expect_error(ErrorCategory::data, {"cannot read", "none: No such file"},
               [&] { WeightFiles files(dir.path() / "none"); });
}

TEST(WeightFiles, AgreeWithTheirIndex) {
  const Folder folder;
  const auto refuse = [&](const std::string& index, std::initializer_list<std::string_view> parts) {
    SCOPED_TRACE(index);
    folder.write_index(index);
    folder.expect_refused(parts);
  };
  refuse("", {"not valid JSON"});
  refuse("[]", {"no object 'weight_map'"});
  refuse(R"({"weight_map":[]})", {"no object 'weight_map'"});
  refuse(index_of(""), {"names no tensors"});
  refuse(index_of(R"("b":1)"), {"the file of tensor 'b' is not a string"});
  for (const std::string path :
       {"", ".", "..", "../m", "/m", "x/m", "m\\u0000", "m\\n", "\\u001bm"}) {
    refuse(index_of(R"("b":")" + path + '"'), {"tensor 'b' is in '", "only files next to it"});
  }
  refuse(index_of(R"("b":"none.safetensors")"),
         {"names 1 file, of which 1 is missing (none.safetensors); download it too"});
  refuse(index_of(kEntries + R"(,"d":")" + kFirst + '"'), {kFirst, "has no tensor 'd'"});
  refuse(index_of(kEntries + R"(,"b":")" + kFirst + '"'), {"b: given twice"});
  refuse(index_of(std::string(R"("a.weight":")") + kFirst + R"(","b":")" + kSecond + '"'),
         {kSecond, "has tensor 'c', which model.safetensors.index.json does not name"});
  write_file(folder.dir.path() / kFirst,
             {{"a.weight", DType::f32, {2, 2}}, {"b", DType::f32, {1}}});
  refuse(index_of(kEntries), {kSecond, "tensor 'b' is in", kFirst});
}

TEST(WeightFiles, NameTheShardThatIsDamaged) {
  const Folder folder;
  const auto path = folder.dir.path() / kSecond;
  fs::resize_file(path, fs::file_size(path) - 1);
  folder.expect_refused({kSecond, "tensor 'c' reaches beyond", "truncated or damaged"});
  fs::remove(path);
  folder.expect_refused({"names 2 files, of which 1 is missing", kSecond});
}

TEST(WeightFiles, SayWhatAFolderHasInstead) {
  const auto says = [](const std::string& file, std::string_view part) {
    const test::TempDir dir;
    dir.write("config.json", "{}");
    dir.write("training_args.bin", "x");
    fs::create_directories((dir.path() / file).parent_path());
    dir.write(file, "x");
    expect_error(ErrorCategory::data, {" has neither model.safetensors nor ", part},
                 [&] { WeightFiles files(dir.path()); });
  };
  says("readme", "; download the weights into it");
  says("consolidated.00.pth", "it has consolidated.00.pth: load it with transformers");
  says("model-Q4_K_M.gguf", "gguf_file");
  says("model.safetensors.incomplete", "is a download that has not ended");
  says(".cache/huggingface/download/x.incomplete", "its download has not ended");
  says("model-00001-of-00003.safetensors", "the index of such files is missing");
  says("other.safetensors", "rename it to model.safetensors");
  says("checkpoint-500/model.safetensors", "its folder checkpoint-500 has weights");
  says("pytorch_model_fsdp_0/x", "accelerate merge-weights");
  says("global_step10/x", "zero_to_fp32.py");
}

TEST(WeightFiles, SayWhichFormatAFileHasInstead) {
  const Folder folder;
  const auto says = [&](const std::string& content, std::string_view part) {
    for (const char* name : {kFirst, kSecond}) {
      const std::string before = read_text(folder.dir.path() / name);
      folder.dir.write(name, content);
      folder.expect_refused({name, part});
      folder.dir.write(name, before);
    }
  };
  says("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 123\n", "git lfs pull");
  folder.write_index("version https://git-lfs.github.com/spec/v1");
  folder.expect_refused({kWeightsIndex, "is a git-lfs pointer"});
  folder.write_index(index_of(kEntries));
  says("PK\x03\x04 archive of PyTorch", "is a file of PyTorch");
  says("GGUF and more", "is GGUF");
  says("<!DOCTYPE html>", "is a web page");
  says(R"({"weight_map": {}})", "is JSON");
  says(std::string(100, '\0'), "begins with zeros");
  says("x", "too short for a safetensors file; download or copy it again");
  says("0123456789", "truncated or not a safetensors file; download or copy it again");
}

/// The message for a model whose tensor names are not those of a Llama.
TEST(WeightFiles, SayWhyTensorsHaveOtherNames) {
  const auto says = [](const std::vector<std::string>& names, std::string_view part) {
    const test::TempDir dir;
    std::vector<TensorToStore> tensors;
    for (const std::string& name : names) tensors.push_back({name, DType::f32, {1}});
    write_file(dir.path() / kSingleWeights, tensors);
    const WeightFiles files(dir.path());
    const std::string missing = "model.layers.0.self_attn.q_proj.weight";
    expect_error(ErrorCategory::data, {"has no tensor '" + missing + "'", part}, [&] {
      std::vector<float> values(1);
      files.read(missing, values);
    });
  };
  const std::string map = "model.layers.0.self_attn.q_proj";
  for (const auto& [prefix, part] : {std::pair("_orig_mod.", "torch.compile"),
                                     {"module.", "DataParallel or DDP"},
                                     {"_fsdp_wrapped_module.", "prefix of FSDP"},
                                     {"_forward_module.", "Lightning"},
                                     {"policy.net.", "has a prefix, 'policy.net.', like all"},
                                     {"base_model.model.", "an unmerged PEFT model"}}) {
    says({prefix + map + ".weight", prefix + std::string("model.norm.weight")}, part);
  }
  says({"model.layers.0._checkpoint_wrapped_module.self_attn.q_proj.weight"}, "checkpointing");
  says({"model.norm.weight", map + ".base_layer.weight"}, "an unmerged PEFT model");
  says({"language_model.layers.0.self_attn.q_proj.weight"}, "a model of text and images");
  says({"thinker.model.layers.0.self_attn.q_proj.weight"}, "a model of text and images");
  says({map + ".qweight", map + ".qzeros"}, "quantised by GPTQ or AWQ");
  says({map + ".weight_packed"}, "compressed-tensors");
  says({map + ".W_q"}, "quantised by HQQ; give the folder of the original model");
  says({"layers.0.attention.wq.weight"}, "Meta's own format");
  says({map + ".wieght"}, "did you mean");
}

/// Reads all values of the model in `folder`. Returns whether it was accepted. An error must name a
/// file of the folder in one line.
bool reads(const fs::path& folder) {
  try {
    const WeightFiles files(folder);
    for (const auto& place : files.tensors()) {
      std::vector<float> values(place.tensor->elements);
      const auto& type = place.tensor->dtype;
      if (type == "F32" || type == "F16" || type == "BF16") {
        files.read(place.tensor->name, values);
      }
    }
    return true;
  } catch (const Error& error) {
    const std::string message = error.what();
    EXPECT_EQ(error.category(), ErrorCategory::data) << message;
    EXPECT_NE(message.find(folder.native()), std::string::npos) << message;
    EXPECT_EQ(message.find_first_of("\n\r\x1b"), std::string::npos) << message;
    return false;
  }
}

std::string damaged_file(const std::string& whole, bool index, std::mt19937_64& random) {
  if (random() % 2 == 0) return test::damaged(whole, random);
  return index ? test::damaged_json(whole, random) : test::damaged_safetensors(whole, random);
}

/// Damages the index, the headers or the data, and reads the files if they are accepted.
/// BALLAST_TEST_FUZZ_INPUTS sets how often.
TEST(WeightFiles, ThatAreDamagedAreRefusedOrRead) {
  const Folder folder;
  std::mt19937_64 random(7);
  const std::size_t inputs = test::fuzz_inputs(4500);
  std::size_t accepted = 0;
  for (const char* name : {kWeightsIndex, kFirst, kSecond}) {
    const fs::path path = folder.dir.path() / name;
    const std::string whole = read_text(path);
    for (std::size_t i = 0; i < inputs; i += 3) {
      fs::remove(path);  // truncating a file may wait for the disk
      const std::string text = damaged_file(whole, name == kWeightsIndex, random);
      std::ofstream(path, std::ios::binary) << text;
      accepted += reads(folder.dir.path()) ? 1 : 0;
      if (HasFailure()) FAIL() << name << ": " << text.substr(0, 1000);
    }
    std::ofstream(path, std::ios::binary) << whole;
  }
  EXPECT_LT(accepted, inputs / 2);
  EXPECT_GT(accepted, inputs / 90);  // metadata and data may be anything
}

TEST(WeightFiles, ThatAreCutAnywhereAreRefused) {
  const Folder folder;
  for (const char* name : {kWeightsIndex, kFirst, kSecond}) {
    const fs::path path = folder.dir.path() / name;
    const std::string whole = read_text(path);
    for (std::size_t length = 0; length < whole.size(); length += test::kSanitized ? 5 : 1) {
      fs::remove(path);
      std::ofstream(path, std::ios::binary) << whole.substr(0, length);
      EXPECT_FALSE(reads(folder.dir.path())) << name << " of " << length << " bytes";
    }
    fs::remove(path);
    std::ofstream(path, std::ios::binary) << whole;
    EXPECT_TRUE(reads(folder.dir.path()));
  }
}

}  // namespace
}  // namespace ballast::formats::weight_files_test
