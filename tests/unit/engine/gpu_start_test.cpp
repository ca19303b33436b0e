// The start of a run on a GPU, from the config to the first step, on fakes of the GPU and its
// libraries: what it logs, what checkpoints record, and limits of the machine.
#include <algorithm>
#include <filesystem>
#include <iterator>
#include <string>
#include <vector>

#include <cublasLt.h>
#include <fmt/format.h>
#include <gtest/gtest.h>

#include "ballast/calibrate/kernel_comparison.h"
#include "ballast/calibrate/machine_rates.h"
#include "ballast/core/error.h"
#include "ballast/setup/setup.h"
#include "ballast/setup/translate.h"

#include "src/calibrate/calibration.h"
#include "tests/support/captured_log.h"
#include "tests/support/fake_cublaslt.h"
#include "tests/support/fake_cuda.h"
#include "tests/support/temp_dir.h"
#include "tests/support/tiny_config.h"
#include "tests/support/tiny_training.h"
#include "tests/support/variable.h"
#include "tools/commands/doctor.h"

namespace ballast::engine::gpu_start_test {
namespace {

using test::FakeCuda;

constexpr const char* kModel = R"("family": "llama", "vocab_size": 131, "hidden_size": 32,
                                  "num_layers": 1, "num_heads": 4, "num_kv_heads": 2,
                                  "intermediate_size": 40)";

class GpuStart : public testing::Test {
 protected:
  ~GpuStart() override {
    FakeCuda::old_gpu = -1;
    FakeCuda::driver = FakeCuda::kSameVersion;
    FakeCuda::root = "/nonexistent";
    FakeCuda::registrations_left = -1;
  }

  config::Config config(std::vector<std::string> overrides, const char* model = kModel) const {
    for (const char* common : {"ballast.device=cuda", "train_micro_batch_size_per_gpu=1",
                               "data.sequence_length=9", "ballast.eval_batches=1"}) {
      overrides.insert(overrides.begin(), common);
    }
    return test::tiny_config(model, true, directory_.path(), overrides);
  }
  void install_driver(const std::string& version) const {
    std::filesystem::create_directories(directory_.path() / "proc/driver/nvidia");
    directory_.write("proc/driver/nvidia/version",
                     "NVRM version: NVIDIA UNIX x86_64 Kernel Module  " + version + "  Tue\n");
    FakeCuda::root = directory_.path();
  }
  test::Outcome train(const std::vector<std::string>& overrides) const {
    return test::train(config(overrides), 2, test::scattered_ids);
  }

