#pragma once

#include <string>
#include <vector>

namespace ballast::config {

/// A key of a config, identified by its path.
struct KeyInfo {
  std::string path;                      ///< "zero_optimization.offload_param.device"
  std::vector<std::string> values;       ///< accepted values, if only these are accepted
  std::vector<std::string> other_names;  ///< names that other programs use for its last part
  bool names_paths = false;              ///< whether its value is a file, a folder or a list of
                                         ///< them
};

/// All keys of configs, in the order of `train --print-config`, without DeepSpeed's keys that have
/// no effect. Keys of single optimizers or families are included.
std::vector<KeyInfo> key_list();

}  // namespace ballast::config
