#include <gtest/gtest.h>

#include <chrono>
#include <numeric>
#include <optional>
#include <thread>

#include <ATen/ATen.h>

#include "lockstep/core/error.h"
#include "lockstep/parallel_state/collectives.h"
#include "lockstep/parallel_state/process_group_state.h"
#include "lockstep/tests/parallel_state/forbidden_calls.h"
#include "lockstep/tests/support/rank_threads.h"

// Collectives whose ranks read each other's memory, compared with the same by messages.

namespace lockstep {
namespace {

using std::chrono::milliseconds;
using testing::BackendLog;
using testing::errors_of_ranks;
using testing::forbid_reading;
using testing::run_ranks;
using Tensors = std::vector<at::Tensor>;

constexpr int64_t kPart = 1 << 17;  ///< bytes, of several chunks

/// Bytes that were read directly; nullopt if everything is sent.
std::optional<int64_t> bytes_read(const ProcessGroup& group) {
  const auto& communicator = group.shared_state()->communicator;
  return communicator ? communicator->transport(c10::kCPU).bytes_read() : std::nullopt;
}

/// The tensor of one rank. All its bits are random.
at::Tensor random_term(int64_t rank, int64_t numel, at::ScalarType dtype) {
  const at::Tensor wave = at::arange(numel, at::kDouble).mul_(0.37 + 0.1 * rank);
  return wave.sub_(wave.floor()).sub_(0.45).mul_(200).to(dtype);
}

using Body = std::function<Tensors(const ParallelState&)>;

/// The results of `body` on each rank. Over a backend with a log, everything is sent.
std::vector<Tensors> results_of(int64_t ranks, const Body& body, bool direct) {
  std::vector<Tensors> results(static_cast<size_t>(ranks));
  BackendLog log;
  run_ranks(ranks,
            [&](const ParallelState& state) {
              EXPECT_EQ(bytes_read(state.world()).has_value(), direct && ranks > 1);
              results[static_cast<size_t>(state.rank())] = body(state);
            },
            {.backend_log = direct ? nullptr : &log});
  return results;
}

void expect_same_both_ways(int64_t ranks, const Body& body) {
  const auto read = results_of(ranks, body, true), sent = results_of(ranks, body, false);
  for (size_t rank = 0; rank < read.size(); ++rank) {
    ASSERT_EQ(read[rank].size(), sent[rank].size());
    for (size_t i = 0; i < read[rank].size(); ++i)
      EXPECT_TRUE(at::equal(read[rank][i], sent[rank][i]))
          << "result " << i << " of rank " << rank << " of " << ranks;
  }
}

/// Sizes of a part: from one element to several chunks. The last one is not a multiple of a chunk.
/// All types but the first have one size.
std::vector<int64_t> part_sizes(at::ScalarType dtype) {
  const int64_t limit = kPart / static_cast<int64_t>(at::elementSize(dtype));
  if (dtype != at::kFloat) return {limit + 17};
  return {1, limit - 1, limit, limit + 1, 2 * limit + 17};
}

TEST(DirectExchange, SumsHaveTheBitsOfThoseThatAreSent) {
  for (const int64_t n : {1, 2, 3, 4})
    expect_same_both_ways(n, [n](const ParallelState& state) {
      Tensors results;
      for (const at::ScalarType dtype : {at::kFloat, at::kDouble, at::kBFloat16, at::kHalf})
        for (const int64_t part : part_sizes(dtype)) {
          const Reduction reduction(ReduceOp::average, 2, 7);
          const at::Tensor input = random_term(state.rank(), n * part, dtype);
          const at::Tensor scattered = at::empty({part}, dtype);
          reduce_scatter(state.world(), scattered, input, ReduceOp::sum, "apart").wait();
          const at::Tensor in_place = input.clone();
          const at::Tensor own = in_place.narrow(0, state.rank() * part, part);
          reduce_scatter(state.world(), own, in_place, reduction, "in place").wait();
          const at::Tensor whole = input.narrow(0, 0, n * part - (n - 1) / 2).clone();
          all_reduce(state.world(), whole, reduction, "whole").wait();
          all_reduce(state.world(), input, ReduceOp::sum, "even").wait();
          results.insert(results.end(), {scattered, in_place, whole, input});
        }
      return results;
    });
}

TEST(DirectExchange, TheLargestTheSmallestAndIntegers) {
  expect_same_both_ways(3, [](const ParallelState& state) {
    Tensors results;
    for (const at::ScalarType dtype : {at::kByte, at::kChar, at::kShort, at::kInt, at::kLong})
      for (const ReduceOp op : {ReduceOp::sum, ReduceOp::max, ReduceOp::min}) {
        const int64_t part = kPart / static_cast<int64_t>(at::elementSize(dtype));
        const at::Tensor term = random_term(state.rank(), 3 * part + 5, at::kDouble);
        results.push_back((dtype == at::kByte ? term.abs() : term).to(dtype));
        all_reduce(state.world(), results.back(), op, "test").wait();
      }
    return results;
  });
}

TEST(DirectExchange, PartsArriveAsTheyAreSent) {
  for (const int64_t n : {1, 2, 3, 4})
    expect_same_both_ways(n, [n](const ParallelState& state) {
      Tensors results;
      const int64_t rank = state.rank();
      for (const int64_t part : {int64_t{1}, kPart - 1, kPart, kPart + 1, 9 * kPart + 3}) {
        const at::Tensor apart = at::empty({n, part}, at::kByte), in_place = at::empty_like(apart);
        const at::Tensor input = random_term(rank, part, at::kFloat).abs().to(at::kByte);
        all_gather(state.world(), apart, input, "apart").wait();
        in_place[rank].copy_(input);
        all_gather(state.world(), in_place, in_place[rank], "in place").wait();
        results.insert(results.end(), {apart, in_place});
        for (int64_t source = 0; source < n; ++source) {
          results.push_back(input.clone());
          broadcast(state.world(), results.back(), source, "test").wait();
        }
      }
      return results;
    });
}

TEST(DirectExchange, AllToAllOfPartsOfAllSizes) {
  for (const int64_t n : {2, 4})
    expect_same_both_ways(n, [n](const ParallelState& state) {
      // From i to j: (i + 2 * j) % 5 times a third of a part, so nothing, or up to several chunks.
      const auto rows = [](int64_t from, int64_t to) {
        return (from + 2 * to) % 5 * (kPart / 3 + 1);
      };
      std::vector<int64_t> in, out;
      for (int64_t peer = 0; peer < n; ++peer) {
        in.push_back(rows(state.rank(), peer));
        out.push_back(rows(peer, state.rank()));
      }
      const auto total = [](const std::vector<int64_t>& counts) {
        return std::accumulate(counts.begin(), counts.end(), int64_t{0});
      };
      const at::Tensor input = random_term(state.rank(), total(in), at::kFloat).abs().to(at::kByte);
      const at::Tensor output = at::empty({total(out)}, at::kByte);
      all_to_all(state.world(), output, input, out, in, "test").wait();
      return Tensors{output};
    });
}

TEST(DirectExchange, ARankReadsWhatItNeedsAndNoMore) {
  constexpr int64_t kRanks = 4;
  run_ranks(kRanks, [](const ParallelState& state) {
    const ProcessGroup world = state.world();
    int64_t before = bytes_read(world).value();
    const auto bytes_of_last = [&] {
      const int64_t now = bytes_read(world).value();
      return now - std::exchange(before, now);
    };
    const at::Tensor whole = at::ones({kRanks * kPart}, at::kByte);
    const at::Tensor part = whole.narrow(0, state.rank() * kPart, kPart);
    reduce_scatter(state.world(), part, whole, ReduceOp::sum, "test").wait();
    EXPECT_EQ(bytes_of_last(), (kRanks - 1) * kPart);
    all_gather(state.world(), whole, part, "test").wait();
    EXPECT_EQ(bytes_of_last(), (kRanks - 1) * kPart);
    all_reduce(state.world(), whole, ReduceOp::sum, "test").wait();
    EXPECT_EQ(bytes_of_last(), 2 * (kRanks - 1) * kPart);
    broadcast(state.world(), whole, 2, "test").wait();
    EXPECT_EQ(bytes_of_last(), state.rank() == 2 ? 0 : kRanks * kPart);
    const at::Tensor small = whole.narrow(0, 0, 3);  // slices of 1, 1, 1 and 0 bytes
    broadcast(state.world(), small, 0, "small").wait();
    EXPECT_EQ(bytes_of_last(), state.rank() == 0 ? 0 : 3);
    all_reduce(state.world(), small, ReduceOp::sum, "small").wait();
    EXPECT_EQ(bytes_of_last(), state.rank() == 3 ? 3 : 3 + 2);
  });
}

TEST(DirectExchange, ManyAreUnderWayInSeveralGroupsAtOnce) {
  run_ranks(4,
            [](const ParallelState& state) {
              const ProcessGroup pair = state.group(GroupKind::tp), world = state.world();
              Tensors tensors;
              std::vector<Work> works;
              for (int i = 0; i < 60; ++i) {
                const int64_t numel = (i % 7 + 1) * kPart / 8;  // 4-byte elements, on 2 or 4 ranks
                tensors.push_back(at::full({numel}, i + state.rank(), at::kFloat));
                works.push_back(
                    all_reduce(i % 2 == 0 ? pair : world, tensors.back(), ReduceOp::sum, "test"));
              }
              for (int i = 0; i < 60; ++i) {
                works[i].wait();
                const int64_t first = state.rank() / 2 * 2;
                const int64_t sum = i % 2 == 0 ? 2 * i + 2 * first + 1 : 4 * i + 6;
                EXPECT_TRUE(at::equal(tensors[i], at::full_like(tensors[i], sum))) << i;
              }
            },
            {.sizes = {.tensor = 2}});
}

TEST(DirectExchange, WhatIsReadMayChangeAtOnceAfterwards) {
  run_ranks(3, [](const ParallelState& state) {
    const at::Tensor mine = at::empty({4 * kPart}, at::kByte);
    const at::Tensor all = at::empty({3, 4 * kPart}, at::kByte);
    const at::Tensor expected = at::arange(3, at::kByte).unsqueeze(1).expand_as(all);
    for (int i = 0; i < 30; ++i) {
      mine.fill_(i + state.rank());
      all_gather(state.world(), all, mine, "test").wait();
      mine.fill_(255);
      EXPECT_TRUE(at::equal(all, expected + i)) << i;
      mine.fill_(i + state.rank());
      broadcast(state.world(), mine, i % 3, "test").wait();
      EXPECT_TRUE(mine.eq(i + i % 3).all().item<bool>()) << i;
    }
    const at::Tensor source = at::empty({128 * kPart}, at::kByte);
    Tensors places;  // without pages yet, so that the reads take longer
    for (int i = 0; i < 4; ++i) {
      places.push_back(state.rank() == 0 ? source.fill_(i) : at::empty_like(source));
      broadcast(state.world(), places.back(), 0, "large").wait();
      if (state.rank() == 0) source.fill_(255);
      EXPECT_TRUE(places.back().eq(state.rank() == 0 ? 255 : i).all().item<bool>()) << i;
    }
  });
}

TEST(DirectExchange, ACallWaitsForTheOneWhoseSpotItUses) {
  constexpr int64_t kCalls = 17;
  // Call 8 waits until rank 1 has taken what call 0 offers; call 16 could offer rank 2 something
  // before call 8 does, although rank 2 calls it later.
  const auto rows = [](int64_t call, int64_t from, int64_t to) -> int64_t {
    if (from == to) return 1;
    return from == 0 && (call == 8 || call == (to == 1 ? 0 : 16)) ? 1 : 0;
  };
  const auto start = [&](const ParallelState& state, int64_t call) {
    std::vector<int64_t> in, out;
    for (int64_t peer = 0; peer < 3; ++peer) {
      in.push_back(rows(call, state.rank(), peer));
      out.push_back(rows(call, peer, state.rank()));
    }
    const auto rows_in_all = [](const std::vector<int64_t>& counts) {
      return at::ones({std::accumulate(counts.begin(), counts.end(), int64_t{0})});
    };
    return all_to_all(state.world(), rows_in_all(out), rows_in_all(in), out, in, "test");
  };
  run_ranks(3,
            [&](const ParallelState& state) {
              std::vector<Work> works;
              barrier(state.world(), "begin");
              if (state.rank() == 1) std::this_thread::sleep_for(milliseconds(1000));
              for (int64_t call = 0; call < kCalls; ++call) {
                works.push_back(start(state, call));
                if (state.rank() != 0) works.back().wait();
              }
              std::this_thread::sleep_for(milliseconds(300));
              for (; !works.empty(); works.pop_back()) works.back().wait();
            },
            {.timeout = std::chrono::seconds(5)});
}

TEST(DirectExchange, AllSendWhereOneMayNotRead) {
  run_ranks(3, [](const ParallelState& state) {
    if (state.rank() == 1) forbid_reading();
    EXPECT_FALSE(bytes_read(state.world()).has_value());
    const at::Tensor tensor = random_term(state.rank(), 3 * kPart, at::kDouble);
    all_reduce(state.world(), tensor, ReduceOp::max, "test").wait();
    const auto term = [](int64_t rank) { return random_term(rank, 3 * kPart, at::kDouble); };
    EXPECT_TRUE(at::equal(tensor, at::maximum(at::maximum(term(0), term(1)), term(2))));
    if (state.rank() != 1) {
      const ProcessGroup others = state.group_of_ranks("others", {0, 2});
      EXPECT_TRUE(bytes_read(others).has_value());
      barrier(others, "test");
    }
  });
}

TEST(DirectExchange, AnOfferOfAnotherSizeIsNamed) {
  const auto errors = errors_of_ranks(2,
                                      [](const ParallelState& state) {
                                        const int64_t part = (state.rank() + 2) * kPart;
                                        const at::Tensor input = at::ones({2 * part}, at::kByte);
                                        const at::Tensor output = at::empty_like(input);
                                        all_to_all(state.world(), output, input, "test").wait();
                                      },
                                      {.timeout = std::chrono::milliseconds(1500)});
  const auto tells = [&](size_t rank, int64_t parts) {
    const std::string offer = std::to_string(parts * kPart) + " bytes for call";
    return errors[rank].find("rank " + std::to_string(1 - rank) + " offers " + offer) !=
           std::string::npos;
  };
  EXPECT_TRUE(tells(0, 3) || tells(1, 2)) << errors[0] << "\n" << errors[1];
  for (const std::string& error : errors) EXPECT_TRUE(error.starts_with("all_to_all of test"));
}

TEST(DirectExchange, ARankThatGivesUpInTheMiddleIsNamedByTheOthers) {
  const auto errors = errors_of_ranks(3, [](const ParallelState& state) {
    const at::Tensor tensor = at::ones({16 * kPart});
    for (int i = 0;; ++i) {
      Work work = all_reduce(state.world(), tensor, ReduceOp::average, "test");
      if (state.rank() == 1 && i == 5) throw UsageError("rank 1 has had enough");
      work.wait();
    }
  });
  EXPECT_EQ(errors[1], "rank 1 has had enough");
  for (const size_t rank : {size_t{0}, size_t{2}})
    EXPECT_NE(errors[rank].find("all_reduce (average) of test over group world [0, 1, 2] failed"),
              std::string::npos)
        << errors[rank];
}

}  // namespace
}  // namespace lockstep
