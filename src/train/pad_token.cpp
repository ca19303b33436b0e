#include "src/train/pad_token.h"

#include <filesystem>
#include <string>

#include <fmt/format.h>

#include "ballast/comm/collective_try.h"
#include "ballast/config/resumption.h"
#include "ballast/core/log.h"
#include "ballast/model/slots.h"

#include "src/checkpoint/checkpoint.h"
#include "src/train/run_checkpoints.h"

namespace ballast::train {
namespace {

bool lacks_pad_token(const std::filesystem::path& from) {
  const auto found = checkpoint::newest_readable(from);
  return found && !found->facts().settings.contains(config::kPadTokenSetting);
}

}  // namespace

config::Config with_pad_token_of_checkpoint(const config::Config& config, const RunOptions& options,
                                            comm::Ranks* ranks) {
  const auto token = model::pad_token(config.model);
  const std::filesystem::path from = resumed_from(config, options);
  if (!token || from.empty() ||
      config::is_allowed(config::kPadTokenSetting, options.allowed_changes)) {
    return config;
  }
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
