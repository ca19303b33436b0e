#pragma once

#include <string>

#include "ballast/train/trainer.h"

namespace ballast::tools {

/// Prints a run to standard output in at most 80 columns: a terminal gets one line that is redrawn;
/// a pipe or a launched process gets one line every `steps_per_print` steps.
class Console final : public train::Observer {
 public:
  Console(std::string title, std::uint64_t steps_per_print, bool launched);

  void planned(const engine::Blueprint& blueprint, const std::string& device) override;
  void started(const train::RunStart& start) override;
  void stepped(const train::StepReport& report) override;
  void finished(const train::RunSummary& summary) override;

 private:
  std::string title_;
  std::uint64_t steps_per_print_;
  bool terminal_;
};

/// Breaks `text` into lines of at most `width` columns, each starting with `indent`.
std::string wrap(const std::string& text, std::size_t width, const std::string& indent);

}  // namespace ballast::tools
