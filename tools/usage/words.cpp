#include "tools/usage/words.h"

#include <algorithm>
#include <array>
#include <cctype>

namespace ballast::tools {
namespace {

bool is_negative_number(const std::string& word) {
  return word.size() > 1 &&
         (std::isdigit(static_cast<unsigned char>(word[1])) != 0 || word[1] == '.');
}

/// Whether `word` is like "-x" or "--x", but neither "-" nor a negative number.
bool looks_like_option(const std::string& word) {
  return word.size() > 1 && word[0] == '-' && !is_negative_number(word);
}

/// Number of required arguments of the command that `read` has not seen yet.
std::size_t missing_arguments(const ReadWords& read) {
  std::size_t required = 0;
  for (const OptionInfo& option : read.command->options) {
    required += option.positional && option.required ? 1 : 0;
  }
  return required - std::min(required, read.arguments.size());
}

class Reader {
 public:
  Reader(const CommandInfo& program, const std::vector<std::string>& words)
      : program_(program), words_(words) {
    read_.command = &program;
  }

  ReadWords read() {
    while (at_ < words_.size() && !read_.has_unknown_command) {
      const std::string& word = words_[at_];
      if (word == "--" && !only_arguments_) {
        only_arguments_ = true;
        ++at_;
      } else if (!only_arguments_ && looks_like_option(word)) {
        read_option(word);
      } else {
        read_argument(word);
      }
    }
    return std::move(read_);
  }

 private:
  void read_argument(const std::string& word) {
    ++at_;
    if (read_.command->commands.empty()) {
      read_.arguments.push_back(word);
    } else if (const CommandInfo* const next = read_.command->command(word)) {
      read_.command = next;
    } else {
      read_.unknown_command = word;
      read_.has_unknown_command = true;
    }
  }

  void read_option(const std::string& word) {
    const std::size_t equals = word.find('=');
    ReadWords::GivenOption given = {
        .option = nullptr, .name = word.substr(0, equals), .values = {}};
    given.attached = equals != std::string::npos;
    given.at = at_++;
    given.option = read_.command->option(given.name);
    if (given.option == nullptr) given.option = program_.option(given.name);
    if (given.option == nullptr) {
      if (!read_short_flags(given)) read_.unknown.push_back(word);
      return;
    }
    if (given.attached) {
      given.values.push_back(word.substr(equals + 1));
    } else if (!given.option->flag) {
      take_values(given);
    }
    read_.options.push_back(std::move(given));
  }

  /// Reads "-vh" as "-v -h". Returns false if the word contains anything else.
  bool read_short_flags(const ReadWords::GivenOption& word) {
    std::vector<ReadWords::GivenOption> flags;
    for (const char letter : word.name.substr(1)) {
      ReadWords::GivenOption given = {.option = nullptr, .name = {'-', letter}, .values = {}};
      given.option = read_.command->option(given.name);
      if (given.option == nullptr) given.option = program_.option(given.name);
      if (given.option == nullptr || !given.option->flag || word.attached) return false;
      flags.push_back(std::move(given));
    }
    read_.options.insert(read_.options.end(), flags.begin(), flags.end());
    return true;
  }

  void take_values(ReadWords::GivenOption& given) {
    while (at_ < words_.size()) {
      const std::string& word = words_[at_];
      const std::string name = word.substr(0, word.find('='));
      const bool option = word == "--" || read_.command->option(name) != nullptr ||
                          program_.option(name) != nullptr;
      if (option || (!given.values.empty() && looks_like_option(word))) return;
      const bool enough = !given.values.empty();
      if (enough && words_.size() - at_ <= missing_arguments(read_)) return;
      given.values.push_back(word);
      ++at_;
      if (!given.option->many) return;
    }
  }

  const CommandInfo& program_;
  const std::vector<std::string>& words_;
  std::size_t at_ = 0;
  bool only_arguments_ = false;
  ReadWords read_;
};

}  // namespace

std::optional<bool> flag_value(const std::string& word) {
  constexpr std::array kWords = {"true", "on", "yes", "1", "false", "off", "no", "0"};
  const auto found = std::find(kWords.begin(), kWords.end(), word) - kWords.begin();
  if (found == std::ssize(kWords)) return {};
  return found < 4;
}

std::vector<std::string> ReadWords::values_of(const OptionInfo& option) const {
  std::vector<std::string> values;
  if (option.positional) {
    auto next = arguments.begin();
    for (const OptionInfo& one : command->options) {
      if (!one.positional || next == arguments.end()) continue;
      if (&one == &option) values.assign(next, one.many ? arguments.end() : next + 1);
      ++next;
    }
    return values;
  }
  for (const GivenOption& one : options) {
    if (one.option != &option) continue;
    if (option.flag) values = {one.attached ? one.values.front() : kFlagAlone};
    if (!option.flag) values.insert(values.end(), one.values.begin(), one.values.end());
  }
  return values;
}

std::size_t ReadWords::excess() const {
  std::size_t excess = arguments.size();
  for (const OptionInfo& option : command->options) {
    if (option.positional) excess -= option.many ? excess : std::min<std::size_t>(excess, 1);
  }
  return excess;
}

bool asks_for_help(const ReadWords& read) {
  return std::any_of(read.options.begin(), read.options.end(),
                     [](const auto& given) { return given.option->name() == "--help"; });
}

ReadWords read_words(const CommandInfo& program, const std::vector<std::string>& words) {
  return Reader(program, words).read();
}

std::vector<std::string> normalised(const CommandInfo& program,
                                    const std::vector<std::string>& words) {
  const ReadWords read = read_words(program, words);
  std::vector<std::string> out = words;
  std::size_t excess = read.excess();
  for (auto given = read.options.rbegin(); given != read.options.rend() && excess > 0; ++given) {
    const std::size_t next = given->at + 1;
    if (!given->option->optional_value() || given->attached || next >= out.size()) continue;
    if (looks_like_option(out[next])) continue;
    out[given->at] += "=" + out[next];
    out.erase(out.begin() + static_cast<std::ptrdiff_t>(next));
    --excess;
  }
  return out;
}

}  // namespace ballast::tools
