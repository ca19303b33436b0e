#include "src/offload/states.h"

#include <algorithm>
#include <array>
#include <functional>
#include <map>
#include <memory>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include "ballast/core/error.h"
#include "ballast/cpu_adam/updater.h"
#include "ballast/formats/safetensors.h"
#include "ballast/state/checksum.h"

namespace ballast::offload {

namespace {

StateValues part_of(const StateValues& values, const ParameterPart& part) {
  const auto some = [&part](std::span<float> all) {
    return all.empty() ? all : all.subspan(part.first, part.count);
  };
  return {some(values.master), some(values.first), some(values.second)};
}

}  // namespace

void read_values(cpu_adam::Optimizer optimizer, const PartStates& states,
                 const StateValues& values) {
  cpu_adam::read_moments(optimizer, states.shard, values.first, values.second);
  if (!values.master.empty()) read_master(states, values.master);
}

void write_values(cpu_adam::Optimizer optimizer, const PartStates& states,
                  const StateValues& values, NewMaster mode) {
  cpu_adam::write_moments(optimizer, states.shard, values.first, values.second);
  if (!values.master.empty()) write_master(states, values.master, mode);
}

void read_values(OffloadedOptimizer& states, std::size_t parameter, void* weights,
                 const StateValues& values) {
  states.visit(parameter, weights, [&](const ParameterPart& part, const PartStates& own) {
    read_values(states.layout().optimizer(), own, part_of(values, part));
    return false;
  });
}

void write_values(OffloadedOptimizer& states, std::size_t parameter, void* weights,
                  const StateValues& values, NewMaster mode) {
  states.visit(parameter, weights, [&](const ParameterPart& part, const PartStates& own) {
    write_values(states.layout().optimizer(), own, part_of(values, part), mode);
    return true;
  });
}

namespace {

/// A part of the states that are copied, and the fp32 values of its moments.
struct Source {
  const ParameterPart& part;
  const PartStates& states;
  std::span<float> first;
  std::span<float> second;
};

/// Copies the states of `source` that overlap `part`. Returns whether there are any.
bool copy_overlap(cpu_adam::Optimizer optimizer, const Source& source, const ParameterPart& part,
                  const PartStates& states) {
  const Elems first = std::max(source.part.first, part.first);
  const Elems last = std::min(source.part.first + source.part.count, part.first + part.count);
  if (first >= last) return false;
  const Elems at = first - source.part.first;
  const Elems count = last - first;
  const auto overlap = [&](std::span<float> all) {
    return all.empty() ? all : all.subspan(at, count);
  };
  const PartStates target = offload::part_of(states, first - part.first, count);
  write_values(optimizer, target, {{}, overlap(source.first), overlap(source.second)});
  if (source.states.shard.weights.format == target.shard.weights.format) {
    copy_master(offload::part_of(source.states, at, count), target);
  }
  return true;
}

}  // namespace

void copy_states(OffloadedOptimizer& from, std::size_t parameter, OffloadedOptimizer& to,
                 std::size_t target) {
  const cpu_adam::Optimizer optimizer = from.layout().optimizer();
  const Parameter& source = from.layout().parameters().at(parameter);
  const Parameter& other = to.layout().parameters().at(target);
  expects(&from != &to && optimizer == to.layout().optimizer() && source.elements == other.elements,
          "optimizer states: copies between other parameters");
  std::vector<float> first, second;
  from.visit(parameter, nullptr, [&](const ParameterPart& part, const PartStates& states) {
    first.resize(cpu_adam::has_first_moment(optimizer) ? part.count : 0);
    second.resize(cpu_adam::has_second_moment(optimizer) ? part.count : 0);
    read_values(optimizer, states, {{}, first, second});
    to.visit(target, nullptr, [&](const ParameterPart& target_part, const PartStates& own) {
      return copy_overlap(optimizer, {part, states, first, second}, target_part, own);
    });
    return false;
  });
}

namespace {

using cpu_adam::Moments;
using state::RunningChecksum;

constexpr const char* kFormat = "ballast.optimizer.format";
constexpr const char* kOptimizer = "ballast.optimizer.name";
constexpr const char* kNotesChecksum = "ballast.optimizer.checksum";
constexpr const char* kVersion = "2";
/// Files of this version number the parameters and have no checksums.
constexpr const char* kFirstVersion = "1";
/// Tensor with the XXH3 of all others, in order. Each is four numbers of 16 bits, lowest first,
/// which fp32 represents exactly.
constexpr const char* kChecksums = "checksums";
constexpr Elems kPieces = 4;
constexpr Elems kBuffer = Elems{1} << 20U;

/// One kind of state in the file.
struct ValueKind {
  const char* name;
  std::span<float> StateValues::*values;
};
constexpr ValueKind kMaster = {"master", &StateValues::master};
constexpr ValueKind kFirst = {"exp_avg", &StateValues::first};
constexpr ValueKind kSecond = {"exp_avg_sq", &StateValues::second};

struct KindInFile {
  ValueKind kind;
  DType type;  ///< represents all bits
  std::string name;
};

std::vector<KindInFile> kinds_of(const FiledParameter& one) {
  const OffloadLayout& layout = one.states->layout();
  const Moments::Format format = layout.moments();
  std::vector<KindInFile> kinds;
  const auto add = [&](const ValueKind& kind, DType type) {
    kinds.push_back({kind, type, fmt::format("{}.{}", one.name, kind.name)});
  };
  if (layout.parameters().at(one.parameter).type != DType::f32) add(kMaster, DType::f32);
  if (cpu_adam::has_first_moment(layout.optimizer())) {
    add(kFirst, format == Moments::Format::f32 ? DType::f32 : DType::bf16);
  }
  if (cpu_adam::has_second_moment(layout.optimizer())) {
    const bool blockwise = format == Moments::Format::blockwise8;
    add(kSecond, blockwise ? DType::bf16 : DType::f32);
  }
  return kinds;
}

Elems elements_of(const FiledParameter& one) {
  return one.states->layout().parameters().at(one.parameter).elements;
}

/// fp32 buffers for the states of one part.
class PartBuffers {
 public:
  StateValues of(const std::vector<KindInFile>& kinds, const ParameterPart& part) {
    StateValues values;
    std::size_t used = 0;
    for (const KindInFile& one : kinds) {
      std::vector<float>& memory = memory_.at(used++);
      memory.resize(part.count);
      values.*one.kind.values = memory;
    }
    return values;
  }

