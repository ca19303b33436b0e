#include <algorithm>
#include <array>
#include <filesystem>
#include <string>
#include <vector>

#include <fmt/format.h>

#include "ballast/comm/collective_try.h"
#include "ballast/config/resumption.h"
#include "ballast/core/error.h"
#include "ballast/core/log.h"
#include "ballast/model/slots.h"

#include "src/checkpoint/checkpoint.h"
#include "src/train/run_checkpoints.h"

namespace ballast::train {
namespace {

namespace fs = std::filesystem;

/// Whether the newest readable checkpoint at `from` has no pad token.
bool lacks_pad_token(const fs::path& from) {
  const std::vector<fs::path> folders =
      checkpoint::names_checkpoint(from) ? std::vector{from} : checkpoint::checkpoints_of(from);
  for (const fs::path& folder : folders) {
    try {
      const checkpoint::Checkpoint found(folder);
      return !found.facts().settings.contains(config::kPadTokenSetting);
    } catch (const Error&) {
      continue;  // a damaged checkpoint is skipped or named when the run resumes
    }
  }
  return false;
}

bool allows(const RunOptions& options) {
  constexpr std::array kNames = {"all", "model", config::kPadTokenSetting};
  return std::ranges::any_of(options.allowed_changes, [&](const std::string& allowed) {
    return std::ranges::find(kNames, allowed) != kNames.end();
  });
}

}  // namespace

config::Config with_pad_token_of_checkpoint(const config::Config& config, const RunOptions& options,
                                            comm::Ranks* ranks) {
  const auto token = model::pad_token(config.model);
  const bool own = options.directory == RunDirectory::continued && options.resume.empty();
  const fs::path from = own ? config.ballast.out : options.resume;
  if (!token || from.empty() || allows(options)) return config;
  const bool root = ranks == nullptr || ranks->rank() == 0;
  bool lacks = false;
  comm::collective_try(ranks, [&] { lacks = root && lacks_pad_token(from); });
  if (!comm::decided_by_root(ranks, lacks)) return config;
  if (root) {
    log(LogLevel::info,
        fmt::format("{}: was written without {}, so the run continues to train the row of token {} "
                    "in the embedding; --allow-change {} ends that",
                    from.string(), config::kPadTokenSetting, *token, config::kPadTokenSetting));
  }
  config::Config changed = config;
  changed.model.details[model::kPadToken] = {};
  return changed;
}

}  // namespace ballast::train
