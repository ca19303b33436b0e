#include "src/offload/state_file.h"

#include <array>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include "ballast/core/error.h"
#include "ballast/train/safetensors.h"

#include "src/offload/state_values.h"

namespace ballast::offload {
namespace {

using cpu_adam::Moments;
using cpu_adam::Shard;

constexpr const char* kFormat = "ballast.optimizer.format";
constexpr const char* kOptimizer = "ballast.optimizer.name";
constexpr const char* kVersion = "1";

/// One kind of state in the file.
struct Kind {
  const char* name;
  std::span<float> StateValues::*values;
};
constexpr Kind kMaster = {"master", &StateValues::master};
constexpr Kind kFirst = {"exp_avg", &StateValues::first};
constexpr Kind kSecond = {"exp_avg_sq", &StateValues::second};

/// The kinds of a parameter, with the type that holds their bits.
std::vector<std::pair<Kind, DType>> kinds_of(const Layout& layout, const Parameter& parameter) {
  std::vector<std::pair<Kind, DType>> kinds;
  const Moments::Format format = layout.moments();
  if (parameter.type != DType::f32) kinds.emplace_back(kMaster, DType::f32);
  if (cpu_adam::has_first_moment(layout.optimizer())) {
    kinds.emplace_back(kFirst, format == Moments::Format::f32 ? DType::f32 : DType::bf16);
  }
  if (cpu_adam::has_second_moment(layout.optimizer())) {
    const bool coded = format == Moments::Format::blockwise8;
    kinds.emplace_back(kSecond, coded ? DType::bf16 : DType::f32);
  }
  return kinds;
}

std::string name_of(std::size_t parameter, const Kind& kind) {
  return fmt::format("{}.{}", parameter, kind.name);
}

/// Floats for the states of one part.
class Buffers {
 public:
  StateValues of(const Layout& layout, const Part& part) {
    StateValues values;
    std::size_t used = 0;
    for (const auto& [kind, type] : kinds_of(layout, layout.parameters()[part.parameter])) {
      std::vector<float>& memory = memory_.at(used++);
      memory.resize(part.count);
      values.*kind.values = memory;
    }
    return values;
  }

 private:
  std::array<std::vector<float>, 3> memory_;
};

void require(bool condition, const std::filesystem::path& file, const std::string& what) {
  if (!condition) throw Error(ErrorCategory::data, fmt::format("{}: {}", file.string(), what));
}

void check_header(const train::SafetensorsReader& reader, const Layout& layout) {
  const auto& notes = reader.metadata();
  const auto format = notes.find(kFormat);
  require(format != notes.end() && format->second == kVersion, reader.path(),
          "not the states of an optimizer of this version of Ballast");
  const std::string optimizer(cpu_adam::to_string(layout.optimizer()));
  require(notes.at(kOptimizer) == optimizer, reader.path(),
          fmt::format("has states of {}, not of {}", notes.at(kOptimizer), optimizer));
  std::size_t expected = 0;
  for (std::size_t i = 0; i < layout.parameters().size(); ++i) {
    const Parameter& parameter = layout.parameters()[i];
    for (const auto& [kind, type] : kinds_of(layout, parameter)) {
      const std::string name = name_of(i, kind);
      const train::StoredTensor* tensor = reader.find(name);
      require(tensor != nullptr, reader.path(), fmt::format("has no {}", name));
      require(tensor->elements == parameter.elements, reader.path(),
              fmt::format("{} has {} elements, the parameter has {}", name, tensor->elements,
                          parameter.elements));
      ++expected;
    }
  }
  require(expected == reader.tensors().size(), reader.path(),
          fmt::format("has {} tensors, not {}: states of other parameters", reader.tensors().size(),
                      expected));
}

}  // namespace

void save_states(OffloadedOptimizer& states, std::span<void* const> weights,
                 const std::filesystem::path& file, const Notes& notes) {
  const Layout& layout = states.layout();
  expects(weights.size() == layout.parameters().size(), "save_states: the number of weights");
  std::vector<train::TensorToStore> tensors;
  for (std::size_t i = 0; i < layout.parameters().size(); ++i) {
    const Parameter& parameter = layout.parameters()[i];
    for (const auto& [kind, type] : kinds_of(layout, parameter)) {
      tensors.push_back({name_of(i, kind), type, {parameter.elements}});
    }
  }
  Notes all = notes;
  all[kFormat] = kVersion;
  all[kOptimizer] = cpu_adam::to_string(layout.optimizer());
  train::SafetensorsWriter writer(file, tensors, all);
  Buffers buffers;
  for (std::size_t i = 0; i < weights.size(); ++i) {
    const auto kinds = kinds_of(layout, layout.parameters()[i]);
    states.visit(i, weights[i], [&](const Part& part, const Shard& shard) {
      const StateValues values = buffers.of(layout, part);
      read_values(layout.optimizer(), shard, values);
      for (const auto& kind : kinds) {
        writer.write(name_of(i, kind.first), values.*kind.first.values, part.first);
      }
      return false;
    });
  }
  writer.finish();
}

Notes load_states(OffloadedOptimizer& states, std::span<void* const> weights,
                  const std::filesystem::path& file) {
  const Layout& layout = states.layout();
  expects(weights.size() == layout.parameters().size(), "load_states: the number of weights");
  const train::SafetensorsReader reader(file);
  check_header(reader, layout);
  Buffers buffers;
  for (std::size_t i = 0; i < weights.size(); ++i) {
    const auto kinds = kinds_of(layout, layout.parameters()[i]);
    states.visit(i, weights[i], [&](const Part& part, const Shard& shard) {
      const StateValues values = buffers.of(layout, part);
      for (const auto& kind : kinds) {
        reader.read(name_of(i, kind.first), values.*kind.first.values, part.first);
      }
      write_values(layout.optimizer(), shard, values);
      return true;
    });
  }
  return reader.metadata();
}

Notes read_notes(const std::filesystem::path& file) {
  const train::SafetensorsReader reader(file);
  require(reader.metadata().contains(kFormat), file, "not the states of an optimizer");
  return reader.metadata();
}

}  // namespace ballast::offload
