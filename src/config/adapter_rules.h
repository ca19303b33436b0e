#pragma once

#include <string>
#include <string_view>

#include "ballast/text/json.h"

namespace ballast::config {

/// Throws Error(config): "FILE: KEY is VALUE, but RULE".
[[noreturn]] void refuse_adapters(const std::string& file, std::string_view key,
                                  const text::Json& value, std::string_view rule);

/// Whether a value of LoraConfig means the same as a missing key.
bool has_no_value(const text::Json& value);

/// Adapters that begin as parts of the base model, which does not change. B is never trained.
inline constexpr const char* kMica = "mica";

/// Refuses a description of adapters other than LoRA.
void check_adapter_type(const std::string& file, const text::Json& json);

/// Refuses a key of LoraConfig that changes what the adapters compute, if Ballast has no key for
/// it.
void check_adapter_key(const std::string& file, const std::string& key, const text::Json& value);

/// Refuses a value of init_lora_weights for which PEFT changes the base model, too.
void check_beginning(const std::string& file, const text::Json& value);

}  // namespace ballast::config
