#include "src/checkpoint/advice.h"

#include <optional>

#include <fmt/format.h>

#include "ballast/checkpoint/checkpoints.h"
#include "ballast/core/error.h"

#include "src/checkpoint/checkpoint.h"
#include "src/checkpoint/format.h"
#include "src/checkpoint/swap.h"
#include "src/checkpoint/swap_owner.h"

namespace ballast::checkpoint {
namespace {

namespace fs = std::filesystem;

/// Returns whether everything but the states of a checkpoint can be read.
bool has_readable_head(const fs::path& folder) {
  try {
    const Checkpoint readable(folder);
    return true;
  } catch (const Error&) {
    return false;
  }
}

}  // namespace

std::string advice_for_copy(const fs::path& folder) {
  const auto owner = owner_of(run_of(folder));
  for (const fs::path& file : files_elsewhere(folder)) {
    const auto name = parse_swap_name(file.filename().string());
    if (!owner || !name || is_owned(file, *owner)) continue;
    const auto other = recorded_owner(file.parent_path(), name->id);
    const Whereabouts found = other ? find_owner(*other) : Whereabouts();
    if (other && other->is_same(*owner)) continue;
    if (found.state != Whereabouts::State::there) {
      return fmt::format("; its states were in swap files of the run of which {} is a copy",
                         owner->path.string());
    }
    return fmt::format(
        "; {} is a copy of the run {}, in whose swap files its states were; copy them with "
        "'ballast "
        "export {} --states --out FOLDER', and continue with --resume=FOLDER and another --out",
        owner->path.string(), found.path.string(), found.path.string());
  }
  return "";
}

std::string advice_after_damage(const fs::path& folder) {
  const fs::path whole = absolute_of(folder);
  if (const std::string advice = advice_for_copy(whole); !advice.empty()) return advice;
  if (!step_of(whole)) return "; write it again with ballast export --states";
  try {
    for (const fs::path& other : checkpoints_of(whole.parent_path().parent_path())) {
      if (other == whole || !has_readable_head(other)) continue;
      return fmt::format("; another checkpoint of this run is {}", other.string());
    }
  } catch (const Error&) {
    return "";  // the folder of checkpoints cannot be listed
  }
  return "; its run has no other checkpoint";
}

}  // namespace ballast::checkpoint
