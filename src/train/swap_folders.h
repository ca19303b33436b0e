#pragma once

#include <list>

#include "ballast/state/swap_plan.h"

#include "src/formats/new_folder.h"

namespace ballast::train {

/// The swap folders of a run or an evaluation that were missing. Those that are empty are removed
/// at the end of this object, so it must outlive the engine.
class SwapFolders {
 public:
  /// Makes the missing folders and logs one line for each that a config key names. Throws Error(io)
  /// that names the key if one cannot be made.
  explicit SwapFolders(const state::SwapOptions& options);

  /// Lets the folders stay that a config key names.
  void keep();

 private:
  std::list<formats::MadeDirectory> unnamed_;
  std::list<formats::MadeDirectory> named_;
};

}  // namespace ballast::train
