#include <array>
#include <string_view>

#include "ballast/model/step_program.h"

namespace ballast::model {
namespace {

constexpr std::array<std::string_view, kKernelCount> kKernelNames = {"embed",
                                                                     "embed backward",
                                                                     "layer",
                                                                     "layer backward",
                                                                     "norm",
                                                                     "norm backward",
                                                                     "tile",
                                                                     "tile backward",
                                                                     "shared expert",
                                                                     "shared expert backward",
                                                                     "router",
                                                                     "router backward",
                                                                     "expert",
                                                                     "expert backward",
                                                                     "exchanged expert",
                                                                     "exchanged expert backward",
                                                                     "head evaluate",
                                                                     "head train",
                                                                     "head scan",
                                                                     "head differentiate",
                                                                     "head end"};
static_assert(static_cast<std::size_t>(Kernel::head_end) + 1 == kKernelCount);

constexpr std::array<std::string_view, kPortCount> kPortNames = {
    "weights",        "output weights",
    "batch",          "input",
    "output",         "activation gradient",
    "kept",           "normed",
    "partial sums",   "routing",
    "routing counts", "router totals",
    "losses",         "pairs",
    "gradient",       "output gradient",
    "workspace"};
static_assert(static_cast<std::size_t>(Port::workspace) + 1 == kPortCount);

}  // namespace

std::string_view to_string(Kernel kernel) noexcept {
  return kKernelNames[static_cast<std::size_t>(kernel)];
}

std::string_view to_string(Port port) noexcept {
  return kPortNames[static_cast<std::size_t>(port)];
}

}  // namespace ballast::model
