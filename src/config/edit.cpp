#include "ballast/config/edit.h"

#include <algorithm>
#include <string_view>

#include <fmt/format.h>

#include "ballast/core/error.h"
#include "ballast/text/files.h"

#include "src/config/document.h"
#include "src/config/sections.h"

namespace ballast::config {
namespace {

constexpr std::string_view kIndent = "  ";
constexpr auto kNone = std::string_view::npos;

/// The indentation of the line that contains `at`.
std::string_view indent_of(std::string_view text, std::size_t at) {
  const std::size_t line = at == 0 ? 0 : text.rfind('\n', at - 1) + 1;  // npos + 1 is 0
  const std::size_t word = std::min(text.find_first_not_of(" \t", line), text.size());
  return text.substr(line, word - line);
}

bool starts_its_line(std::string_view text, std::size_t at) {
  const std::string_view indent = indent_of(text, at);
  const auto line = static_cast<std::size_t>(indent.data() - text.data());
  return line + indent.size() == at;
}

std::string_view newline_of(std::string_view text) {
  return text.find("\r\n") == kNone ? "\n" : "\r\n";
}

/// `json` with all lines except the first indented.
std::string indented(std::string_view json, std::string_view indent, std::string_view newline) {
  std::string out;
  for (const char c : json) {
    if (c == '\n') {
      out += newline;
      out += indent;
    } else {
      out += c;
    }
  }
  return out;
}

/// The first end of line from `at` on in white space and comments before `limit`; npos if none.
std::size_t end_of_line(std::string_view text, std::size_t at, std::size_t limit) {
  while (at < limit) {
    if (text[at] == '\n') return at > 0 && text[at - 1] == '\r' ? at - 1 : at;
    if (text.substr(at, 2) == "/*") {
      at = text.find("*/", at + 2) + 2;
    } else if (text.substr(at, 2) == "//") {
      at = text.find('\n', at);
    } else {
      ++at;
    }
  }
  return kNone;
}

/// Adds a member at the end of an object.
void insert_member(std::string& text, const Json& object, std::string_view key,
                   std::string_view json) {
  const std::string newline(newline_of(text));
  const std::size_t close = object.end_at() - 1;
  const bool first = object.members().empty();
  const std::size_t last = first ? object.begin_at() + 1 : object.members().back().value.end_at();
  const std::size_t line_end = end_of_line(text, last, close);
  const std::string close_indent(indent_of(text, close));
  if (line_end == kNone) {
    // The object ends on this line: inserts after any comment, before the brace.
    const std::size_t at = text.find_last_not_of(" \t", close - 1) + 1;
    const std::string member =
        fmt::format("{}: {}", Json(key).compact(), indented(json, close_indent, newline));
    text.insert(at, (first ? "" : " ") + member);
    if (!first) text.insert(last, ",");
    return;
  }
  std::string indent = close_indent + std::string(kIndent);
  if (!first && starts_its_line(text, object.members().back().at)) {
    indent = indent_of(text, object.members().back().at);
  }
  // Inserts after the last member's line with its comment; in an empty object after all comments.
  std::size_t at = line_end;
  if (first) at = text.find_last_not_of(" \t\r\n", close - 1) + 1;
  text.insert(at, fmt::format("{}{}{}: {}", newline, indent, Json(key).compact(),
                              indented(json, indent, newline)));
  if (!first) text.insert(last, ",");
}

/// Returns {"a": {"b": json}} on several lines, for missing `keys`.
std::string nested(std::span<const std::string> keys, const std::string& json) {
  if (keys.empty()) return json;
  const std::string inner = nested(keys.subspan(1), json);
  return fmt::format("{{\n{}{}: {}\n}}", kIndent, Json(keys.front()).compact(),
                     indented(inner, kIndent, "\n"));
}

std::vector<std::string> split(const std::string& path) {
  std::vector<std::string> keys;
  for (std::size_t start = 0; start <= path.size();) {
    const std::size_t dot = std::min(path.find('.', start), path.size());
    keys.push_back(path.substr(start, dot - start));
    start = dot + 1;
  }
  return keys;
}

/// Returns `keys` with the name of their section that the text has.
std::vector<std::string> as_written(const Json& root, std::vector<std::string> keys) {
  const std::vector<std::string> written = written_section(root, keys.front());
  keys.erase(keys.begin());
  keys.insert(keys.begin(), written.begin(), written.end());
  return keys;
}

void apply(std::string& text, const Edit& edit, const std::string& name) {
  const Json root = Document(text, ".", name, {}).root();
  const std::vector<std::string> keys = as_written(root, split(edit.path));
  const Json* object = &root;
  std::string so_far;
  for (std::size_t i = 0;; ++i) {
    const auto& members = object->members();
    const auto found = std::find_if(members.begin(), members.end(),
                                    [&](const auto& member) { return member.key == keys[i]; });
    so_far += (i == 0 ? "" : ".") + keys[i];
    if (found == members.end()) {
      const auto missing = std::span(keys).subspan(i + 1);
      return insert_member(text, *object, keys[i], nested(missing, edit.json));
    }
    object = &found->value;
    if (i + 1 == keys.size()) {
      const std::string indent(indent_of(text, found->at));
      text.replace(object->begin_at(), object->end_at() - object->begin_at(),
                   indented(edit.json, indent, newline_of(text)));
      return;
    }
    if (object->is_null()) {
      const std::string section = nested(std::span(keys).subspan(i + 1), edit.json);
      text.replace(object->begin_at(), object->end_at() - object->begin_at(),
                   indented(section, indent_of(text, found->at), newline_of(text)));
      return;
    }
    if (!object->is_object()) {
      throw Error(ErrorCategory::config,
                  fmt::format("{}: {}: is not a JSON object, so {} cannot be set", name, so_far,
                              edit.path));
    }
  }
}

}  // namespace

std::string edit_text(std::string text, std::span<const Edit> edits, const std::string& name) {
  for (const Edit& edit : edits) apply(text, edit, name);
  return text;
}

namespace {

/// The edited text in a file next to `file`, after all checks. commit() replaces `file`.
class EditedFile {
 public:
  EditedFile(const std::filesystem::path& file, std::span<const Edit> edits,
             const std::function<void(const Config&)>& accept)
      : text_(edit_text(text::read_settings(file, "config"), edits, file.string())),
        replaced_(std::filesystem::canonical(file)) {
    replaced_.write(text_);
    accept(parse(text::read_settings(replaced_.temporary(), "config"),
                 std::filesystem::absolute(file).parent_path(), file.string(), {}));
  }
  void commit() { replaced_.commit(); }

 private:
  std::string text_;
  text::ReplacedFile replaced_;
};

}  // namespace

void edit_file(const std::filesystem::path& file, std::span<const Edit> edits,
               const std::function<void(const Config&)>& accept) {
  EditedFile(file, edits, accept).commit();
}

void try_edit(const std::filesystem::path& file, std::span<const Edit> edits,
              const std::function<void(const Config&)>& accept) {
  const EditedFile edited(file, edits, accept);
}

}  // namespace ballast::config
