#include <string>

#include <gtest/gtest.h>

#include "ballast/config/hugging_face_config.h"

#include "tests/support/temp_dir.h"

namespace ballast::config::model_source_test {
namespace {

TEST(ModelSource, SaysHowToDownloadWhatMayBeAnId) {
  for (const char* id : {"Qwen/Qwen2.5-0.5B", "gpt2", "adapter-only"}) {
    const std::string hint = download_hint(id);
    EXPECT_NE(hint.find(std::string("`hf download ") + id + " --local-dir DIR`"),
              std::string::npos);
    const std::string reason = explain_no_model(std::string("/no/such/") + id, id).value_or("");
    EXPECT_EQ(reason, std::string("there is no folder /no/such/") + id + ". " + hint);
  }
  for (const char* path : {"", "../a/b", "./a", "/no/such", "a/b/c", "a/", "x.safetensors",
                           "config.json", "with space", "~/model"}) {
    EXPECT_EQ(download_hint(path), "") << path;
  }
}

TEST(ModelSource, SaysWhatAFolderIsIfItHasNoModel) {
  const test::TempDir dir;
  const auto expect = [&](const std::string& path, const std::string& part) {
    const std::string reason = explain_no_model(dir.path() / path, path).value_or("");
    EXPECT_EQ(reason.find((dir.path() / path).string()), 0U) << reason;
    EXPECT_NE(reason.find(part), std::string::npos) << path << ": " << reason;
  };
  dir.write("adapter/adapter_config.json", R"({"base_model_name_or_path": "org/base"})");
  expect("adapter",
         "without their base model (adapter_config.json); give the folder of org/base as "
         "model.path and this one as ballast.adapters.path");
  const std::pair<const char*, const char*> files[] = {
      {"run/run.json", "is a run of Ballast; `ballast export "},
      {"pipe/model_index.json", "is a pipeline of diffusers"},
      {"gguf/model-Q4.gguf", "has a model in GGUF"},
      {"onnx/model.onnx", "has a model in ONNX"},
      {"meta/params.json", "in the format of its makers"},
      {"bare/model.safetensors", "has weights without the config.json"},
      {"bin/pytorch_model.bin", "has pickled weights"},
      {"ds/latest", "is a checkpoint of DeepSpeed"},
      {"trainer/checkpoint-20/config.json", "give a folder in it, such as "},
      {"models--a--b/snapshots/0f3/config.json", "models--a--b/snapshots/0f3"},
      {"empty/README.md", "has no config.json; give the folder of a Hugging Face model"}};
  for (const auto& [file, part] : files) {
    dir.write(file, "{}");
    expect(std::string(file).substr(0, std::string(file).find('/')), part);
  }
  expect("run", "`ballast export " + (dir.path() / "run").string() + " --out DIR`");
  expect("gguf/model-Q4.gguf", "is a file in GGUF");
  expect("bare/model.safetensors", "is a file; give its folder ");
  dir.write("m/config.json", "{}");
  expect("m/config.json", "is a file; give its folder ");
  EXPECT_EQ(explain_no_model(dir.path() / "m", "m"), std::nullopt);
}

TEST(ModelSource, SaysWhatAFolderIsIfItHasNoAdapters) {
  const test::TempDir dir;
  dir.write("m/config.json", "{}");
  dir.write("a/adapter_config.json", "{}");
  dir.write("run/weights/adapter_config.json", "{}");
  const auto reason = [&](const char* path) {
    return explain_no_adapters(dir.path() / path, path).value_or("");
  };
  EXPECT_EQ(reason("a"), "");
  EXPECT_NE(reason("m").find("a whole model belongs into model.path"), std::string::npos);
  EXPECT_NE(reason("run").find("/run/weights"), std::string::npos);
  EXPECT_NE(reason("org/lora").find("hf download org/lora"), std::string::npos);
}

}  // namespace
}  // namespace ballast::config::model_source_test
