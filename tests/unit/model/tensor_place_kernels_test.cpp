#include <algorithm>
#include <cstddef>
#include <cstring>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "ballast/model/architecture.h"
#include "ballast/model/block_layout.h"
#include "ballast/model/compute.h"
#include "ballast/model/family.h"
#include "ballast/model/step_program.h"

#include "tests/support/expanded_sums.h"
#include "tests/unit/model/fixture.h"
#include "tests/unit/model/layers_run.h"

// The tiles of a model on several tensor places have the results of one place, bit for bit. The
// places are in one process. Their passes are those of the step program; the test performs the
// exchanges as the program defines them.

namespace ballast::model::tensor_place_kernels_test {
namespace {

using Values = std::vector<double>;

constexpr MicroBatchShape kShape = {2, 21};

/// One tensor place: its model, and a buffer for each value and each gradient sum of the program.
class Place {
 public:
  Place(const Architecture& whole, std::uint64_t number, DType type)
      : b_(at_tensor_place(whole, number), type, kShape) {
    for (const BlockSpec& block : b_.architecture.blocks) {
      weights_.push_back(b_.upload(test::weights_by_name(block)));
    }
    std::vector<std::int32_t> batch = b_.tokens(3);
    std::vector<std::int32_t> targets = b_.tokens(4);
    for (std::size_t i = 0; i < targets.size(); i += 7) targets[i] = -1;
    slots_ = number_sum_rows(b_.architecture, batch);
    batch.insert(batch.end(), targets.begin(), targets.end());
    batch.insert(batch.end(), slots_.begin(), slots_.end());
    batch_ = b_.upload_tokens(batch);
  }

  [[nodiscard]] const KernelSizes& sizes() const { return b_.compute->sizes(); }
  [[nodiscard]] const test::Bench& bench() const { return b_; }

  /// Allocates the buffers. Their content is NaN.
  void start(const StepProgram& program) {
    for (const StepValue& value : program.values) {
      values_.push_back(b_.device->allocate(round_up(program.bytes_of(value), 4), value.name));
      forget(static_cast<ValueId>(values_.size() - 1));
    }
    for (const GradientSum& sum : program.sums) {
      sums_.push_back(b_.gradient(std::vector<float>(sum.bytes / sizeof(float), kNan)));
      if (sum.clears) b_.compute->clear_gradient(*b_.stream, sum.block, sums_.back());
    }
  }
  void run(const Pass& pass) {
    PassArguments arguments;
    arguments.batch = BatchViews::cut(as_bytes(batch_), kShape.tokens());
    arguments.scalars.accumulation = Accumulation::first;
    arguments.scalars.loss_gradient = 0.5F;
    for (const Operand& operand : pass.operands) {
      if (operand.optional || operand.port == Port::batch) continue;
      const DeviceBytes view = view_of(operand);
      if (operand.access == OperandAccess::writes) forget(operand.number);
      if (operand.port == Port::output_weights) {
        arguments.output_weights.push_back(view);
      } else if (operand.port == Port::output_gradient) {
        arguments.output_gradient.push_back(view);
      } else {
        arguments[operand.port] = view;
      }
    }
    b_.compute->run(*b_.stream, pass, arguments);
  }

  [[nodiscard]] DeviceBytes value(ValueId id) const { return values_.at(id); }
  /// Returns the content of a gradient sum, of all rows of the vocabulary.
  [[nodiscard]] Values sum(const GradientSum& about, SumId id) const {
    const Values values = b_.values(sums_.at(id));
    const Architecture& model = b_.architecture;
    if (!about.by_token) return values;
    return test::expanded_sums(model, model.blocks[about.block], b_.tokens(3), slots_, values);
  }
  template <class T>
  void write(ValueId id, const std::vector<T>& content) {
    const auto bytes = std::as_bytes(std::span(content));
    ASSERT_LE(bytes.size(), values_.at(id).size());
    b_.device->copy_to_device(*b_.stream, values_.at(id).subview(0, bytes.size()), bytes);
    b_.stream->synchronize();
  }

 private:
  static constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

  template <class T>
  static DeviceBytes as_bytes(DeviceView<T> view) {
    return {reinterpret_cast<std::byte*>(view.raw()), view.size() * sizeof(T)};
  }
  [[nodiscard]] DeviceBytes view_of(const Operand& operand) const {
    switch (operand.kind) {
      case OperandKind::weights:
        return weights_.at(operand.number);
      case OperandKind::value:
        return values_.at(operand.number);
      case OperandKind::gradient:
        return as_bytes(sums_.at(operand.number));
      case OperandKind::rows:
      case OperandKind::workspace:
        break;
    }
    return {};
  }
  /// Fills a value with NaN in every type.
  void forget(ValueId id) {
    write(id, std::vector<std::byte>(values_.at(id).size(), std::byte{0xff}));
  }

