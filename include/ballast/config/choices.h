#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string_view>

#include "ballast/core/machine.h"
#include "ballast/cpu_adam/optimizer.h"
#include "ballast/model/kernels.h"
#include "ballast/step/options.h"

namespace ballast::config {

/// `data.token_type`: the type of headerless token files, little-endian. automatic: u16 if every id
/// fits.
enum class TokenType : std::uint8_t { automatic, u16, u32 };

/// `aio.backend`. automatic: the best one that works.
enum class IoBackend : std::uint8_t { automatic, io_uring, threads };

/// `ballast.device`. automatic: CUDA if there is a usable GPU.
enum class DeviceChoice : std::uint8_t { automatic, host, cuda };

/// `ballast.product_algorithms`: how the CUDA device chooses algorithms of matrix products.
/// automatic: timed if the choices can be kept for later runs and all ranks are on one machine.
enum class ProductSearch : std::uint8_t { automatic, heuristic, timed };

/// `ballast.quantized_base`: how frozen matrices of layers are stored (model::quantize()).
enum class QuantizedBase : std::uint8_t { automatic, none, int8, nf4 };

/// `ballast.on_error`: the reaction to an error of the swap space.
enum class OnError : std::uint8_t { stop, resume };

/// A value of a closed choice and its name in configs.
template <class T>
struct NamedValue {
  std::string_view name;
  T value;
};

/// All values of the closed choice T, in the order in which messages and completion list them.
/// Reading, printing and suggestions use only these tables. Types without a table do not compile.
template <class T>
inline constexpr std::nullptr_t kChoices = nullptr;

template <>
inline constexpr auto kChoices<TokenType> = std::to_array<NamedValue<TokenType>>(
    {{"auto", TokenType::automatic}, {"u16", TokenType::u16}, {"u32", TokenType::u32}});
template <>
inline constexpr auto kChoices<IoBackend> =
    std::to_array<NamedValue<IoBackend>>({{"auto", IoBackend::automatic},
                                          {"io_uring", IoBackend::io_uring},
                                          {"threads", IoBackend::threads}});
template <>
inline constexpr auto kChoices<DeviceChoice> =
    std::to_array<NamedValue<DeviceChoice>>({{"auto", DeviceChoice::automatic},
                                             {"host", DeviceChoice::host},
                                             {"cuda", DeviceChoice::cuda}});
template <>
inline constexpr auto kChoices<model::AttentionBackend> =
    std::to_array<NamedValue<model::AttentionBackend>>({{"auto", model::AttentionBackend::best},
                                                        {"own", model::AttentionBackend::own},
                                                        {"cudnn", model::AttentionBackend::cudnn}});
template <>
inline constexpr auto kChoices<model::KernelSet> = std::to_array<NamedValue<model::KernelSet>>(
    {{"auto", model::KernelSet::best}, {"plain", model::KernelSet::plain}});
template <>
inline constexpr auto kChoices<model::GpuChecks> = std::to_array<NamedValue<model::GpuChecks>>(
    {{"off", model::GpuChecks::off}, {"each", model::GpuChecks::each}});
template <>
inline constexpr auto kChoices<ProductSearch> =
    std::to_array<NamedValue<ProductSearch>>({{"auto", ProductSearch::automatic},
                                              {"heuristic", ProductSearch::heuristic},
                                              {"timed", ProductSearch::timed}});
template <>
inline constexpr auto kChoices<QuantizedBase> =
    std::to_array<NamedValue<QuantizedBase>>({{"auto", QuantizedBase::automatic},
                                              {"none", QuantizedBase::none},
                                              {"int8", QuantizedBase::int8},
                                              {"nf4", QuantizedBase::nf4}});
/// `ballast.order`; "auto": the planner's choice.
template <>
inline constexpr auto kChoices<std::optional<step::Order>> =
    std::to_array<NamedValue<std::optional<step::Order>>>(
        {{"layer_major", step::Order::layer_major},
         {"micro_batch_major", step::Order::micro_batch_major},
         {"micro_batch_major_offload", step::Order::micro_batch_major_offload},
         {"auto", std::nullopt}});
template <>
inline constexpr auto kChoices<step::Update> = std::to_array<NamedValue<step::Update>>(
    {{"gated", step::Update::gated}, {"eager", step::Update::eager}});
/// `ballast.expert_updates`; "touched" is the former name of "active".
template <>
inline constexpr auto kChoices<step::ExpertUpdates> =
    std::to_array<NamedValue<step::ExpertUpdates>>({{"all", step::ExpertUpdates::all},
                                                    {"active", step::ExpertUpdates::active},
                                                    {"touched", step::ExpertUpdates::active}});
/// `ballast.router_losses`.
template <>
inline constexpr auto kChoices<model::RouterLossSpan> =
    std::to_array<NamedValue<model::RouterLossSpan>>({{"step", model::RouterLossSpan::step},
                                                      {"micro_batch",
                                                       model::RouterLossSpan::micro_batch}});
/// `ballast.update_isa`; "auto": the best one of the machine.
template <>
inline constexpr auto kChoices<std::optional<Isa>> =
    std::to_array<NamedValue<std::optional<Isa>>>({{"auto", std::nullopt},
                                                   {"scalar", Isa::scalar},
                                                   {"neon", Isa::neon},
                                                   {"avx2", Isa::avx2},
                                                   {"avx512", Isa::avx512}});
/// `ballast.optimizer_states`.
template <>
inline constexpr auto kChoices<cpu_adam::Moments::Format> =
    std::to_array<NamedValue<cpu_adam::Moments::Format>>(
        {{"fp32", cpu_adam::Moments::Format::f32},
         {"bf16_first", cpu_adam::Moments::Format::bf16_first},
         {"8bit", cpu_adam::Moments::Format::blockwise8}});
template <>
inline constexpr auto kChoices<OnError> =
    std::to_array<NamedValue<OnError>>({{"stop", OnError::stop}, {"resume", OnError::resume}});
template <>
inline constexpr auto kChoices<cpu_adam::Optimizer> = [] {
  std::array<NamedValue<cpu_adam::Optimizer>, cpu_adam::kOptimizers.size()> choices = {};
  for (const cpu_adam::OptimizerRow& row : cpu_adam::kOptimizers) {
    choices.at(static_cast<std::size_t>(row.type)) = {row.title, row.type};
  }
  return choices;
}();
/// The name of `value` in configs.
template <class T>
constexpr std::string_view name_of(const T& value) {
  for (const auto& choice : kChoices<T>) {
    if (choice.value == value) return choice.name;
  }
  return "";
}

/// The value called `name`; empty if there is none.
template <class T>
constexpr std::optional<T> value_named(std::string_view name) {
  for (const auto& choice : kChoices<T>) {
    if (choice.name == name) return choice.value;
  }
  return std::nullopt;
}

}  // namespace ballast::config
