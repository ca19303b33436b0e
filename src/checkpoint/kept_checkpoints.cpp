#include "src/checkpoint/kept_checkpoints.h"

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstdio>
#include <limits>
#include <optional>
#include <set>
#include <string_view>
#include <system_error>
#include <utility>

#include <fmt/format.h>

#include "ballast/checkpoint/checkpoints.h"
#include "ballast/core/error.h"
#include "ballast/text/files.h"

#include "src/checkpoint/checkpoint.h"
#include "src/checkpoint/format.h"
#include "src/checkpoint/owner.h"

namespace ballast::checkpoint {

namespace {

namespace fs = std::filesystem;
using engine::KeptHome;
using engine::KeptStates;
using engine::StateRange;
using text::Json;

constexpr std::string_view kIncomplete = ".incomplete-";
constexpr std::string_view kRemoved = ".removed-";
constexpr std::string_view kDamaged = "damaged-";
constexpr std::string_view kElsewhere = "ballast-";  // also in the names of older versions

static_assert(state::kChunk == kCheckpointChunk);

Json json_of_home(const KeptHome& home) {
  Json chunks = Json::array();
  for (const std::uint64_t checksum : home.content.checksums) {
    chunks.push_back(fmt::format("{:016x}", checksum));
  }
  Json ranges = Json::array();
  for (const auto& [range, offset] : home.ranges) {
    Json entry = json_of(range);
    entry.push_back(offset);
    ranges.push_back(std::move(entry));
  }
  return Json::object({{"block", home.block},
                       {"states", home.states},
                       {"sub_group", home.sub_group},
                       {"extent", home.content.extent},
                       {"chunks", std::move(chunks)},
                       {"ranges", std::move(ranges)}});
}

std::uint64_t checksum_of(const Json& json, const fs::path& path) {
  std::uint64_t value = 0;
  const std::string& text = json.text();
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value, 16);
  if (error != std::errc() || end != text.data() + text.size()) {
    refuse_checkpoint(path, "a checksum is not a hexadecimal number");
  }
  return value;
}

/// Throws unless the range is within its home of `bytes`.
void check_place(const StateRange& range, Bytes offset, Bytes bytes, const fs::path& path) {
  const bool inside = range.width > 0 && range.width <= bytes && offset <= bytes &&
                      range.count <= (bytes - offset) / range.width;
  if (!inside) refuse_checkpoint(path, "a range is outside its extent");
}

/// Checkpoints of uncut blocks may lack it.
std::uint32_t sub_group_of(const Json& json, const fs::path& path) {
  if (json.find("sub_group") == nullptr) return 0;
  const std::uint64_t number = whole_of(json, "sub_group", path);
  if (number > std::numeric_limits<std::uint32_t>::max()) {
    refuse_checkpoint(path, "a sub-group's number is too large");
  }
  return static_cast<std::uint32_t>(number);
}

KeptHome home_of(const Json& json, const state::SwapImage& image, const fs::path& path) {
  const Json* const states = json.find("states");
  if (states == nullptr || !states->is_boolean()) refuse_checkpoint(path, "a home has no 'states'");
  KeptHome home = {.block = whole_of(json, "block", path),
                   .states = states->flag(),
                   .sub_group = sub_group_of(json, path),
                   .content = {.extent = whole_of(json, "extent", path)}};
  for (const Json& chunk : array_of(json, "chunks", path)) {
    home.content.checksums.push_back(checksum_of(chunk, path));
  }
  if (home.content.extent >= image.extents.size()) refuse_checkpoint(path, "an extent is missing");
  const Bytes bytes = image.extents[home.content.extent];
  if (home.content.checksums.size() != (bytes + state::kChunk - 1) / state::kChunk) {
    refuse_checkpoint(path, "an extent has another number of checksums than chunks");
  }
  for (const Json& entry : array_of(json, "ranges", path)) {
    const auto& parts = entry.elements();
    const auto offset = parts.size() == 6 ? parts[5].whole() : std::nullopt;
    if (!offset) refuse_checkpoint(path, "a range has no offset");
    const StateRange range = range_of(entry, path);
    check_place(range, *offset, bytes, path);
    home.ranges.emplace_back(range, *offset);
  }
  return home;
}

/// Returns the swap files elsewhere that were named for the checkpoint `folder`. A copy of a run
/// lists the files of the original, and a copy of a checkpoint those of another checkpoint.
std::vector<fs::path> owned_elsewhere(const fs::path& folder) {
  std::vector<fs::path> files = files_elsewhere(folder);
  if (files.empty()) return files;
  const auto owner = owner_of(run_of(folder));
  const auto step = step_in_name(folder);
  std::erase_if(files, [&](const fs::path& file) {
    const auto name = parse_swap_name(file.filename().string());
    return !owner || !name || name->step != step || !is_owned(file, *owner);
  });
  return files;
}

fs::path renamed(std::string_view prefix, const fs::path& folder) {
  return folder.parent_path() / fmt::format("{}{}", prefix, folder.filename().string());
}

/// The folder is removed last, because only its files list the ones elsewhere. Then flushed,
/// because nothing looks for remains of a run that has ended.
void remove_with_files(const fs::path& folder) {
  std::error_code error;
  for (const fs::path& file : owned_elsewhere(folder)) {
    if (fs::remove(file, error)) text::try_to_sync_name(file);
  }
  const auto removed = fs::remove_all(folder, error);
  if (!error && removed > 0) text::try_to_sync_name(folder);
}

}  // namespace

