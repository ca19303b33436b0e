#include "ballast/model/step_program.h"

#include <algorithm>
#include <cstdlib>
#include <fstream>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "ballast/core/error.h"
#include "ballast/model/family.h"

#include "tests/support/fixtures.h"
#include "tests/support/step_programs.h"

namespace ballast::model::step_program_test {
namespace {

/// A model and the other inputs of a program.
struct Case {
  std::string name;
  Architecture model;
  StepShape shape = {.micro_batch = {.sequences = 2, .length = 16}};
};

ModelConfig config_of(const std::string& family, std::uint64_t layers) {
  ModelConfig c = default_config(family);
  c.vocab_size = 96;
  c.hidden_size = 32;
  c.num_layers = layers;
  c.num_heads = 4;
  c.intermediate_size = 64;
  c.max_sequence = 16;
  return c;
}

ModelConfig with_experts() {
  ModelConfig c = config_of("qwen2_moe", 1);
  c.details["num_experts"] = std::uint64_t{4};
  c.details["num_experts_per_tok"] = std::uint64_t{2};
  c.details["moe_intermediate_size"] = std::uint64_t{16};
  c.details["shared_expert_intermediate_size"] = std::uint64_t{48};
  return c;
}

/// Norms of the experts' sum.
Case experts_between_norms() {
  ModelConfig c = config_of("afmoe", 1);
  c.details["num_experts"] = std::uint64_t{2};
  c.details["num_experts_per_tok"] = std::uint64_t{1};
  c.details["num_dense_layers"] = std::uint64_t{0};
  c.details["moe_intermediate_size"] = std::uint64_t{16};
  return {"experts_between_norms", build_architecture(c)};
}

/// Experts read the norm of attention.
Case experts_parallel_to_attention() {
  ModelConfig c = config_of("cohere2_moe", 1);
  c.details["num_experts"] = std::uint64_t{2};
  return {"experts_parallel_to_attention", build_architecture(c)};
}

Case tiles_of_layers() {
  ModelConfig c = config_of("llama", 1);
  c.num_kv_heads = 2;
  c.layer_tiles = 2;
  return {"layers_in_tiles", build_architecture(c)};
}

Case tiles_of_the_vocabulary(bool tied) {
  ModelConfig c = config_of("llama", 1);
  c.tie_embeddings = tied;
  c.vocabulary_tiles = 2;
  return {tied ? "tied_vocabulary_in_tiles" : "vocabulary_in_tiles", build_architecture(c)};
}

Architecture with_adapters(ModelConfig c) {
  Architecture model = build_architecture(std::move(c));
  AdapterConfig adapters;
  adapters.rank = 4;
  adapters.targets = {"q_proj", "v_proj"};
  adapt(model, adapters, [](std::string_view key, const std::string& rule) {
    throw Error(ErrorCategory::config, std::string(key) + ": " + rule);
  });
  return model;
}

Case pairs() {
  Case one = {"pairs_with_reference", with_adapters(config_of("llama", 2))};
  one.shape.pairs = true;
  return one;
}

Case quantised() {
  Case one = {"quantised_base_packed", with_adapters(config_of("llama", 2))};
  quantize(one.model, {.format = Quantization::Format::nf4},
           [](const std::string& rule) { throw Error(ErrorCategory::config, rule); });
  one.shape.packed = true;
  return one;
}

/// The last layer attends to the keys of the first one, and all have inputs.
Case linked_layers() {
  ModelConfig c = config_of("gemma4", 3);
  c.details["layer_types"] =
      text::Json::array({"full_attention", "sliding_attention", "full_attention"});
  c.details["global_head_dim"] = std::uint64_t{16};
  c.details["num_kv_shared_layers"] = std::uint64_t{1};
  c.details["hidden_size_per_layer_input"] = std::uint64_t{8};
  c.details["vocab_size_per_layer_input"] = std::uint64_t{96};
  return {"shared_keys_and_layer_inputs", build_architecture(c)};
}

Case shared_experts() {
  Case one = {"experts_of_two_ranks", build_architecture(with_experts(), {.experts = 2})};
  one.shape.ranks = 2;
  return one;
}

Case pairs_of_experts() {
  Case one = {"pairs_of_experts", with_adapters(with_experts())};
  one.shape.pairs = true;
  return one;
}

Case losses_of_a_step() {
  ModelConfig c = with_experts();
  c.num_layers = 2;
  c.details["output_router_logits"] = true;
  Case one = {"router_losses_of_a_step", build_architecture(c)};
  one.shape.micro_batches = 2;
  return one;
}

/// Two tensor places, each with one tile of attention, two of the MLP and two of the vocabulary.
Case tensor_places(bool tied) {
  ModelConfig c = config_of("llama", 1);
  c.num_kv_heads = 2;
  c.tie_embeddings = tied;
  c.layer_tiles = 4;
  c.vocabulary_tiles = 4;
  Case one = {tied ? "tied_tiles_of_two_tensor_places" : "tiles_of_two_tensor_places",
              build_architecture(c, {.tensor = 2})};
  one.shape.sum_scratch = 8192;
  return one;
}

std::vector<Case> cases() {
  return {{"whole_layers", build_architecture(config_of("llama", 2))},
          {"tied_whole_layers", build_architecture(config_of("gpt2", 2))},
          tiles_of_layers(),
          tiles_of_the_vocabulary(false),
          tiles_of_the_vocabulary(true),
          {"experts", build_architecture(with_experts())},
          shared_experts(),
          experts_between_norms(),
          experts_parallel_to_attention(),
          tensor_places(false),
          tensor_places(true),
          pairs(),
          quantised(),
          linked_layers(),
          losses_of_a_step(),
          pairs_of_experts()};
}

/// Sizes as a device might need them: round numbers, so that the texts do not depend on kernels.
KernelSizes sizes_of(const Case& one) {
  const Bytes activation = one.shape.micro_batch.tokens() * one.model.config.hidden_size * 2;
  const std::size_t blocks = one.model.blocks.size();
  KernelSizes sizes = {.workspace = 65536,
                       .intermediates = std::vector<Bytes>(blocks, 8 * activation),
                       .rows = activation + 1024,
                       .cleared = std::vector<Bytes>(blocks, 256)};
  for (const BlockSpec& block : one.model.blocks) {
    if (block.content == BlockContent::expert) sizes.experts = block.expert + block.pieces;
  }
  sizes.router_totals = 2 * sizes.experts;
  return sizes;
}

StepProgram program_of(const Case& one) {
  return write_program(one.model, DType::bf16, one.shape, sizes_of(one));
}

TEST(StepProgramText, EqualsTheGoldenFiles) {
  const bool rewrites = std::getenv("BALLAST_REWRITE_GOLDEN") != nullptr;
  for (const Case& one : cases()) {
    const std::string path = test::fixture("step_programs/" + one.name + ".txt");
    const std::string text = to_text(program_of(one));
    if (rewrites) std::ofstream(path) << text;
    std::ostringstream golden;
    golden << std::ifstream(path).rdbuf();
    EXPECT_EQ(text, golden.str()) << path << " differs. After a change that is wanted, set "
                                  << "BALLAST_REWRITE_GOLDEN=1 and review the difference.";
  }
}

TEST(StepProgramCheck, FindsNothingInProgramsOfModels) {
  for (const Case& one : cases()) {
    EXPECT_EQ(check(program_of(one)), std::vector<std::string>()) << one.name;
  }
}

/// The only breach of `program`, or all of them.
std::string breach_of(const StepProgram& program) {
  std::string all;
  for (const std::string& line : check(program)) all += (all.empty() ? "" : "; ") + line;
  return all;
}

Pass& pass_of(StepProgram& program, Kernel kernel) {
  for (Pass& pass : program.passes) {
    if (pass.kernel == kernel) return pass;
  }
  throw Error(ErrorCategory::state, "no such pass");
}

Operand& operand_of(StepProgram& program, Kernel kernel, Port port) {
  for (Operand& operand : pass_of(program, kernel).operands) {
    if (operand.port == port) return operand;
  }
  throw Error(ErrorCategory::state, "no such operand");
}

StepProgram whole() {
  return program_of({"", build_architecture(config_of("llama", 2))});
}

TEST(StepProgramCheck, FindsInvalidNumbers) {
  StepProgram program = whole();
  operand_of(program, Kernel::layer, Port::input).number = 99;
  EXPECT_EQ(breach_of(program), "layer: input has an invalid number");
  program = whole();
  program.training.back().finishes = {99};
  EXPECT_EQ(breach_of(program), "a stop finishes the invalid block 99");
}

TEST(StepProgramCheck, FindsReadsOfMissingValues) {
  StepProgram program = whole();
  std::swap(program.evaluation[1], program.evaluation[2]);
  EXPECT_EQ(breach_of(program),
            "layer of layer 1 reads 'input of layer 1', which does not exist; "
            "layer of layer 0 reads 'input of layer 0', which does not exist; "
            "head evaluate of head reads 'input of head', which does not exist");

  // One stop later, the next activation has taken its buffer.
  program = whole();
  const Operand first = operand_of(program, Kernel::layer, Port::input);
  pass_of(program, Kernel::head_evaluate).operands.push_back(first);
  EXPECT_EQ(breach_of(program),
            "head evaluate of head reads 'input of layer 0', which does not exist");
}

TEST(StepProgramCheck, FindsGradientsThatBeginTwice) {
  StepProgram program = whole();
  operand_of(program, Kernel::layer_backward, Port::activation_gradient).access =
      OperandAccess::writes;
  EXPECT_EQ(breach_of(program), "layer backward of layer 1 writes 'activation gradient' again");
}

/// Programs whose kernels can keep attention without the rest differ only in optional operands.
TEST(StepProgram, MayKeepAttentionOfLayers) {
  const Case one = cases().front();
  const Bytes bytes = 3 * 4096;
  KernelSizes sizes = sizes_of(one);
  sizes.attention.assign(one.model.blocks.size(), bytes);
  StepProgram program = write_program(one.model, DType::bf16, one.shape, sizes);
  EXPECT_EQ(check(program), std::vector<std::string>());
  const MicroBatchShape shape = one.shape.micro_batch;
  const auto layer = static_cast<BlockId>(one.model.first_layer());
  const double attention = one.model.attention_flops(layer, shape.sequences, shape.length);
  const Operand& kept = operand_of(program, Kernel::layer_backward, Port::kept_attention);
  EXPECT_EQ(program.values[kept.number].bytes, bytes);
  EXPECT_EQ(kept.spared.attention_flops, attention);
  EXPECT_EQ(kept.spared.flops,
            one.model.attention_output_flops(layer, shape.sequences, shape.length));
  EXPECT_GT(kept.spared.flops, attention);
  const Pass& backward = pass_of(program, Kernel::layer_backward);
  EXPECT_EQ(backward.cost.attention_backward_flops, 2.0 * attention);
  EXPECT_EQ(backward.cost.attention_flops, 0.0);
  EXPECT_EQ(operand_of(program, Kernel::layer_backward, Port::kept).absent.attention_flops,
            attention);
  // Without these operands the passes are those of other programs.
  for (Pass& pass : program.passes) {
    std::erase_if(pass.operands,
                  [](const Operand& one) { return one.port == Port::kept_attention; });
  }
  const StepProgram without = program_of(one);
  ASSERT_EQ(program.passes.size(), without.passes.size());
  for (std::size_t p = 0; p < program.passes.size(); ++p) {
    EXPECT_EQ(program.passes[p].operands.size(), without.passes[p].operands.size());
    EXPECT_EQ(program.passes[p].cost, without.passes[p].cost);
    EXPECT_EQ(program.passes[p].shape, without.passes[p].shape);
  }
}

TEST(StepProgramCheck, FindsGradientsCompletedOutOfOrder) {
  StepProgram program = whole();
  std::swap(program.training[4].finishes, program.training[5].finishes);
  EXPECT_EQ(breach_of(program),
            "layer backward adds to the gradient of layer 0, which is complete; "
            "gradients are not completed in order from head down to embedding");
  program = whole();
  program.training.back().finishes.clear();
  EXPECT_EQ(breach_of(program), "gradients are not completed in order from head down to embedding");
}

TEST(StepProgramCheck, FindsUnusedGradientSums) {
  StepProgram program = whole();
  pass_of(program, Kernel::embed_backward).operands.pop_back();
  EXPECT_EQ(breach_of(program), "nothing adds to the gradient sum of embedding");
}

TEST(StepProgramCheck, FindsAbsenceCostsOfRequiredOperands) {
  StepProgram program = whole();
  operand_of(program, Kernel::layer, Port::input).absent.flops = 1.0;
  EXPECT_EQ(breach_of(program),
            "layer of layer 0: input is not optional, but has a cost of absence");
  program = whole();
  operand_of(program, Kernel::layer_backward, Port::input).optional = true;
  EXPECT_EQ(breach_of(program),
            "layer backward of layer 1: input is optional, but not kept without a recipe");
}

TEST(StepProgramCheck, FindsRecipesThatDoNotWriteTheirValue) {
  StepProgram program = program_of(tiles_of_layers());
  program.recipes.back().stops.pop_back();
  EXPECT_EQ(breach_of(program).find("the recipe of 'input of layer 0 mlp' does not write it; "), 0U)
      << breach_of(program);
}

TEST(StepProgramCheck, FindsRecipesThatReadUnkeptValues) {
  StepProgram program = program_of(tiles_of_layers());
  for (StepValue& value : program.values) {
    if (value.waits == Waits::placed) value.waits = Waits::no;
  }
  const std::string breaches = breach_of(program);
  for (const std::string recipe : {"input of layer 0 mlp", "rows of layer 0 attention"}) {
    EXPECT_NE(breaches.find("the recipe of '" + recipe +
                            "' reads 'input of layer 0 attention', "
                            "which is not kept"),
              std::string::npos)
        << breaches;
  }
}

TEST(StepProgramCheck, FindsRowsThatAreNotCounted) {
  StepProgram program = program_of({"", build_architecture(with_experts())});
  operand_of(program, Kernel::expert, Port::routing_counts).port = Port::batch;
  EXPECT_EQ(breach_of(program), "expert of layer 0 expert 0 does not read its row counts");
  program = program_of({"", build_architecture(with_experts())});
  // Experts before their router.
  std::rotate(program.training.begin() + 2, program.training.begin() + 3,
              program.training.begin() + 5);
  EXPECT_NE(breach_of(program).find("reads 'layer 0 router routing', which does not exist"),
            std::string::npos)
      << breach_of(program);
}

}  // namespace
}  // namespace ballast::model::step_program_test
