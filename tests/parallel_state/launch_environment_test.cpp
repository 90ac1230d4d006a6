#include "lockstep/parallel_state/launch_environment.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>

#include "lockstep/core/error.h"
#include "lockstep/parallel_state/job_start.h"

namespace lockstep {
namespace {

using Variables = std::map<std::string, std::string>;

LaunchEnvironment read(const Variables& variables) {
  return read_launch_environment([&](const char* name) -> std::optional<std::string> {
    const auto found = variables.find(name);
    return found == variables.end() ? std::nullopt : std::optional(found->second);
  });
}

std::string refusal(const Variables& variables) {
  try {
    read(variables);
    return "";
  } catch (const ConfigError& error) {
    return error.what();
  }
}

const Variables kTorchrun = {{"RANK", "3"},
                             {"WORLD_SIZE", "4"},
                             {"LOCAL_RANK", "1"},
                             {"LOCAL_WORLD_SIZE", "2"},
                             {"MASTER_ADDR", "10.0.0.1"},
                             {"MASTER_PORT", "1234"}};

Variables with(Variables variables, const Variables& changes) {
  for (const auto& [name, value] : changes) variables[name] = value;
  return variables;
}

Variables without(Variables variables, const char* name) {
  variables.erase(name);
  return variables;
}

TEST(LaunchEnvironment, NothingSetIsASingleProcess) {
  const auto env = read({});
  EXPECT_EQ(env.launcher, Launcher::none);
  EXPECT_EQ(env.world_size, 1);
  EXPECT_TRUE(env.single_host());
}

TEST(LaunchEnvironment, Torchrun) {
  const auto env = read(kTorchrun);
  EXPECT_EQ(env.launcher, Launcher::torchrun);
  EXPECT_EQ(env.rank, 3);
  EXPECT_EQ(env.world_size, 4);
  EXPECT_EQ(env.local_rank, 1);
  EXPECT_EQ(env.local_world_size, 2);
  EXPECT_EQ(env.master_address, "10.0.0.1");
  EXPECT_EQ(env.master_port, 1234);
  EXPECT_FALSE(env.agent_serves_store);
  EXPECT_FALSE(env.single_host());
}

TEST(LaunchEnvironment, TorchrunsAgentServesTheStoreOnlyWhenItSaysTrue) {
  EXPECT_TRUE(read(with(kTorchrun, {{"TORCHELASTIC_USE_AGENT_STORE", "True"}})).agent_serves_store);
  EXPECT_FALSE(
      read(with(kTorchrun, {{"TORCHELASTIC_USE_AGENT_STORE", "False"}})).agent_serves_store);
}

TEST(LaunchEnvironment, MissingAndNonsensicalVariablesAreNamed) {
  EXPECT_EQ(refusal(without(kTorchrun, "RANK")), "environment variable RANK: not set");
  EXPECT_EQ(refusal(without(kTorchrun, "WORLD_SIZE")), "environment variable WORLD_SIZE: not set");
  EXPECT_EQ(refusal(without(kTorchrun, "MASTER_ADDR")),
            "environment variable MASTER_ADDR: not set");
  EXPECT_EQ(refusal(with(kTorchrun, {{"RANK", "4"}})),
            "environment variable RANK: found '4', allowed: 0 to 3");
  EXPECT_EQ(refusal(with(kTorchrun, {{"RANK", "-1"}})),
            "environment variable RANK: found '-1', allowed: 0 to 3");
  EXPECT_EQ(refusal(with(kTorchrun, {{"WORLD_SIZE", "two"}})),
            "environment variable WORLD_SIZE: found 'two', allowed: 1 to 16777216");
  EXPECT_EQ(refusal(with(kTorchrun, {{"MASTER_PORT", "70000"}})),
            "environment variable MASTER_PORT: found '70000', allowed: 1 to 65535");
  EXPECT_EQ(refusal(with(kTorchrun, {{"LOCAL_RANK", "2"}})),
            "environment variable LOCAL_RANK: found '2', allowed: 0 to 1");
}

const Variables kSlurm = {{"SLURM_PROCID", "9"},
                          {"SLURM_NTASKS", "20"},
                          {"SLURM_LOCALID", "1"},
                          {"SLURM_NODEID", "1"},
                          {"SLURM_STEP_NUM_NODES", "3"},
                          {"SLURM_STEP_TASKS_PER_NODE", "8(x2),4"},
                          {"SLURM_STEP_NODELIST", "node[03-05]"},
                          {"SLURM_JOB_ID", "77"},
                          {"SLURM_STEP_ID", "0"}};

TEST(LaunchEnvironment, Slurm) {
  const auto env = read(kSlurm);
  EXPECT_EQ(env.launcher, Launcher::slurm);
  EXPECT_EQ(env.rank, 9);
  EXPECT_EQ(env.world_size, 20);
  EXPECT_EQ(env.local_rank, 1);
  EXPECT_EQ(env.local_world_size, 8);
  EXPECT_EQ(env.master_address, "node03");
  EXPECT_EQ(env.master_port, read(with(kSlurm, {{"SLURM_PROCID", "8"}})).master_port);
  EXPECT_NE(env.master_port, read(with(kSlurm, {{"SLURM_JOB_ID", "78"}})).master_port);
}

TEST(LaunchEnvironment, AShellInsideASlurmAllocationIsASingleProcess) {
  EXPECT_EQ(read({{"SLURM_JOB_ID", "77"}, {"SLURM_NTASKS", "4"}}).launcher, Launcher::none);
}

/// Its one task has the variables of the whole job.
TEST(LaunchEnvironment, SlurmsInteractiveStepIsAWorldOfItsOwn) {
  const auto env = read({{"SLURM_JOB_ID", "77"},
                         {"SLURM_STEP_ID", "4294967290"},
                         {"SLURM_PROCID", "0"},
                         {"SLURM_LOCALID", "0"},
                         {"SLURM_NTASKS", "8"},
                         {"SLURM_STEP_NUM_TASKS", "1"}});
  EXPECT_EQ(env.launcher, Launcher::slurm);
  EXPECT_EQ(env.world_size, 1);
  EXPECT_EQ(env.local_world_size, 1);
}

TEST(LaunchEnvironment, SlurmsListsAreParsed) {
  EXPECT_EQ(first_slurm_host("login"), "login");
  EXPECT_EQ(first_slurm_host("a,b"), "a");
  EXPECT_EQ(first_slurm_host("node[03-05,9],login1"), "node03");
  EXPECT_EQ(first_slurm_host("rack[2,4]-ib0"), "rack2-ib0");
  EXPECT_EQ(first_slurm_host("rack[0-63]_blade[07-41,3],login"), "rack0_blade07");
  EXPECT_THROW(first_slurm_host("node[03"), ConfigError);
  EXPECT_EQ(slurm_tasks_on_node("8(x2),4", 0), 8);
  EXPECT_EQ(slurm_tasks_on_node("8(x2),4", 1), 8);
  EXPECT_EQ(slurm_tasks_on_node("8(x2),4", 2), 4);
  EXPECT_EQ(slurm_tasks_on_node("1,2(x2147483647),3", 2), 2);
  for (const char* bad : {"", "8(x2", "8(y2)", "0", "-3", "8,,4"})
    EXPECT_THROW(slurm_tasks_on_node(bad, 2), ConfigError) << bad;
}

const Variables kOpenMpi = {{"OMPI_COMM_WORLD_RANK", "1"},
                            {"OMPI_COMM_WORLD_SIZE", "2"},
                            {"OMPI_COMM_WORLD_LOCAL_RANK", "1"},
                            {"OMPI_COMM_WORLD_LOCAL_SIZE", "2"},
                            {"PMIX_NAMESPACE", "123@1"}};

TEST(LaunchEnvironment, OpenMpi) {
  const auto env = read(kOpenMpi);
  EXPECT_EQ(env.launcher, Launcher::open_mpi);
  EXPECT_EQ(env.rank, 1);
  EXPECT_EQ(env.master_address, "127.0.0.1");
  EXPECT_NE(env.master_port, read(with(kOpenMpi, {{"PMIX_NAMESPACE", "123@2"}})).master_port);
  EXPECT_EQ(read(with(kOpenMpi, {{"MASTER_PORT", "555"}})).master_port, 555);
}

TEST(LaunchEnvironment, OpenMpiOnSeveralHostsNeedsAnAddress) {
  const Variables two_hosts =
      with(kOpenMpi, {{"OMPI_COMM_WORLD_LOCAL_SIZE", "1"}, {"OMPI_COMM_WORLD_LOCAL_RANK", "0"}});
  EXPECT_TRUE(refusal(two_hosts).starts_with("environment variable MASTER_ADDR: not set"));
  EXPECT_EQ(read(with(two_hosts, {{"MASTER_ADDR", "h1"}})).master_address, "h1");
}

/// Linux takes ports from 32768 on for connections, such as those of ranks that wait for rank 0.
TEST(LaunchEnvironment, NoDerivedPortIsOneThatTheSystemGivesToConnections) {
  int least = 65535, most = 0;
  for (int job = 0; job < 20000; ++job) {
    const int port = read(with(kSlurm, {{"SLURM_JOB_ID", std::to_string(job)}})).master_port;
    least = std::min(least, port);
    most = std::max(most, port);
  }
  EXPECT_GE(least, 20000);
  EXPECT_LT(least, 20100) << "the ports are spread over the whole range";
  EXPECT_LT(most, 32768);
}

TEST(LaunchEnvironment, TheRunIdTellsRunsAndRestartsApart) {
  EXPECT_EQ(read({}).run_id, "");
  EXPECT_EQ(read(kTorchrun).run_id, "");
  const Variables elastic = with(kTorchrun, {{"TORCHELASTIC_RUN_ID", "none"}});
  EXPECT_EQ(read(elastic).run_id, "none/0");
  EXPECT_EQ(read(with(elastic, {{"TORCHELASTIC_RESTART_COUNT", "2"}})).run_id, "none/2");
  // Agents that serve the store count differently.
  const Variables agents = with(
      elastic, {{"TORCHELASTIC_USE_AGENT_STORE", "True"}, {"TORCHELASTIC_RESTART_COUNT", "2"}});
  EXPECT_EQ(read(agents).run_id, "none");
  EXPECT_EQ(read(with(agents, {{"LOCKSTEP_RUN_ID", "mine"}})).run_id, "mine");
  EXPECT_EQ(read(kSlurm).run_id, "77.0/0");
  EXPECT_EQ(read(with(kSlurm, {{"SLURM_RESTART_COUNT", "1"}})).run_id, "77.0/1");
  EXPECT_EQ(read(kOpenMpi).run_id, "123@1");
  EXPECT_EQ(read(with(kSlurm, {{"LOCKSTEP_RUN_ID", "mine"}})).run_id, "mine");
  const Variables named = with(elastic, {{"LOCKSTEP_RUN_ID", "mine"}});
  EXPECT_EQ(read(named).run_id, "mine");
  for (const char* const count : {"0", "1"}) {
    const std::string expected = std::string("mine/") + count;
    EXPECT_EQ(read(with(named, {{"TORCHELASTIC_RESTART_COUNT", count}})).run_id, expected);
    EXPECT_EQ(
        read(with(kSlurm, {{"LOCKSTEP_RUN_ID", "mine"}, {"SLURM_RESTART_COUNT", count}})).run_id,
        expected);
  }
  // torchrun may run on hosts of which only some have Slurm's variables.
  EXPECT_EQ(read(with(named, {{"SLURM_RESTART_COUNT", "1"}})).run_id, "mine");
  EXPECT_EQ(refusal(with(kTorchrun, {{"LOCKSTEP_RUN_ID", ""}})),
            "environment variable LOCKSTEP_RUN_ID: not set");
}

TEST(LaunchEnvironment, RanksOfASingleHostMeetOnLoopback) {
  const Variables together = with(kTorchrun, {{"LOCAL_WORLD_SIZE", "4"}});
  EXPECT_EQ(read(together).store_address(), "127.0.0.1");
  EXPECT_EQ(read(with(together, {{"MASTER_ADDR", "127.0.0.2"}})).store_address(), "127.0.0.2");
  EXPECT_EQ(read(with(together, {{"MASTER_ADDR", "::1"}})).store_address(), "::1");
  EXPECT_EQ(read(with(together, {{"TORCHELASTIC_USE_AGENT_STORE", "True"}})).store_address(),
            "10.0.0.1");
  // RANK and WORLD_SIZE set by hand.
  Variables by_hand = without(without(kTorchrun, "LOCAL_WORLD_SIZE"), "LOCAL_RANK");
  EXPECT_FALSE(read(by_hand).single_host());
  EXPECT_EQ(read(by_hand).store_address(), "10.0.0.1");
  by_hand["MASTER_ADDR"] = "localhost";
  EXPECT_TRUE(read(by_hand).single_host());
  EXPECT_EQ(read(by_hand).store_address(), "127.0.0.1");
}

TEST(LaunchEnvironment, ALocalRankNeedsNoLocalWorldSize) {
  Variables by_hand = without(kTorchrun, "LOCAL_WORLD_SIZE");
  for (const char* const variable : {"WORLD_SIZE", "LOCAL_RANK", "RANK"})
    by_hand[variable] = variable == std::string("WORLD_SIZE") ? "4" : "3";
  EXPECT_EQ(read(by_hand).local_rank, 3);
  EXPECT_FALSE(read(by_hand).single_host());
  EXPECT_EQ(refusal(with(by_hand, {{"LOCAL_RANK", "4"}})),
            "environment variable LOCAL_RANK: found '4', allowed: 0 to 3");
}

TEST(LaunchEnvironment, TorchrunGoesBeforeTheBatchSystemAroundIt) {
  EXPECT_EQ(read(with(kSlurm, kTorchrun)).launcher, Launcher::torchrun);
}

JobStart job_start(const Variables& variables) {
  return read_job_start([&](const char* name) -> std::optional<std::string> {
    const auto found = variables.find(name);
    return found == variables.end() ? std::nullopt : std::optional(found->second);
  });
}

TEST(JobStartOfLaunchers, IsTheSameJobAfterEveryRestart) {
  const Variables torchrun = {{"TORCHELASTIC_RUN_ID", "mine"}, {"TORCHELASTIC_RESTART_COUNT", "2"}};
  EXPECT_EQ(job_start(torchrun).job_id, "mine");
  EXPECT_EQ(job_start(torchrun).restarts, 2);
  const JobStart launched = job_start(with(torchrun, {{"LOCKSTEP_JOB_ID", "launch a/7/9"}}));
  EXPECT_EQ(launched.job_id, "launch a/7/9");
  EXPECT_EQ(launched.restarts, 2);
  const Variables slurm = {
      {"SLURM_JOB_ID", "77"}, {"SLURM_STEP_ID", "0"}, {"SLURM_RESTART_COUNT", "1"}};
  EXPECT_EQ(job_start(slurm).job_id, "slurm 77.0");
  EXPECT_EQ(job_start(slurm).restarts, 1);
  EXPECT_EQ(job_start(without(slurm, "SLURM_RESTART_COUNT")).restarts, 0);
}

// A requeued job has a new store of torchrun's agent, in which no round has begun.
TEST(JobStartOfLaunchers, RoundsReplaceTheCountOfTorchrunAndAddToThatOfSlurm) {
  const Variables torchrun = {{"TORCHELASTIC_RUN_ID", "mine"}, {"TORCHELASTIC_RESTART_COUNT", "2"}};
  const Variables requeued = {{"TORCHELASTIC_RUN_ID", "none"},
                              {"TORCHELASTIC_RESTART_COUNT", "1"},
                              {"SLURM_JOB_ID", "77"},
                              {"SLURM_STEP_ID", "0"},
                              {"SLURM_RESTART_COUNT", "4"}};
  const Variables named = with(requeued, {{"TORCHELASTIC_RUN_ID", "mine"}});
  const auto restarts = [](const Variables& variables, std::optional<int64_t> rounds) {
    return with_earlier_rounds(job_start(variables), rounds).restarts;
  };
  EXPECT_EQ(restarts(torchrun, 0), 0);
  EXPECT_EQ(restarts(torchrun, 3), 3);
  EXPECT_EQ(restarts(torchrun, std::nullopt), 2);
  for (const Variables& variables : {requeued, named}) {
    EXPECT_EQ(restarts(variables, 0), 4);
    EXPECT_EQ(restarts(variables, 3), 7);
    EXPECT_EQ(restarts(variables, std::nullopt), 5);
    EXPECT_EQ(job_start(variables).requeues, 4);
  }
  EXPECT_EQ(with_earlier_rounds(job_start(requeued), 0).job_id, "slurm 77.0");
  EXPECT_EQ(with_earlier_rounds(job_start(named), 0).job_id, "mine");
}

TEST(JobStartOfLaunchers, IsUnknownWhereJobsShareAName) {
  for (const Variables& variables :
       {Variables{},
        Variables{{"TORCHELASTIC_RUN_ID", "none"}, {"TORCHELASTIC_RESTART_COUNT", "1"}},
        Variables{{"SLURM_JOB_ID", "77"}}}) {
    EXPECT_EQ(job_start(variables).job_id, "");
    EXPECT_EQ(job_start(variables).restarts, 0);
  }
}

TEST(JobStartOfLaunchers, ACountThatIsNoNumberIsNamed) {
  try {
    job_start({{"TORCHELASTIC_RUN_ID", "mine"}, {"TORCHELASTIC_RESTART_COUNT", "-1"}});
    ADD_FAILURE();
  } catch (const ConfigError& error) {
    EXPECT_STREQ(error.what(),
                 "environment variable TORCHELASTIC_RESTART_COUNT: found '-1', allowed: 0 to "
                 "1073741824");
  }
}

}  // namespace
}  // namespace lockstep
