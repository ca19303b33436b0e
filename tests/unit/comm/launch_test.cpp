#include <cstdlib>
#include <map>
#include <string>

#include <gtest/gtest.h>

#include "ballast/comm/communicator.h"
#include "ballast/core/error.h"
#include "ballast/text/json.h"

namespace ballast::comm::launch_test {
namespace {

using Variables = std::map<std::string, std::string>;

constexpr std::string_view kAll =
    "OMPI_COMM_WORLD_RANK OMPI_COMM_WORLD_SIZE OMPI_COMM_WORLD_LOCAL_RANK "
    "OMPI_COMM_WORLD_LOCAL_SIZE PMI_RANK PMI_SIZE MPI_LOCALRANKID MPI_LOCALNRANKS "
    "SLURM_STEP_ID SLURM_PROCID SLURM_NTASKS SLURM_LOCALID SLURM_NODEID SLURM_TASKS_PER_NODE "
    "SLURM_NTASKS_PER_NODE RANK WORLD_SIZE LOCAL_RANK MASTER_ADDR FLUX_TASK_RANK FLUX_JOB_SIZE "
    "JSM_NAMESPACE_RANK JSM_NAMESPACE_SIZE MV2_COMM_WORLD_RANK MV2_COMM_WORLD_SIZE HOROVOD_RANK "
    "HOROVOD_SIZE";

/// Calls `work` with these variables and no others of launchers.
template <class Work>
auto call_with(const Variables& variables, Work work) {
  for (const auto name : text::words_of(kAll)) unsetenv(std::string(name).c_str());
  for (const auto& [name, value] : variables) setenv(name.c_str(), value.c_str(), 1);
  struct Restore {
    ~Restore() {
      for (const auto name : text::words_of(kAll)) unsetenv(std::string(name).c_str());
    }
  } restore;
  return work();
}

Launch read_with(const Variables& variables) {
  return call_with(variables, read_launch);
}

Variables with(Variables variables, const Variables& changes) {
  for (const auto& [name, value] : changes) variables[name] = value;
  return variables;
}

Variables without(Variables variables, const std::string& name) {
  variables.erase(name);
  return variables;
}

void expect_launch(const Variables& variables, const Launch& expected) {
  const Launch launch = read_with(variables);
  EXPECT_EQ(launch.launcher, expected.launcher);
  EXPECT_EQ(launch.rank, expected.rank);
  EXPECT_EQ(launch.world, expected.world);
  EXPECT_EQ(launch.local_rank, expected.local_rank);
  EXPECT_EQ(launch.local_world, expected.local_world);
}

void expect_refusal(const Variables& variables, const std::string& text) {
  try {
    read_with(variables);
    FAIL() << "no error that says: " << text;
  } catch (const Error& error) {
    EXPECT_EQ(error.category(), ErrorCategory::usage);
    EXPECT_NE(std::string(error.what()).find(text), std::string::npos) << error.what();
    EXPECT_EQ(std::string(error.what()).find('\n'), std::string::npos);
  }
}

const Variables kOpenMpi = {{"OMPI_COMM_WORLD_RANK", "5"},
                            {"OMPI_COMM_WORLD_SIZE", "8"},
                            {"OMPI_COMM_WORLD_LOCAL_RANK", "1"},
                            {"OMPI_COMM_WORLD_LOCAL_SIZE", "4"}};
const Variables kPmi = {
    {"PMI_RANK", "3"}, {"PMI_SIZE", "4"}, {"MPI_LOCALRANKID", "1"}, {"MPI_LOCALNRANKS", "2"}};
const Variables kSrun = {{"SLURM_STEP_ID", "0"}, {"SLURM_PROCID", "8"},
                         {"SLURM_NTASKS", "11"}, {"SLURM_LOCALID", "0"},
                         {"SLURM_NODEID", "2"},  {"SLURM_TASKS_PER_NODE", "4(x2),3"}};

TEST(Launch, WithoutALauncherThereIsOneRank) {
  expect_launch({}, {});
  EXPECT_TRUE(read_with({}).first());
}

TEST(Launch, OpenMpi) {
  expect_launch(
      kOpenMpi,
      {.launcher = "mpirun (Open MPI)", .rank = 5, .world = 8, .local_rank = 1, .local_world = 4});
  EXPECT_FALSE(read_with(kOpenMpi).first());
}

TEST(Launch, Pmi) {
  expect_launch(
      kPmi,
      {.launcher = "mpiexec (PMI)", .rank = 3, .world = 4, .local_rank = 1, .local_world = 2});
  expect_launch({{"PMI_RANK", "0"}, {"PMI_SIZE", "1"}}, {.launcher = "mpiexec (PMI)"});
}

TEST(Launch, Srun) {
  expect_launch(kSrun,
                {.launcher = "srun", .rank = 8, .world = 11, .local_rank = 0, .local_world = 3});
  expect_launch(with(kSrun, {{"SLURM_NODEID", "1"}, {"SLURM_PROCID", "7"}, {"SLURM_LOCALID", "3"}}),
                {.launcher = "srun", .rank = 7, .world = 11, .local_rank = 3, .local_world = 4});
  const Variables plain =
      with(without(kSrun, "SLURM_TASKS_PER_NODE"), {{"SLURM_NTASKS_PER_NODE", "6"}});
  expect_launch(plain,
                {.launcher = "srun", .rank = 8, .world = 11, .local_rank = 0, .local_world = 6});
}

TEST(Launch, AnSbatchScriptAndAnSallocShellStayAlone) {
  expect_launch(without(kSrun, "SLURM_STEP_ID"), {});
  expect_launch(with(kSrun, {{"SLURM_STEP_ID", "4294967291"}}), {});
}

TEST(Launch, MpirunInsideSrunIsMpirun) {
  EXPECT_EQ(read_with(with(kSrun, kOpenMpi)).rank, 5U);
  EXPECT_EQ(read_with(with(kSrun, kPmi)).rank, 3U);
}

TEST(Launch, SrunWithPmiTakesTheLocalRankOfSlurm) {
  const Variables both = with(kSrun, {{"PMI_RANK", "8"}, {"PMI_SIZE", "11"}});
  expect_launch(both,
                {.launcher = "srun", .rank = 8, .world = 11, .local_rank = 0, .local_world = 3});
}

TEST(Launch, HalfOfAPairIsRefusedByName) {
  for (const Variables& whole : {kOpenMpi, kPmi}) {
    for (const auto& [name, value] : whole) expect_refusal(without(whole, name), name);
  }
  for (const std::string name :
       {"SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_TASKS_PER_NODE"}) {
    expect_refusal(without(kSrun, name),
                   name == "SLURM_TASKS_PER_NODE" ? "SLURM_NTASKS_PER_NODE" : name);
  }
  expect_refusal({{"OMPI_COMM_WORLD_RANK", "0"}, {"OMPI_COMM_WORLD_SIZE", "2"}},
                 "OMPI_COMM_WORLD_LOCAL_RANK");
  expect_refusal({{"PMI_RANK", "0"}, {"PMI_SIZE", "2"}}, "MPI_LOCALRANKID");
}

TEST(Launch, WhatIsNoNumberIsRefusedByName) {
  for (const Variables& whole : {kOpenMpi, kPmi, kSrun}) {
    for (const auto& [name, value] : whole) {
      for (const std::string text : {"", "two", "-1", "1x", " 1", "99999999999999999999"}) {
        expect_refusal(with(whole, {{name, text}}), name + "=" + text + " in the environment");
      }
    }
  }
}

TEST(Launch, ContradictionsAreRefusedByName) {
  expect_refusal(with(kOpenMpi, {{"OMPI_COMM_WORLD_RANK", "8"}}), "OMPI_COMM_WORLD_RANK=8");
  expect_refusal(with(kOpenMpi, {{"OMPI_COMM_WORLD_SIZE", "0"}}), "OMPI_COMM_WORLD_SIZE=0");
  expect_refusal(with(kOpenMpi, {{"OMPI_COMM_WORLD_LOCAL_RANK", "4"}}),
                 "OMPI_COMM_WORLD_LOCAL_RANK=4");
  expect_refusal(with(kOpenMpi, {{"OMPI_COMM_WORLD_LOCAL_SIZE", "9"}}),
                 "OMPI_COMM_WORLD_LOCAL_SIZE=9");
  expect_refusal(with(kPmi, {{"PMI_RANK", "4"}}), "PMI_RANK=4");
  expect_refusal(with(kSrun, {{"SLURM_LOCALID", "3"}}), "SLURM_LOCALID=3");
  expect_refusal(with(kSrun, {{"SLURM_NODEID", "3"}}), "SLURM_NODEID");
  for (const std::string text : {"4(x2", "4(2),3", "4(x),3", ",4", "0(x3)", "4(x2)),3"}) {
    expect_refusal(with(kSrun, {{"SLURM_TASKS_PER_NODE", text}}), "SLURM_TASKS_PER_NODE=" + text);
  }
}

TEST(OtherLaunchers, OfSeveralProcessesAreFound) {
  const Variables torchrun = {
      {"RANK", "1"}, {"WORLD_SIZE", "4"}, {"LOCAL_RANK", "1"}, {"MASTER_ADDR", "127.0.0.1"}};
  const auto found = call_with(torchrun, find_other_launcher);
  ASSERT_TRUE(found);
  EXPECT_EQ(found->rank, 1);
  EXPECT_EQ(found->world, 4);
  EXPECT_EQ(found->variables, "RANK and WORLD_SIZE");
  for (const std::string name :
       {"FLUX_TASK_RANK FLUX_JOB_SIZE", "HOROVOD_RANK HOROVOD_SIZE",
        "JSM_NAMESPACE_RANK JSM_NAMESPACE_SIZE", "MV2_COMM_WORLD_RANK MV2_COMM_WORLD_SIZE"}) {
    const auto names = text::words_of(name);
    const auto other = call_with({{std::string(names[0]), "0"}, {std::string(names[1]), "2"}},
                                 find_other_launcher);
    EXPECT_TRUE(other && other->rank == 0 && other->world == 2) << name;
  }
}

TEST(OtherLaunchers, OfOneProcessAreIgnored) {
  const Variables none[] = {{},
                            {{"RANK", "3"}},
                            {{"WORLD_SIZE", "4"}},
                            {{"RANK", "0"}, {"WORLD_SIZE", "1"}},
                            {{"RANK", "first"}, {"WORLD_SIZE", "many"}},
                            {{"SLURM_PROCID", "0"}, {"SLURM_NTASKS", "4"}}};
  for (const Variables& variables : none) {
    EXPECT_FALSE(call_with(variables, find_other_launcher));
  }
  // mpirun may start processes inside of them.
  EXPECT_FALSE(
      call_with(with(kOpenMpi, {{"RANK", "1"}, {"WORLD_SIZE", "4"}}), find_other_launcher));
}

}  // namespace
}  // namespace ballast::comm::launch_test
