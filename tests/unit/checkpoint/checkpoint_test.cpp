#include "src/checkpoint/checkpoint.h"

#include <algorithm>
#include <random>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "ballast/core/error.h"
#include "ballast/engine/blueprint.h"
#include "ballast/formats/safetensors.h"
#include "ballast/model/architecture.h"
#include "ballast/model/family.h"
#include "ballast/setup/setup.h"
#include "ballast/state/checksum.h"

#include "src/checkpoint/format.h"
#include "src/checkpoint/kept_checkpoints.h"
#include "src/checkpoint/writer.h"
#include "tests/support/damaged_json.h"
#include "tests/support/expect_error.h"
#include "tests/support/fuzz_inputs.h"
#include "tests/support/tags.h"
#include "tests/support/temp_dir.h"
#include "tests/support/tiny_config.h"
#include "tests/support/tiny_training.h"
#include "tests/unit/checkpoint/checkpoint_files.h"

namespace ballast::checkpoint::checkpoint_test {
namespace {

namespace fs = std::filesystem;
using engine::StateKind;
using engine::StateRange;
using test::expect_error;
using test::Forms;
using test::WrittenStates;

constexpr CheckpointQuestions kAll = {.whole = true, .hash = true};

CheckpointReport examined(const fs::path& folder, const CheckpointQuestions& questions = kAll) {
  return examine_checkpoint(folder, questions, [](Bytes, Bytes) {});
}

TEST(Checkpoint, ItsHashIsThatOfTheStatesInEveryForm) {
  const Forms forms;
  const std::uint64_t expected = forms.states.hash();
  for (const fs::path& folder : forms.folders) {
    const CheckpointReport report = examined(folder);
    EXPECT_EQ(report.damage, "");
    EXPECT_EQ(report.hash, expected) << folder;
  }
}

TEST(Checkpoint, DescribesItsContent) {
  const Forms forms;
  for (std::size_t i = 0; i < forms.folders.size(); ++i) {
    const auto content = examined(forms.folders[i], {}).content.value();
    EXPECT_EQ(content.portable, i % 2 == 1);
    EXPECT_EQ(content.ranks, 1 + i / 2);
    EXPECT_EQ(content.facts.step, 7U);
    EXPECT_EQ(content.facts.skipped_in_a_row, 1U);
    EXPECT_EQ(content.files.size(), content.portable ? 4U : 1 + 2 * content.ranks);
    ASSERT_EQ(content.states.size(), 6U);
    EXPECT_EQ(content.states[0].kind, "weights");
    EXPECT_EQ(content.states[0].bytes(), 2U * 405300);
    EXPECT_EQ(content.states[5].kind, "second_exponents");
    EXPECT_EQ(content.states[5].entries, 20U + 1563 + 2);
    Bytes on_disk = 0;
    for (const auto& entry : fs::directory_iterator(forms.folders[i])) on_disk += entry.file_size();
    EXPECT_EQ(content.bytes(), on_disk);
  }
}

TEST(Checkpoint, ReadsTheSameRangesInEveryForm) {
  const Forms forms;
  std::mt19937_64 random(3);
  for (const fs::path& folder : forms.folders) {
    const Checkpoint checkpoint(folder);
    for (const StateRange& whole : checkpoint.whole_ranges()) {
      const auto expected = forms.states.array(whole.block, whole.kind);
      ASSERT_EQ(whole.bytes(), expected.size());
      const Elems first = random() % whole.count;
      const Elems count = 1 + random() % (whole.count - first);
      std::vector<std::byte> found(count * whole.width);
      checkpoint.read({whole.block, whole.kind, first, count, whole.width}, found);
      EXPECT_TRUE(std::equal(found.begin(), found.end(),
                             expected.begin() + static_cast<std::ptrdiff_t>(first * whole.width)))
          << folder;
    }
  }
}

TEST(PortableCheckpoint, IsSafetensorsWithATensorForEachBlockAndKind) {
  const Forms forms;
  const formats::SafetensorsReader file(forms.folders[1] / "block-1.safetensors");
  ASSERT_EQ(file.tensors().size(), 6U);
  const std::vector<std::pair<std::string, std::string>> expected = {
      {"layer.0.weights", "BF16"},       {"layer.0.remainders", "U16"},
      {"layer.0.first_moments", "U8"},   {"layer.0.second_moments", "U8"},
      {"layer.0.first_exponents", "U8"}, {"layer.0.second_exponents", "U8"}};
  for (std::size_t i = 0; i < expected.size(); ++i) {
    const formats::StoredTensor& tensor = file.tensors()[i];
    EXPECT_EQ(tensor.name, expected[i].first);
    EXPECT_EQ(tensor.dtype, expected[i].second);
    const std::string bytes = test::read_text(file.path()).substr(tensor.offset, tensor.bytes);
    const auto array = forms.states.array(1, WrittenStates::kinds()[i]);
    EXPECT_EQ(state::checksum(std::as_bytes(std::span(bytes))), state::checksum(array));
  }
  EXPECT_EQ(state_dtype(StateKind::first_moments, 4), "F32");
  EXPECT_EQ(state_dtype(StateKind::first_moments, 2), "BF16");
  EXPECT_EQ(state_dtype(StateKind::weights, 4), "F32");
  EXPECT_EQ(state_dtype(StateKind::weights, 1), "");
}

TEST(PortableCheckpoint, OfAPortableCheckpointHasTheSameFiles) {
  const Forms forms;
  const fs::path copy = forms.dir.path() / "copy";
  export_states(forms.folders[3], copy, [](Bytes, Bytes) {});
  for (const auto& entry : fs::directory_iterator(forms.folders[3])) {
    EXPECT_TRUE(test::read_text(entry.path()) == test::read_text(copy / entry.path().filename()))
        << entry.path();
  }
}

TEST(PortableCheckpoint, ExportsTheLatestCompleteCheckpointOfARun) {
  const Forms forms;
  const fs::path run = forms.dir.path() / "run";
  fs::remove(run / kCheckpoints / "step-3" / "rank-2.states");
  export_states(run, forms.dir.path() / "new", [](Bytes, Bytes) {});
  EXPECT_EQ(examined(forms.dir.path() / "new").content.value().ranks, 2U);
}

/// Expects that a failed export has left nothing.
void expect_no_export(const Forms& forms) {
  for (const auto& entry : fs::directory_iterator(forms.dir.path())) {
    EXPECT_FALSE(entry.path().filename().string().starts_with("new")) << entry.path();
  }
}

TAG_TESTS("one_thread", "PortableCheckpoint.OfDamagedStatesIsNotWritten");
TEST(PortableCheckpoint, OfDamagedStatesIsNotWritten) {
  const Forms forms;
  const fs::path out = forms.dir.path() / "new";
  for (const std::size_t form : {2U, 3U}) {
    const fs::path file =
        forms.folders[form] / (form == 2 ? "rank-1.states" : "block-1.safetensors");
    const std::string whole = test::read_text(file);
    std::string changed = whole;
    changed[kCheckpointChunk + 100] ^= 1;
    test::write_text(file, changed);
    const std::string advice = form == 2 ? "another checkpoint of this run is " : "write it again";
    expect_error(ErrorCategory::data, {file.string(), "damaged", "at offset 1048576", advice},
                 [&] { export_states(forms.folders[form], out, [](Bytes, Bytes) {}); });
    expect_no_export(forms);
    test::write_text(file, whole);
  }
  expect_error(ErrorCategory::interrupted, {}, [&] {
    export_states(forms.folders[0], out,
                  [](Bytes, Bytes) { throw Error(ErrorCategory::interrupted, "stop"); });
  });
  expect_no_export(forms);
  expect_error(ErrorCategory::usage, {"out-1 exists"},
               [&] { export_states(forms.folders[0], forms.folders[1], [](Bytes, Bytes) {}); });
  expect_error(ErrorCategory::data, {"nowhere", "no such checkpoint or run"},
               [&] { export_states(forms.dir.path() / "nowhere", out, [](Bytes, Bytes) {}); });
  expect_error(ErrorCategory::data, {"neither a checkpoint nor a run directory"},
               [&] { export_states(forms.dir.path(), out, [](Bytes, Bytes) {}); });
}

/// Expects that damage is found, and that the message is one line that names a file of the folder.
/// Returns whether it was found.
bool is_found(const fs::path& folder) {
  const std::string damage = examined(folder).damage;
  if (damage.empty()) return false;
  EXPECT_NE(damage.find(folder.native()), std::string::npos) << damage;
  EXPECT_EQ(damage.find_first_of("\n\r\x1b"), std::string::npos) << damage;
  return true;
}

TAG_TESTS("one_thread", "Checkpoint.EveryChangeOfItsFilesIsFound");
TEST(Checkpoint, EveryChangeOfItsFilesIsFound) {
  const Forms forms;
  std::mt19937_64 random(5);
  const std::size_t inputs = test::fuzz_inputs(600);
  std::size_t same = 0;  // white space, or values that were exchanged with equal ones
  for (const std::size_t form : {2U, 3U}) {
    const fs::path& folder = forms.folders[form];
    const CheckpointContent content = examined(folder, {}).content.value();
    for (const CheckpointFile& file : content.files) {
      const std::string whole = test::read_text(file.path);
      for (std::size_t i = 0; i < inputs; i += 30) {
        const bool json = file.path.extension() == ".json" && random() % 2 == 0;
        const std::string changed =
            json ? test::damaged_json(whole, random) : test::damaged(whole, random);
        if (changed == whole) continue;
        test::write_text(file.path, changed);
        if (!is_found(folder)) {
          ++same;
          EXPECT_EQ(file.path.extension(), ".json") << i;
        }
        if (HasFailure()) return;
      }
      fs::remove(file.path);
      EXPECT_TRUE(is_found(folder)) << file.path;
      fs::create_directory(file.path);
      EXPECT_TRUE(is_found(folder)) << file.path;
      fs::remove(file.path);
      test::write_text(file.path, whole);
      EXPECT_FALSE(is_found(folder));
    }
  }
  EXPECT_LT(same, inputs / 20);
}

/// A file of JSON whose content is damaged and whose checksum fits.
std::string resealed(const std::string& sealed, std::mt19937_64& random) {
  const text::Json json = text::parse_json(sealed, "test");
  const std::string changed = test::damaged_json(json.find("content")->compact(), random);
  try {
    return seal(text::parse_json(changed, "test", {.deepest = 5000}));
  } catch (const Error&) {
    return sealed;
  }
}

TAG_TESTS("one_thread", "Checkpoint.ImpossibleContentIsRefusedOrRead");
/// No program writes such files, but they must not end the program.
TEST(Checkpoint, ImpossibleContentIsRefusedOrRead) {
  const Forms forms;
  std::mt19937_64 random(6);
  const std::size_t inputs = test::fuzz_inputs(1200);
  std::size_t found = 0;
  for (std::size_t i = 0; i < inputs; ++i) {
    const fs::path& folder = forms.folders[i % 2];
    const fs::path facts = facts_file(folder);
    const std::string whole = test::read_text(facts);
    if (i % 4 == 0) {
      const fs::path ranges = ranges_file(folder, 0);
      const std::string before = test::read_text(ranges);
      const std::string after = resealed(before, random);
      test::write_text(ranges, after);
      text::Json content = *text::parse_json(whole, "test").find("content");
      content["ranks"] = text::Json::array({checksum_text(after)});
      test::write_text(facts, seal(content));
      found += is_found(folder) ? 1 : 0;
      test::write_text(ranges, before);
    } else {
      test::write_text(facts, resealed(whole, random));
      found += is_found(folder) ? 1 : 0;
    }
    test::write_text(facts, whole);
    if (HasFailure()) FAIL() << i;
  }
  EXPECT_GT(found, inputs / 4);
  EXPECT_FALSE(is_found(forms.folders[0]));
  EXPECT_FALSE(is_found(forms.folders[1]));
}

TAG_TESTS("one_thread", "Checkpoint.OfALaterVersionOrAnotherFormatIsRefused");
TEST(Checkpoint, OfALaterVersionOrAnotherFormatIsRefused) {
  const Forms forms;
  for (const fs::path& folder : {forms.folders[0], forms.folders[1]}) {
    text::Json content =
        *text::parse_json(test::read_text(facts_file(folder)), "test").find("content");
    content["version"] = 99;
    test::write_text(facts_file(folder), seal(content));
    EXPECT_NE(examined(folder).unreadable.find("checkpoint.json: of version 99"),
              std::string::npos);
    content["version"] = 1;
    content["format"] = "square";
    test::write_text(facts_file(folder), seal(content));
    EXPECT_NE(examined(folder).unreadable.find("unknown format"), std::string::npos);
  }
}

TAG_TESTS("one_thread", "Checkpoint.AnErrorOfTheSystemIsNotDamage");
TEST(Checkpoint, AnErrorOfTheSystemIsNotDamage) {
  const Forms forms;
  for (const char* name : {"checkpoint.json", "rank-0.json", "rank-0.states"}) {
    const fs::path file = forms.folders[0] / name;
    const fs::path away = forms.dir.path() / "away";
    fs::rename(file, away);
    expect_error(ErrorCategory::data, {name, "No such file"},
                 [&] { Checkpoint checkpoint(forms.folders[0]); });
    fs::create_symlink(name, file);  // a link to itself: ELOOP stops root, too, unlike EACCES
    expect_error(ErrorCategory::io,
                 {name, "Too many levels", "this is not damage", "symbolic links"},
                 [&] { Checkpoint checkpoint(forms.folders[0]); });
    const CheckpointReport report = examined(forms.folders[0]);
    EXPECT_EQ(report.damage, "");
    EXPECT_NE(report.unreadable.find(file.string()), std::string::npos);
    EXPECT_FALSE(report.usable());
    fs::remove(file);
    fs::rename(away, file);
  }
  EXPECT_TRUE(examined(forms.folders[0]).usable());
  const fs::path run = forms.dir.path() / "run";
  const fs::path checkpoints = run / kCheckpoints;
  fs::rename(checkpoints, forms.dir.path() / "away");
  EXPECT_TRUE(checkpoints_of(run).empty());
  fs::create_symlink(kCheckpoints, checkpoints);
  expect_error(ErrorCategory::io, {"cannot list", "Too many levels"},
               [&] { static_cast<void>(checkpoints_of(run)); });
}

TAG_TESTS("one_thread", "Checkpoint.ADamagedOneKeepsItsFilesExceptSwapFiles");
TEST(Checkpoint, ADamagedOneKeepsItsFilesExceptSwapFiles) {
  const Forms forms;
  const fs::path run = forms.dir.path() / "run";
  for (const char* expected : {"damaged-step-2", "damaged-step-2-2"}) {
    forms.states.write(run / kCheckpoints / "step-2", 2);
    test::write_text(run / kCheckpoints / "step-2/rank-0.swap-0", "swapped");
    const fs::path aside = set_aside(run / kCheckpoints / "step-2");
    EXPECT_EQ(aside.filename(), expected);
    EXPECT_TRUE(fs::exists(aside / "rank-1.states"));
    EXPECT_FALSE(fs::exists(aside / "rank-0.swap-0"));
    EXPECT_EQ(checkpoints_of(run).size(), 2U);
  }
  const fs::path file = run / kCheckpoints / "step-9";
  test::write_text(file, "not a folder");
  EXPECT_EQ(test::read_text(set_aside(file)), "not a folder");
}

/// Replaces the ranges of the remainders of the embedding, which has 5000, in a checkpoint of one
/// rank.
void replace_ranges(const fs::path& folder, const std::vector<std::pair<Elems, Elems>>& parts) {
  const fs::path ranges = ranges_file(folder, 0);
  text::Json content = *text::parse_json(test::read_text(ranges), "test").find("content");
  text::Json changed = text::Json::array();
  bool replaced = false;
  for (const text::Json& range : content.find("ranges")->elements()) {
    if (range.elements()[0].whole() != 0U || !(range.elements()[1] == "remainders")) {
      changed.push_back(range);
      continue;
    }
    if (std::exchange(replaced, true)) continue;
    for (const auto& [first, count] : parts) {
      changed.push_back(text::Json::array({0, "remainders", first, count, 2}));
    }
  }
  content["ranges"] = changed;
  const std::string text = seal(content);
  test::write_text(ranges, text);
  const fs::path path = facts_file(folder);
  text::Json facts = *text::parse_json(test::read_text(path), "test").find("content");
  facts["ranks"] = text::Json::array({checksum_text(text)});
  test::write_text(path, seal(facts));
}

TEST(Checkpoint, RangesThatOverlapOrLeaveGapsAreRefused) {
  const test::TempDir dir;
  const fs::path folder = dir.path() / "step-1";
  WrittenStates().write(folder, 1);
  using Parts = std::vector<std::pair<Elems, Elems>>;
  for (const Parts& parts : {Parts{{1, 5000}}, Parts{{0, 1000}, {0, 1000}, {2000, 3000}}}) {
    replace_ranges(folder, parts);
    EXPECT_NE(examined(folder).damage.find("lack some remainders of block 'embedding'"),
              std::string::npos);
  }
  replace_ranges(folder, {{3000, 2000}, {0, 3000}});
  EXPECT_EQ(examined(folder).damage, "");
}

TAG_TESTS("one_thread", "PortableCheckpoint.TheHeadsOfItsFilesAreCheckedWhenItIsOpened");
TEST(PortableCheckpoint, TheHeadsOfItsFilesAreCheckedWhenItIsOpened) {
  const Forms forms;
  const fs::path file = forms.folders[1] / "block-0.safetensors";
  std::string changed = test::read_text(file);
  const std::size_t padding = changed.find("  ");
  ASSERT_LT(padding, 4096U);
  changed[padding] = '\n';  // as good as a space
  test::write_text(file, changed);
  EXPECT_NE(examined(forms.folders[1], {}).damage.find("block-0.safetensors: damaged"),
            std::string::npos);
}

TAG_TESTS("one_thread", "Checkpoint.AdviceNamesAnotherOneOfTheRun");
TEST(Checkpoint, AdviceNamesAnotherOneOfTheRun) {
  const Forms forms;
  const auto has = [](const std::string& text, const std::string& part) {
    EXPECT_NE(text.find(part), std::string::npos) << text;
  };
  has(advice_after_damage(forms.folders[4]), "run/checkpoints/step-2");
  has(advice_after_damage(forms.folders[0]), "run/checkpoints/step-3");
  fs::remove(facts_file(forms.folders[4]));
  has(advice_after_damage(forms.folders[0]), "run/checkpoints/step-2");
  fs::remove(facts_file(forms.folders[2]));
  has(advice_after_damage(forms.folders[0]), "no other checkpoint");
  has(advice_after_damage(forms.folders[1]), "write it again");
}

TAG_TESTS("one_thread", "Checkpoint.PathsAreOfARun");
TEST(Checkpoint, PathsAreOfARun) {
  const Forms forms;
  const fs::path run = forms.dir.path() / "run";
  EXPECT_TRUE(is_of_run(run / ".", run));
  EXPECT_TRUE(is_of_run(forms.folders[0] / "", run));
  EXPECT_TRUE(is_of_run(forms.folders[0], run / "checkpoints" / ".."));
  EXPECT_FALSE(is_of_run(forms.folders[1], run));
  EXPECT_FALSE(is_of_run(forms.folders[0], forms.dir.path()));
  EXPECT_TRUE(names_checkpoint(run / "checkpoints/step-12/"));
  EXPECT_TRUE(names_checkpoint(forms.folders[1]));
  EXPECT_FALSE(names_checkpoint(run));
}

TAG_TESTS("one_thread", "Checkpoint.OfOtherTilesNamesTheKey");
TEST(Checkpoint, OfOtherTilesNamesTheKey) {
  const auto refusal = [](const std::vector<std::string>& names, std::uint64_t layer_tiles,
                          std::uint64_t vocabulary_tiles) {
    const test::TempDir dir;
    WrittenStates states;
    for (std::size_t b = 0; b < names.size(); ++b) states.blocks[b].name = names[b];
    states.write(dir.path(), 1);
    engine::Blueprint blueprint;
    model::ModelConfig config = model::default_config("llama");
    config.hidden_size = 64;
    config.num_layers = 1;
    config.num_heads = 4;
    config.layer_tiles = layer_tiles;
    config.vocabulary_tiles = vocabulary_tiles;
    blueprint.model = model::build_architecture(config);
    try {
      Checkpoint(dir.path()).check_fits(blueprint);
    } catch (const Error& error) {
      return std::string(error.what()).substr(dir.path().string().size() + 2);
    }
    return std::string("no error");
  };
  const std::vector<std::string> layers = {"layer 0 mlp", "layer 0 mlp 0", "layer 0 mlp 1"};
  EXPECT_EQ(refusal(layers, 1, 1), "has model.layer_tiles 2, but the config has 1; set it to 2");
  EXPECT_EQ(refusal(layers, 3, 1), "has model.layer_tiles 2, but the config has 3; set it to 2");
  EXPECT_EQ(refusal({"embedding", "layer 0", "head"}, 3, 1),
            "has model.layer_tiles 1, but the config has 3; set it to 1");
  EXPECT_EQ(refusal({"embedding 0", "embedding 1", "layer 0"}, 1, 1),
            "has model.vocabulary_tiles 2, but the config has 1; set it to 2");
  EXPECT_EQ(refusal({"embedding", "layer 0", "head"}, 1, 1),
            "is of another model than the config's");
}

const std::string kGpt2 =
    R"("family": "gpt2", "vocab_size": 131, "hidden_size": 32, "num_layers": 2, "num_heads": 2)";
const std::string kMiniMax =
    R"("family": "minimax_m2", "vocab_size": 131, "hidden_size": 32, "num_layers": 2,
       "num_heads": 2, "intermediate_size": 16, "num_local_experts": 4, "num_experts_per_tok": 2,
       "router_bias_update_speed": 0.1)";

void expect_to_go_on(const std::string& model, const std::vector<std::string>& overrides) {
  const test::TempDir dir;
  const config::Config config = test::tiny_config(model, false, dir.path() / "run", overrides);
  const auto step = [](engine::Engine& engine, std::uint64_t number) {
    const auto batch = test::scattered_ids(engine.blueprint().problem.tokens_per_step(), number);
    return engine.train_step(batch.view(), 0.01).loss;
  };
  engine::Engine before = setup::make_engine(config);
  before.start();
  step(before, 1);
  step(before, 2);
  const std::uint64_t hash = before.snapshot().hash();
  const fs::path native =
      CheckpointWriter(
          before, dir.path() / "run",
          {.step = 2, .updates = before.updates(), .loss_scale = LossScale{0.75, 3, 17}}, 2,
          nullptr)
          .publish();
  export_states(native, dir.path() / "out", [](Bytes, Bytes) {});
  const formats::SafetensorsReader layer(portable_file(dir.path() / "out", 1));
  for (const formats::StoredTensor& tensor : layer.tensors()) {
    if (!tensor.name.ends_with(".weights")) continue;
    EXPECT_EQ(tensor.dtype, config.type == DType::f16 ? "F16" : "BF16");
  }
  const double loss = step(before, 3);
  for (const fs::path& folder : {native, dir.path() / "run", dir.path() / "out"}) {
    engine::Engine after = setup::make_engine(config);
    const Checkpoint checkpoint = Checkpoint::open(folder, after.blueprint(), nullptr);
    EXPECT_EQ(checkpoint.whole_ranges(), engine::whole_ranges(after.blueprint()));
    EXPECT_EQ(examined(checkpoint.folder()).hash, hash);
    EXPECT_EQ(checkpoint.facts().loss_scale, (LossScale{0.75, 3, 17}));
    after.resume([&](const StateRange& range, HostBytes bytes) { checkpoint.read(range, bytes); },
                 checkpoint.facts().updates, {}, {}, checkpoint.facts().side_states);
    EXPECT_EQ(after.snapshot().hash(), hash);
    EXPECT_EQ(step(after, 3), loss);
  }
}

TEST(Checkpoint, TrainingResumesFromEveryForm) {
  expect_to_go_on(kGpt2, {"bf16.enabled=true", "ballast.optimizer_states=8bit"});
  expect_to_go_on(kGpt2, {"fp16.enabled=true"});
  expect_to_go_on(kMiniMax, {"bf16.enabled=true"});
}

}  // namespace
}  // namespace ballast::checkpoint::checkpoint_test