 private:
  std::array<std::vector<float>, 3> memory_;
};

void require(bool condition, const std::filesystem::path& file, const std::string& what) {
  if (!condition) throw Error(ErrorCategory::data, fmt::format("{}: {}", file.string(), what));
}

std::array<float, kPieces> pieces_of(std::uint64_t checksum) {
  std::array<float, kPieces> pieces = {};
  for (float& piece : pieces) {
    piece = static_cast<float>(checksum & 0xffffU);
    checksum >>= 16U;
  }
  return pieces;
}

/// Returns the XXH3 of all notes except its own.
std::string checksum_of(const Notes& notes) {
  RunningChecksum sum;
  for (const auto& [name, value] : notes) {
    if (name == kNotesChecksum) continue;
    for (const std::string& text : {name, value}) {
      sum.add(std::as_bytes(std::span(text.data(), text.size() + 1)));
    }
  }
  return fmt::format("{:016x}", sum.digest());
}

void check_notes(const formats::SafetensorsReader& reader) {
  const Notes& notes = reader.metadata();
  const auto format = notes.find(kFormat);
  require(format != notes.end(), reader.path(), "not the states of an optimizer");
  if (format->second == kFirstVersion) return;
  require(format->second == kVersion, reader.path(),
          "the states of an optimizer of another version of Ballast");
  const auto found = notes.find(kNotesChecksum);
  require(found != notes.end() && found->second == checksum_of(notes), reader.path(),
          "the notes of the optimizer are damaged; use another copy of the file");
}

void check_parameters(const formats::SafetensorsReader& reader,
                      std::span<const FiledParameter> parameters) {
  for (const FiledParameter& one : parameters) {
    const std::string own(cpu_adam::to_string(one.states->layout().optimizer()));
    const auto saved = reader.metadata().find(kOptimizer);
    require(saved != reader.metadata().end() && saved->second == own, reader.path(),
            fmt::format("has states of {}, not of {}",
                        saved == reader.metadata().end() ? "nothing" : saved->second, own));
    for (const KindInFile& kind : kinds_of(one)) {
      const formats::StoredTensor* tensor = reader.find(kind.name);
      if (tensor == nullptr && kind.kind.values == kMaster.values) continue;
      require(tensor != nullptr, reader.path(), fmt::format("has no {}", kind.name));
      require(tensor->elements == elements_of(one), reader.path(),
              fmt::format("{} has {} elements, the parameter has {}", kind.name, tensor->elements,
                          elements_of(one)));
    }
  }
}

/// Reads the whole file and compares its checksums.
void check_values(const formats::SafetensorsReader& reader) {
  const formats::StoredTensor* sums = reader.find(kChecksums);
  if (reader.metadata().at(kFormat) == kFirstVersion) return;
  require(sums != nullptr && sums->elements == (reader.tensors().size() - 1) * kPieces,
          reader.path(), "has no checksums; use another copy of the file");
  std::vector<float> buffer;
  std::array<float, kPieces> expected = {};
  Elems number = 0;
  for (const formats::StoredTensor& tensor : reader.tensors()) {
    if (&tensor == sums) continue;
    RunningChecksum sum;
    for (Elems first = 0; first < tensor.elements; first += buffer.size()) {
      buffer.resize(std::min(tensor.elements - first, kBuffer));
      reader.read(tensor.name, buffer, first);
      sum.add(std::as_bytes(std::span(buffer)));
    }
    reader.read(kChecksums, expected, kPieces * number++);
    require(expected == pieces_of(sum.digest()), reader.path(),
            fmt::format("{} is damaged; use another copy of the file", tensor.name));
  }
}

/// Returns the parameters in the order of their states, so that each sub-group is transferred once.
std::vector<const FiledParameter*> in_order_of_states(std::span<const FiledParameter> parameters) {
  std::vector<const FiledParameter*> all;
  for (const FiledParameter& one : parameters) all.push_back(&one);
  std::ranges::sort(all, std::less<>(), [](const FiledParameter* one) {
    return std::pair(one->states, one->parameter);
  });
  return all;
}

/// Checksums of the kinds of one parameter.
using Checksums = std::vector<std::uint64_t>;

/// Writes one parameter. Returns the checksums of its kinds.
Checksums save_parameter(const FiledParameter& one, formats::SafetensorsWriter& writer,
                         PartBuffers& buffers) {
  const auto kinds = kinds_of(one);
  std::array<RunningChecksum, 3> sums;
  one.states->visit(one.parameter, one.weights,
                    [&](const ParameterPart& part, const PartStates& states) {
                      const StateValues values = buffers.of(kinds, part);
                      read_values(one.states->layout().optimizer(), states, values);
                      for (std::size_t i = 0; i < kinds.size(); ++i) {
                        const std::span<float> some = values.*kinds[i].kind.values;
                        sums.at(i).add(std::as_bytes(some));
                        writer.write(kinds[i].name, some, part.first);
                      }
                      return false;
                    });
  Checksums checksums;
  for (std::size_t i = 0; i < kinds.size(); ++i) checksums.push_back(sums.at(i).digest());
  return checksums;
}

void load_parameter(const FiledParameter& one, const formats::SafetensorsReader& reader,
                    PartBuffers& buffers) {
  auto kinds = kinds_of(one);
  std::erase_if(kinds, [&](const KindInFile& kind) { return reader.find(kind.name) == nullptr; });
  const bool has_master = std::ranges::any_of(
      kinds, [](const KindInFile& kind) { return kind.kind.values == kMaster.values; });
  one.states->visit(one.parameter, one.weights,
                    [&](const ParameterPart& part, const PartStates& states) {
                      const StateValues values = buffers.of(kinds, part);
                      for (const KindInFile& kind : kinds) {
                        reader.read(kind.name, values.*kind.kind.values, part.first);
                      }
                      if (!has_master) forget_master(states);
                      write_values(one.states->layout().optimizer(), states, values);
                      return true;
                    });
}

}  // namespace

void save_states(std::span<const FiledParameter> parameters, const std::filesystem::path& file,
                 const Notes& notes) {
  std::vector<formats::TensorToStore> tensors;
  Notes all = notes;
  all[kFormat] = kVersion;
  for (const FiledParameter& one : parameters) {
    for (const KindInFile& kind : kinds_of(one)) {
      tensors.push_back({kind.name, kind.type, {elements_of(one)}});
    }
    all[kOptimizer] = cpu_adam::to_string(one.states->layout().optimizer());
  }
  all[kNotesChecksum] = checksum_of(all);
  tensors.push_back({kChecksums, DType::f32, {tensors.size(), kPieces}});
  formats::SafetensorsWriter writer(file, tensors, all);
  PartBuffers buffers;
  std::map<const FiledParameter*, Checksums> sums;
  for (const FiledParameter* one : in_order_of_states(parameters)) {
    sums[one] = save_parameter(*one, writer, buffers);
  }
  std::vector<float> checksums;
  for (const auto& [one, own] : sums) {  // addresses are in the order of the file
    for (const std::uint64_t sum : own) {
      for (const float piece : pieces_of(sum)) checksums.push_back(piece);
    }
  }
  writer.write(kChecksums, checksums);
  writer.finish();
}

void load_states(std::span<const FiledParameter> parameters, const std::filesystem::path& file) {
  const formats::SafetensorsReader reader(file);
  check_notes(reader);
  check_parameters(reader, parameters);
  check_values(reader);
  PartBuffers buffers;
  for (const FiledParameter* one : in_order_of_states(parameters)) {
    load_parameter(*one, reader, buffers);
  }
}

Notes read_notes(const std::filesystem::path& file) {
  const formats::SafetensorsReader reader(file);
  check_notes(reader);
  return reader.metadata();
}

}  // namespace ballast::offload
