#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace ballast::config {

/// The effect of a key on a run that resumes.
enum class KeyRole : std::uint8_t {
  mathematics,  ///< determines the results of a run; another value must be allowed
  position,     ///< determines the position in the data; another value is never allowed
  free          ///< affects only speed, memory, files and messages, or only how a run begins
};

/// Whether a saved plan is for one value of a key.
enum class PlanRole : std::uint8_t { fixed, free };

/// The effects of another value of a key.
struct KeyEffects {
  KeyRole on_resume;
  PlanRole on_plan;
};
inline constexpr KeyEffects kResultsAndPlan = {KeyRole::mathematics, PlanRole::fixed};
inline constexpr KeyEffects kResultsOnly = {KeyRole::mathematics, PlanRole::free};
inline constexpr KeyEffects kPositionAndPlan = {KeyRole::position, PlanRole::fixed};
inline constexpr KeyEffects kPlanOnly = {KeyRole::free, PlanRole::fixed};
inline constexpr KeyEffects kNeither = {KeyRole::free, PlanRole::free};

/// The documentation of a key, in the Markdown of configs/README.md.
template <class Text>
struct KeyDocumentation {
  Text meaning;
  Text initial;  ///< the default, or where it comes from; may be ""
  Text range;    ///< accepted values; may be ""
};
/// The documentation in the table of keys. "{families}" stands for the families that have a key.
using KeyText = KeyDocumentation<std::string_view>;

/// A key of a config, identified by its path.
struct KeyInfo {
  std::string path;                      ///< "zero_optimization.offload_param.device"
  std::vector<std::string> values;       ///< accepted values, if only these are accepted
  std::vector<std::string> other_names;  ///< names that other programs use for its last part
  bool names_paths = false;              ///< whether its value is a file, a folder or a list of
                                         ///< them
  bool is_section = false;               ///< whether its value is an object of further keys
  KeyEffects effects = kResultsAndPlan;
  KeyDocumentation<std::string> text = {};
};

/// The table of all keys, in the order of `train --print-config`, without DeepSpeed's keys that
/// have no effect. Keys of single optimizers or families are included, and the sections whose keys
/// share effects or a text.
std::vector<KeyInfo> key_rows();

/// The rows that are no sections.
std::vector<KeyInfo> key_list();

}  // namespace ballast::config
