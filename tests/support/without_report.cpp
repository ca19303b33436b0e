#include <string>
#include <utility>

#include "ballast/core/error.h"
#include "ballast/text/output_file.h"

#include "tools/command_line.h"
#include "tools/report/page.h"

// Replaces tools/report in ballast_without_report and in the programs of tests that use no report,
// which cannot depend on reports then.

namespace ballast::tools {
namespace {

[[noreturn]] void refuse_report() {
  throw Error(ErrorCategory::usage,
              "this program has no reports; the test must run the program ballast");
}

}  // namespace

void add_report(Command program) {
  Command command = program.add_command("report", "Not in this program");
  command.set_action([] { refuse_report(); });
}

std::string html_page(std::string_view /*title*/, const text::Json& /*data*/) {
  refuse_report();
}

std::string plan_page(const setup::Forecast& /*forecast*/,
                      const std::filesystem::path& /*config*/) {
  refuse_report();
}

std::string now_in_utc() {
  refuse_report();
}

/// `ballast plan` asks for the rule also if it writes no page.
text::OutputRule page_rule(bool overwrite, std::vector<std::filesystem::path> inputs) {
  return {.kind = "a page of ballast",
          .begins = "",
          .overwrite = overwrite,
          .inputs = std::move(inputs)};
}

}  // namespace ballast::tools
