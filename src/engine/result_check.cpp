#include "src/engine/result_check.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <optional>
#include <span>
#include <vector>

#include <fmt/format.h>

#include "ballast/core/dtype.h"
#include "ballast/core/error.h"
#include "ballast/model/port_numbers.h"

namespace ballast::engine {
namespace {

using model::Port;

constexpr Bytes kPiece = 16 * kMiB;

/// Searches the results of one port.
class ResultSearch {
 public:
  ResultSearch(const CurrentOperation& at, Port port) : at_(at), port_(port) {}

  /// `width`: elements per row, or 0.
  template <class T>
  void run(ConstDeviceBytes values, std::size_t width) {
    std::vector<std::byte> piece(std::min<Bytes>(kPiece, values.size()));
    for (Bytes done = 0; done < values.size();) {
      const Bytes size = std::min<Bytes>(piece.size(), values.size() - done);
      at_.own().device.copy_to_host(at_.stream(), HostBytes(piece).first(size),
                                    values.subview(done, size));
      at_.stream().synchronize();
      search(std::span(reinterpret_cast<const T*>(piece.data()), size / sizeof(T)),
             done / sizeof(T));
      done += size;
    }
    if (count_ > 0) refuse(values.size() / sizeof(T), width);
  }

 private:
  template <class T>
  void search(std::span<const T> values, std::size_t first_number) {
    for (std::size_t i = 0; i < values.size(); ++i) {
      const double value = model::to_double(values[i]);
      if (std::isfinite(value)) continue;
      if (count_++ > 0) continue;
      first_ = first_number + i;
      value_ = value;
    }
  }
  [[noreturn]] void refuse(std::size_t all, std::size_t width) const {
    const std::string place =
        width == 0 ? fmt::format("number {}", first_)
                   : fmt::format("in row {}, column {}", first_ / width, first_ % width);
    throw Error(ErrorCategory::numeric,
                fmt::format("{} of {} values of its {} are not finite; the first, {}, is {}",
                            count_, all, to_string(port_), value_, place));
  }

  const CurrentOperation& at_;
  Port port_;
  std::size_t count_ = 0;
  std::size_t first_ = 0;
  double value_ = 0.0;
};

}  // namespace

void check_results(const CurrentOperation& at, const model::Pass& pass,
                   const model::PassArguments& arguments) {
  const DType type = at.blueprint().type;
  const std::size_t width = at.blueprint().model.config.hidden_size;
  std::size_t tile = 0;
  for (const model::Operand& operand : pass.operands) {
    const model::PortNumbers numbers = model::numbers_of(operand.port);
    if (numbers == model::PortNumbers::none || operand.access == model::OperandAccess::reads) {
      continue;
    }
    const bool may_overflow = operand.port != Port::output && operand.port != Port::losses;
    if (type == DType::f16 && may_overflow) continue;
    DeviceBytes values = arguments[operand.port];
    if (operand.port == Port::output_gradient) {
      if (tile == arguments.output_gradient.size()) continue;
      values = arguments.output_gradient[tile++];
    }
    const bool in_rows = numbers == model::PortNumbers::of_training;
    model::with_numbers(operand.port, type, [&](auto of_type) {
      ResultSearch(at, operand.port).run<decltype(of_type)>(values, in_rows ? width : 0);
    });
  }
}

}  // namespace ballast::engine
