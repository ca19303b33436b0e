#include <set>
#include <string>
#include <utility>

#include <fmt/format.h>
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include "ballast/text/json.h"

#include "tests/unit/config/samples.h"

namespace ballast::config::optimizer_test {
namespace {

using test::error_of;
using test::kMinimal;
using test::parse_text;
using test::with;
using Type = cpu_adam::Optimizer;

OptimizerSection optimizer(const std::string& section) {
  return parse_text(with("\"optimizer\": " + section)).optimizer;
}

std::string optimizer_error(const std::string& section) {
  return error_of(with("\"optimizer\": " + section));
}

TEST(OptimizerConfig, NamesAreReadInAnyCase) {
  const std::pair<const char*, Type> cases[] = {
      {"AdamW", Type::adamw}, {"ADAMW", Type::adamw},     {"adam", Type::adamw},
      {"Adam", Type::adamw},  {"AdaGrad", Type::adagrad}, {"adagrad", Type::adagrad},
      {"lion", Type::lion},   {"Lion", Type::lion},       {"sgd", Type::sgd},
      {"SGD", Type::sgd}};
  for (const auto& [name, type] : cases) {
    EXPECT_EQ(optimizer(std::string(R"({"type": ")") + name + "\"}").type, type) << name;
  }
  EXPECT_EQ(parse_text(kMinimal).optimizer.type, Type::adamw);
  for (const cpu_adam::OptimizerRow& row : cpu_adam::kOptimizers) {
    const OptimizerSection section =
        optimizer(fmt::format(R"({{"type": "{}"}})", row.name));  // lower case
    EXPECT_EQ(section.type, row.type == Type::adam ? Type::adamw : row.type);
  }
}

TEST(OptimizerConfig, NamesOfOtherToolsAreTranslated) {
  for (const cpu_adam::OptimizerRow& row : cpu_adam::kOptimizers) {
    for (const std::string_view name : text::words_of(row.spellings)) {
      EXPECT_EQ(
          optimizer_error(fmt::format(R"({{"type": "{}"}})", name)),
          fmt::format("c.json: optimizer.type: \"{}\" is called {} in Ballast", name, row.title));
    }
  }
}

TEST(OptimizerConfig, AdamMeansAdamWUnlessItsModeSaysOtherwise) {
  EXPECT_EQ(optimizer(R"({"type": "Adam"})").type, Type::adamw);
  EXPECT_EQ(optimizer(R"({"type": "Adam"})").weight_decay, 0.01);
  EXPECT_EQ(optimizer(R"({"type": "Adam", "params": {"adam_w_mode": true}})").type, Type::adamw);
  // The mode is read first, wherever it is in the file.
  const auto adam = optimizer(
      R"({"params": {"weight_decay": 0.5, "lr": 0.25, "adam_w_mode": false}, "type": "Adam"})");
  EXPECT_EQ(adam.type, Type::adam);
  EXPECT_EQ(adam.weight_decay, 0.5);
  EXPECT_EQ(adam.lr, 0.25);
  EXPECT_EQ(optimizer_error(R"({"type": "AdamW", "params": {"adam_w_mode": false}})"),
            "c.json: optimizer.params.adam_w_mode: the type AdamW decouples weight decay; set it "
            "to true or use the type \"Adam\"");
  EXPECT_EQ(optimizer_error(R"({"type": "AdamW", "params": {"adam_w_mode": true}})"), "");
}

TEST(OptimizerConfig, EveryTypeHasItsOwnDefaults) {
  const auto adamw = optimizer(R"({"type": "AdamW"})");
  EXPECT_EQ(adamw.lr, 1e-3);
  EXPECT_EQ(adamw.beta1, 0.9);
  EXPECT_EQ(adamw.beta2, 0.999);
  EXPECT_EQ(adamw.eps, 1e-8);
  EXPECT_EQ(adamw.weight_decay, 0.01);
  const auto adam = optimizer(R"({"type": "Adam", "params": {"adam_w_mode": false}})");
  EXPECT_EQ(adam.lr, 1e-3);
  EXPECT_EQ(adam.beta2, 0.999);
  EXPECT_EQ(adam.eps, 1e-8);
  EXPECT_EQ(adam.weight_decay, 0.0);
  const auto adagrad = optimizer(R"({"type": "Adagrad"})");
  EXPECT_EQ(adagrad.lr, 1e-2);
  EXPECT_EQ(adagrad.eps, 1e-10);
  EXPECT_EQ(adagrad.weight_decay, 0.0);
  const auto lion = optimizer(R"({"type": "Lion"})");
  EXPECT_EQ(lion.lr, 1e-4);
  EXPECT_EQ(lion.beta1, 0.9);
  EXPECT_EQ(lion.beta2, 0.99);
  EXPECT_EQ(lion.weight_decay, 0.0);
  const auto sgd = optimizer(R"({"type": "SGD"})");
  EXPECT_EQ(sgd.lr, 1e-3);
  EXPECT_EQ(sgd.momentum, 0.0);
  EXPECT_FALSE(sgd.nesterov);
  EXPECT_EQ(sgd.weight_decay, 0.0);
}

TEST(OptimizerConfig, ParametersAreRead) {
  const auto lion = optimizer(
      R"({"type": "Lion", "params": {"lr": 2e-4, "betas": [0.95, 0.98], "weight_decay": 1}})");
  EXPECT_EQ(lion.lr, 2e-4);
  EXPECT_EQ(lion.beta1, 0.95);
  EXPECT_EQ(lion.beta2, 0.98);
  EXPECT_EQ(lion.weight_decay, 1.0);
  const auto sgd = optimizer(
      R"({"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9, "nesterov": true,
                                    "weight_decay": 0.2, "dampening": 0}})");
  EXPECT_EQ(sgd.lr, 0.1);
  EXPECT_EQ(sgd.momentum, 0.9);
  EXPECT_TRUE(sgd.nesterov);
  EXPECT_EQ(sgd.weight_decay, 0.2);
  EXPECT_EQ(optimizer(R"({"type": "Adagrad", "params": {"eps": 1e-5}})").eps, 1e-5);
}