  test::Bench b_;
  std::vector<std::int32_t> slots_;
  DeviceView<std::int32_t> batch_;
  std::vector<DeviceBytes> weights_;
  std::vector<DeviceBytes> values_;
  std::vector<DeviceView<float>> sums_;
};

/// Results of a step. Those of tiles are joined.
struct Results {
  double loss = 0.0;
  double evaluated = 0.0;
  std::map<std::string, Values> gradients;  ///< by tensor; those by a tied head have another name
};

/// Runs the step program of a model on all tensor places.
class Step {
 public:
  Step(const ModelConfig& config, DType type, std::uint64_t places)
      : model_(build_architecture(config, {.tensor = places})), type_(type) {
    for (std::uint64_t p = 0; p < places; ++p) {
      places_.push_back(std::make_unique<Place>(model_, p, type));
    }
    program_ = write_program(model_, type, {.micro_batch = kShape, .sum_scratch = kPage},
                             places_.front()->sizes());
    for (const auto& place : places_) place->start(program_);
  }

  Results train() {
    Results found;
    run(program_.evaluation);
    found.evaluated = loss();
    run(program_.training);
    found.loss = loss();
    for (std::size_t s = 0; s < program_.sums.size(); ++s) collect(s, found.gradients);
    return found;
  }

 private:
  void run(const std::vector<Stop>& stops) {
    for (const Stop& stop : stops) {
      if (stop.form == HeadForm::one_pass) continue;
      for (const PassId id : stop.passes) {
        const Pass& pass = program_.passes[id];
        if (pass.kernel == Kernel::sum_tiles) {
          sum_tiles(pass);
        } else if (pass.kernel == Kernel::share_row_sums) {
          share_row_sums(pass);
        } else {
          for (const auto& place : places_) place->run(pass);
        }
      }
    }
  }

  static std::optional<ValueId> find(const Pass& pass, Port port) {
    for (const Operand& operand : pass.operands) {
      if (operand.port == port) return operand.number;
    }
    return std::nullopt;
  }

  /// Adds the terms of all places in the order of the tiles. Gradients are added in descending
  /// order, as one place does.
  void sum_tiles(const Pass& pass) {
    const ValueId terms = find(pass, Port::terms).value();
    const std::size_t size = kShape.tokens() * model_.config.hidden_size;
    std::vector<std::vector<float>> all;
    for (const auto& place : places_) {
      const DeviceBytes bytes = place->value(terms);
      const bool embedding = pass.block < model_.first_layer();
      std::vector<float> values;
      if (embedding) {
        const Values exact = place->bench().download(bytes);
        values.assign(exact.begin(), exact.end());
      } else {
        values = place->bench().get(view_as<float>(bytes));
      }
      for (std::size_t at = 0; at < values.size(); at += size) {
        const auto begin = values.begin() + static_cast<std::ptrdiff_t>(at);
        all.emplace_back(begin, begin + static_cast<std::ptrdiff_t>(size));
      }
    }
    const std::optional<ValueId> gradient = find(pass, Port::normed_gradient);
    if (gradient) std::ranges::reverse(all);
    if (const std::optional<ValueId> input = find(pass, Port::input)) {
      const Values exact = places_.front()->bench().download(places_.front()->value(*input));
      all.emplace(all.begin(), exact.begin(), exact.end());
    }
    std::vector<float> sum = all.front();
    for (std::size_t term = 1; term < all.size(); ++term) {
      for (std::size_t i = 0; i < size; ++i) sum[i] += all[term][i];
    }
    const ValueId to = gradient ? *gradient : find(pass, Port::output).value();
    with_training_type(type_, [&](auto of_type) {
      std::vector<decltype(of_type)> rounded;
      for (const float value : sum) rounded.push_back(from_float<decltype(of_type)>(value));
      for (const auto& place : places_) place->write(to, rounded);
    });
  }

  void share_row_sums(const Pass& pass) {
    const ValueId own = find(pass, Port::row_sums).value();
    std::vector<std::byte> all;
    for (const auto& place : places_) {
      const auto sums = place->bench().get(place->value(own));
      all.insert(all.end(), sums.begin(), sums.end());
    }
    const ValueId to = find(pass, Port::all_row_sums).value();
    for (const auto& place : places_) place->write(to, all);
  }

