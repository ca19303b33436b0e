#include "src/checkpoint/format.h"

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <optional>
#include <span>
#include <string_view>
#include <system_error>
#include <utility>

#include <fmt/format.h>

#include "ballast/core/error.h"
#include "ballast/formats/model_folder.h"
#include "ballast/state/checksum.h"

#include "src/checkpoint/checkpoint.h"

namespace ballast::checkpoint {
namespace {

namespace fs = std::filesystem;
using engine::StateRange;
using text::Json;

constexpr std::string_view kPrefix = "step-";

/// Suggests a remedy if a program cannot read an existing file.
std::string_view remedy_for(int error_number) {
  switch (error_number) {
    case EACCES:
    case EPERM:
      return "give this user the permission to read it";
    case EMFILE:
    case ENFILE:
      return "allow more open files (ulimit -n)";
    case ENOMEM:
      return "free some memory";
    case ELOOP:
      return "repair the symbolic links in its path";
    case ENAMETOOLONG:
      return "move the run to a shorter path";
    case ESTALE:
    case ENOTCONN:
    case ETIMEDOUT:
      return "mount its file system again";
    default:
      return "check the drive and its file system";
  }
}

/// Returns whether a file is missing, of another kind, or has wrong content.
bool is_damage(const Error& error) {
  switch (error.error_number()) {
    case 0:
      return true;
    case ENOENT:
    case ENOTDIR:
    case EISDIR:
      return error.category() == ErrorCategory::data;
    default:
      return false;
  }
}

[[noreturn]] void fail_to_read(const std::string& what, int error_number) {
  throw Error(ErrorCategory::io, fmt::format("{}; {}", what, remedy_for(error_number)));
}

}  // namespace

fs::path absolute_of(const fs::path& path) {
  std::error_code ignored;
  fs::path whole = fs::weakly_canonical(path, ignored);
  if (ignored) whole = path.lexically_normal();
  return whole.has_filename() ? whole : whole.parent_path();
}

void refuse_unreadable(const fs::path& path, const std::string& what) {
  throw Error(ErrorCategory::io, fmt::format("{}: {}", path.string(), what));
}

void reading(const std::function<void()>& work) {
  try {
    work();
  } catch (const Error& error) {
    if (is_damage(error)) throw;
    fail_to_read(fmt::format("{}; this is not damage", error.what()), error.error_number());
  }
}

bool can_be_found(const fs::path& path) {
  std::error_code error;
  const bool found = fs::exists(fs::status(path, error));
  if (!found && error && error != std::errc::no_such_file_or_directory &&
      error != std::errc::not_a_directory) {
    fail_to_read(fmt::format("cannot access {}: {}", path.string(), error.message()),
                 error.value());
  }
  return found;
}

void refuse_checkpoint(const fs::path& path, const std::string& what) {
  throw Error(ErrorCategory::data, fmt::format("{}: {}", path.string(), what));
}

std::string checksum_text(ConstHostBytes bytes) {
  return fmt::format("{:016x}", state::checksum(bytes));
}

std::string checksum_text(const std::string& text) {
  return checksum_text(std::as_bytes(std::span(text)));
}

std::string seal(const Json& content) {
  return Json::object({{"checksum", checksum_text(content.compact())}, {"content", content}})
             .compact() +
         "\n";
}

Json read_sealed(const fs::path& path) {
  const std::string text = formats::read_small_file(path);
  const Json json = text::parse_json(text, path.string(), {.category = ErrorCategory::data});
  const Json* const content = json.find("content");
  const Json* const checksum = json.find("checksum");
  if (content == nullptr || checksum == nullptr ||
      !(*checksum == checksum_text(content->compact()))) {
    refuse_checkpoint(path, "damaged: its checksum does not match its content");
  }
  const std::uint64_t version = whole_of(*content, "version", path);
  if (version > kCheckpointVersion) {
    refuse_unreadable(path, fmt::format("of version {}, but this program reads versions up to {}; "
                                        "use a newer one",
                                        version, kCheckpointVersion));
  }
  return *content;
}

std::uint64_t whole_of(const Json& object, std::string_view key, const fs::path& path) {
  const Json* const value = object.find(key);
  const auto number = value == nullptr || !value->is_number() ? std::nullopt : value->whole();
  if (!number) refuse_checkpoint(path, fmt::format("has no whole number '{}'", key));
  return *number;
}

const std::vector<Json>& array_of(const Json& object, std::string_view key, const fs::path& path) {
  const Json* const value = object.find(key);
  if (value == nullptr || !value->is_array()) {
    refuse_checkpoint(path, fmt::format("has no array '{}'", key));
  }
  return value->elements();
}

Json json_of(const StateRange& range) {
  return Json::array({range.block, to_string(range.kind), range.first, range.count, range.width});
}

StateRange range_of(const Json& json, const fs::path& path) {
  const auto& parts = json.elements();
  const auto whole = [&](std::size_t i) {
    const auto number = parts[i].is_number() ? parts[i].whole() : std::nullopt;
    if (!number) refuse_checkpoint(path, "a range is malformed");
    return *number;
  };
  if (parts.size() < 5) refuse_checkpoint(path, "a range is malformed");
  const auto kind = engine::state_kind(parts[1].is_string() ? parts[1].text() : "");
  if (!kind) refuse_checkpoint(path, "a range is of an unknown kind");
  return {whole(0), *kind, whole(2), whole(3), whole(4)};
}

Json json_of(const CheckpointFacts& facts) {
  Json losses = Json::array();
  for (const double loss : facts.losses) losses.push_back(loss);
  Json json = Json::object({{"version", kCheckpointVersion},
                            {"step", facts.step},
                            {"updates", facts.updates},
                            {"skipped_in_a_row", facts.skipped_in_a_row},
                            {"batch", facts.batch},
                            {"sequence_length", facts.length},
                            {"metrics_bytes", facts.metrics_bytes},
                            {"skipped_batches", facts.skipped_batches},
                            {"losses", losses}});
  if (!facts.arithmetic.empty()) json["arithmetic"] = facts.arithmetic;
  for (const auto& [name, lists] : facts.side_states) {
    Json written = Json::array();
    for (const std::vector<float>& list : lists) {
      Json values = Json::array();
      for (const float value : list) values.push_back(static_cast<double>(value));
      written.push_back(std::move(values));
    }
    json[name] = std::move(written);
  }
  if (facts.loss_scale) {
    json["loss_scale"] = Json::object({{"scale", facts.loss_scale->scale},
                                       {"hysteresis", facts.loss_scale->hysteresis},
                                       {"good_steps", facts.loss_scale->good_steps}});
  }
  if (facts.settings.empty()) return json;
  Json settings = Json::object();
  for (const auto& [key, value] : facts.settings) settings[key] = text::parse_json(value, key);
  json["settings"] = std::move(settings);
  return json;
}

namespace {

LossScale loss_scale_of(const Json& json, const fs::path& path) {
  const Json* const scale = json.find("scale");
  if (scale == nullptr || !scale->is_number() || !(scale->number() > 0.0)) {
    refuse_checkpoint(path, "the loss scale is not a positive number");
  }
  return {scale->number(), whole_of(json, "hysteresis", path), whole_of(json, "good_steps", path)};
}

std::vector<std::vector<float>> side_state_of(const Json& json, std::string_view name,
                                              const fs::path& path) {
  std::vector<std::vector<float>> lists;
  for (const Json& list : array_of(json, name, path)) {
    if (!list.is_array()) refuse_checkpoint(path, fmt::format("{} is not a list of lists", name));
    std::vector<float>& values = lists.emplace_back();
    for (const Json& value : list.elements()) {
      if (!value.is_number()) refuse_checkpoint(path, fmt::format("{} has no number", name));
      values.push_back(static_cast<float>(value.number()));
    }
  }
  return lists;
}

}  // namespace

CheckpointFacts facts_of(const Json& content, const fs::path& path) {
  const auto whole = [&](std::string_view key) { return whole_of(content, key, path); };
  CheckpointFacts facts = {.step = whole("step"),
                           .updates = whole("updates"),
                           .skipped_in_a_row = whole("skipped_in_a_row"),
                           .batch = whole("batch"),
                           .length = whole("sequence_length"),
                           .metrics_bytes = whole("metrics_bytes"),
                           .skipped_batches = whole("skipped_batches")};
  for (const Json& loss : array_of(content, "losses", path)) {
    if (!loss.is_number()) refuse_checkpoint(path, "a loss is not a number");
    facts.losses.push_back(loss.number());
  }
  const Json* const arithmetic = content.find("arithmetic");
  if (arithmetic != nullptr && arithmetic->is_string()) facts.arithmetic = arithmetic->text();
  if (const Json* const scale = content.find("loss_scale")) {
    facts.loss_scale = loss_scale_of(*scale, path);
  }
  for (const engine::SideStateKind& kind : engine::kSideStates) {
    if (content.find(kind.name) == nullptr) continue;
    facts.side_states.emplace(kind.name, side_state_of(content, kind.name, path));
  }
  if (const Json* const settings = content.find("settings")) {
    if (!settings->is_object()) refuse_checkpoint(path, "the settings are not an object");
    for (const auto& member : settings->members()) {
      facts.settings.emplace(member.key, member.value.compact());
    }
  }
  return facts;
}

fs::path states_file(const fs::path& folder, std::uint32_t rank) {
  return folder / fmt::format("rank-{}.states", rank);
}

fs::path ranges_file(const fs::path& folder, std::uint32_t rank) {
  return folder / fmt::format("rank-{}.json", rank);
}

fs::path facts_file(const fs::path& folder) {
  return folder / "checkpoint.json";
}

std::optional<std::uint64_t> step_of(const fs::path& folder) {
  const std::string name = folder.filename().string();
  if (!name.starts_with(kPrefix)) return std::nullopt;
  std::uint64_t step = 0;
  const char* const end = name.data() + name.size();
  const auto [rest, error] = std::from_chars(name.data() + kPrefix.size(), end, step);
  return error == std::errc() && rest == end ? std::optional(step) : std::nullopt;
}

fs::path checkpoint_folder(const fs::path& run, std::uint64_t step) {
  return run / kCheckpoints / fmt::format("{}{}", kPrefix, step);
}

std::vector<fs::path> checkpoints_of(const fs::path& run) {
  std::vector<std::pair<std::uint64_t, fs::path>> found;
  std::error_code error;
  for (fs::directory_iterator entry(run / kCheckpoints, error);
       !error && entry != fs::directory_iterator(); entry.increment(error)) {
    if (const auto step = step_of(entry->path())) found.emplace_back(*step, entry->path());
  }
  if (error && error != std::errc::no_such_file_or_directory &&
      error != std::errc::not_a_directory) {
    fail_to_read(fmt::format("cannot list {}: {}", (run / kCheckpoints).string(), error.message()),
                 error.value());
  }
  std::sort(found.rbegin(), found.rend());
  std::vector<fs::path> folders;
  folders.reserve(found.size());
  for (auto& [step, folder] : found) folders.push_back(std::move(folder));
  return folders;
}

bool names_checkpoint(const fs::path& path) {
  return step_of(absolute_of(path)) || can_be_found(facts_file(path));
}

bool is_of_run(const fs::path& path, const fs::path& run) {
  const fs::path whole = absolute_of(path);
  const fs::path directory = absolute_of(run);
  return whole == directory || (step_of(whole) && whole.parent_path() == directory / kCheckpoints);
}

void check_names_states(const fs::path& path) {
  if (names_checkpoint(path) || !checkpoints_of(path).empty()) return;
  refuse_checkpoint(
      path, can_be_found(path)
                ? "neither a checkpoint nor a run directory with checkpoints; a run writes them "
                  "with ballast.checkpoint_every"
                : "there is no such checkpoint or run directory");
}

}  // namespace ballast::checkpoint