std::vector<fs::path> files_elsewhere(const fs::path& folder) {
  std::vector<fs::path> found;
  for (std::uint32_t rank = 0;; ++rank) {
    const fs::path path = ranges_file(folder, rank);
    std::error_code error;
    if (!fs::exists(path, error)) return found;
    try {
      const Json json = read_sealed(path);
      const Json* const swap = json.find("swap");
      if (swap == nullptr) continue;
      for (const fs::path& file : kept_states_of(*swap, path).image.files) {
        const bool named = file.filename().string().starts_with(kElsewhere);
        if (named && file.parent_path() != folder) found.push_back(file);
      }
    } catch (const Error&) {
      // A damaged file refers to nothing.
    }
  }
}

Json json_of(const KeptStates& kept) {
  Json files = Json::array();
  for (const fs::path& file : kept.image.files) {
    const bool inside = file.filename().string().starts_with("rank-");
    files.push_back(inside ? file.filename().string() : fs::absolute(file).string());
  }
  Json extents = Json::array();
  for (const Bytes bytes : kept.image.extents) extents.push_back(bytes);
  Json weights = Json::array();
  for (const double weight : kept.image.weights) weights.push_back(weight);
  Json homes = Json::array();
  for (const KeptHome& home : kept.homes) homes.push_back(json_of_home(home));
  return Json::object({{"files", std::move(files)},
                       {"extents", std::move(extents)},
                       {"weights", std::move(weights)},
                       {"segment_bytes", kept.image.segment_bytes},
                       {"homes", std::move(homes)}});
}

KeptStates kept_states_of(const Json& json, const fs::path& path) {
  KeptStates kept = {.image = {.segment_bytes = whole_of(json, "segment_bytes", path)}};
  for (const Json& file : array_of(json, "files", path)) {
    const fs::path name = file.text();
    const bool inside = name == name.filename();
    if (!inside && !name.is_absolute()) refuse_checkpoint(path, "a swap file has a relative path");
    kept.image.files.push_back(inside ? path.parent_path() / name : name);
  }
  for (const Json& extent : array_of(json, "extents", path)) {
    const auto bytes = extent.is_number() ? extent.whole() : std::nullopt;
    if (!bytes || *bytes % kPage != 0)
      refuse_checkpoint(path, "an extent is not a whole number of pages");
    kept.image.extents.push_back(*bytes);
  }
  for (const Json& weight : array_of(json, "weights", path)) {
    if (!weight.is_number() || !(weight.number() > 0.0)) {
      refuse_checkpoint(path, "a path's weight is not a number above 0");
    }
    kept.image.weights.push_back(weight.number());
  }
  if (kept.image.weights.size() != kept.image.files.size() || kept.image.files.empty()) {
    refuse_checkpoint(path, "its swap files and their weights differ in number");
  }
  for (const Json& home : array_of(json, "homes", path)) {
    kept.homes.push_back(home_of(home, kept.image, path));
  }
  return kept;
}

fs::path incomplete(const fs::path& folder) {
  return renamed(kIncomplete, folder);
}

void remove_checkpoint(const fs::path& folder) {
  const fs::path gone = renamed(kRemoved, folder);
  remove_with_files(gone);
  if (std::rename(folder.c_str(), gone.c_str()) != 0) {
    if (errno == ENOENT) return;
    throw Error(ErrorCategory::io, fmt::format("cannot remove {}", folder.string()), errno);
  }
  text::sync_folder(folder.parent_path());
  remove_with_files(gone);
}

