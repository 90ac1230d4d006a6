#include <ATen/CPUGeneratorImpl.h>

#include "lockstep/core/check.h"
#include "lockstep/parallel_state/collectives.h"
#include "lockstep/tests/device/nccl_job.h"
#include "lockstep/tests/support/host_transport.h"
#include "lockstep/tests/support/rank_threads.h"

// Numbers of the backend with NCCL's rules, compared with sums in double and with the bits of the
// host transport.

namespace lockstep::testing {
namespace {

/// The terms of `size` ranks, combined in double and converted to `dtype`.
at::Tensor combined(int size, int64_t numel, c10d::ReduceOp::RedOpType op, double factor,
                    at::ScalarType dtype) {
  at::Tensor result = whole_numbers(0, numel) * factor;
  for (int rank = 1; rank < size; ++rank) {
    const at::Tensor next = whole_numbers(rank, numel) * factor;
    result = op == c10d::ReduceOp::PRODUCT ? result * next : result + next;
  }
  return (op == c10d::ReduceOp::AVG ? result / size : result).to(dtype);
}

TEST(NcclValues, AveragesProductsAndScaledSumsAreThoseOfDouble) {
  for (const int size : {2, 4})
    run_job(size, [&](NcclRank& self) {
      for (const auto dtype : {at::kFloat, at::kDouble, at::kHalf, at::kBFloat16}) {
        const auto check = [&](const c10d::ReduceOp& op, double factor) {
          Tensors one = {self.put(whole_numbers(self.rank, 21).to(dtype))};
          c10d::AllreduceOptions options;
          options.reduceOp = op;
          self.backend->allreduce(one, options)->wait();
          const at::Tensor expected = combined(size, 21, op.op_, factor, dtype);
          EXPECT_TRUE(at::equal(one[0].cpu(), expected))
              << dtype << ", op " << static_cast<int>(op.op_) << ": " << one[0].cpu()
              << ", expected " << expected;
        };
        check(c10d::ReduceOp::SUM, 1);
        check(c10d::ReduceOp::AVG, 1);
        check(c10d::ReduceOp::PRODUCT, 1);
        if (dtype != at::kBFloat16) check(c10d::makeNCCLPreMulSum(0.25), 0.25);
      }
    });
}

TEST(NcclValues, ASumOfBoolIsOr) {
  run_job(3, [](NcclRank& self) {
    const at::Tensor mine = at::arange(4).eq(self.rank);
    const at::Tensor any = self.put(mine);
    self.all_reduce(any)->wait();
    EXPECT_TRUE(at::equal(any.cpu(), at::arange(4).lt(3)));
  });
}

TEST(NcclValues, ListsOfSeveralSizes) {
  run_job(3, [](NcclRank& self) {
    Tensors mine = {self.filled(self.rank + 1, self.rank)};
    std::vector<Tensors> all = {{self.fresh(1), self.fresh(2), self.fresh(3)}};
    self.backend->allgather(all, mine)->wait();
    for (int peer = 0; peer < 3; ++peer)
      EXPECT_TRUE(at::equal(all[0][static_cast<size_t>(peer)].cpu(),
                            at::full({peer + 1}, peer, at::kFloat)));
    Tensors own = {self.fresh(self.rank + 1)};
    std::vector<Tensors> parts = {{self.filled(1, 1), self.filled(2, 2), self.filled(3, 3)}};
    self.backend->reduce_scatter(own, parts)->wait();
    EXPECT_TRUE(
        at::equal(own[0].cpu(), at::full({self.rank + 1}, 3 * (self.rank + 1), at::kFloat)));
    Tensors from = {self.filled(1, self.rank), self.filled(2, self.rank), self.filled(0, 0)};
    const int64_t size = self.rank == 2 ? 0 : self.rank + 1;
    Tensors to = {self.fresh(size), self.fresh(size), self.fresh(size)};
    self.backend->alltoall(to, from)->wait();
    for (int peer = 0; peer < 3; ++peer)
      EXPECT_TRUE(
          at::equal(to[static_cast<size_t>(peer)].cpu(), at::full({size}, peer, at::kFloat)));
  });
}

TEST(NcclValues, SeveralTensorsInOneCallAreOneKernel) {
  run_job(2, [](NcclRank& self) {
    Tensors sums = {self.filled(3, self.rank + 1), self.filled(5, 10)};
    self.backend->allreduce_coalesced(sums)->wait();
    EXPECT_TRUE(at::equal(sums[0].cpu(), at::full({3}, 3, at::kFloat)));
    EXPECT_TRUE(at::equal(sums[1].cpu(), at::full({5}, 20, at::kFloat)));
    Tensors wholes = {self.fresh(4), self.fresh(6)};
    Tensors parts = {self.filled(2, self.rank), self.filled(3, self.rank + 5)};
    self.backend->allgather_into_tensor_coalesced(wholes, parts)->wait();
    EXPECT_TRUE(at::equal(wholes[1].cpu(), at::tensor({5, 5, 5, 6, 6, 6}, at::kFloat)));
    self.backend->reduce_scatter_tensor_coalesced(parts, wholes)->wait();
    EXPECT_TRUE(at::equal(parts[0].cpu(), at::full({2}, 2 * self.rank, at::kFloat)));
    EXPECT_TRUE(at::equal(parts[1].cpu(), at::full({3}, 2 * (self.rank + 5), at::kFloat)));
    EXPECT_EQ(self.rules.counts(self.rank).kernels, 3);
  });
}

TEST(NcclValues, InPlaceGathersAndScatters) {
  run_job(4, [](NcclRank& self) {
    const at::Tensor whole = self.put(at::full({8}, -1, at::kFloat));
    const at::Tensor mine = whole.narrow(0, 2 * self.rank, 2);
    mine.fill_(self.rank);
    self.all_gather(whole, mine)->wait();
    EXPECT_TRUE(at::equal(whole.cpu(), at::tensor({0, 0, 1, 1, 2, 2, 3, 3}, at::kFloat)));
    at::Tensor input = whole, output = mine;
    self.backend->_reduce_scatter_base(output, input)->wait();
    EXPECT_TRUE(at::equal(output.cpu(), at::full({2}, 4 * self.rank, at::kFloat)));
  });
}

/// Terms over many orders of magnitude, so the order of a sum affects its bits.
at::Tensor wild(int64_t rank, int64_t numel, at::ScalarType dtype) {
  auto random = at::detail::createCPUGenerator(static_cast<uint64_t>(100 + rank));
  const at::Tensor values = at::randn({numel}, random, at::TensorOptions(at::kDouble));
  return (values * at::exp(2 * at::randn({numel}, random, at::TensorOptions(at::kDouble))))
      .to(dtype);
}

constexpr at::ScalarType kFloatTypes[] = {at::kFloat, at::kDouble, at::kBFloat16, at::kHalf};
constexpr ReduceOp kHostOps[] = {ReduceOp::sum, ReduceOp::average, ReduceOp::max, ReduceOp::min};
constexpr c10d::ReduceOp::RedOpType kNcclOps[] = {c10d::ReduceOp::SUM, c10d::ReduceOp::AVG,
                                                  c10d::ReduceOp::MAX, c10d::ReduceOp::MIN};

/// For each rank: all-reduce and reduce-scatter for every dtype and operation.
std::vector<Tensors> host_transport_results(int size, int64_t numel) {
  std::vector<Tensors> results(static_cast<size_t>(size));
  run_ranks(size, [&](const ParallelState& state) {
    for (const auto dtype : kFloatTypes)
      for (const ReduceOp op : kHostOps) {
        const at::Tensor sum = wild(state.rank(), numel, dtype);
        const at::Tensor part = at::empty({numel / size}, dtype);
        reduce_scatter(state.world(), part, sum, op, "part").wait();
        all_reduce(state.world(), sum, op, "sum").wait();
        results[static_cast<size_t>(state.rank())].insert(
            results[static_cast<size_t>(state.rank())].end(), {sum, part});
      }
  });
  return results;
}

Tensors nccl_rules_results(NcclRank& self, int64_t numel) {
  Tensors results;
  for (const auto dtype : kFloatTypes)
    for (const auto op : kNcclOps) {
      at::Tensor sum = self.put(wild(self.rank, numel, dtype)),
                 part = self.fresh(numel / self.size, dtype);
      c10d::ReduceScatterOptions scatter;
      scatter.reduceOp = op;
      self.backend->_reduce_scatter_base(part, sum, scatter)->wait();
      Tensors one = {sum};
      c10d::AllreduceOptions all;
      all.reduceOp = op;
      self.backend->allreduce(one, all)->wait();
      results.insert(results.end(), {sum.cpu(), part.cpu()});
    }
  return results;
}

TEST(NcclValues, SumsHaveTheBitsOfTheHostTransport) {
  LOCKSTEP_NEEDS_HOST_TRANSPORT();
  for (const int size : {2, 3, 8}) {
    const int64_t numel = 1009L * size;
    const std::vector<Tensors> expected = host_transport_results(size, numel);
    run_job(size, [&](NcclRank& self) {
      const Tensors found = nccl_rules_results(self, numel);
      for (size_t i = 0; i < found.size(); ++i)
        EXPECT_TRUE(at::equal(found[i].view(at::kByte),
                              expected[static_cast<size_t>(self.rank)][i].view(at::kByte)))
            << size << " ranks, result " << i;
    });
  }
}

/// Operators, collectives and messages that depend on each other, over several communicators.
at::Tensor mixed_work(NcclRank& self, at::Tensor x) {
  const int next = (self.rank + 1) % self.size, last = (self.rank + self.size - 1) % self.size;
  for (int round = 0; round < 4; ++round) {
    x = x * 2 + self.rank;
    self.all_reduce(x)->wait();
    const at::Tensor sent = x + self.rank, got = at::empty_like(x),
                     whole = self.fresh(x.numel() * self.size, at::kDouble);
    self.backend->startCoalescing();
    self.send(sent, next);
    self.receive(got, last);
    self.backend->endCoalescing()->wait();
    self.all_gather(whole, got - x)->wait();
    x = x.remainder(1000) + whole.view({self.size, -1}).cumsum(0).select(0, last);
  }
  return x;
}

/// The same on the host, for all ranks at once.
Tensors mixed_work_on_host(Tensors x) {
  const auto size = x.size();
  for (int round = 0; round < 4; ++round) {
    at::Tensor sum = at::zeros_like(x[0]);
    for (size_t rank = 0; rank < size; ++rank) sum += x[rank] * 2 + static_cast<int64_t>(rank);
    Tensors differences;
    for (size_t rank = 0; rank < size; ++rank)
      differences.push_back(at::full_like(sum, static_cast<double>((rank + size - 1) % size)));
    const at::Tensor sums = at::stack(differences).cumsum(0);
    for (size_t rank = 0; rank < size; ++rank)
      x[rank] = sum.remainder(1000) + sums[static_cast<int64_t>((rank + size - 1) % size)];
  }
  return x;
}

TEST(NcclValues, MixedWorkIsRightUnderTwentySeedsOfDelays) {
  Tensors start;
  for (int rank = 0; rank < 4; ++rank) start.push_back(whole_numbers(rank, 50));
  const Tensors expected = mixed_work_on_host(start);
  for (uint64_t seed = 1; seed <= 20; ++seed)
    run_job(4,
            [&](NcclRank& self) {
              const auto rank = static_cast<size_t>(self.rank);
              EXPECT_TRUE(at::equal(mixed_work(self, self.put(start[rank])).cpu(), expected[rank]))
                  << "seed " << seed << ", rank " << rank;
            },
            {.seed = seed});
}

TEST(NcclValues, CountsCallsAndBytesOfEachGroupAndKind) {
  run_job(3, [](NcclRank& self) {
    self.all_reduce(self.filled(5, 1))->wait();
    self.all_reduce(self.filled(0, 1))->wait();
    self.all_gather(self.fresh(6), self.filled(2, 1))->wait();
    self.backend->startCoalescing();
    self.all_reduce(self.filled(3, 1, at::kDouble));
    self.all_reduce(self.filled(1, 1));
    self.backend->endCoalescing()->wait();
    if (self.rank == 0) self.send(self.filled(4, 1), 2)->wait();
    if (self.rank == 2) self.receive(self.fresh(4), 0)->wait();
    self.synchronize();
    const NcclCounts counts = self.rules.counts(self.rank);
    const auto& calls = counts.calls.at("test");
    EXPECT_EQ(calls.at("allreduce"), (NcclCalls{4, 20 + 24 + 4}));
    EXPECT_EQ(calls.at("allgather"), (NcclCalls{1, 8}));
    if (self.rank == 0) {
      EXPECT_EQ(calls.at("send"), (NcclCalls{1, 16}));
    }
    if (self.rank == 2) {
      EXPECT_EQ(calls.at("recv"), (NcclCalls{1, 16}));
    }
    EXPECT_EQ(calls.size(), self.rank == 1 ? 2U : 3U);
    EXPECT_EQ(counts.kernels, self.rank == 1 ? 3 : 4);  // calls without elements launch none
    EXPECT_EQ(counts.communicators, self.rank == 1 ? 1 : 2);
    EXPECT_EQ(counts.host_blocks, self.rank == 1 ? 1 : 3);
  });
}

}  // namespace
}  // namespace lockstep::testing
