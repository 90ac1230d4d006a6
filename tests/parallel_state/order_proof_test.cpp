// Hand-written programs: what prove_order() finds under each backend's rules.

#include "lockstep/parallel_state/order_proof.h"

#include <gtest/gtest.h>

#include <algorithm>

#include "lockstep/core/error.h"
#include "lockstep/parallel_state/job_program.h"

namespace lockstep {
namespace {

using Kind = ProgramEvent::Kind;
using OperationKind = CollectiveOperation::Kind;
using Reason = OrderVerdict::Reason;

/// Writes the program of one rank.
class Writer {
 public:
  explicit Writer(int64_t rank) { program_.rank = rank; }

  uint32_t connect(const std::string& name, RankList ranks) {
    const auto index = static_cast<uint32_t>(program_.groups.size());
    const auto own = std::find(ranks.begin(), ranks.end(), program_.rank) - ranks.begin();
    program_.groups.push_back({name, "", std::move(ranks), own});
    program_.events.push_back({Kind::connect, index});
    return index;
  }
  uint32_t start(uint32_t group, const std::string& label, int64_t numel = 8,
                 CollectiveOperation operation = {.reduction = ReduceOp::sum},
                 const std::string& dtype = "Float", bool on_device = true) {
    program_.calls.push_back({group, operation, label, dtype, numel, 4 * numel, on_device});
    program_.events.push_back({Kind::start, static_cast<uint32_t>(program_.calls.size()) - 1});
    return started_++;
  }
  uint32_t on_host(uint32_t group, const std::string& label) {
    return start(group, label, 8, {.reduction = ReduceOp::sum}, "Float", /*on_device=*/false);
  }
  uint32_t send(uint32_t group, int64_t to, const std::string& label, int64_t numel = 4) {
    return start(group, label, numel, {.kind = OperationKind::send, .position = to});
  }
  uint32_t receive(uint32_t group, int64_t from, const std::string& label, int64_t numel = 4) {
    return start(group, label, numel, {.kind = OperationKind::receive, .position = from});
  }
  /// Both ends connect in the same order.
  void pair(uint32_t group, int64_t other, bool begins) {
    program_.calls.push_back(
        {group,
         {.kind = begins ? OperationKind::send : OperationKind::receive, .position = other},
         "first message",
         "",
         0,
         0,
         true});
    program_.events.push_back({Kind::pair, static_cast<uint32_t>(program_.calls.size()) - 1});
  }
  void wait(uint32_t operation) {
    program_.events.push_back({Kind::wait, operation});
    ++waits_;
  }
  void host_wait() { program_.events.push_back({Kind::host_wait, waits_}); }

  RankProgram take() { return std::move(program_); }