  test::TempDir directory_;
};

TEST_F(GpuStart, NamesEverythingThatTheBitsDependOn) {
  install_driver("580.95.05");
  const std::string expected = fmt::format(
      "1 rank, Fake GPU with 132 multiprocessors, driver 580.95.05, CUDA {}.{}, cuBLASLt {}.{}.{}, "
      "attention by Ballast",
      CUDART_VERSION / 1000, CUDART_VERSION % 1000 / 10, CUBLAS_VER_MAJOR, CUBLAS_VER_MINOR,
      CUBLAS_VER_PATCH);
  const test::CapturedLog log;
  Engine engine = setup::make_engine(config({"ballast.product_algorithms=heuristic"}));
  engine.start();
  EXPECT_EQ(engine.arithmetic(), expected);
  EXPECT_NE(log.text().find("device: " + expected + "\n"), std::string::npos) << log.text();
  EXPECT_NE(log.text().find(" of host memory pinned; 7.94 GiB of device memory free after a "
                            "warm-up of "),
            std::string::npos)
      << log.text();
  install_driver("575.57.08");
  EXPECT_NE(engine.arithmetic(), expected) << "a resume with another driver is logged";
}

TEST_F(GpuStart, NamesTheTimedChoicesOfProducts) {
  const auto arithmetic = [&](const std::filesystem::path& cache) {
    const test::Variable home("XDG_CACHE_HOME", cache.c_str());
    Engine engine = setup::make_engine(config({}));
    EXPECT_EQ(engine.arithmetic().find("timed"), std::string::npos) << "before the warm-up";
    engine.start();
    return engine.arithmetic();
  };
  const std::string first = arithmetic(directory_.path() / "one");
  EXPECT_NE(first.find(", products by timed choices "), std::string::npos) << first;
  EXPECT_EQ(arithmetic(directory_.path() / "one"), first);
  EXPECT_NE(arithmetic(directory_.path() / "two"), first) << "a resume elsewhere is logged";
  EXPECT_EQ(arithmetic("/dev/null").find("timed"), std::string::npos);
}

TEST_F(GpuStart, RunsWithPageableMemoryWherePinningIsRefused) {
  const std::vector<std::string> on_host = {"zero_optimization.offload_optimizer.device=cpu",
                                            "zero_optimization.offload_param.device=cpu"};
  const test::Outcome pinned = train(on_host);
  FakeCuda::registrations_left = 0;
  const test::CapturedLog log;
  test::expect_same(train(on_host), pinned, "pageable");
  EXPECT_NE(log.text().find("nothing of "), std::string::npos) << log.text();
  EXPECT_NE(log.text().find("device: 0 B of host memory pinned"), std::string::npos) << log.text();
}

TEST_F(GpuStart, WarnsOfABudgetThatLeavesNothingForLibraries) {
  const auto warning_of = [&](const std::string& bytes) {
    const test::CapturedLog log;
    setup::check_device(config({"ballast.device_bytes=" + bytes}));
    return log.text();
  };
  const std::string text = warning_of("7GiB");
  EXPECT_NE(text.find("ballast.device_bytes is 7.00 GiB of 8.00 GiB that are free on the GPU"),
            std::string::npos)
      << text;
  EXPECT_NE(text.find("set it to 6.50 GiB or to \"auto\""), std::string::npos) << text;
  EXPECT_EQ(warning_of("6656MiB"), "");
  EXPECT_EQ(warning_of("auto"), "");
}

TEST_F(GpuStart, AdaptersMayHaveAnyRank) {
  for (const int rank : {1, 4, 12}) {
    const test::Outcome run =
        train({"ballast.train=adapters",
               fmt::format(R"(ballast.adapters={{"targets":"all-linear","rank":{}}})", rank)});
    EXPECT_EQ(run.losses.size(), 2U);
  }
}

TEST_F(GpuStart, DoctorNamesTheDriverThatIsTooOld) {
  const auto gpu_line = [](std::uint32_t local_rank) {
    const auto findings = tools::examine_machine({.device = {.local_rank = local_rank}});
    const auto found = std::find_if(findings.begin(), findings.end(),
                                    [](const auto& finding) { return finding.name == "GPU"; });
    return found == findings.end() ? tools::Finding() : *found;
  };
  // The GPU of each local rank is examined once, so these ranks occur in no other test.
  const tools::Finding good = gpu_line(12);
  EXPECT_EQ(good.severity, tools::Severity::good);
  EXPECT_TRUE(good.text.starts_with("Fake GPU, 8.00 GiB, 8.00 GiB free; CUDA ")) << good.text;
  install_driver("470.82.01");
  std::filesystem::create_directories(directory_.path() / "dev");
  directory_.write("dev/nvidia0", "");
  FakeCuda::driver = 11040;
  const tools::Finding bad = gpu_line(13);
  EXPECT_EQ(bad.severity, tools::Severity::fault);
  EXPECT_NE(bad.text.find("the NVIDIA driver 470.82.01 supports CUDA 11.4"), std::string::npos)
      << bad.text;
  EXPECT_NE(bad.text.find("update the driver to "), std::string::npos) << bad.text;
}

/// Findings with this name.
std::vector<tools::Finding> named(const std::vector<tools::Finding>& all, const std::string& name) {
  std::vector<tools::Finding> found;
  std::copy_if(all.begin(), all.end(), std::back_inserter(found),
               [&](const auto& finding) { return finding.name == name; });
  return found;
}

constexpr tools::GpuEffort kLittle = {.pinned = 2 * kMiB, .seconds = 0.001, .rows = 64};

TEST_F(GpuStart, DoctorComparesTheKernelsOfTheModel) {
  const auto all = tools::examine_gpu(config({}), kLittle);
  for (const tools::Finding& finding : all) {
    EXPECT_EQ(finding.severity, tools::Severity::good) << finding.name << ": " << finding.text;
  }
  const auto text_of = [&](const std::string& name) {
    const auto found = named(all, name);
    return found.size() == 1 ? found.front().text : "";
  };
  EXPECT_TRUE(text_of("passes").starts_with("5 agree with the host device; ")) << text_of("passes");
  EXPECT_NE(text_of("products").find(" agree with the plain kernel; "), std::string::npos);
  EXPECT_TRUE(text_of("sequence").starts_with("5 agree with the plain kernels; "));
  EXPECT_NE(text_of("link").find("2.00 MiB pinned"), std::string::npos) << text_of("link");
  EXPECT_NE(text_of("GEMM peak").find(" TFLOP/s in bf16"), std::string::npos);
  EXPECT_NE(text_of("attention").find("backward "), std::string::npos) << text_of("attention");
  EXPECT_EQ(text_of("device memory"), "8.00 GiB free after all libraries were loaded");
}

TEST_F(GpuStart, DoctorNamesTheKernelThatIsWrong) {
  test::FakeCublasLt::factor = 1.25F;
  const auto all = tools::examine_gpu(config({}), kLittle);
  test::FakeCublasLt::factor = 1.0F;
  const auto products = named(all, "products");
  ASSERT_FALSE(products.empty());
  for (const tools::Finding& product : products) {
    EXPECT_EQ(product.severity, tools::Severity::fault) << product.text;
    EXPECT_TRUE(product.text.starts_with("product [")) << product.text;
  }
  const auto passes = named(all, "passes");
  ASSERT_FALSE(passes.empty());
  EXPECT_TRUE(passes.front().text.starts_with("forward of layer 0, output: difference "))
      << passes.front().text;
  EXPECT_TRUE(passes.front().text.ends_with("train with ballast.kernels=plain"));
}

TEST_F(GpuStart, CopiesBetweenItsGpusAreMeasured) {
  const auto peers = [&](const std::vector<std::string>& overrides) {
    const engine::RunInputs run = setup::translate(config(overrides));
    plan::Rates rates;
    calibrate::measure_link(calibrate::make_sample(run), rates);
    return rates.peer_per_second;
  };
  const std::size_t before = FakeCuda::copied_to_peers;
  EXPECT_EQ(peers({}), 0.0);
  EXPECT_EQ(FakeCuda::copied_to_peers, before);
  EXPECT_GT(peers({"ballast.devices=[0, 0]"}), 0.0);
  EXPECT_GT(FakeCuda::copied_to_peers, before);
}

TEST_F(GpuStart, DoctorExaminesEveryFamilyOfLayers) {
  const char* const experts =
      R"("family": "qwen3_moe", "vocab_size": 131, "hidden_size": 32, "num_layers": 2,
         "num_heads": 4, "num_kv_heads": 2, "head_dim": 8, "intermediate_size": 40,
         "moe_intermediate_size": 24, "num_experts": 4, "num_experts_per_tok": 2)";
  const auto all =
      calibrate::compare_with_host(setup::translate(config({"model.vocabulary_tiles=2"}, experts)));
  EXPECT_GT(all.size(), 12U);
  for (const auto& one : all) {
    EXPECT_TRUE(one.agrees) << one.name << ", " << one.port << ": " << one.difference.mean << ", "
                            << one.difference.most;
  }
}

