#include "src/config/document.h"

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include "ballast/core/error.h"

namespace ballast::config {
namespace {

constexpr std::size_t kMaxDepth = 32;

[[noreturn]] void fail_with(const std::string& message) {
  throw Error(ErrorCategory::config, message);
}

/// Bytes of the well-formed UTF-8 character at `at` (RFC 3629), 0 when there is none.
std::size_t utf8_length(std::string_view text, std::size_t at) {
  const auto byte = [&](std::size_t i) {
    return i < text.size() ? static_cast<unsigned char>(text[i]) : 0U;
  };
  const unsigned lead = byte(at);
  if (lead < 0x80) return 1;
  const std::size_t length = lead < 0xC2   ? 0
                             : lead < 0xE0 ? 2
                             : lead < 0xF0 ? 3
                             : lead < 0xF5 ? 4
                                           : 0;
  for (std::size_t i = 1; i < length; ++i) {
    if ((byte(at + i) & 0xC0U) != 0x80) return 0;
  }
  const unsigned second = byte(at + 1);
  const bool overlong = (lead == 0xE0 && second < 0xA0) || (lead == 0xF0 && second < 0x90);
  const bool outside = (lead == 0xED && second > 0x9F) || (lead == 0xF4 && second > 0x8F);
  return overlong || outside ? 0 : length;
}

/// The first byte that is not UTF-8, or npos.
std::size_t find_not_utf8(std::string_view text) {
  for (std::size_t at = 0; at < text.size();) {
    const std::size_t length = utf8_length(text, at);
    if (length == 0) return at;
    at += length;
  }
  return std::string_view::npos;
}

/// "NAME:LINE:COLUMN" of byte `at`, both from 1; columns count characters.
std::string position(const std::string& name, std::string_view text, std::size_t at) {
  const std::string_view before = text.substr(0, std::min(at, text.size()));
  const auto line = 1 + std::count(before.begin(), before.end(), '\n');
  const std::size_t start = before.rfind('\n') + 1;  // npos + 1 is 0
  const auto column = 1 + std::count_if(before.begin() + static_cast<std::ptrdiff_t>(start),
                                        before.end(), [](char c) { return (c & 0xC0) != 0x80; });
  return fmt::format("{}:{}:{}", name, line, column);
}

void check_utf8(const std::string& name, std::string_view text) {
  const std::size_t bad = find_not_utf8(text);
  if (bad == std::string_view::npos) return;
  fail_with(fmt::format("{}: not UTF-8: found byte 0x{:02x}; save the file as UTF-8",
                        position(name, text, bad), static_cast<unsigned char>(text[bad])));
}

/// Builds the tree from the parser's events. The library's own builder keeps the last of two equal
/// keys without a word, and does not say where a number is out of range.
class TreeBuilder final : public nlohmann::json_sax<Json> {
 public:
  TreeBuilder(const std::string& name, std::string_view text) : name_(name), text_(text) {}

  bool null() override { return add(nullptr); }
  bool boolean(bool value) override { return add(value); }
  bool number_integer(std::int64_t value) override { return add(value); }
  bool number_unsigned(std::uint64_t value) override { return add(value); }
  bool number_float(double value, const std::string& /*digits*/) override { return add(value); }
  bool string(std::string& value) override { return add(std::move(value)); }
  bool binary(Json::binary_t& /*value*/) override { return false; }
  bool start_object(std::size_t /*size*/) override { return open(Json::object()); }
  bool end_object() override { return close(); }
  bool start_array(std::size_t /*size*/) override { return open(Json::array()); }
  bool end_array() override { return close(); }

  bool key(std::string& value) override {
    auto& frame = frames_.back();
    frame.key = value;
    if (frame.node->contains(value)) fail_with(fmt::format("{}: {}: given twice", name_, path()));
    return true;
  }

  bool parse_error(std::size_t end, const std::string& /*token*/,
                   const nlohmann::detail::exception& error) override {
    // The library says "[json...] parse error at ...: syntax error while parsing X - REASON".
    std::string_view reason = error.what();
    if (const auto dash = reason.find(" - "); dash != std::string_view::npos) {
      reason.remove_prefix(dash + 3);
    } else if (const auto bracket = reason.find("] "); bracket != std::string_view::npos) {
      reason.remove_prefix(bracket + 2);
    }
    const std::size_t at = end == 0 ? 0 : end - 1;
    fail_with(fmt::format("{}: not valid JSON: {}{}", position(name_, text_, at),
                          printable(reason, 200), comma_before(at) ? kCommaHint : ""));
  }

  Json take() { return std::move(root_); }

 private:
  static constexpr std::string_view kCommaHint = " (is there a comma too many before it?)";

  struct Frame {
    Json* node = nullptr;
    std::string key;
  };

