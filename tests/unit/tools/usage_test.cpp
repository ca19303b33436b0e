#include <sstream>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "ballast/core/error.h"

#include "tools/command_line.h"

// Each mistake in a command line gives one line. tests/e2e/command_line_test.py starts the program
// with a few of them.

namespace ballast::tools::usage_test {
namespace {

struct Mistake {
  std::string line;  ///< words after the program's name
  std::string message;
};

std::vector<std::string> words_of(const std::string& line) {
  std::istringstream stream(line);
  std::vector<std::string> words;
  for (std::string word; stream >> word;) words.push_back(word == "''" ? "" : word);
  return words;
}

/// The error of the program's command line; "" if it is accepted.
std::string error_of(const std::vector<std::string>& words) {
  CommandLine line("ballast", "");
  const Command program = line.program();
  for (const auto add : {add_train, add_plan, add_eval, add_export, add_inspect, add_report,
                         add_tokenize, add_bench, add_doctor, add_tune}) {
    add(program);
  }
  add_help(program, line);
  try {
    const bool runs = line.parse(normalised(line.table(), words));
    EXPECT_TRUE(runs) << "asks for help";
  } catch (const Error& error) {
    EXPECT_EQ(error.category(), ErrorCategory::usage);
    return error.what();
  }
  return "";
}

class Usage : public testing::TestWithParam<Mistake> {};

TEST_P(Usage, MistakesSayWhatToWrite) {
  const std::string error = error_of(words_of(GetParam().line));
  EXPECT_NE(error.find(GetParam().message), std::string::npos) << error;
  EXPECT_EQ(error.find('\n'), std::string::npos) << error;
  EXPECT_NE(error.find("; see ballast"), std::string::npos) << error;
}

TEST(Usages, CorrectLinesAreAccepted) {
  for (const char* line :
       {"train /dev/null --steps 3 --set a=1 --set b=2", "bench io --path . --seconds 0.5",
        "train --resume . /dev/null", "help train"}) {
    EXPECT_EQ(error_of(words_of(line)), "") << line;
  }
}

INSTANTIATE_TEST_SUITE_P(
    Options, Usage,
    testing::Values(
        Mistake{"train c --stepps 3",
                "ballast train has no option --stepps (did you mean '--steps'?); see ballast train "
                "--help"},
        Mistake{"train c --steps 1 --steps 2", "--steps is given twice (1 and 2); give it once"},
        Mistake{"train c --out --serial", "--out needs a value: --out DIR"},
        Mistake{"train c --set", "--set needs a value: --set KEY=VALUE"},
        Mistake{"train c --out=", "--out=: must not be empty; give --out=DIR"},
        Mistake{"train c --resume ''", "--resume=: must not be empty"},
        Mistake{"train c --serial=maybe", "--serial takes no value, got 'maybe'"},
        Mistake{"train c -steps 3", "ballast train has no option -steps (did you mean '--steps'?)"},
        Mistake{"train c \u2014steps 3", "'\u2014steps' begins with a long dash; write --steps"},
        Mistake{"train c --set optimizer.params.lr = 1",
                "a setting is one word without spaces: --set KEY=VALUE"},
        Mistake{"train c optimizer.params.lr=1",
                "a setting needs --set before it: --set optimizer.params.lr=1"},
        Mistake{"train c --lr 1", "it is a key of the config: --set optimizer.params.lr=VALUE"},
        Mistake{"train c --batch-size 8", "--set train_batch_size=VALUE"},
        Mistake{"train c --save FILE", "it is an option of ballast plan"},
        Mistake{"train c --deepspeed_config x", "give only the DeepSpeed config"},
        Mistake{"--nproc_per_node 4 train c", "mpirun -n N --bind-to none ballast train CONFIG"},
        Mistake{"eval model --documents x", "give the file with --data FILE"},
        Mistake{"train c --trace-steps 3", "--trace-steps is for --trace; give both, or neither"},
        Mistake{"export run", "--out is missing; give --out DIR"},
        Mistake{"plan c --recalibrate --rates c",
                "--recalibrate and --rates exclude each other; give one of them"},
        Mistake{"export . --out x --dtype bf8",
                "--dtype: must be one of bf16, fp16, fp32, got 'bf8' (did you mean 'bf16'?)"}));

INSTANTIATE_TEST_SUITE_P(
    Commands, Usage,
    testing::Values(
        Mistake{"train", "CONFIG is missing: ballast train CONFIG"},
        Mistake{"train c second.json",
                "ballast train takes no more arguments, got second.json; see ballast train --help"},
        Mistake{"evaluate run", "to compute a loss: ballast eval PATH"},
        Mistake{"config.json", "to train: ballast train config.json"},
        Mistake{"tune", "ballast tune needs a command: io; see ballast tune --help"},
        Mistake{"bench stp", "'stp' is not a bench command (did you mean 'step'?)"},
        Mistake{"trian --help", "'trian' is not a ballast command (did you mean 'train'?)"}));

INSTANTIATE_TEST_SUITE_P(
    Values, Usage,
    testing::Values(
        Mistake{"train ''", "CONFIG: must not be empty"},
        Mistake{"plan ''", "CONFIG: must not be empty"},
        Mistake{"train /dev/null --out ''", "--out: must not be empty"},
        Mistake{"train /dev/null --steps 0",
                "--steps: must be at least 1, got 0; see ballast train"},
        Mistake{"train /dev/null --steps=-1",
                "--steps: must be at least 1, got -1; see ballast train"},
        Mistake{"train /dev/null --steps 99999999999999999999",
                "--steps: must be at most 1099511627776, got 99999999999999999999; see"},
        Mistake{"train /dev/null --steps 1e3", "--steps: must be a whole number, got '1e3'; see"},
        Mistake{"train /dev/null --steps ''", "--steps: must be a whole number, got ''; see"},
        Mistake{"bench adam --threads 0",
                "--threads: must be at least 1, got 0; see ballast bench adam --help"},
        Mistake{"bench step --kv-heads=-1", "--kv-heads: must be at least 0, got -1; see"},
        Mistake{"bench step --kv-heads 99999999999999999999",
                "--kv-heads: must be at most 18446744073709551615, got 99999999999999999999; see"},
        Mistake{"bench io --seconds 0", "--seconds: must be at least 0.01, got 0; see"},
        Mistake{"bench io --seconds nan", "--seconds: must be a finite number, got 'nan'; see"},
        Mistake{"tune io --path . --tflops 100,0",
                "--tflops: must be greater than 0, got 0; see ballast tune io --help"}));

}  // namespace
}  // namespace ballast::tools::usage_test