TEST_F(GpuStart, DoctorMeasuresEachWidthOfHeads) {
  const char* const two_widths =
      R"("family": "gemma4", "vocab_size": 131, "hidden_size": 32, "num_layers": 6,
         "num_heads": 2, "num_kv_heads": 1, "head_dim": 8, "global_head_dim": 264)";
  std::vector<std::string> texts;
  for (const tools::Finding& one :
       named(tools::examine_gpu(config({}, two_widths), kLittle), "attention")) {
    EXPECT_EQ(one.severity, tools::Severity::good) << one.text;
    texts.push_back(one.text.substr(one.text.rfind(", ") + 2));
  }
  EXPECT_EQ(texts, (std::vector<std::string>{"heads of 8", "heads of 264"}));
}

TEST_F(GpuStart, DoctorRefersToTheRatesOfKnownGpus) {
  for (const tools::KnownGpu& gpu : tools::known_gpus()) {
    const plan::Rates rates =
        calibrate::load_rates(std::filesystem::path(BALLAST_CONFIGS) / "rates" / gpu.rates);
    EXPECT_DOUBLE_EQ(rates.forward.back().flops_per_second, 1e12 * gpu.tflops) << gpu.rates;
    EXPECT_DOUBLE_EQ(rates.upload_per_second, 1e9 * gpu.upload_gbps) << gpu.rates;
    EXPECT_DOUBLE_EQ(rates.offload_per_second, 1e9 * gpu.offload_gbps) << gpu.rates;
  }
}

TEST_F(GpuStart, RefusesRanksThatAreNotMultiplesOfAnAccess) {
  const auto make = [&](int rank) {
    const std::string model =
        R"("family": "deepseek_v3", "vocab_size": 131, "hidden_size": 32, "num_layers": 1,
           "num_heads": 2, "intermediate_size": 40, "first_k_dense_replace": 1, "q_lora_rank": 16,
           "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8, "kv_lora_rank": )" +
        std::to_string(rank);
    static_cast<void>(setup::make_engine(config({}, model.c_str())));
  };
  EXPECT_NO_THROW(make(24));
  try {
    make(20);
    ADD_FAILURE() << "nothing was thrown";
  } catch (const Error& error) {
    EXPECT_EQ(error.category(), ErrorCategory::config);
    EXPECT_STREQ(error.what(),
                 "model.kv_lora_rank is 20, but device cuda needs a multiple of 8; change "
                 "model.kv_lora_rank or set ballast.device to \"host\"");
  }
}

TEST_F(GpuStart, RefusesHeadsThatAnOldGpuCannotHold) {
  const std::string model = R"("family": "llama", "vocab_size": 131, "hidden_size": 32,
                               "num_layers": 1, "num_heads": 1, "intermediate_size": 40,
                               "head_dim": )";
  const auto make = [&](int size) {
    const std::string of_size = model + std::to_string(size);
    static_cast<void>(
        setup::make_engine(config({"bf16.enabled=false", "fp16.enabled=true"}, of_size.c_str())));
  };
  EXPECT_NO_THROW(make(256));
  FakeCuda::old_gpu = 0;
  EXPECT_NO_THROW(make(320));
  try {
    make(328);
    ADD_FAILURE() << "nothing was thrown";
  } catch (const Error& error) {
    EXPECT_EQ(error.category(), ErrorCategory::config);
    EXPECT_STREQ(
        error.what(),
        "model.head_dim is 328, but Fake GPU (compute capability 7.5) supports at most 320; "
        "use a GPU of 8.0 or newer, or set ballast.device to \"host\"");
  }
}

}  // namespace
}  // namespace ballast::engine::gpu_start_test
