#include "src/train/swap_folders.h"

#include <system_error>

#include <fmt/format.h>

#include "ballast/aio/file_system.h"
#include "ballast/core/error.h"
#include "ballast/core/log.h"

namespace ballast::train {

SwapFolders::SwapFolders(const state::SwapOptions& options) {
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
    log(LogLevel::info,
        fmt::format("{}: made the folder {} on {}", path.key, path.directory.string(),
                    aio::inspect_file_system(path.directory).type));
  }
}

void SwapFolders::keep() {
  for (formats::MadeDirectory& folder : named_) folder.keep();
}

}  // namespace ballast::train