  Json* place(Json value) {
    if (frames_.empty()) return &(root_ = std::move(value));
    auto& [node, key] = frames_.back();
    if (node->is_array()) return &node->emplace_back(std::move(value));
    return &((*node)[key] = std::move(value));
  }
  bool add(Json value) {
    place(std::move(value));
    return true;
  }
  bool open(Json value) {
    if (frames_.size() == kMaxDepth) {
      fail_with(
          fmt::format("{}: nested deeper than {} levels; that is no config", name_, kMaxDepth));
    }
    Json* node = place(std::move(value));
    frames_.push_back({node, ""});
    return true;
  }
  bool close() {
    frames_.pop_back();
    return true;
  }
  [[nodiscard]] std::string path() const {
    std::string path;
    for (const auto& frame : frames_) {
      if (frame.node->is_array()) {
        path += fmt::format("[{}]", frame.node->size() - 1);
      } else {
        if (!path.empty()) path += '.';
        path += printable(frame.key);
      }
    }
    return path;
  }
  [[nodiscard]] bool comma_before(std::size_t at) const {
    if (at >= text_.size() || (text_[at] != '}' && text_[at] != ']')) return false;
    const auto last = text_.substr(0, at).find_last_not_of(" \t\r\n");
    return last != std::string_view::npos && text_[last] == ',';
  }

  const std::string& name_;
  std::string_view text_;
  Json root_;
  std::vector<Frame> frames_;
};

Json parse_file(const std::string& text, const std::string& name) {
  check_utf8(name, text);
  if (text.find_first_not_of(" \t\r\n") == std::string::npos) {
    fail_with(name + ": the file is empty; expected a JSON object");
  }
  TreeBuilder builder(name, text);
  Json::sax_parse(text, &builder, nlohmann::detail::input_format_t::json, true, true);
  Json root = builder.take();
  if (!root.is_object()) {
    fail_with(fmt::format("{}: expected a JSON object at the top, got {}", name, describe(root)));
  }
  return root;
}

/// The value of an override: JSON or, failing that, the text itself.
Json parse_value(const std::string& text, const std::string& name) {
  if (!Json::accept(text)) return text;
  TreeBuilder builder(name, text);
  Json::sax_parse(text, &builder);
  return builder.take();
}

}  // namespace

std::string printable(std::string_view text, std::size_t limit) {
  const bool cut = text.size() > limit;
  if (cut) {
    while (limit > 0 && (static_cast<unsigned char>(text[limit]) & 0xC0U) == 0x80) --limit;
    text = text.substr(0, limit);
  }
  std::string out;
  for (const char c : text) {
    const auto byte = static_cast<unsigned char>(c);
    out += byte < 0x20 || byte == 0x7F ? fmt::format("\\u{:04x}", byte) : std::string(1, c);
  }
  return cut ? out + "..." : out;
}

std::string describe(const Json& json) {
  switch (json.type()) {
    case Json::value_t::string:
      return fmt::format("the string \"{}\"", printable(json.get_ref<const std::string&>(), 60));
    case Json::value_t::array:
      return "an array";
    case Json::value_t::object:
      return "an object";
    default:
      return json.dump();
  }
}

Document::Document(const std::string& text, const std::filesystem::path& base,
                   const std::string& name, std::span<const std::string> overrides)
    : name_(printable(name, 4096)),
      base_(std::filesystem::weakly_canonical(std::filesystem::absolute(base))),
      root_(parse_file(text, name_)) {
  for (const auto& assignment : overrides) apply(assignment);
}

void Document::fail(const std::string& path, const std::string& message) const {
  std::string origin;
  for (std::string at = path; !at.empty();) {
    if (const auto found = origins_.find(at); found != origins_.end()) {
      origin = fmt::format(" (--set {})", printable(found->second));
      break;
    }
    const auto up = at.find_last_of(".[");
    at = up == std::string::npos ? "" : at.substr(0, up);
  }
  const std::string where = path.empty() ? "" : printable(path, 400) + origin + ": ";
  fail_with(fmt::format("{}: {}{}", name_, where, message));
}

void Document::apply(const std::string& assignment) {
  const std::string label = fmt::format("{}: --set {}", name_, printable(assignment));
  const auto refuse = [&](const std::string& message) { fail_with(label + ": " + message); };
  if (find_not_utf8(assignment) != std::string::npos) fail_with(name_ + ": --set: not UTF-8");
  const auto equals = assignment.find('=');
  if (equals == std::string::npos) {
    refuse("expected path=value, such as optimizer.params.lr=3e-4");
  }
  const std::string path = assignment.substr(0, equals);
  Json* node = &root_;
  for (std::size_t start = 0;;) {
    const std::size_t dot = std::min(path.find('.', start), path.size());
    const std::string key = path.substr(start, dot - start);
    if (key.empty()) refuse("the path has an empty part");
    if (node->is_null()) {
      *node = Json::object();
      origins_[path.substr(0, start - 1)] = assignment;
    }
    if (!node->is_object()) {
      refuse(fmt::format("'{}' is {}, not a section", path.substr(0, start - 1), describe(*node)));
    }
    node = &(*node)[key];
    if (dot == path.size()) break;
    start = dot + 1;
  }
  *node = parse_value(assignment.substr(equals + 1), label);
  origins_[path] = assignment;
}

}  // namespace ballast::config