TEST(OptimizerConfig, AParameterOfAnotherTypeIsRefused) {
  const std::pair<std::string, const char*> cases[] = {
      {"AdamW", "momentum nesterov lr_decay"},
      {"Adam", "dampening"},
      {"Adagrad", "betas momentum adam_w_mode"},
      {"Lion", "eps nesterov initial_accumulator_value"},
      {"SGD", "betas eps adam_w_mode"}};
  for (const auto& [type, names] : cases) {
    for (const std::string_view name : text::words_of(names)) {
      EXPECT_EQ(
          optimizer_error(fmt::format(R"({{"type": "{}", "params": {{"{}": true}}}})", type, name)),
          fmt::format("c.json: optimizer.params.{}: is not a parameter of the optimizer \"{}\"",
                      name, type));
    }
  }
}

TEST(OptimizerConfig, ValuesThatAreNotInThisVersionAreRefused) {
  EXPECT_EQ(optimizer_error(R"({"type": "Adagard"})"),
            "c.json: optimizer.type: expected one of " + test::optimizer_titles() +
                ", got the string \"Adagard\" (did you mean 'Adagrad'?)");
  EXPECT_EQ(optimizer_error(R"({"type": "SGD", "params": {"dampening": 0.5}})"),
            "c.json: optimizer.params.dampening: must be 0 in Ballast, got 0.5");
  EXPECT_EQ(optimizer_error(R"({"type": "Adagrad", "params": {"lr_decay": 0.1}})"),
            "c.json: optimizer.params.lr_decay: must be 0 in Ballast, got 0.1");
  EXPECT_EQ(optimizer_error(R"({"type": "SGD", "params": {"momentum": 1}})"),
            "c.json: optimizer.params.momentum: must be at least 0 and below 1, got 1");
  EXPECT_EQ(optimizer_error(R"({"type": "SGD", "params": {"nesterov": true}})"),
            "c.json: optimizer.params.nesterov: needs a momentum above 0; give momentum");
}