fs::path set_aside(const fs::path& folder) {
  std::error_code error;
  fs::path aside = renamed(kDamaged, folder);
  for (int i = 2; fs::exists(fs::symlink_status(aside, error)); ++i) {
    aside = renamed(kDamaged, folder);
    aside += fmt::format("-{}", i);
  }
  if (std::rename(folder.c_str(), aside.c_str()) != 0) {
    throw Error(ErrorCategory::io, fmt::format("cannot rename {}", folder.string()), errno);
  }
  text::sync_folder(folder.parent_path());
  if (!fs::is_directory(fs::symlink_status(aside, error))) return aside;
  // The run reuses their extents, and a name would keep the space of all of them.
  std::vector<fs::path> swap_files = owned_elsewhere(aside);
  for (fs::directory_iterator entry(aside, error); !error && entry != fs::directory_iterator();
       entry.increment(error)) {
    const std::string name = entry->path().filename().string();
    if (name.starts_with("rank-") && name.find(".swap-") != std::string::npos) {
      swap_files.push_back(entry->path());
    }
  }
  for (const fs::path& file : swap_files) {
    if (fs::remove(file, error)) text::try_to_sync_name(file);
  }
  return aside;
}

void remove_later(const fs::path& run, std::uint64_t step) {
  for (const fs::path& folder : checkpoints_of(run)) {
    if (step_of(folder) <= step) continue;
    log(LogLevel::info,
        fmt::format("removing {}: the run has gone back to step {}", folder.string(), step));
    remove_checkpoint(folder);
  }
}

void remove_older(const fs::path& run, const fs::path& newest, std::uint64_t keep) {
  const std::vector<fs::path> folders = checkpoints_of(run);
  const auto first =
      static_cast<std::size_t>(std::find(folders.begin(), folders.end(), newest) - folders.begin());
  for (std::size_t i = first + keep; i < folders.size(); ++i) remove_checkpoint(folders[i]);
}

void remove_checkpoints(const fs::path& run) {
  std::set<fs::path> directories;
  for (const fs::path& folder : all_folders(run)) {
    for (const fs::path& file : owned_elsewhere(folder)) directories.insert(file.parent_path());
    remove_with_files(folder);
  }
  const auto owner = owner_of(run);
  for (const fs::path& directory : directories) remove_unused_record(directory, *owner);
  std::error_code ignored;
  fs::remove_all(run / kCheckpoints, ignored);
}

std::vector<fs::path> all_folders(const fs::path& run) {
  std::vector<fs::path> found;
  std::error_code error;
  for (fs::directory_iterator entry(run / kCheckpoints, error);
       !error && entry != fs::directory_iterator(); entry.increment(error)) {
    if (step_in_name(entry->path())) found.push_back(entry->path());
  }
  return found;
}

void remove_left_names(const fs::path& run, const fs::path& directory) {
  const auto owner = owner_of(run);
  std::error_code error;
  if (!owner) return;
  const auto has_checkpoint = [&](const fs::path& file) {
    const auto name = parse_swap_name(file.filename().string());
    std::error_code ignored;
    return !name || fs::symlink_status(checkpoint_folder(run, name->step), ignored).type() !=
                        fs::file_type::not_found;
  };
  std::vector<fs::path> left;
  for (fs::directory_iterator entry(directory, error); !error && entry != fs::directory_iterator();
       entry.increment(error)) {
    const fs::path& file = entry->path();
    if (!has_checkpoint(file) && is_owned(file, *owner)) left.push_back(file);
  }
  for (const fs::path& file : left) {
    if (fs::remove(file, error)) text::try_to_sync_name(file);
  }
  if (!left.empty()) remove_unused_record(directory, *owner);
}

bool is_leftover(const fs::path& path) {
  const std::string name = path.filename().string();
  return name.starts_with(kIncomplete) || name.starts_with(kRemoved);
}

void remove_incomplete(const fs::path& checkpoints) {
  std::error_code error;
  std::vector<fs::path> found;
  for (fs::directory_iterator entry(checkpoints, error);
       !error && entry != fs::directory_iterator(); entry.increment(error)) {
    if (is_leftover(entry->path())) found.push_back(entry->path());
  }
  for (const fs::path& folder : found) remove_with_files(folder);
}

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
