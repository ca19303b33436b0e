#pragma once

#include <filesystem>
#include <string>
#include <vector>

#include <fmt/format.h>

#include "ballast/config/config.h"

#include "tests/support/device_kind.h"

namespace ballast::test {

/// Replaces the data of a tiny_config() by packed documents.
inline const char* const kPacked = R"(data={"documents": ["unused.safetensors"],
                                             "sequence_length": 37})";

/// A config with `model` (the content of the model section, at most 131 token ids), 3 micro-batches
/// of 2 sequences of 37 tokens and large budgets, for device_kind(). Its run directory is
/// `directory`. `ranks`: as config::parse() takes it.
inline config::Config tiny_config(const std::string& model, bool bf16,
                                  const std::filesystem::path& directory,
                                  const std::vector<std::string>& overrides = {},
                                  std::uint64_t ranks = 1) {
  const std::string device = device_kind();
  // A GPU's matrix products have 32 MiB of workspace.
  const char* const device_bytes = device == "cuda" ? "128MiB" : "64MiB";
  const std::string text = fmt::format(
      R"({{"model": {{{}}},
          "data": {{"tokens": ["unused.bin"], "sequence_length": 37}},
          "optimizer": {{"type": "AdamW", "params": {{"lr": 0.003, "weight_decay": 0.1}}}},
          "bf16": {{"enabled": {}}},
          "gradient_clipping": 0.9,
          "aio": {{"any_file_system": true}},
          "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 3,
          "ballast": {{"device": "{}", "device_bytes": "{}", "host_bytes": "64MiB",
                       "out": "{}"}}}})",
      model, bf16, device, device_bytes, directory.string());
  return config::parse(text, directory, "test", overrides, ranks);
}

}  // namespace ballast::test
