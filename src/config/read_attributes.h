#pragma once

#include <optional>
#include <string_view>

namespace ballast::config {

/// The keys of config.json that transformers' class for this model_type reads, separated by spaces,
/// without those that all classes share. For a quant_method: the keys of quantization_config.
/// Nothing for a type that transformers does not have.
std::optional<std::string_view> read_attributes(std::string_view model_type);

}  // namespace ballast::config
