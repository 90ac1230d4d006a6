#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <map>
#include <memory>
#include <random>
#include <thread>

#include <ATen/Parallel.h>

#include "lockstep/checkpoint/checkpoint_folder.h"
#include "lockstep/core/config_io.h"
#include "lockstep/tests/support/launch.h"
#include "lockstep/tests/support/synthetic_text.h"
#include "lockstep/tests/support/temporary_folder.h"
#include "lockstep/training/run_checkpoints.h"

// A run of two processes that is killed again and again. The processes are forks of this one, which
// has loaded libtorch and started no thread, so a life costs little. tests/end_to_end/kill_test.py
// kills some runs through the command line.

namespace lockstep {
namespace {

using std::chrono::microseconds;
using std::chrono::milliseconds;
using Clock = std::chrono::steady_clock;

constexpr int64_t kRanks = 2;
constexpr int64_t kInterval = 2;
constexpr int64_t kMostLines = 100'000;
constexpr milliseconds kPatience{20'000};

/// The numbers of one iteration of a life. All bits count.
struct Line {
  int64_t life = 0;
  int64_t iteration = 0;
  std::array<double, 4> numbers = {};  ///< loss, gradient norm, learning rate, samples
};

/// Memory shared by this process and all its forks, so that records outlive the process that wrote
/// them.
struct Blackboard {
  std::atomic<int64_t> lines;
  std::array<Line, kMostLines> line;
  std::atomic<int64_t> complete;  ///< newest iteration whose checkpoint is known to be complete

  static Blackboard& shared() {
    void* const memory = ::mmap(nullptr, sizeof(Blackboard), PROT_READ | PROT_WRITE,
                                MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) throw std::runtime_error("mmap");
    return *new (memory) Blackboard;
  }
};

/// One start of the run.
struct Life {
  Config config;
  std::string folder;
  int64_t number = 0;
  int64_t last = 0;  ///< iteration at which it ends on its own
  std::shared_ptr<testing::ReservedPort> port = std::make_shared<testing::ReservedPort>();
};

void train(const Life& life, const ParallelState& state, Blackboard& board) {
  RunCheckpoints checkpoints(life.config.checkpoint, life.folder, state);
  Trainer trainer(life.config, state);
  checkpoints.load(trainer);
  while (trainer.iteration() < life.last) {
    const IterationMetrics metrics = trainer.train_step();
    if (state.rank() == 0) {
      const int64_t line = board.lines;
      board.line.at(static_cast<size_t>(line)) = {
          life.number,
          metrics.iteration,
          {metrics.lm_loss, metrics.grad_norm, metrics.learning_rate,
           static_cast<double>(metrics.consumed_samples)}};
      board.lines = line + 1;
    }
    checkpoints.after_iteration(trainer, trainer.iteration() == life.last);
    if (!life.config.checkpoint.async_save && trainer.iteration() % kInterval == 0)
      board.complete = trainer.iteration();
  }
}

/// A rank in its own process. Ends without destructors, as the program does.
[[noreturn]] void be_rank(const Life& life, int rank, Blackboard& board) {
  ::prctl(PR_SET_PDEATHSIG, SIGKILL);
  at::set_num_threads(1);
  try {
    LaunchEnvironment environment = testing::environment_of(rank, kRanks, life.port->number());
    environment.run_id = "life " + std::to_string(life.number);
    static const ParallelState state(environment, parallel_options(life.config, c10::kCPU));
    train(life, state, board);
    ::_exit(0);
  } catch (const std::exception& error) {
    if (std::getenv("LOCKSTEP_KILL_TEST_TELLS") != nullptr)
      std::fprintf(stderr, "life %d, rank %d: %s\n", static_cast<int>(life.number), rank,
                   error.what());
    ::_exit(1);
  }
}

std::vector<pid_t> begin(const Life& life, Blackboard& board) {
  std::vector<pid_t> ranks;
  for (int rank = 0; rank < kRanks; ++rank) {
    ranks.push_back(::fork());
    if (ranks.back() == 0) be_rank(life, rank, board);
  }
  return ranks;
}

/// Returns the exit statuses of the processes. Kills those that have not ended after `patience`, as
/// a launcher does with ranks that wait for a dead one.
std::vector<int> wait_for_end(const std::vector<pid_t>& ranks, milliseconds patience) {
  std::vector<int> statuses;
  const auto deadline = Clock::now() + patience;
  for (const pid_t rank : ranks) {
    int status = 0;
    while (::waitpid(rank, &status, WNOHANG) == 0) {
      if (Clock::now() > deadline) ::kill(rank, SIGKILL);
      std::this_thread::sleep_for(milliseconds(1));
    }
    statuses.push_back(status);
  }
  return statuses;
}

bool any_has_ended(const std::vector<pid_t>& ranks) {
  for (const pid_t rank : ranks) {
    siginfo_t info = {};
    if (::waitid(P_PID, static_cast<id_t>(rank), &info, WEXITED | WNOHANG | WNOWAIT) != 0 ||
        info.si_pid != 0)
      return true;
  }
  return false;
}

bool inside_a_save(const std::string& folder) {
  std::error_code error;
  for (const auto& entry : std::filesystem::directory_iterator(folder, error))
    if (entry.path().filename().string().ends_with(".partial")) return true;
  return false;
}

int64_t newest_iteration(const std::string& folder) {
  return has_checkpoint(folder) ? CheckpointReader(folder).manifest().iteration : 0;
}

class KillTest : public ::testing::Test {
 protected:
  KillTest() { text_ = folder_.write("text", testing::synthetic_text()); }

  Life life(const std::string& name, int64_t number, int64_t last, int64_t interval) const {
    const std::string into = folder_.path() / name;
    Life life{.config = parse_config(
                  "model { num_layers: 1 hidden_size: 8 num_attention_heads: 2 seq_length: 8 } "
                  "optimizer { lr: 0.01 lr_warmup_iters: 5 lr_decay_iters: 1000 clip_grad: 0.5 "
                  "weight_decay: 0.1 lr_decay_style: \"cosine\" } "
                  "ddp { use_distributed_optimizer: true overlap_param_gather: true } "
                  "train { global_batch_size: 4 micro_batch_size: 2 train_iters: 100000 "
                  "eval_iters: 0 } checkpoint { load_if_present: true keep: 2 } "
                  "parallel { distributed_timeout_seconds: 20 }",
                  "test",
                  {"data.path=" + text_, "checkpoint.load=" + into,
                   "checkpoint.save_interval=" + std::to_string(interval),
                   std::string("checkpoint.async_save=") + (number % 2 == 0 ? "false" : "true")}),
              .folder = into,
              .number = number,
              .last = last};
    return life;
  }

  testing::TemporaryFolder folder_;
  std::string text_;
};

/// An environment variable, such as the number of kills or the seed of their moments.
int64_t setting(const char* name, int64_t otherwise) {
  const char* const text = std::getenv(name);
  return text == nullptr ? otherwise : std::atoll(text);
}

TEST_F(KillTest, EveryLifeGoesOnFromTheLastCheckpointBitForBit) {
  const int64_t kills = setting("LOCKSTEP_KILLS", 100);
  std::mt19937_64 random(static_cast<uint64_t>(setting("LOCKSTEP_KILL_SEED", 1)));
  const auto below = [&](double limit) {
    return std::uniform_real_distribution<double>(0, limit)(random);
  };
  Blackboard& board = Blackboard::shared();
  const std::string folder = folder_.path() / "killed";
  std::map<int64_t, int64_t> resumed_at;  // per life
  int64_t inside = 0;
  double start_seconds = 0.1;  // of a life, until its first iteration
  for (int64_t kill = 0; kill < kills; ++kill) {
    const int64_t known = board.complete;
    resumed_at[kill] = newest_iteration(folder);
    ASSERT_GE(resumed_at[kill], known) << "life " << kill << " has lost a checkpoint";
    const int64_t lines = board.lines;
    const auto start = Clock::now();
    const std::vector<pid_t> ranks = begin(life("killed", kill, kMostLines, kInterval), board);
    const auto seconds = [&] {
      return std::chrono::duration<double>(Clock::now() - start).count();
    };
    const auto wait_until = [&](const std::function<bool()>& reached) {
      while (!reached() && seconds() < 20 && !any_has_ended(ranks))
        std::this_thread::sleep_for(microseconds(200));
    };
    // One kill in five comes at a random moment of the start, the others after some iterations.
    // Most of these wait for a save to begin.
    const bool in_start = below(1) < 0.2;
    if (in_start) {
      std::this_thread::sleep_for(microseconds(static_cast<int64_t>(1e6 * below(start_seconds))));
    } else {
      wait_until([&] { return board.lines > lines; });
      start_seconds = std::min(0.5, seconds());
      const auto iterations = static_cast<int64_t>(below(6));
      wait_until([&] { return board.lines > lines + iterations; });
      if (below(1) < 0.7) wait_until([&] { return inside_a_save(folder); });
      std::this_thread::sleep_for(microseconds(static_cast<int64_t>(below(4000))));
    }
    ASSERT_FALSE(any_has_ended(ranks)) << "life " << kill << " ended by itself";
    inside += inside_a_save(folder) ? 1 : 0;
    const auto victim = static_cast<size_t>(below(3));  // 2: both
    for (size_t rank = 0; rank < ranks.size(); ++rank)
      if (victim == 2 || victim == rank) ::kill(ranks[rank], SIGKILL);
    // A surviving rank continues until it notices. Most launchers here are as impatient as
    // torchrun. The patient ones meet even and odd lives, which save in different ways.
    const bool launcher_waits = !in_start && kill % 7 == 0;
    const auto patience = milliseconds(static_cast<int64_t>(below(300)));
    const auto statuses = wait_for_end(ranks, launcher_waits ? kPatience : patience);
    for (size_t rank = 0; rank < ranks.size(); ++rank) {
      const bool killed = WIFSIGNALED(statuses[rank]) && WTERMSIG(statuses[rank]) == SIGKILL;
      const bool failed = WIFEXITED(statuses[rank]) && WEXITSTATUS(statuses[rank]) == 1;
      ASSERT_TRUE(victim == 2 || victim == rank ? killed : failed || (!launcher_waits && killed))
          << "life " << kill << ", rank " << rank << ": status " << statuses[rank];
    }
    ASSERT_TRUE(!has_checkpoint(folder) || verify_checkpoint(folder).empty());
  }
  EXPECT_GE(inside, kills / 5);

  const int64_t last = newest_iteration(folder) + 5;
  resumed_at[kills] = newest_iteration(folder);
  EXPECT_EQ(wait_for_end(begin(life("killed", kills, last, kInterval), board), kPatience),
            (std::vector<int>{0, 0}));
  const auto killed = static_cast<size_t>(board.lines.load());
  resumed_at[kills + 1] = 0;
  EXPECT_EQ(wait_for_end(begin(life("whole", kills + 1, last, kMostLines), board), kPatience),
            (std::vector<int>{0, 0}));
  const auto all = static_cast<size_t>(board.lines.load());
  ASSERT_EQ(all - killed, static_cast<size_t>(last));
  int64_t again = 0, before = -1, expected = 0;
  for (size_t i = 0; i < all; ++i) {
    const Line& line = board.line.at(i);
    expected = line.life == before ? expected + 1 : resumed_at.at(line.life) + 1;
    before = line.life;
    ASSERT_EQ(line.iteration, expected) << "life " << line.life;
    const Line& reference = board.line.at(killed + static_cast<size_t>(line.iteration) - 1);
    ASSERT_EQ(line.numbers, reference.numbers)
        << "life " << line.life << ", iteration " << line.iteration;
    again += i < killed ? 1 : 0;
  }
  std::printf("%d kills, %d of them inside a save; %d iterations of %d were trained\n",
              static_cast<int>(kills), static_cast<int>(inside), static_cast<int>(again),
              static_cast<int>(last));
}

}  // namespace
}  // namespace lockstep
