#include "src/data/documents.h"

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <map>
#include <memory>
#include <numeric>
#include <random>
#include <set>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "ballast/config/config.h"
#include "ballast/core/error.h"
#include "ballast/data/loader.h"
#include "ballast/model/family.h"
#include "ballast/text/json.h"

#include "src/formats/data_files.h"
#include "tests/support/damaged.h"
#include "tests/support/documents_file.h"
#include "tests/support/expect_error.h"
#include "tests/support/fixtures.h"
#include "tests/support/fuzz_inputs.h"
#include "tests/support/temp_dir.h"

namespace ballast::data::documents_test {
namespace {

namespace fs = std::filesystem;
using test::bytes_of;
using test::documents_of;
using test::expect_error;
using test::kDocumentsFormat;
using test::safetensors_of;
using Ids = std::vector<std::int32_t>;

std::shared_ptr<const DocumentFiles> open(const std::vector<std::string>& paths,
                                          std::uint64_t vocab_size = 1000, bool pairs = false) {
  return std::make_shared<const DocumentFiles>(DocumentFiles::open(paths, vocab_size, pairs));
}

void expect_refused(const std::string& bytes, std::initializer_list<std::string_view> parts,
                    std::uint64_t vocab_size = 1000) {
  const test::TempDir dir;
  const std::string path = dir.write("d.safetensors", bytes);
  expect_error(ErrorCategory::data, parts, [&] { open({path}, vocab_size); });
  expect_error(ErrorCategory::data, {path}, [&] { open({path}, vocab_size); });
}

struct Sequence {
  Ids tokens;
  Ids targets;
  Ids positions;
};

Sequence read(const SequenceSource& source, std::uint64_t n, std::size_t length) {
  Sequence sequence = {Ids(length, 9), Ids(length, 9), Ids(length, 9)};
  source.read(n, {sequence.tokens, sequence.targets, sequence.positions});
  return sequence;
}

TEST(PairedDocuments, HavePositionsOnlyIfTheyAreWanted) {
  const test::TempDir dir;
  const auto file = dir.write(
      "d.safetensors",
      documents_of({{11, 12, 13}, {21, 22, 23, 24, 25, 26}}, {{0, 1, 1, 0, 1, 1, 1, 1, 1}},
                   std::string(kDocumentsFormat) + R"(,"pairs":"true")"));
  const auto files = open({file}, 1000, true);
  const auto plain = paired(files, {0, 2}, 5, false, 0, false);
  EXPECT_FALSE(plain->packed());
  EXPECT_EQ(read(*plain, 0, 5).positions, Ids(5, 9));
  const auto source = paired(files, {0, 2}, 5, false, 0, true);
  EXPECT_TRUE(source->packed());
  EXPECT_EQ(read(*source, 0, 5).targets, (Ids{12, 13, -1, -2, -2}));
  EXPECT_EQ(read(*source, 0, 5).positions, (Ids{0, 1, 2, 0, 1}));
  EXPECT_EQ(read(*source, 1, 5).positions, (Ids{0, 1, 2, 3, 4}));
}

TEST(PairedDocuments, HavePositionsIfTheLengthOfADocumentCounts) {
  const auto have = [](const text::Json& scaling, const char* family = "llama") {
    config::Config c;
    c.model = model::default_config(family);
    c.model.head_dim = 16;
    if (!scaling.is_null()) c.model.details["rope_scaling"] = scaling;
    c.data.sequence_length = 32;
    c.data.pairs = {"p"};
    return c.has_positions();
  };
  const auto dynamic = [](double trained) {
    return text::Json::object(
        {{"rope_type", "dynamic"}, {"factor", 2.0}, {"original_max_position_embeddings", trained}});
  };
  EXPECT_FALSE(have({}));
  EXPECT_FALSE(have({}, "gpt2"));
  EXPECT_FALSE(have(dynamic(32.0)));  // as long as a sequence
  EXPECT_TRUE(have(dynamic(31.0)));
}

TEST(PackedDocuments, RestartPositionsAndIgnoreMaskedTargetsEndsAndPadding) {
  const test::TempDir dir;
  const auto file = dir.write(
      "d.safetensors", documents_of({{11, 12, 13}, {21, 22, 23, 24}}, {{1, 0, 1, 0, 1, 0, 1}}));
  const auto files = open({file});
  EXPECT_EQ(files->targets(), 3U);  // 13, 22, 24; the first token of a document is no target
  const auto source = packed(files, {0, 2}, 8, false, 0);
  ASSERT_EQ(source->size(), 1U);
  EXPECT_TRUE(source->packed());
  EXPECT_EQ(source->real_tokens(0), 7U);
  const auto sequence = read(*source, 0, 8);
  EXPECT_EQ(sequence.tokens, (Ids{11, 12, 13, 21, 22, 23, 24, 0}));
  EXPECT_EQ(sequence.targets, (Ids{-1, 13, -1, 22, -1, 24, -1, -2}));
  EXPECT_EQ(sequence.positions, (Ids{0, 1, 2, 0, 1, 2, 3, 0}));
}

TEST(PackedDocuments, CutLongDocumentsButKeepTheTargetAtTheCut) {
  const test::TempDir dir;
  const auto files = open({dir.write("d.safetensors", documents_of({{1, 2, 3, 4, 5, 6, 7, 8}}))});
  const auto source = packed(files, {0, 1}, 3, false, 0);
  ASSERT_EQ(source->size(), 3U);
  EXPECT_EQ(read(*source, 0, 3).targets, (Ids{2, 3, 4}));
  EXPECT_EQ(read(*source, 1, 3).targets, (Ids{5, 6, 7}));
  const auto last = read(*source, 2, 3);
  EXPECT_EQ(last.tokens, (Ids{7, 8, 0}));
  EXPECT_EQ(last.targets, (Ids{8, -1, -2}));
  EXPECT_EQ(last.positions, (Ids{0, 1, 0}));
  EXPECT_EQ(source->real_tokens(2), 2U);
}

/// `count` documents of 1 to 30 tokens; no two tokens are equal.
std::vector<std::vector<std::uint16_t>> numbered(std::size_t count) {
  std::mt19937_64 random(count);
  std::vector<std::vector<std::uint16_t>> documents(count);
  std::uint16_t next = 1;
  for (auto& document : documents) {
    document.resize(1 + random() % 30);
    std::iota(document.begin(), document.end(), next);
    next = static_cast<std::uint16_t>(next + document.size());
  }
  return documents;
}

TEST(PackedDocuments, VisitEveryTokenAndTargetOnceInEveryEpoch) {
  const test::TempDir dir;
  const auto documents = numbered(100);
  const std::string half =
      dir.write("a.safetensors", documents_of({documents.begin(), documents.begin() + 37}));
  const std::string rest =
      dir.write("b.safetensors", documents_of({documents.begin() + 37, documents.end()}));
  const auto files = open({half, rest}, 65536);
  const auto source = packed(files, {0, 100}, 25, true, 3);
  std::set<std::vector<std::int32_t>> orders;
  for (std::uint64_t epoch = 0; epoch < 3; ++epoch) {
    std::multiset<std::int32_t> tokens;
    std::multiset<std::int32_t> targets;
    Ids firsts;
    for (std::uint64_t n = 0; n < source->size(); ++n) {
      const auto sequence = read(*source, epoch * source->size() + n, 25);
      firsts.push_back(sequence.tokens.front());
      std::uint64_t real = 0;
      for (std::size_t i = 0; i < 25; ++i) {
        if (sequence.tokens[i] == 0) continue;
        ++real;
        tokens.insert(sequence.tokens[i]);
        if (sequence.targets[i] < 0) continue;
        targets.insert(sequence.targets[i]);
        EXPECT_EQ(sequence.targets[i], sequence.tokens[i] + 1);
      }
      EXPECT_EQ(real, source->real_tokens(epoch * source->size() + n));
    }
    orders.insert(firsts);
    const auto total = files->offsets().back();
    EXPECT_EQ(tokens.size(), total);
    EXPECT_EQ(std::set(tokens.begin(), tokens.end()).size(), total);
    EXPECT_EQ(targets.size(), files->targets());
    EXPECT_EQ(std::set(targets.begin(), targets.end()).size(), files->targets());
  }
  EXPECT_EQ(orders.size(), 3U);
}

TEST(PackedDocuments, GiveTheSameStepToAnyNumberOfRanks) {
  const test::TempDir dir;
  const auto files = open({dir.write("d.safetensors", documents_of(numbered(200)))}, 65536);
  const auto source = packed(files, {0, 200}, 31, true, 5);
  const auto step_of = [&](std::uint64_t world, std::uint64_t step) {
    LoaderOptions options = {.micro_batches = 12 / world, .sequences = 2, .length = 31};
    options.places = world;
    std::vector<Ids> all(3);
    for (options.place = 0; options.place < world; ++options.place) {
      const Batch batch = Loader(source, nullptr, options).batch(step);
      EXPECT_EQ(batch.positions.size(), batch.tokens.size());
      all[0].insert(all[0].end(), batch.tokens.begin(), batch.tokens.end());
      all[1].insert(all[1].end(), batch.targets.begin(), batch.targets.end());
      all[2].insert(all[2].end(), batch.positions.begin(), batch.positions.end());
      all.push_back({static_cast<std::int32_t>(batch.real_tokens)});
    }
    EXPECT_EQ(all.back().front(), 24 * 31 - std::count(all[0].begin(), all[0].end(), 0));
    all.resize(4);
    return all;
  };
  for (std::uint64_t step = 1; step <= 4; ++step) {
    for (const std::uint64_t world : {2U, 3U, 4U})
      EXPECT_EQ(step_of(world, step), step_of(1, step));
  }
}

TEST(PackedDocuments, FillTheLastMicroBatchOfAnEvaluationWithPadding) {
  const test::TempDir dir;
  const auto files = open({dir.write("d.safetensors", documents_of({{1, 2, 3}, {4, 5, 6}}))});
  const auto all = packed(files, {0, 2}, 3, false, 0);
  const Loader loader(all, all, {.sequences = 3, .length = 3});
  ASSERT_EQ(loader.evaluation().size(), 1U);
  const auto batch = loader.evaluation().batch(0);
  EXPECT_EQ(batch.tokens, (Ids{1, 2, 3, 4, 5, 6, 0, 0, 0}));
  EXPECT_EQ(batch.targets, (Ids{2, 3, -1, 5, 6, -1, -2, -2, -2}));
  EXPECT_EQ(batch.positions, (Ids{0, 1, 2, 0, 1, 2, 0, 1, 2}));
  EXPECT_EQ(batch.real_tokens, 6U);
  EXPECT_EQ(loader.evaluation().batch(1).targets, Ids(9, -2));
  EXPECT_EQ(loader.evaluation().batch(1).real_tokens, 0U);
  const Loader empty(all, packed(files, {2, 2}, 3, false, 0), {.sequences = 3, .length = 3});
  EXPECT_EQ(empty.evaluation().size(), 0U);
}

TEST(TrainingDocuments, HoldOutTheLastDocumentsUpToTheShare) {
  const std::vector<std::uint64_t> offsets = {0, 50, 70, 90, 100};
  EXPECT_EQ(training_documents(offsets, 0.0), 4U);
  EXPECT_EQ(training_documents(offsets, 0.09), 4U);
  EXPECT_EQ(training_documents(offsets, 0.1), 3U);
  EXPECT_EQ(training_documents(offsets, 0.29), 3U);
  EXPECT_EQ(training_documents(offsets, 0.3), 2U);
  EXPECT_EQ(training_documents(offsets, 0.5), 1U);
}

TEST(DocumentFiles, ReadEveryTypeOfTokensAndOffsets) {
  const test::TempDir dir;
  const auto file_of = [&](const std::string& type, const std::string& tokens,
                           const std::string& offsets) {
    const std::string path = dir.write(
        type + ".safetensors", safetensors_of({{"tokens", type, "[3]", tokens},
                                               {"documents", offsets, "[3]",
                                                bytes_of(std::vector<std::uint64_t>{0, 2, 3})}},
                                              kDocumentsFormat));
    Ids ids(2);
    std::vector<std::uint8_t> trained(2);
    open({path}, 1U << 20U)->read(0, ids, trained);
    EXPECT_EQ(trained, (std::vector<std::uint8_t>{1, 1}));
    return ids;
  };
  EXPECT_EQ(file_of("U16", bytes_of(std::vector<std::uint16_t>{65535, 2, 3}), "I64"),
            (Ids{65535, 2}));
  EXPECT_EQ(file_of("U32", bytes_of(std::vector<std::uint32_t>{70000, 2, 3}), "U64"),
            (Ids{70000, 2}));
  EXPECT_EQ(file_of("I32", bytes_of(std::vector<std::int32_t>{70000, 2, 3}), "I64"),
            (Ids{70000, 2}));
}

TEST(DocumentFiles, RefuseWhatBreaksTheFormatNamingTheTensor) {
  const std::string two = bytes_of(std::vector<std::uint16_t>{5, 6});
  const auto offsets = [](std::vector<std::int64_t> values) {
    const auto shape = "[" + std::to_string(values.size()) + "]";
    return test::RawTensor{"documents", "I64", shape, bytes_of(values)};
  };
  const test::RawTensor tokens = {"tokens", "U16", "[2]", two};
  const auto refuse = [](const std::vector<test::RawTensor>& tensors,
                         std::initializer_list<std::string_view> parts) {
    expect_refused(safetensors_of(tensors, kDocumentsFormat), parts);
  };
  expect_refused(safetensors_of({tokens, offsets({0, 2})}, ""), {"format \"ballast documents\""});
  expect_refused(
      safetensors_of({tokens, offsets({0, 2})}, R"("format":"ballast documents","version":"2")"),
      {"version '2'"});
  refuse({offsets({0, 2})}, {"no tensor 'tokens'"});
  refuse({tokens}, {"no tensor 'documents'"});
  refuse({{"tokens", "F32", "[1]", "abcd"}, offsets({0, 1})}, {"'tokens' has dtype F32"});
  refuse({{"tokens", "U16", "[1,2]", two}, offsets({0, 2})}, {"'tokens' has 2 dimensions"});
  refuse({tokens, {"documents", "I32", "[1]", "abcd"}}, {"'documents' has dtype I32"});
  refuse({tokens, offsets({})}, {"'documents' is empty"});
  refuse({tokens, offsets({1, 2})}, {"'documents' starts with 1"});
  refuse({tokens, offsets({0, 3, 2})}, {"'documents' is not ascending: element 2 is 2, after 3"});
  refuse({tokens, offsets({0, -1, 2})}, {"element 1 is -1"});
  refuse({tokens, offsets({0, 1})}, {"'documents' ends with 1, but 'tokens' has 2"});
  refuse({tokens, offsets({0, 3})}, {"'documents' ends with 3, but 'tokens' has 2"});
  refuse({tokens, offsets({0, 2}), {"mask", "U8", "[1]", "\1"}}, {"'mask' has 1 elements"});
  refuse({tokens, offsets({0, 2}), {"mask", "I8", "[2]", "\1\1"}}, {"'mask' has dtype I8"});
  refuse({tokens, offsets({0, 2}), {"mask", "U8", "[2]", "\1\2"}}, {"'mask' holds 2 at element 1"});
  refuse({tokens, offsets({0, 2}), {"weights", "U8", "[2]", "\1\1"}}, {"'weights' is not part"});
  refuse({tokens, offsets({0, 1, 2})}, {"no token is trained on"});
  expect_refused(documents_of({{5, 6}}, {{1, 0}}), {"no token is trained on"});
  expect_refused(documents_of({{5, 6}}), {"'tokens' holds id 6 at element 1", "vocab_size is 6"},
                 6);
  expect_refused(safetensors_of({{"tokens", "I32", "[2]", bytes_of(Ids{1, -1})}, offsets({0, 2})},
                                kDocumentsFormat),
                 {"'tokens' holds id -1"});
}

TEST(DocumentFiles, RefuseIdsWithoutARowInATable) {
  const test::TempDir dir;
  const std::vector<std::string> path = {dir.write("d.safetensors", documents_of({{5, 6}}))};
  const auto open = [&](std::uint64_t rows) {
    return DocumentFiles::open(path, 100, false, {},
                               TokenTable{.key = "model.small", .rows = rows});
  };
  EXPECT_NO_THROW(open(7));
  expect_error(ErrorCategory::data,
               {path.front(), "holds id 6 at element 1", "model.small is 6", "have no row"},
               [&] { open(6); });
}

TEST(DocumentFiles, RefuseTwoTokenizersAndFoldersWithoutFiles) {
  const test::TempDir dir;
  const auto made_by = [&](const std::string& name, const std::string& hash) {
    return dir.write(
        name,
        documents_of({{1, 2}}, {}, kDocumentsFormat + R"(,"tokenizer_sha256":")" + hash + '"'));
  };
  const std::string a = made_by("x/a.safetensors", "aa");
  const std::string b = made_by("x/b.safetensors", "bb");
  EXPECT_EQ(open({a, a})->tokenizer().serialised, "aa");
  expect_error(ErrorCategory::data, {b, "another tokenizer than " + a},
               [&] { open({dir.path() / "x"}); });
  dir.write("y/tokens.bin", "ab");
  expect_error(ErrorCategory::data, {"no file of documents (.safetensors) matches"},
               [&] { open({dir.path() / "y"}); });
  // One vocabulary, serialised by two versions of transformers.
  const auto with_vocabulary = [&](const std::string& name, const std::string& hash) {
    return dir.write(name,
                     documents_of({{1, 2}}, {},
                                  kDocumentsFormat + R"(,"tokenizer_sha256":")" + hash +
                                      R"(","vocabulary_sha256":"v","added_tokens_sha256":"t")"));
  };
  EXPECT_EQ(open({with_vocabulary("c.safetensors", "c"), with_vocabulary("d.safetensors", "d")})
                ->offsets()
                .size(),
            3U);
}

TEST(DocumentFiles, NameFilesOfOtherKinds) {
  const test::TempDir dir;
  const auto refuse = [&](const std::string& name, const std::string& bytes,
                          std::initializer_list<std::string_view> parts) {
    const std::string path = dir.write(name, bytes);
    expect_error(ErrorCategory::data, parts, [&] { open({path}); });
    expect_error(ErrorCategory::data, {path}, [&] { open({path}); });
  };
  const std::string json = R"({"prompt": "a question", "completion": "an answer"})";
  refuse("c.jsonl", json + '\n', {"JSON Lines", "tools/prepare.py", "--out c.safetensors"});
  refuse("n.npy", "\x93NUMPY" + std::string(40, '\0'), {"NumPy", "name it as data.tokens"});
  refuse("t.bin", bytes_of(Ids{5, 6, 7, 8}), {"not a safetensors file", "data.tokens"});
  refuse("g.safetensors", "version https://git-lfs.github.com/spec/v1\n", {"git lfs pull"});
  refuse("r.jsonl.gz", std::string("\x1f\x8b\x08\x00", 4) + std::string(40, '\0'),
         {"gzip", "prepare.py", "--out r.safetensors"});
  refuse("r.parquet", "PAR1" + std::string(40, '\0') + "PAR1", {"Parquet", "prepare.py"});
  refuse("z.safetensors", std::string("\x1f\x8b\x08\x00", 4) + std::string(40, '\0'), {"gzip"});
  const std::string pairs = dir.write("p.jsonl", json + '\n');
  expect_error(ErrorCategory::data, {"prepare.py --pairs ", "--model folder", "data.pairs"},
               [&] { DocumentFiles::open(std::vector<std::string>{pairs}, 100, true, "folder"); });
}

TEST(DocumentFiles, CountDocumentsWithNothingToTrainOn) {
  const test::TempDir dir;
  std::string lines;
  set_log_sink([&](LogLevel, std::string_view line) { lines += line; });
  const std::vector<std::vector<std::uint16_t>> documents = {{1},    {2, 3}, {}, {},
                                                             {4, 5}, {6, 7}, {}};
  const auto files =
      open({dir.write("d.safetensors", documents_of({{9}})),
            dir.write("e.safetensors", documents_of(documents, {{1, 1, 1, 1, 0, 1, 1}}))});
  set_log_sink({});
  EXPECT_NE(lines.find("6 of 8 documents in 2 files have nothing"), std::string::npos) << lines;
  EXPECT_EQ(files->targets(), 2U);
  EXPECT_EQ(files->first_trained(), 2U);
  EXPECT_EQ(files->last_trained(), 6U);
  const std::string pair =
      dir.write("p.safetensors", documents_of({{1, 2}, {3, 4}}, {{0, 1, 1, 0}},
                                              kDocumentsFormat + R"(,"pairs":"chosen, rejected")"));
  expect_error(ErrorCategory::data, {pair, "document 1 of the pairs has no token"},
               [&] { DocumentFiles::open(std::vector<std::string>{pair}, 100, true); });
}

TEST(TokenizerIdentity, HashesAreThoseOfTheTokenizersLibrary) {
  EXPECT_EQ(formats::sha256(""),
            "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
  EXPECT_EQ(formats::sha256("abc"),
            "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
  EXPECT_EQ(formats::sha256(std::string(1000, 'a')),
            "41edece42d63e8d9bf515a9ba6932e1c20cbc9f5a5d134645adb5db1b9737ea3");
  const test::TempDir dir;
  EXPECT_EQ(formats::identify_tokenizer(dir.path()).vocabulary, "");
  dir.write("tokenizer.json", R"({"version": "1.0"})");
  EXPECT_EQ(formats::identify_tokenizer(dir.path()).vocabulary, "");
  // By ascending ids, with merges as pairs, without white space: as Tokenizer.to_str() writes it.
  dir.write("tokenizer.json", R"({"version": "1.0", "added_tokens": [{"id": 3, "content": "<s>"}],
                                  "model": {"type": "BPE", "vocab": {"ab": 2, "a": 0, "\u00e4": 1},
                                            "merges": ["a b"]}})");
  const formats::TokenizerIdentity found = formats::identify_tokenizer(dir.path());
  EXPECT_EQ(found.vocabulary, formats::sha256("0\ta\n1\t\xc3\xa4\n2\tab\n"));
  EXPECT_EQ(found.added_tokens, formats::sha256("3\t<s>\n"));
  EXPECT_EQ(found.serialised,
            formats::sha256(
                "{\"version\":\"1.0\",\"added_tokens\":[{\"id\":3,\"content\":\"<s>\"}],\"model\":"
                "{\"type\":\"BPE\",\"vocab\":{\"a\":0,\"\xc3\xa4\":1,\"ab\":2},\"merges\":[[\"a\","
                "\"b\"]]}}"));
}

TEST(TokenizerIdentity, OfADamagedFileIsUnknownOrWhole) {
  const test::TempDir dir;
  const std::string whole =
      R"({"added_tokens": [{"id": 3, "content": "<s>"}], "model": {"vocab": {"a": 0, "b": 1}, )"
      R"("merges": ["a b"]}})";
  std::mt19937_64 random(2);
  const std::size_t inputs = test::fuzz_inputs(400);
  std::size_t known = 0;
  for (std::size_t i = 0; i < inputs; ++i) {
    dir.write("tokenizer.json", test::damaged(whole, random));
    const formats::TokenizerIdentity found = formats::identify_tokenizer(dir.path());
    EXPECT_EQ(found.vocabulary.empty(), found.serialised.empty());
    known += found.vocabulary.empty() ? 0 : 1;
  }
  EXPECT_GT(known, 0U);
}

TEST(TokenizerIdentity, IsComparedByVocabularyBeforeItsSerialisation) {
  using enum formats::TokenizerDifference;
  const formats::TokenizerIdentity a = {.serialised = "1", .vocabulary = "v", .added_tokens = "t"};
  auto other = a;
  EXPECT_EQ(formats::compare(a, other), none);
  other.serialised = "2";
  EXPECT_EQ(formats::compare(a, other), none);
  other.added_tokens = "u";
  EXPECT_EQ(formats::compare(a, other), added_tokens);
  other.vocabulary = "w";
  EXPECT_EQ(formats::compare(a, other), vocabulary);
  EXPECT_EQ(formats::compare({.serialised = "1"}, other), unclear);
  EXPECT_EQ(formats::compare({.serialised = "2"}, other), none);
  EXPECT_EQ(formats::compare(a, {}), none);
}

/// Reads the file that tests/data/make_documents_fixture.py has written.
TEST(DocumentFiles, ReadWhatThePreparerWrites) {
  const auto files = open({test::fixture("documents/conversations.safetensors")}, 131);
  EXPECT_EQ(files->offsets().size(), 61U);
  EXPECT_EQ(files->offsets().back(), 2066U);
  EXPECT_EQ(files->targets(), 1033U);
  Ids ids(2);
  std::vector<std::uint8_t> trained(2);
  for (std::size_t d = 0; d < 60; ++d) {
    files->read(files->offsets()[d], ids, trained);  // the start of a question
    EXPECT_EQ(trained, (std::vector<std::uint8_t>{0, 0}));
    files->read(files->offsets()[d + 1] - 2, ids, trained);  // the end of an answer
    EXPECT_EQ(trained, (std::vector<std::uint8_t>{1, 1}));
  }
}

/// Damages a byte of a file, and reads the file if it is accepted.
TEST(DocumentFiles, ThatAreDamagedAreRefusedOrRead) {
  const test::TempDir dir;
  const auto documents = numbered(6);
  std::size_t count = 0;
  for (const auto& document : documents) count += document.size();
  const std::string whole =
      documents_of(documents, std::vector<std::uint8_t>(count, 1),
                   kDocumentsFormat + R"(,"tokenizer":"t","mask":"assistant")");
  std::mt19937_64 random(11);
  const std::size_t inputs = test::fuzz_inputs(8000);
  std::size_t refused = 0;
  std::size_t accepted = 0;
  for (std::size_t i = 0; i < inputs; ++i) {
    const fs::path path = dir.path() / "d.safetensors";
    fs::remove(path);
    std::ofstream(path, std::ios::binary) << test::damaged(whole, random);
    try {
      const auto files = open({path}, 256);
      const auto source = packed(files, {0, files->offsets().size() - 1}, 16, true, 1);
      for (std::uint64_t n = 0; n < source->size(); ++n) {
        for (const auto id : read(*source, n, 16).tokens) ASSERT_LT(id, 256);
      }
      ++accepted;
    } catch (const Error& error) {
      const std::string message = error.what();
      EXPECT_EQ(error.category(), ErrorCategory::data) << message;
      EXPECT_NE(message.find(path.native()), std::string::npos) << message;
      EXPECT_EQ(message.find('\n'), std::string::npos) << message;
      ++refused;
    }
  }
  EXPECT_GT(refused, inputs / 2);
  EXPECT_GT(accepted, inputs / 80);
}

}  // namespace
}  // namespace ballast::data::documents_test
