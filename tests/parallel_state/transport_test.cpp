#include "lockstep/parallel_state/transport.h"

#include <gtest/gtest.h>

#include <numeric>
#include <thread>

#include <ATen/ATen.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include "lockstep/core/check.h"
#include "lockstep/parallel_state/backends.h"
#include "lockstep/parallel_state/c10d_transport.h"
#include "lockstep/parallel_state/collectives.h"
#include "lockstep/parallel_state/cpu_transport.h"
#include "lockstep/parallel_state/gloo_transport.h"
#include "lockstep/parallel_state/planning_backend.h"
#include "lockstep/tests/parallel_state/impatient_group.h"
#include "lockstep/tests/support/rank_threads.h"
#include "lockstep/tests/support/throws_with.h"

// The contract of Transport, for each implementation in the build, against plain sums in double.
// Terms are small integers, so that sums are exact in every dtype.

namespace lockstep {
namespace {

using Tensors = Transport::Tensors;
using std::chrono::milliseconds;

constexpr milliseconds kTimeout{20000};
constexpr at::ScalarType kReduced[] = {at::kDouble, at::kFloat, at::kBFloat16, at::kHalf, at::kLong,
                                       at::kInt,    at::kShort, at::kChar,     at::kByte};
constexpr at::ScalarType kMoved[] = {at::kDouble, at::kFloat, at::kBFloat16,     at::kHalf,
                                     at::kLong,   at::kShort, at::kByte,         at::kBool,
                                     at::kChar,   at::kInt,   at::kComplexFloat, at::kFloat8_e5m2};
/// Sizes of the tensors of one call.
constexpr int64_t kSizes[] = {5, 0, 1, 1003};

enum class Kind { build, observed, gloo, planning };

const char* to_string(Kind kind) {
  constexpr const char* kNames[] = {"build", "observed", "gloo", "planning"};
  return kNames[static_cast<size_t>(kind)];
}

std::unique_ptr<Transport> make_transport(Kind kind,
                                          const c10::intrusive_ptr<c10d::ProcessGroup>& group) {
  if (kind == Kind::gloo) return std::make_unique<GlooTransport>(group, kTimeout);
  if (kind == Kind::planning) return std::make_unique<C10dTransport>(group, c10::kCPU);
  return cpu_transport(kind == Kind::observed)(group, kTimeout);
}

/// One rank of a group, under one implementation.
struct Rank {
  Kind kind;
  int64_t rank, size;
  Transport& transport;
  FailureBoard& failures;

