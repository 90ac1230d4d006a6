#include <gtest/gtest.h>

#include <mutex>
#include <thread>

#include <ATen/ATen.h>

#include "lockstep/core/error.h"
#include "lockstep/parallel_state/collectives.h"
#include "lockstep/parallel_state/process_group_state.h"
#include "lockstep/tests/parallel_state/impatient_group.h"
#include "lockstep/tests/support/rank_threads.h"
#include "lockstep/tests/support/throws_with.h"

// The results that c10d's own tests expect from its process groups.

namespace lockstep {
namespace {

using testing::errors_of_ranks;
using testing::run_ranks;
using testing::throws_with;
using Tensors = std::vector<at::Tensor>;

at::Tensor number(int64_t value, at::ScalarType dtype = at::kFloat) {
  return at::full({1}, value, dtype);
}

at::Tensor integers(std::vector<int64_t> values) { return at::tensor(values, at::kLong); }

int64_t sum_to(int64_t n) { return n * (n + 1) / 2; }

/// The sum of all elements of `tensors`.
double added(const Tensors& tensors) { return at::cat(tensors).sum().item<double>(); }

TEST(CollectiveGolden, AllReduceOfRankPlusOne) {
  for (const int64_t n : {1, 2, 3, 4})
    run_ranks(n, [n](const ParallelState& state) {
      for (const auto dtype : {at::kFloat, at::kDouble, at::kBFloat16, at::kLong, at::kInt}) {
        const auto reduced = [&](const Reduction& reduction) {
          const at::Tensor tensor = number(state.rank() + 1, dtype);
          all_reduce(state.world(), tensor, reduction, "test").wait();
          return tensor.item<double>();
        };
        EXPECT_EQ(reduced(ReduceOp::sum), sum_to(n));
        EXPECT_EQ(reduced(ReduceOp::min), 1);
        EXPECT_EQ(reduced(ReduceOp::max), n);
        if (!at::isFloatingType(dtype)) continue;
        EXPECT_EQ(reduced(ReduceOp::average), static_cast<double>(n + 1) / 2);
        EXPECT_EQ(reduced({ReduceOp::sum, 3, 1}), 3 * sum_to(n));
      }
    });
}

TEST(CollectiveGolden, ListsOfTwoTensors) {
  for (const int64_t n : {1, 2, 3, 4})
    run_ranks(n, [n](const ParallelState& state) {
      const int64_t r = state.rank();
      const auto reduced = [&](Tensors tensors, ReduceOp op) {
        all_reduce(state.world(), tensors, op, "test").wait();
        return tensors;
      };
      EXPECT_EQ(added(reduced({number(2 * r), number(2 * r + 1)}, ReduceOp::sum)), n * (2 * n - 1));
      const auto least = reduced({number(2 * r + 1), number(2 * r + 2)}, ReduceOp::min);
      EXPECT_EQ(least[0].item<int64_t>(), 1);
      EXPECT_EQ(least[1].item<int64_t>(), 2);
      const auto most = reduced({number(2 * r + 1), number(2 * r + 2)}, ReduceOp::max);
      EXPECT_EQ(most[0].item<int64_t>(), 2 * n - 1);
      EXPECT_EQ(most[1].item<int64_t>(), 2 * n);
      const auto powers =
          reduced({number(r + 1), at::full({3}, (r + 1) * (r + 1), at::kFloat)}, ReduceOp::sum);
      EXPECT_EQ(powers[0].item<int64_t>(), sum_to(n));
      EXPECT_TRUE(at::equal(powers[1], at::full({3}, n * (n + 1) * (2 * n + 1) / 6, at::kFloat)));
    });
}

TEST(CollectiveGolden, AllToAllOfUnevenParts) {
  run_ranks(4, [](const ParallelState& state) {
    struct Of {
      std::vector<int64_t> input, input_rows, output_rows, output;
    };
    const std::vector<Of> ranks = {
        {{0, 1, 2, 3, 4, 5}, {2, 2, 1, 1}, {2, 3, 2, 2}, {0, 1, 10, 11, 12, 20, 21, 30, 31}},
        {{10, 11, 12, 13, 14, 15, 16, 17, 18},
         {3, 2, 2, 2},
         {2, 2, 1, 2},
         {2, 3, 13, 14, 22, 32, 33}},
        {{20, 21, 22, 23, 24}, {2, 1, 1, 1}, {1, 2, 1, 2}, {4, 15, 16, 23, 34, 35}},
        {{30, 31, 32, 33, 34, 35, 36}, {2, 2, 2, 1}, {1, 2, 1, 1}, {5, 17, 18, 24, 36}}};
    const Of& of = ranks[static_cast<size_t>(state.rank())];
    const at::Tensor output = at::empty({static_cast<int64_t>(of.output.size())}, at::kLong);
    all_to_all(state.world(), output, integers(of.input), of.output_rows, of.input_rows, "test")
        .wait();
    EXPECT_TRUE(at::equal(output, integers(of.output))) << output;
  });
}

TEST(CollectiveGolden, AllToAllOfEqualPartsAndOfNone) {
  for (const int64_t n : {1, 2, 3, 4, 5})
    run_ranks(n, [n](const ParallelState& state) {
      const int64_t r = state.rank();
      const at::Tensor input = (at::arange(2 * n, at::kLong) + 100 * r).view({2 * n, 1});
      const at::Tensor output = at::empty({2 * n, 1}, at::kLong);
      all_to_all(state.world(), output, input, "even").wait();
      const at::Tensor expected =
          at::arange(2, at::kLong) + (100 * at::arange(n, at::kLong) + 2 * r).unsqueeze(1);
      EXPECT_TRUE(at::equal(output.view({n, 2}), expected));

      // Everything goes to the last rank.
      std::vector<int64_t> to(n, 0), from(n, r == n - 1 ? r : 0);
      to.back() = n - 1;
      const at::Tensor all = at::full({r == n - 1 ? n * (n - 1) : 0, 2}, -1, at::kLong);
      all_to_all(state.world(), all, at::full({n - 1, 2}, r, at::kLong), from, to, "to one").wait();
      for (int64_t i = 0; i < all.size(0); ++i)
        EXPECT_EQ(all[i][1].item<int64_t>(), i / (n - 1)) << i;
    });
}

TEST(CollectiveGolden, BroadcastFromEveryRank) {
  for (const int64_t n : {1, 2, 3, 4, 5})
    run_ranks(n, [n](const ParallelState& state) {
      for (int64_t source = 0; source < n; ++source) {
        const Tensors two = {number(2 * state.rank()), number(2 * state.rank() + 1)};
        broadcast(state.world(), two, source, "test").wait();
        for (int64_t i = 0; i < 2; ++i) EXPECT_EQ(two[i].item<int64_t>(), 2 * source + i);
        const at::Tensor many = at::full({70001}, state.rank(), at::kShort);
        broadcast(state.world(), many, source, "many").wait();
        EXPECT_TRUE(many.eq(source).all().item<bool>());
      }
    });
}

TEST(CollectiveGolden, QueuedAllReducesKeepTheirOrder) {
  for (const int64_t n : {1, 2, 3, 4})
    run_ranks(n, [n](const ParallelState& state) {
      std::vector<std::pair<at::Tensor, Work>> queued;
      for (int64_t i = 0; i < 1000; ++i) {
        const at::Tensor tensor = number(i + state.rank(), at::kDouble);
        queued.emplace_back(tensor, all_reduce(state.world(), tensor, ReduceOp::sum, "test"));
      }
      for (int64_t i = 0; i < 1000; ++i) {
        queued[i].second.wait();
        EXPECT_EQ(queued[i].first.item<int64_t>(), n * i + n * (n - 1) / 2) << i;
      }
    });
}

TEST(CollectiveGolden, SeveralTensorsOfSeveralSizesInOneCall) {
  for (const int64_t n : {1, 2, 3, 4})
    run_ranks(n, [n](const ParallelState& state) {
      const int64_t r = state.rank();
      Tensors inputs, outputs, wide;
      for (const int64_t numel : {3, 0, 1, 1000}) {
        inputs.push_back(at::arange(n * numel, at::kDouble) + static_cast<double>(r));
        outputs.push_back(at::empty({numel}, at::kDouble));
        wide.push_back(at::empty({n, numel}, at::kDouble));
      }
      reduce_scatter(state.world(), outputs, inputs, ReduceOp::sum, "test").wait();
      for (size_t i = 0; i < inputs.size(); ++i) {
        const int64_t numel = outputs[i].numel();
        const at::Tensor all =
            at::arange(n * numel, at::kDouble) * n + static_cast<double>(n * (n - 1) / 2);
        EXPECT_TRUE(at::equal(outputs[i], all.narrow(0, r * numel, numel)));
      }
      all_gather(state.world(), wide, outputs, "test").wait();
      for (size_t i = 0; i < inputs.size(); ++i) {
        const at::Tensor all = at::arange(wide[i].numel(), at::kDouble) * n;
        EXPECT_TRUE(at::equal(wide[i].view(-1), all + static_cast<double>(n * (n - 1) / 2)));
      }
    });
}

TEST(CollectiveGolden, MessagesKeepTheirOrderBetweenEveryPair) {
  for (const int64_t n : {2, 3, 4})
    run_ranks(n, [n](const ParallelState& state) {
      const ProcessGroup world = state.world();
      const int64_t r = state.rank();
      std::vector<Work> works;
      Tensors kept;
      for (int64_t peer = 0; peer < n; ++peer)
        for (int64_t i = 0; i < 20 && peer != r; ++i) {
          kept.push_back(at::full({i}, 1000 * r + 100 * peer + i, at::kInt));
          works.push_back(send(world, kept.back(), peer, "test"));
        }
      for (int64_t peer = n - 1; peer >= 0; --peer)
        for (int64_t i = 0; i < 20 && peer != r; ++i) {
          const at::Tensor tensor = at::zeros({i}, at::kInt);
          receive(world, tensor, peer, "test").wait();
          EXPECT_TRUE(at::equal(tensor, at::full({i}, 1000 * peer + 100 * r + i, at::kInt)));
        }
      for (Work& work : works) work.wait();
    });
}

TEST(CollectiveGolden, EmptyTensors) {
  for (const int64_t n : {1, 2, 3})
    run_ranks(n, [n](const ParallelState& state) {
      const ProcessGroup world = state.world();
      const at::Tensor none = at::empty({0}), also = at::empty({n, 0, 5});
      for (int64_t source = 0; source < n; ++source) broadcast(world, none, source, "test").wait();
      all_reduce(world, none, ReduceOp::average, "test").wait();
      all_reduce(world, Tensors{none, at::empty({0, 3})}, ReduceOp::max, "test").wait();
      reduce_scatter(world, none, also, ReduceOp::sum, "test").wait();
      all_gather(world, also, none, "test").wait();
      all_to_all(world, none, at::empty({0}), "test").wait();
      const std::vector<int64_t> zeros(static_cast<size_t>(n), 0);
      all_to_all(world, none, at::empty({0}), zeros, zeros, "test").wait();
      if (n > 1 && state.rank() == 0) send(world, none, n - 1, "test").wait();
      if (n > 1 && state.rank() == n - 1) receive(world, none, 0, "test").wait();
      const at::Tensor after = number(1);
      all_reduce(world, after, ReduceOp::sum, "test").wait();
      EXPECT_EQ(after.item<int64_t>(), n);
    });
}

template <class Call>
void expect_refused(Call call, const std::string& message) {
  EXPECT_TRUE(throws_with<UsageError>([&] { (void)call(); }, message));
}

TEST(CollectiveGolden, RanksThatTheGroupDoesNotHave) {
  for (const int64_t n : {1, 2, 3, 4})
    run_ranks(n, [n](const ParallelState& state) {
      const ProcessGroup world = state.world();
      const at::Tensor one = number(1);
      for (const int64_t wrong : {int64_t{-1}, n}) {
        const std::string found = "found rank " + std::to_string(wrong) +
                                  " of the group, allowed: 0 to " + std::to_string(n - 1);
        expect_refused([&] { return broadcast(world, one, wrong, "x"); },
                       "broadcast (from " + std::to_string(wrong) + ") of x over group " +
                           world.to_string() + ": " + found);
        expect_refused([&] { return broadcast(world, Tensors{one, one}, wrong, "x"); }, found);
        expect_refused([&] { return send(world, one, wrong, "x"); }, found);
        expect_refused([&] { return receive(world, one, wrong, "x"); }, found);
      }
      expect_refused([&] { return send(world, one, state.rank(), "x"); },
                     "found this rank as the peer, allowed: another one");
    });
}

TEST(CollectiveGolden, ListsThatDoNotFit) {
  for (const int64_t n : {1, 2, 3})
    run_ranks(n, [n](const ParallelState& state) {
      const ProcessGroup world = state.world();
      const at::Tensor one = at::ones({1}), wide = at::ones({n});
      const Tensors mixed = {one, at::ones({1}, at::kDouble)}, none;
      const std::string several = "found tensors of several dtypes or devices, allowed: one";
      const std::string number_of = "found 1 outputs and 2 inputs, allowed: equal numbers";
      const ReduceOp sum = ReduceOp::sum;
      expect_refused([&] { return all_reduce(world, mixed, sum, "x"); }, several);
      expect_refused([&] { return broadcast(world, mixed, 0, "x"); }, several);
      expect_refused([&] { return all_gather(world, at::ones({n}, at::kInt), one, "x"); }, several);
      expect_refused([&] { return all_reduce(world, none, sum, "x"); }, "found no tensor");
      expect_refused([&] { return all_gather(world, none, none, "x"); }, "found no tensor");
      expect_refused([&] { return all_gather(world, {wide}, {one, one}, "x"); }, number_of);
      expect_refused(
          [&] {
            return reduce_scatter(world, {one}, {wide, wide}, sum, "x");
          },
          number_of);
      const at::Tensor more = at::ones({n + 1});
      const std::string ratio = "the output has " + std::to_string(n + 1) +
                                " elements and the input 1, allowed: a ratio of " +
                                std::to_string(n) + " : 1";
      expect_refused([&] { return all_gather(world, {wide, more}, {one, one}, "x"); }, ratio);
      expect_refused(
          [&] {
            return reduce_scatter(world, {one, one}, {wide, more}, sum, "x");
          },
          "the output has 1 elements and the input " + std::to_string(n + 1));
      expect_refused(
          [&] {
            return all_to_all(world, wide, wide, {n}, {n, 0, 0, 0, 0}, "x");
          },
          "and input rows [");
    });
}

TEST(CollectiveGolden, TensorsThatAreNotContiguous) {
  for (const int64_t n : {1, 2})
    run_ranks(n, [n](const ParallelState& state) {
      const ProcessGroup world = state.world();
      const at::Tensor good = at::ones({2 * n, 2}), bad = at::ones({2, 2 * n}).t();
      const at::Tensor columns = at::ones({2, 2 * n * n}).t();
      const std::string message = "found a tensor that is not contiguous";
      const ReduceOp sum = ReduceOp::sum;
      const int64_t peer = n - 1 - state.rank();
      expect_refused([&] { return all_reduce(world, bad, sum, "x"); }, message);
      expect_refused([&] { return all_reduce(world, Tensors{good, bad}, sum, "x"); }, message);
      expect_refused([&] { return broadcast(world, bad, 0, "x"); }, message);
      expect_refused([&] { return all_gather(world, columns, good, "x"); }, message);
      expect_refused([&] { return all_gather(world, at::ones({n, 2 * n, 2}), bad, "x"); }, message);
      expect_refused([&] { return reduce_scatter(world, good, columns, sum, "x"); }, message);
      expect_refused([&] { return reduce_scatter(world, bad, at::ones({4 * n * n}), sum, "x"); },
                     message);
      expect_refused([&] { return all_to_all(world, good, bad, "x"); }, message);
      expect_refused([&] { return all_to_all(world, bad, good, "x"); }, message);
      expect_refused([&] { return send(world, bad, peer, "x"); }, message);
      expect_refused([&] { return receive(world, bad, peer, "x"); }, message);
    });
}

int64_t sequence_of(const ProcessGroup& group) {
  return group.shared_state()->communicator->ledger().state().sequence;
}

TEST(CollectiveGolden, EveryCollectiveIsOneNumber) {
  for (const int64_t n : {2, 3, 4})
    run_ranks(n, [n](const ParallelState& state) {
      const ProcessGroup world = state.world();
      const at::Tensor one = number(1), wide = at::empty({n});
      const int64_t start = sequence_of(world);
      int64_t expected = start;
      const auto counts = [&](Work work) {
        work.wait();
        EXPECT_EQ(sequence_of(world), ++expected);
      };
      counts(all_reduce(world, one, ReduceOp::sum, "test"));
      counts(all_reduce(world, Tensors{one, one.clone()}, ReduceOp::sum, "test"));
      counts(broadcast(world, one, 1, "test"));
      counts(all_gather(world, wide, one, "test"));
      counts(reduce_scatter(world, one, wide, ReduceOp::sum, "test"));
      counts(all_to_all(world, at::empty({n}), wide, "test"));
      if (state.rank() == 0) send(world, one, 1, "test").wait();
      if (state.rank() == 1) receive(world, one, 0, "test").wait();
      EXPECT_EQ(sequence_of(world), expected) << "messages between two ranks do not count";

      const at::Tensor of_all = at::empty({n}, at::kLong);
      all_gather(world, of_all, number(expected, at::kLong), "sequence").wait();
      EXPECT_TRUE(of_all.eq(expected).all().item<bool>());
    });
}

TEST(CollectiveGolden, ARankThatSkipsACollectiveLagsByOne) {
  std::mutex mutex;
  std::vector<int64_t> sequences(3);
  const auto errors = errors_of_ranks(
      3,
      [&](const ParallelState& state) {
        const ProcessGroup group = testing::impatient_group(state);
        const auto note = [&] {
          const std::lock_guard<std::mutex> lock(mutex);
          sequences[static_cast<size_t>(state.rank())] = sequence_of(group);
        };
        const at::Tensor one = number(1);
        all_reduce(group, one, ReduceOp::sum, "both").wait();
        if (state.rank() == 1) return note();
        Work skipped = all_reduce(group, one, ReduceOp::sum, "skipped");
        note();
        skipped.wait();
      },
      testing::with_impatient_group(std::chrono::seconds(1)));
  EXPECT_EQ(sequences[0], sequences[1] + 1);
  EXPECT_EQ(sequences[2], sequences[1] + 1);
  for (const int rank : {0, 2})
    EXPECT_NE(errors[rank].find("all_reduce (sum) of skipped over group dp [0, 1, 2] failed"),
              std::string::npos)
        << errors[rank];
  EXPECT_EQ(errors[1], "");
}

}  // namespace
}  // namespace lockstep
