#include "src/train/run_folders.h"

#include <system_error>

#include <fmt/format.h>

#include "ballast/comm/collective_try.h"
#include "ballast/core/error.h"
#include "ballast/core/log.h"
#include "ballast/inputs/engine_inputs.h"

namespace ballast::train {

RunFolders::RunFolders(const config::Config& config, const engine::Blueprint& blueprint,
                       comm::Ranks* ranks) {
  comm::collective_try(ranks, [&] {
    if (ranks != nullptr && ranks->rank() != 0) unnamed_.emplace_back(config.ballast.out);
    if (blueprint.schedule.bytes(Tier::nvme) == 0) return;
    make_swap_folders(
        inputs::swap_options(config, ranks == nullptr ? comm::Launch{} : ranks->launch()));
  });
}

void RunFolders::make_swap_folders(const state::SwapOptions& options) {
  for (const state::SwapPath& path : options.paths) {
    std::error_code ignored;
    if (!path.made_later || std::filesystem::exists(path.directory, ignored)) continue;
    if (path.key.empty()) {
      unnamed_.emplace_back(path.directory);
      continue;
    }
    try {
      named_.emplace_back(path.directory, "swap folder", "choose another");
    } catch (const Error& error) {
      throw error.with_context(path.key);
    }
    log(LogLevel::info, fmt::format("{}: made the folder {} on {}", path.key,
                                    path.directory.string(), path.file_system()));
  }
}

void RunFolders::keep() {
  for (formats::MadeDirectory& folder : named_) folder.keep();
}

}  // namespace ballast::train