  /// Returns the loss, which must be the same on all places.
  double loss() {
    const auto losses = std::ranges::find(program_.values, "losses", &StepValue::name);
    const auto id = static_cast<ValueId>(losses - program_.values.begin());
    Values found;
    for (const auto& place : places_) {
      found.push_back(place->bench().one(view_as<double>(place->value(id))));
    }
    EXPECT_EQ(found, Values(places_.size(), found.front()));
    return found.front();
  }

  /// Adds the gradients of one sum, which must be the same on all places that have them.
  void collect(std::size_t sum, std::map<std::string, Values>& gradients) {
    for (const auto& place : places_) {
      const GradientSum& about = program_.sums[sum];
      const Architecture& model = place->bench().architecture;
      const Values values = place->sum(about, static_cast<SumId>(sum));
      for (const TensorSpec& tensor : model.blocks[about.block].tensors) {
        if (!about.clears && tensor.name != model.outer.tokens) continue;
        Values& whole = gradients[tensor.name + (about.clears ? "" : " by the head")];
        whole.resize(test::whole_size(tensor), std::numeric_limits<double>::quiet_NaN());
        const std::size_t offset = about.clears ? tensor.offset : 0;
        test::for_elements(tensor, [&](Elems at, Elems in_all) {
          const double value = values.at(offset + at);
          if (whole[in_all] == whole[in_all] && whole[in_all] != value) {
            ADD_FAILURE() << tensor.name << " differs between places";
          }
          whole[in_all] = value;
        });
      }
    }
  }

  Architecture model_;
  DType type_;
  std::vector<std::unique_ptr<Place>> places_;
  StepProgram program_;
};

/// Four tiles of everything. The last tiles of the MLP and of the vocabulary are smaller.
ModelConfig config_in_tiles(const std::string& family, bool tied) {
  ModelConfig c = default_config(family);
  c.vocab_size = 61;
  c.hidden_size = 64;
  c.num_layers = 2;
  c.num_heads = 8;
  c.num_kv_heads = family == "gpt2" ? 8 : 4;
  c.head_dim = 8;
  c.intermediate_size = 120;
  c.max_sequence = 32;
  c.tie_embeddings = tied;
  c.layer_tiles = 4;
  c.vocabulary_tiles = 4;
  return c;
}

struct Case {
  std::string family;
  bool tied = false;
  DType type = DType::f32;
};

class TensorPlaceKernels : public testing::TestWithParam<Case> {};

TEST_P(TensorPlaceKernels, HaveTheBitsOfOne) {
  const auto [family, tied, type] = GetParam();
  const ModelConfig config = config_in_tiles(family, tied);
  const Results one = Step(config, type, 1).train();
  EXPECT_GT(one.loss, 0.0);
  EXPECT_EQ(one.evaluated, one.loss);
  for (const std::uint64_t places : {2U, 4U}) {
    SCOPED_TRACE(places);
    const Results several = Step(config, type, places).train();
    EXPECT_EQ(several.loss, one.loss);
    EXPECT_EQ(several.evaluated, one.loss);
    ASSERT_EQ(several.gradients.size(), one.gradients.size());
    for (const auto& [name, expected] : one.gradients) {
      EXPECT_GT(test::dot(expected, expected), 0.0) << name;
      EXPECT_EQ(several.gradients.at(name), expected) << name;
    }
  }
}

TEST(TensorPlaceMemory, IsForTheSameChunksOfRows) {
  // Sums over rows depend on the chunks of logits, which fill most of this workspace.
  ModelConfig config = config_in_tiles("llama", false);
  config.vocab_size = 163840;
  const auto workspace = [&](std::uint64_t places) {
    const Architecture model = build_architecture(config, {.tensor = places});
    return kernel_memory(model, DType::bf16, {.sequences = 64, .length = 64}, "host", 1).workspace;
  };
  const Bytes one = workspace(1);
  EXPECT_GT(one, 32 * kMiB);
  for (const std::uint64_t places : {2U, 4U}) {
    // Only the scratch for the parts of tiles is not there.
    EXPECT_LT(workspace(places), one);
    EXPECT_GT(workspace(places), one - kMiB);
  }
}

INSTANTIATE_TEST_SUITE_P(Models, TensorPlaceKernels,
                         testing::Values(Case{"llama"}, Case{"llama", true},
                                         Case{"qwen2", false, DType::bf16}, Case{"gpt2", true},
                                         Case{"gpt2", false, DType::bf16},
                                         Case{"phi3", false, DType::f16},
                                         Case{"llama", true, DType::bf16}),
                         [](const auto& info) {
                           return info.param.family + (info.param.tied ? "_tied_" : "_") +
                                  std::string(to_string(info.param.type));
                         });

}  // namespace
}  // namespace ballast::model::tensor_place_kernels_test
