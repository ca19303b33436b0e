#include "ballast/config/config.h"

#include "ballast/core/error.h"
#include "ballast/text/files.h"

#include "src/config/sections.h"

namespace ballast::config {
Config load(const std::filesystem::path& file, std::span<const std::string> overrides,
            std::uint64_t world) {
  return parse(text::read_settings(file, "config"), std::filesystem::absolute(file).parent_path(),
               file.string(), overrides, world);
}

Config parse(const std::string& text, const std::filesystem::path& base, const std::string& name,
             std::span<const std::string> overrides, std::uint64_t world) {
  expects(world > 0, "config::parse: world must be at least 1");
  Document document(text, base, name, overrides);
  Config config;
  map_deprecated(document, config.ignored);
  replace_auto(document, config.ignored);
  read_section(Value(document, document.root(), ""), all_keys(config));
  complete(config, document, world);
  return config;
}

std::string print(const Config& config) {
  Config copy = config;  // the key table needs mutable fields
  return write_section(all_keys(copy)).pretty() + "\n";
}

}  // namespace ballast::config