  /// The rank whose terms this rank receives as those of `peer`.
  int64_t source(int64_t peer) const { return kind == Kind::planning ? rank : peer; }
  void wait(const Transport::Parts& parts) const {
    for (const auto& part : parts) {
      part->wait({failures, std::chrono::steady_clock::now(), kTimeout});
      EXPECT_TRUE(part->is_completed());
    }
  }
};

using OnRank = std::function<void(const Rank&)>;

void be_rank(Kind kind, const c10::intrusive_ptr<c10d::Store>& store, int64_t rank, int64_t size,
             const OnRank& body) {
  BackendSpec spec;
  spec.store = store;
  spec.group_name = "test";
  spec.ranks.resize(static_cast<size_t>(size));
  std::iota(spec.ranks.begin(), spec.ranks.end(), 0);
  spec.rank = static_cast<int>(rank);
  spec.timeout = kTimeout;
  const auto group =
      c10::make_intrusive<c10d::ProcessGroup>(store, spec.rank, static_cast<int>(size));
  using Type = c10d::ProcessGroup::BackendType;
  group->setBackend(c10::kCPU, Type::GLOO,
                    kind == Kind::planning ? make_planning_backend(spec) : make_gloo_backend(spec));
  group->setDefaultBackend(Type::GLOO);
  group->setGroupName(fmt::format("test {} {}", static_cast<const void*>(store.get()), rank));
  FailureBoard failures(nullptr, rank, size);
  const auto transport = make_transport(kind, group);
  transport->greet();
  body({kind, rank, size, *transport, failures});
}

/// Runs `body` as every rank of groups of 2, 3 and 4, with every implementation.
void on_all_transports(const OnRank& body) {
  for (const Kind kind : {Kind::build, Kind::observed, Kind::gloo, Kind::planning})
    for (const int64_t size : {2, 3, 4}) {
      SCOPED_TRACE(fmt::format("{}, {} ranks", to_string(kind), size));
      const auto store = c10::make_intrusive<c10d::HashStore>();
      std::vector<std::thread> threads;
      std::vector<std::string> errors(static_cast<size_t>(size));
      for (int64_t rank = 0; rank < size; ++rank)
        threads.emplace_back([&, rank] {
          try {
            be_rank(kind, store, rank, size, body);
          } catch (const std::exception& error) {
            errors[static_cast<size_t>(rank)] = error.what();
          }
        });
      for (std::thread& thread : threads) thread.join();
      for (const std::string& error : errors) EXPECT_EQ(error, "");
    }
}

/// Small integers in double.
at::Tensor term(int64_t rank, int64_t numel) {
  return (at::arange(numel, at::kDouble) * 7 + rank * 3).remainder(11);
}

/// The terms of all ranks, combined in double, as `dtype`.
at::Tensor combined(const Rank& on, int64_t numel, const Reduction& reduction,
                    at::ScalarType dtype) {
  at::Tensor result;
  for (int64_t peer = 0; peer < on.size; ++peer) {
    const at::Tensor next =
        term(on.source(peer), numel) * reduction.numerator / reduction.denominator;
    result = peer == 0                       ? next
             : reduction.op == ReduceOp::max ? at::maximum(result, next)
             : reduction.op == ReduceOp::min ? at::minimum(result, next)
                                             : result + next;
  }
  if (reduction.op == ReduceOp::average) result = result / on.size;
  return result.to(dtype);
}

std::vector<Reduction> reductions_of(at::ScalarType dtype) {
  std::vector<Reduction> all = {ReduceOp::sum, ReduceOp::max, ReduceOp::min};
  if (at::isFloatingType(dtype))
    all.insert(all.end(), {ReduceOp::average, {ReduceOp::sum, 3, 4}, {ReduceOp::average, 1, 2}});
  return all;
}

void expect_same(const at::Tensor& found, const at::Tensor& expected, const std::string& what) {
  EXPECT_TRUE(
      at::equal(found.view(-1).view(at::kByte), expected.contiguous().view(-1).view(at::kByte)))
      << what << " " << expected.numel() << " x " << expected.scalar_type();
}

TEST(Transports, AllReduceAListOfTensors) {
  on_all_transports([](const Rank& on) {
    uint64_t identity = 1;
    for (const at::ScalarType dtype : kReduced)
      for (const Reduction& reduction : reductions_of(dtype)) {
        Tensors tensors;
        for (const int64_t numel : kSizes) tensors.push_back(term(on.rank, numel).to(dtype));
        on.wait(on.transport.all_reduce(tensors, reduction, identity++));
        for (const at::Tensor& tensor : tensors)
          expect_same(tensor, combined(on, tensor.numel(), reduction, dtype),
                      lockstep::to_string(reduction.op));
      }
  });
}

TEST(Transports, ReduceScatterAListOfTensorsApartAndInPlace) {
  on_all_transports([](const Rank& on) {
    uint64_t identity = 1;
    for (const at::ScalarType dtype : kReduced)
      for (const Reduction& reduction : reductions_of(dtype))
        for (const bool in_place : {false, true}) {
          Tensors outputs, inputs;
          for (const int64_t numel : kSizes) {
            inputs.push_back(term(on.rank, on.size * numel).to(dtype));
            outputs.push_back(in_place ? inputs.back().narrow(0, on.rank * numel, numel)
                                       : at::empty({numel}, dtype));
          }
          on.wait(on.transport.reduce_scatter(outputs, inputs, reduction, identity++));
          for (const at::Tensor& output : outputs) {
            const int64_t numel = output.numel();
            const at::Tensor whole = combined(on, on.size * numel, reduction, dtype);
            expect_same(output, whole.narrow(0, on.rank * numel, numel),
                        lockstep::to_string(reduction.op));
          }
        }
  });
}

// 256 + 1 rounds to 256 in bf16, and 2048 + 1 to 2048 in fp16.
TEST(Transports, NarrowTypesAreRoundedOnce) {
  on_all_transports([](const Rank& on) {
    if (on.kind == Kind::planning) return;  // all its ranks have the same term
    for (const auto& [dtype, large] : {std::pair(at::kBFloat16, 256), std::pair(at::kHalf, 2048)}) {
      const at::Tensor tensor = at::full({3}, on.rank == 0 ? large : 1, dtype);
      const at::Tensor input = tensor.repeat({on.size}), output = at::empty({3}, dtype);
      on.wait(on.transport.all_reduce({tensor}, ReduceOp::sum, 1));
      on.wait(on.transport.reduce_scatter({output}, {input}, ReduceOp::sum, 2));
      const at::Tensor sum = at::full({3}, large + on.size - 1, at::kDouble).to(dtype);
      expect_same(tensor, sum, "all_reduce");
      expect_same(output, sum, "reduce_scatter");
    }
  });
}

TEST(Transports, WhatIsReducedIsTheSameEverywhere) {
  for (int8_t i = 0; i < static_cast<int8_t>(at::ScalarType::NumOptions); ++i) {
    const auto dtype = static_cast<at::ScalarType>(i);
    EXPECT_EQ(reducible_on_cpu(dtype),
              std::find(std::begin(kReduced), std::end(kReduced), dtype) != std::end(kReduced))
        << dtype;
  }
}

TEST(Transports, AllGatherAListOfTensorsApartAndInPlace) {
  on_all_transports([](const Rank& on) {
    uint64_t identity = 1;
    for (const at::ScalarType dtype : kMoved)
      for (const bool in_place : {false, true}) {
        Tensors outputs, inputs;
        for (const int64_t numel : kSizes) {
          outputs.push_back(at::zeros({on.size, numel}, dtype));
          const at::Tensor mine = term(on.rank, numel).to(dtype);
          inputs.push_back(in_place ? outputs.back()[on.rank].copy_(mine) : mine);
        }
        on.wait(on.transport.all_gather(outputs, inputs, identity++));
        for (const at::Tensor& output : outputs)
          for (int64_t peer = 0; peer < on.size; ++peer)
            expect_same(output[peer], term(on.source(peer), output.size(1)).to(dtype), "part");
      }
  });
}

TEST(Transports, BroadcastAListOfTensorsFromEveryRank) {
  on_all_transports([](const Rank& on) {
    uint64_t identity = 1;
    for (const at::ScalarType dtype : kMoved)
      for (int64_t source = 0; source < on.size; ++source) {
        Tensors tensors;
        for (const int64_t numel : kSizes) tensors.push_back(term(on.rank, numel).to(dtype));
        on.wait(on.transport.broadcast(tensors, static_cast<int>(source), identity++));
        for (const at::Tensor& tensor : tensors)
          expect_same(tensor, term(on.source(source), tensor.numel()).to(dtype), "tensor");
      }
  });
}

/// The rows that `from` sends to `to`.
at::Tensor rows_between(int64_t from, int64_t to, int64_t rows, at::ScalarType dtype) {
  return (term(from, rows * 3) + to).view({rows, 3}).to(dtype);
}

void expect_all_to_all(const Rank& on, at::ScalarType dtype, uint64_t identity,
                       const std::function<int64_t(int64_t, int64_t)>& rows) {
  std::vector<int64_t> in, out;
  Tensors sent, expected;
  for (int64_t peer = 0; peer < on.size; ++peer) {
    in.push_back(rows(on.rank, peer));
    out.push_back(rows(peer, on.rank));
    sent.push_back(rows_between(on.rank, peer, in.back(), dtype));
    expected.push_back(rows_between(on.source(peer), on.rank, out.back(), dtype));
  }
  const at::Tensor input = at::cat(sent), received = at::cat(expected);
  const at::Tensor output = at::ones_like(received);
  on.wait(on.transport.all_to_all(output, input, out, in, identity));
  expect_same(output, received, "output");
}

TEST(Transports, AllToAllOfEvenUnevenAndNoRows) {
  on_all_transports([](const Rank& on) {
    uint64_t identity = 1;
    for (const at::ScalarType dtype : kMoved) {
      expect_all_to_all(on, dtype, identity++, [](int64_t, int64_t) { return 4; });
      if (on.kind == Kind::planning) continue;  // it returns zeros for uneven rows
      expect_all_to_all(on, dtype, identity++,
                        [](int64_t from, int64_t to) { return (from + 2 * to) % 5; });
      expect_all_to_all(on, dtype, identity++, [](int64_t from, int64_t) { return from * 3; });
      expect_all_to_all(on, dtype, identity++, [](int64_t, int64_t to) { return to == 1 ? 2 : 0; });
      expect_all_to_all(on, dtype, identity++, [](int64_t, int64_t) { return 0; });
    }
  });
}

TEST(Transports, MessagesKeepTheirOrder) {
  on_all_transports([](const Rank& on) {
    const auto next = static_cast<int>((on.rank + 1) % on.size);
    const auto before = static_cast<int>((on.rank + on.size - 1) % on.size);
    for (const at::ScalarType dtype : kMoved) {
      Tensors received;
      std::vector<Transport::Parts> sending, receiving;
      for (const int64_t numel : {3, 4, 4}) {
        const at::Tensor mine = (term(on.rank, numel) + received.size()).to(dtype);
        received.push_back(at::ones({numel}, dtype));
        sending.push_back(on.transport.send(mine, next, 9));
        receiving.push_back(on.transport.receive(received.back(), before, 9));
      }
      for (const auto& parts : sending) on.wait(parts);
      for (const auto& parts : receiving) on.wait(parts);
      for (size_t i = 0; i < received.size(); ++i) {
        const at::Tensor sent = term(before, received[i].numel()) + i;
        expect_same(received[i], (on.kind == Kind::planning ? sent * 0 : sent).to(dtype),
                    "message");
      }
    }
  });
}

// The host's messages of different calls never match each other; see desync_test.cpp.
TEST(Transports, PlainGlooTellsWhereRanksMakeDifferentCalls) {
  on_all_transports([](const Rank& on) {
    if (on.kind != Kind::gloo) return;
    const auto identity = static_cast<uint64_t>(on.rank == 1 ? 2 : 1);
    const at::Tensor tensor = at::ones({3});
    const auto parts = on.transport.all_reduce({tensor}, ReduceOp::sum, identity);
    EXPECT_TRUE(testing::throws_with<CommunicationError>([&] { on.wait(parts); },
                                                         "the ranks have called different "
                                                         "operations"));
    on.wait(on.transport.all_reduce({tensor}, ReduceOp::sum, 3));
  });
}

/// A call that no other rank joins.
struct LoneCall {
  std::string name;
  std::function<Work(const ProcessGroup&)> start;
};

TEST(Transports, APeerThatNeverComesEndsEveryOperationAtItsTimeoutWithOneMessage) {
  const at::Tensor two = at::ones({2}), one = at::ones({1});
  const LoneCall calls[] = {
      {"all_reduce (average)",
       [&](const ProcessGroup& g) { return all_reduce(g, two, ReduceOp::average, "x"); }},
      {"reduce_scatter (sum)",
       [&](const ProcessGroup& g) { return reduce_scatter(g, one, two, ReduceOp::sum, "x"); }},
      {"all_gather", [&](const ProcessGroup& g) { return all_gather(g, two, one, "x"); }},
      {"all_to_all", [&](const ProcessGroup& g) { return all_to_all(g, two.clone(), two, "x"); }},
      {"broadcast (from 1)", [&](const ProcessGroup& g) { return broadcast(g, two, 1, "x"); }},
      {"receive (from 1)", [&](const ProcessGroup& g) { return receive(g, two, 1, "x"); }},
  };
  for (const LoneCall& call : calls) {
    const auto errors = testing::errors_of_ranks(
        2,
        [&](const ParallelState& state) {
          const ProcessGroup group = testing::impatient_group(state);
          if (state.rank() == 1) return std::this_thread::sleep_for(milliseconds(2500));
          call.start(group).wait();
        },
        testing::with_impatient_group(milliseconds(1000)));
    EXPECT_TRUE(
        errors[0].starts_with(call.name + " of x over group dp [0, 1] failed on rank 0 after "))
        << errors[0];
    EXPECT_NE(errors[0].find("(timeout 1.0 s): "), std::string::npos) << errors[0];
    EXPECT_EQ(errors[1], "");
  }
}

}  // namespace
}  // namespace lockstep