TEST(OptimizerConfig, StatesAreStoredAsTheKeySays) {
  EXPECT_EQ(parse_text(kMinimal).ballast.optimizer_states, cpu_adam::Moments::Format::f32);
  for (const char* states : {"fp32", "bf16_first", "8bit"}) {
    const std::string key = std::string("ballast.optimizer_states=") + states;
    EXPECT_EQ(name_of(parse_text(kMinimal, {key}).ballast.optimizer_states), states);
  }
  EXPECT_EQ(error_of(with(R"("optimizer": {"type": "Adagrad"},
                             "ballast": {"optimizer_states": "bf16_first"})")),
            "c.json: ballast.optimizer_states: \"bf16_first\" applies to the first moment, which "
            "Adagrad lacks; use \"fp32\" or \"8bit\"");
}

TEST(OptimizerConfig, TheUpdateRunsOnAnyNodeUnlessOneIsNamed) {
  EXPECT_EQ(parse_text(kMinimal).ballast.update_numa_node, std::nullopt);
  EXPECT_EQ(parse_text(kMinimal, {"ballast.update_numa_node=auto"}).ballast.update_numa_node,
            std::nullopt);
  EXPECT_EQ(parse_text(kMinimal, {"ballast.update_numa_node=0"}).ballast.update_numa_node, 0);
}

TEST(OptimizerConfig, PrintsTheParametersOfItsTypeAndReadsThemBack) {
  for (const cpu_adam::OptimizerRow& row : cpu_adam::kOptimizers) {
    std::set<std::string> names;
    for (const cpu_adam::HyperParameter& own : row.parameters) {
      if (!own.name.empty()) names.emplace(own.name);
    }
    if (row.type == Type::adam) names.emplace("adam_w_mode");
    Config config = parse_text(kMinimal);
    config.optimizer = OptimizerSection::defaults(row.type);
    config.optimizer.lr = 0.5;
    config.optimizer.weight_decay = 0.25;
    const auto printed = nlohmann::ordered_json::parse(print(config))["optimizer"];
    std::set<std::string> found;
    for (const auto& [name, value] : printed["params"].items()) found.insert(name);
    EXPECT_EQ(found, names) << printed["type"];
    const OptimizerSection again = parse_text(print(config)).optimizer;
    EXPECT_EQ(again, config.optimizer) << printed["type"];
  }
}

TEST(ConfigWithoutOptimizer, HasThatOfTransformersTrainer) {
  const Config c = parse_text(kMinimal, {"ballast.steps=30"});
  EXPECT_EQ(c.optimizer.type, cpu_adam::Optimizer::adamw);
  EXPECT_EQ(c.optimizer.lr, 5e-5);
  EXPECT_EQ(c.optimizer.beta2, 0.999);
  EXPECT_EQ(c.optimizer.eps, 1e-8);
  EXPECT_EQ(c.optimizer.weight_decay, 0.0);
  EXPECT_EQ(c.scheduler.type, SchedulerSection::Type::linear);
  EXPECT_EQ(c.scheduler.total_num_steps, 30U);
  EXPECT_EQ(c.scheduler.warmup_num_steps, 0U);
  ASSERT_EQ(c.notes.size(), 1U);
  EXPECT_EQ(
      c.notes[0],
      "optimizer: not given, so it is that of transformers' Trainer: AdamW with learning rate "
      "5e-05 and weight_decay 0.0, and the learning rate falls linearly to 0; give the section "
      "to choose");
  EXPECT_EQ(parse_text(kMinimal).scheduler.total_num_steps, 0U);  // the command line may give it
  // "auto" has these values, too.
  const Config automatic =
      parse_text(kMinimal, {R"(optimizer={"params": {"lr": "auto", "betas": "auto", "eps": "auto",
                                          "weight_decay": "auto"}})"});
  EXPECT_EQ(automatic.optimizer.lr, c.optimizer.lr);
  EXPECT_EQ(automatic.optimizer.weight_decay, c.optimizer.weight_decay);
}

TEST(ConfigWithoutOptimizer, KeepsItsScheduler) {
  const Config c = parse_text(kMinimal, {R"(scheduler={"type": "WarmupLR"})"});
  EXPECT_EQ(c.optimizer.lr, 5e-5);
  EXPECT_EQ(c.scheduler.type, SchedulerSection::Type::warmup);
  EXPECT_EQ(c.notes.at(0).find("falls linearly"), std::string::npos);
}

TEST(ConfigWithoutOptimizer, IsNotOneWithoutSomeParameters) {
  const Config c = parse_text(kMinimal, {"optimizer.type=AdamW"});
  EXPECT_EQ(c.optimizer.lr, 1e-3);
  EXPECT_EQ(c.optimizer.weight_decay, 0.01);
  EXPECT_EQ(c.scheduler.type, SchedulerSection::Type::constant);
}

TEST(LinearSchedule, EndsWithTheRunUnlessItSaysOtherwise) {
  const auto schedule = [](const std::string& params) {
    return parse_text(kMinimal, {"optimizer.type=SGD", "ballast.steps=9",
                                 R"(scheduler={"type": "linear", "params": {)" + params + "}}"})
        .scheduler;
  };
  EXPECT_EQ(schedule("").total_num_steps, 9U);
  EXPECT_EQ(schedule("").warmup_num_steps, 0U);
  EXPECT_EQ(schedule(R"("total_num_steps": 5, "warmup_num_steps": 2)").total_num_steps, 5U);
  EXPECT_EQ(schedule(R"("warmup_num_steps": 2)").warmup_num_steps, 2U);
}

}  // namespace
}  // namespace ballast::config::optimizer_test
