#include "ballast/config/config.h"

#include <cerrno>
#include <fstream>
#include <iterator>
#include <system_error>

#include <fmt/format.h>

#include "ballast/core/error.h"

#include "src/config/deepspeed_keys.h"
#include "src/config/document.h"
#include "src/config/read_file.h"
#include "src/config/sections.h"

namespace ballast::config {
namespace {

constexpr std::size_t kLongestFile = 1 * kMiB;

}  // namespace

std::string read_file(const std::filesystem::path& file) {
  const std::string name = printable(file.string(), 4096);
  std::error_code status;
  if (std::filesystem::is_directory(file, status)) {
    throw Error(ErrorCategory::config, name + ": is a directory; give a config file");
  }
  errno = 0;
  std::ifstream in(file, std::ios::binary);
  if (!in) throw Error(ErrorCategory::config, name + ": cannot open the config", errno);
  std::string text(kLongestFile + 1, '\0');
  in.read(text.data(), static_cast<std::streamsize>(text.size()));
  if (in.bad()) throw Error(ErrorCategory::config, name + ": cannot read the config", errno);
  text.resize(static_cast<std::size_t>(in.gcount()));
  if (text.size() > kLongestFile) {
    throw Error(ErrorCategory::config, name + ": longer than 1 MiB; that is no config");
  }
  return text;
}

Config load(const std::filesystem::path& file, std::span<const std::string> overrides,
            std::uint64_t world) {
  return parse(read_file(file), std::filesystem::absolute(file).parent_path(), file.string(),
               overrides, world);
}

Config parse(const std::string& text, const std::filesystem::path& base, const std::string& name,
             std::span<const std::string> overrides, std::uint64_t world) {
  expects(world > 0, "config::parse: world must be at least 1");
  Document document(text, base, name, overrides);
  Config config;
  map_deprecated(document, config.ignored);
  read_section(Value(document, document.root(), ""), all_keys(config));
  complete(config, document, world);
  return config;
}

std::string print(const Config& config) {
  Config copy = config;  // the table of keys is bound to fields that can be written
  constexpr int kIndent = 2;
  return write_section(all_keys(copy)).dump(kIndent, ' ', false, Json::error_handler_t::replace) +
         "\n";
}

}  // namespace ballast::config