 private:
  RankProgram program_;
  uint32_t started_ = 0, waits_ = 0;
};

JobProgram job_of(int64_t world, const std::function<void(int64_t rank, Writer&)>& write) {
  JobProgram job;
  for (int64_t rank = 0; rank < world; ++rank) {
    Writer writer(rank);
    write(rank, writer);
    job.programs.push_back(writer.take());
    job.program_of.push_back(static_cast<uint32_t>(rank));
  }
  return job;
}

TEST(OrderProof, RanksThatDoTheSameFinish) {
  const OrderVerdict verdict = prove_order(job_of(3, [](int64_t, Writer& writer) {
    const uint32_t world = writer.connect("world", {0, 1, 2});
    writer.wait(writer.start(world, "a"));
    writer.wait(writer.start(world, "b"));
  }));
  EXPECT_TRUE(verdict.ok()) << verdict.to_string();
  EXPECT_EQ(verdict.classes, 3);  // each has its own program
  EXPECT_EQ(verdict.num_operations, 6);
}

/// Two groups that contain ranks 0 and 1. If `swaps`, rank 1 uses them in the other order.
void two_groups(int64_t rank, Writer& writer, bool waits, bool swaps, bool on_device) {
  RankProgram unused;
  const uint32_t a = writer.connect("dp", {0, 1, 2}), b = writer.connect("cp", {0, 1});
  const auto one = [&](uint32_t group, const char* label) {
    const uint32_t started = on_device ? writer.start(group, label) : writer.on_host(group, label);
    if (waits) writer.wait(started);
  };
  const bool second_first = swaps && rank == 1;
  if (second_first) one(b, "of cp");
  one(a, "of dp");
  if (!second_first) one(b, "of cp");
}

TEST(OrderProof, TheOrderAcrossGroupsMatters) {
  const auto verdict = [](bool waits, bool swaps, bool on_device) {
    return prove_order(job_of(3, [&](int64_t rank, Writer& writer) {
      if (rank < 2) return two_groups(rank, writer, waits, swaps, on_device);
      const uint32_t a = writer.connect("dp", {0, 1, 2});
      const uint32_t started = on_device ? writer.start(a, "of dp") : writer.on_host(a, "of dp");
      if (waits) writer.wait(started);
    }));
  };
  for (const bool on_device : {true, false})
    for (const bool waits : {true, false})
      EXPECT_TRUE(verdict(waits, /*swaps=*/false, on_device).ok());
  const OrderVerdict found = verdict(/*waits=*/true, /*swaps=*/true, /*on_device=*/true);
  EXPECT_EQ(found.reason, Reason::deadlock);
  EXPECT_EQ(found.rules, "NCCL");
  EXPECT_EQ(found.ranks, (std::vector<int64_t>{0, 1}));
  EXPECT_EQ(found.operations,
            (std::vector<std::string>{
                "rank 0: all_reduce (sum) of of dp, 8 x Float over dp [0, 1, 2], the first use",
                "rank 1: all_reduce (sum) of of cp, 8 x Float over cp [0, 1], the first use"}));
  EXPECT_EQ(verdict(/*waits=*/false, /*swaps=*/true, /*on_device=*/true).reason, Reason::deadlock);
  // On the host, a start that is not waited for blocks nobody.
  const OrderVerdict on_host = verdict(/*waits=*/true, /*swaps=*/true, /*on_device=*/false);
  EXPECT_EQ(on_host.reason, Reason::deadlock);
  EXPECT_EQ(on_host.ranks, (std::vector<int64_t>{0, 1}));
  EXPECT_TRUE(verdict(/*waits=*/false, /*swaps=*/true, /*on_device=*/false).ok());
}

TEST(OrderProof, CommunicatorsThatAreThereAlreadyRunInTheOrderOfTheStarts) {
  const auto verdict = [](bool waits) {
    return prove_order(job_of(2, [&](int64_t rank, Writer& writer) {
      const uint32_t a = writer.connect("dp", {0, 1}), b = writer.connect("cp", {1, 0});
      for (const uint32_t group : {a, b}) writer.wait(writer.start(group, "warm-up"));
      const uint32_t first = writer.start(rank == 0 ? a : b, rank == 0 ? "x" : "y");
      if (waits) writer.wait(first);
      writer.wait(writer.start(rank == 0 ? b : a, rank == 0 ? "y" : "x"));
    }));
  };
  for (const bool waits : {true, false}) {
    const OrderVerdict found = verdict(waits);
    EXPECT_EQ(found.reason, Reason::deadlock);
    EXPECT_EQ(found.operations, (std::vector<std::string>{
                                    "rank 0: all_reduce (sum) of x, 8 x Float over dp [0, 1]",
                                    "rank 1: all_reduce (sum) of y, 8 x Float over cp [1, 0]"}));
  }
}

TEST(OrderProof, ConnectingInAnotherOrderIsFound) {
  const OrderVerdict found = prove_order(job_of(2, [](int64_t rank, Writer& writer) {
    const RankList lists[] = {{0, 1}, {1, 0}};
    for (const int64_t i : {rank, 1 - rank}) writer.connect(i == 0 ? "a" : "b", lists[i]);
  }));
  EXPECT_EQ(found.reason, Reason::deadlock);
  EXPECT_EQ(found.operations, (std::vector<std::string>{"rank 0: connecting group a [0, 1]",
                                                        "rank 1: connecting group b [1, 0]"}));
}

TEST(OrderProof, MessagesOfAPairShareAStreamOnNccl) {
  const auto verdict = [](bool both_send_first, bool connected) {
    return prove_order(job_of(2, [&](int64_t rank, Writer& writer) {
      const uint32_t pp = writer.connect("pp", {0, 1});
      for (int times = 0; connected && times < 2; ++times) writer.pair(pp, 1 - rank, rank == 0);
      const bool sends = rank == 0 || both_send_first;
      const char *own = rank == 0 ? "forth" : "back", *other = rank == 0 ? "back" : "forth";
      const uint32_t a =
          sends ? writer.send(pp, 1 - rank, own) : writer.receive(pp, 1 - rank, other);
      const uint32_t b =
          sends ? writer.receive(pp, 1 - rank, other) : writer.send(pp, 1 - rank, own);
      writer.wait(a);
      writer.wait(b);
    }));
  };
  for (const bool connected : {true, false}) {
    EXPECT_TRUE(verdict(/*both_send_first=*/false, connected).ok());
    const OrderVerdict found = verdict(/*both_send_first=*/true, connected);
    EXPECT_EQ(found.reason, Reason::deadlock);
    EXPECT_EQ(found.rules, "NCCL");
    EXPECT_EQ(found.ranks, (std::vector<int64_t>{0, 1}));
  }
}

/// Each rank of a ring starts a receive from the previous rank, then sends to the next one.
JobProgram ring(int64_t world, bool connects) {
  return job_of(world, [&](int64_t rank, Writer& writer) {
    RankList all;
    for (int64_t r = 0; r < world; ++r) all.push_back(r);
    const uint32_t pp = writer.connect("pp", all);
    const int64_t before = (rank + world - 1) % world, behind = (rank + 1) % world;
    if (connects)
      for (int64_t first = 0; first < world; ++first)
        for (int64_t second = first + 1; second < world; ++second)
          if ((rank == first && (second == before || second == behind)) ||
              (rank == second && (first == before || first == behind)))
            writer.pair(pp, rank == first ? second : first, rank == first);
    const uint32_t received = writer.receive(pp, before, "x");
    const uint32_t sent = writer.send(pp, behind, "x");
    writer.wait(received);
    writer.wait(sent);
  });
}

TEST(OrderProof, TheFirstMessageHoldsUpTheHost) {
  const OrderVerdict found = prove_order(ring(3, /*connects=*/false));
  EXPECT_EQ(found.reason, Reason::deadlock);
  EXPECT_EQ(found.ranks.size(), 3u);
  EXPECT_NE(found.operations[0].find("receive from rank"), std::string::npos);
  EXPECT_NE(found.operations[0].find("the first use"), std::string::npos);
  const OrderVerdict connected = prove_order(ring(3, /*connects=*/true));
  EXPECT_TRUE(connected.ok()) << connected.to_string();
}

TEST(OrderProof, AHostThatWaitsForItsStreamLaunchesLater) {
  const auto verdict = [](bool waits) {
    return prove_order(job_of(2, [&](int64_t rank, Writer& writer) {
      const uint32_t pp = writer.connect("pp", {0, 1});
      writer.pair(pp, 1 - rank, rank == 0);
      const uint32_t other = writer.connect("host", {1, 0});
      if (rank == 0) {
        const uint32_t received = writer.receive(pp, 1, "x");
        writer.wait(received);
        if (waits) writer.host_wait();
        writer.wait(writer.on_host(other, "flag"));
      } else {
        writer.wait(writer.on_host(other, "flag"));
        writer.wait(writer.send(pp, 0, "x"));
      }
    }));
  };
  EXPECT_EQ(verdict(true).reason, Reason::deadlock);
  EXPECT_EQ(verdict(true).rules, "NCCL");
  EXPECT_EQ(verdict(false).rules, "Gloo");  // whose wait() blocks the host
}

TEST(OrderProof, WhatIsMissingAtTheEndIsAMismatch) {
  const OrderVerdict found = prove_order(job_of(3, [](int64_t rank, Writer& writer) {
    const uint32_t world = writer.connect("world", {0, 1, 2});
    writer.wait(writer.start(world, "a"));
    if (rank != 1) writer.wait(writer.start(world, "b"));
  }));
  EXPECT_EQ(found.reason, Reason::mismatch);
  EXPECT_EQ(found.ranks, (std::vector<int64_t>{0, 1}));
  EXPECT_EQ(found.operations[1], "rank 1: no more than 1 operations over world [0, 1, 2]");
}

TEST(OrderProof, AGroupThatAMemberNeverConnects) {
  const OrderVerdict found = prove_order(job_of(2, [](int64_t rank, Writer& writer) {
    if (rank == 0) writer.connect("dp", {0, 1});
  }));
  EXPECT_EQ(found.reason, Reason::mismatch);
  EXPECT_EQ(found.operations,
            (std::vector<std::string>{"rank 0: uses dp [0, 1]", "rank 1: does not"}));
}

TEST(OrderProof, ExchangesMustMeet) {
  const auto verdict = [](bool backwards) {
    return prove_order(job_of(4, [&](int64_t rank, Writer& writer) {
      const uint32_t cp = writer.connect("cp", {0, 1, 2, 3});
      const int64_t step = backwards && rank == 2 ? 3 : 1;
      writer.wait(writer.start(cp, "keys", 8,
                               {.kind = OperationKind::exchange,
                                .position = (rank + step) % 4,
                                .source = (rank + 4 - step) % 4}));
    }));
  };
  EXPECT_TRUE(verdict(false).ok()) << verdict(false).to_string();
  const OrderVerdict found = verdict(true);
  EXPECT_EQ(found.reason, Reason::mismatch);
  EXPECT_TRUE(std::count(found.ranks.begin(), found.ranks.end(), 2) == 1) << found.to_string();
}

/// tp x pp x dp ranks. Each stage has one program.
JobProgram staged(const ParallelSizes& sizes, bool swaps_on_last_stage) {
  JobProgram job{.programs = {}, .program_of = {}, .grids = RankGrids(sizes)};
  const RankGroups pp = job.grids->groups(GroupKind::pp);
  for (int64_t rank = 0; rank < sizes.world_size; ++rank) {
    const int64_t stage = *pp.position_of(rank);
    job.program_of.push_back(static_cast<uint32_t>(stage));
    if (static_cast<int64_t>(job.programs.size()) > stage) continue;
    Writer writer(rank);
    const auto group = [&](GroupKind kind) {
      return writer.connect(to_string(kind), job.grids->group_of(kind, rank));
    };
    const uint32_t tp = group(GroupKind::tp), dp = group(GroupKind::dp),
                   along = group(GroupKind::pp);
    const uint32_t world = group(GroupKind::tp_dp);
    for (int64_t other = 0; other < pp.size(); ++other)
      if (other == stage - 1 || other == stage + 1) writer.pair(along, other, stage < other);
    if (stage > 0) writer.wait(writer.receive(along, stage - 1, "hidden"));
    writer.wait(writer.start(tp, "layer"));
    if (stage + 1 < pp.size()) writer.wait(writer.send(along, stage + 1, "hidden"));
    const bool swaps = swaps_on_last_stage && stage + 1 == pp.size();
    const uint32_t reduced = writer.start(swaps ? world : dp, swaps ? "norm" : "bucket");
    writer.wait(reduced);
    writer.wait(writer.start(swaps ? dp : world, swaps ? "bucket" : "norm"));
    job.programs.push_back(writer.take());
  }
  return job;
}

TEST(OrderProof, OneRankOfAClassStandsForAll) {
  const OrderVerdict small =
      prove_order(staged({.world_size = 16, .tensor = 2, .pipeline = 4}, false));
  EXPECT_TRUE(small.ok()) << small.to_string();
  EXPECT_EQ(small.classes, 4);
  EXPECT_EQ(small.num_operations, 4 * (4 + 5 + 5 + 4));
  // All ranks of a stage swap, so they agree with each other.
  EXPECT_TRUE(prove_order(staged({.world_size = 16, .tensor = 2, .pipeline = 4}, true)).ok());
  const OrderVerdict large =
      prove_order(staged({.world_size = 131072, .tensor = 8, .pipeline = 16, .context = 4}, false));
  EXPECT_TRUE(large.ok()) << large.to_string();
  EXPECT_EQ(large.classes, 16);
}

TEST(OrderProof, OneRankThatDiffersFromItsClassIsFound) {
  JobProgram job = staged({.world_size = 64, .tensor = 2, .pipeline = 4}, false);
  RankProgram odd = job.programs[1];
  odd.rank = 21;
  for (ProgramGroup& group : odd.groups) {
    for (const GroupKind kind : all_group_kinds())
      if (to_string(kind) == group.name) group.ranks = job.grids->group_of(kind, odd.rank);
    group.position =
        std::find(group.ranks.begin(), group.ranks.end(), odd.rank) - group.ranks.begin();
  }
  ASSERT_EQ(job.program_of[21], 1u);
  // As recorded, it is like the others. With the starts of bucket and norm swapped, it is not.
  job.program_of[21] = static_cast<uint32_t>(job.programs.size());
  job.programs.push_back(odd);
  EXPECT_TRUE(prove_order(job).ok()) << prove_order(job).to_string();
  std::vector<size_t> starts;
  for (size_t i = 0; i < odd.events.size(); ++i)
    if (odd.events[i].kind == Kind::start) starts.push_back(i);
  std::swap(job.programs.back().events[starts[starts.size() - 1]],
            job.programs.back().events[starts[starts.size() - 2]]);
  const OrderVerdict found = prove_order(job);
  EXPECT_EQ(found.reason, Reason::deadlock);
  EXPECT_EQ(std::count(found.ranks.begin(), found.ranks.end(), 21), 1) << found.to_string();
}

TEST(OrderProof, RanksOfAProgramMustStandAlike) {
  JobProgram job = staged({.world_size = 4, .tensor = 1, .pipeline = 4}, false);
  job.program_of[2] = 1;
  try {
    prove_order(job);
    FAIL();
  } catch (const UsageError& error) {
    EXPECT_NE(std::string(error.what())
                  .find("ranks 1 and 2 share a program, but stand at positions "
                        "1 and 2"),
              std::string::npos)
        << error.what();
  }
}

}  // namespace
}  // namespace lockstep
