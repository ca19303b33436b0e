// One of two ranks on fake GPUs that share the tiles of a model. The GPU of rank 1 hangs in the
// middle of a step. comm_faults_test.py starts it under mpirun and checks messages and exit status.
#include <cstdint>
#include <cstdio>

#include "ballast/comm/communicator.h"
#include "ballast/engine/engine.h"
#include "ballast/setup/setup.h"

#include "tests/support/fake_nccl.h"
#include "tests/support/report_errors.h"
#include "tests/support/temp_dir.h"
#include "tests/support/tiny_config.h"
#include "tests/support/tiny_training.h"

namespace ballast::comm {
namespace {

void train() {
  const auto ranks = join_ranks(read_launch(), {.timeout_seconds = 5.0});
  const test::TempDir directory;
  const config::Config config = test::tiny_config(
      R"("family": "llama", "vocab_size": 131, "hidden_size": 32, "num_layers": 2, "num_heads": 4,
         "vocabulary_tiles": 2, "layer_tiles": 2)",
      true, directory.path(),
      {"ballast.device=cuda", "ballast.device_bytes=128MiB", "train_micro_batch_size_per_gpu=1",
       "gradient_accumulation_steps=2", "data.sequence_length=9", "tensor_parallel.autotp_size=2"},
      ranks->world());
  engine::Engine engine = setup::make_engine(config, nullptr, ranks.get());
  engine.start();
  for (std::uint64_t number = 1; number <= 2; ++number) {
    constexpr int kSums = 9;  // of 22 sums and gathers in a step
    if (number == 2 && ranks->rank() == 1) test::FakeNccl::groups_until_hang = kSums;
    const engine::Blueprint& blueprint = engine.blueprint();
    const test::Batch batch =
        test::part_of(test::chained_ids(blueprint.problem.tokens_per_step(), number), blueprint);
    engine.train_step(batch.view(), 1e-3);
    std::printf("step %d is over\n", static_cast<int>(number));
  }
}

}  // namespace
}  // namespace ballast::comm

int main() {
  return ballast::test::report_errors(ballast::comm::train);
}
