#pragma once

#include <initializer_list>
#include <string>
#include <string_view>

#include <gtest/gtest.h>

#include "ballast/core/error.h"

namespace ballast::test {

/// Expects `action` to throw Error of `category` with a message of one line, and returns that.
template <class Action>
std::string error_of(ErrorCategory category, Action&& action) {
  try {
    action();
  } catch (const Error& error) {
    const std::string message = error.what();
    EXPECT_EQ(to_string(error.category()), to_string(category)) << message;
    EXPECT_EQ(message.find('\n'), std::string::npos) << message;
    return message;
  }
  ADD_FAILURE() << "nothing was thrown";
  return "";
}

/// Expects `action` to throw Error of `category` whose one-line message contains every one of
/// `parts`.
template <class Action>
void expect_error(ErrorCategory category, std::initializer_list<std::string_view> parts,
                  Action&& action) {
  const std::string message = error_of(category, action);
  for (const auto part : parts) {
    EXPECT_NE(message.find(part), std::string::npos) << "no '" << part << "' in: " << message;
  }
}

}  // namespace ballast::test
