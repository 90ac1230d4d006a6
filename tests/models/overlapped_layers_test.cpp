// Linear layers whose forward sends in parts, during products: values compared with one process,
// what is sent, and in which order.

#include <gtest/gtest.h>

#include <array>
#include <chrono>
#include <functional>
#include <future>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#include <ATen/ATen.h>
#include <ATen/record_function.h>

#include "lockstep/core/check.h"
#include "lockstep/models/linear.h"
#include "lockstep/models/overlapped_product.h"
#include "lockstep/tests/support/rank_threads.h"
#include "lockstep/tests/support/throws_with.h"

namespace lockstep {
namespace {

using testing::CollectiveLog;
using testing::run_ranks;
using testing::throws_with;

constexpr int64_t kWide = 6, kInner = 12;

at::Tensor waves(at::IntArrayRef shape, double phase, at::ScalarType dtype = at::kDouble) {
  return at::sin(at::arange(c10::multiply_integers(shape), at::kDouble) * 0.7 + phase)
      .view(shape)
      .to(dtype);
}

/// The sizes of a gated column-parallel layer and of a row-parallel layer after it.
struct Pair {
  int64_t ranks = 2;
  bool sequence = false;
  int64_t positions = 8;  ///< over all ranks
  int64_t batch = 1;
  bool bias = false;
  at::ScalarType dtype = at::kDouble;
};

struct Results {
  std::vector<at::Tensor> all;  ///< of one rank: outputs, gradients of the input and of the weights
};

testing::RankThreadOptions threads_of(int64_t ranks) {
  testing::RankThreadOptions options;
  options.sizes.tensor = ranks;
  return options;
}

ParallelContext context_of(const ParallelState& state, const Pair& pair, bool overlap) {
  return {.state = state,
          .options = pair.dtype,
          .sequence_parallel = pair.sequence,
          .tp_comm_overlap = overlap,
          .name = "mlp."};
}

/// This rank's part of dimension 0.
at::Tensor own(const at::Tensor& whole, const Pair& pair, int64_t rank) {
  return pair.sequence ? whole.chunk(pair.ranks, 0)[static_cast<size_t>(rank)] : whole;
}

/// Results of rank `of`: outputs of both layers, gradients of the input, weights and biases.
Results run_pair(const Pair& pair, bool overlap, testing::RankThreadOptions options, int64_t of,
                 bool backward = true) {
  Results results;
  run_ranks(
      pair.ranks,
      [&](const ParallelState& state) {
        const ParallelContext context = context_of(state, pair, overlap);
        const ColumnParallelLinear up(context.child("up"), kWide, {2, kInner}, pair.bias, 0.4);
        const RowParallelLinear down(context.child("down"), kInner, kWide, pair.bias, 0.4);
        const at::NoGradGuard no_grad;
        for (const NamedParameter& param : collect_parameters(up))
          if (param.name.find("bias") != std::string::npos) param.tensor.fill_(0.5);
        for (const NamedParameter& param : collect_parameters(down))
          if (param.name.find("bias") != std::string::npos) param.tensor.fill_(0.25);
        const at::AutoGradMode with_grad(true);
        const at::Tensor all = waves({pair.positions, pair.batch, kWide}, 1, pair.dtype);
        const at::Tensor x = own(all, pair, state.rank()).detach().clone().requires_grad_(true);
        const at::Tensor inner = up.forward(x);
        const std::vector<at::Tensor> halves = inner.chunk(2, -1);
        const at::Tensor y = down.forward(halves[0].tanh() * halves[1]);
        if (backward)
          y.backward(
              own(waves({pair.positions, pair.batch, kWide}, 2, pair.dtype), pair, state.rank()));
        if (state.rank() != of) return;
        results.all = {inner.detach(), y.detach()};
        if (!backward) return;
        results.all.push_back(x.grad());
        for (const auto* layer : std::array<const DescribedModule*, 2>{&up, &down})
          for (const NamedParameter& param : collect_parameters(*layer))
            results.all.push_back(param.tensor.grad());
      },
      std::move(options));
  return results;
}

double apart(const at::Tensor& found, const at::Tensor& expected) {
  if (found.sizes() != expected.sizes()) return 1e300;
  const double largest = expected.abs().max().item<double>();
  return (found.to(at::kDouble) - expected.to(at::kDouble)).abs().max().item<double>() / largest;
}

/// The results of `pair` on one rank, cut as on rank `rank` of `pair`.
std::vector<at::Tensor> one_process(const Pair& pair, int64_t rank) {
  Pair whole = pair;
  whole.ranks = 1;
  whole.sequence = false;
  std::vector<at::Tensor> all = run_pair(whole, false, threads_of(1), 0).all;
  // Blocks of columns, each cut over the ranks; a bias too. Rows for down.weight.
  const auto columns = [&](const at::Tensor& t, int64_t dim) {
    return t.chunk(pair.ranks, dim)[static_cast<size_t>(rank)];
  };
  const at::Tensor inner =
      columns(all[0].view({pair.positions, pair.batch, 2, kInner}), 3).flatten(2);
  std::vector<at::Tensor> cut = {inner, own(all[1], pair, rank), own(all[2], pair, rank),
                                 columns(all[3], 1)};
  size_t next = 4;
  if (pair.bias) cut.push_back(columns(all[next++], 1));
  cut.push_back(columns(all[next], 1));
  return cut;
}

TEST(OverlappedLayers, PartsCoverTheSequenceInOrder) {
  for (int64_t positions = 0; positions < 40; ++positions) {
    int64_t next = 0;
    const std::vector<SequencePart> parts = sequence_parts(positions);
    EXPECT_EQ(static_cast<int64_t>(parts.size()), std::min<int64_t>(2, positions));
    for (const SequencePart& part : parts) {
      EXPECT_EQ(part.first, next);
      EXPECT_GE(part.count, positions / 2);
      EXPECT_LE(part.count, (positions + 1) / 2);
      next += part.count;
    }
    EXPECT_EQ(next, positions);
  }
}

/// Compared with one process and with layers without overlap. Chunks have fewer positions than
/// there are parts, as many, or more.
TEST(OverlappedLayers, HaveTheResultsOfOneProcess) {
  for (const int64_t ranks : {2, 3, 4})
    for (const bool sequence : {false, true})
      for (const int64_t chunk : {1, 3, 4, 6, 9})
        for (const int64_t batch : {1, 2}) {
          const bool bias = (chunk + batch) % 2 == 0;
          const Pair pair = {ranks, sequence, chunk * ranks, batch, bias};
          const int64_t rank = (chunk + ranks) % ranks;
          SCOPED_TRACE(fmt::format("{} ranks, sp {}, chunks of {}, bias {}, rank {}", ranks,
                                   sequence, chunk, bias, rank));
          const auto found = run_pair(pair, true, threads_of(ranks), rank).all;
          const auto plain = run_pair(pair, false, threads_of(ranks), rank).all;
          const auto expected = one_process(pair, rank);
          ASSERT_EQ(found.size(), plain.size());
          for (size_t i = 0; i < found.size(); ++i)
            EXPECT_LT(apart(found[i], plain[i]), 1e-14) << i;
          for (size_t i = 0; i < expected.size(); ++i)
            EXPECT_LT(apart(found[i], expected[i]), 1e-13) << i;
        }
}

TEST(OverlappedLayers, InNarrowDtypesTheyAreApartByRoundingAlone) {
  const std::map<at::ScalarType, double> bounds = {
      {at::kFloat, 1e-6}, {at::kBFloat16, 0.02}, {at::kHalf, 0.002}};
  for (const auto& [dtype, bound] : bounds)
    for (const bool sequence : {false, true}) {
      const Pair pair = {3, sequence, 15, 2, true, dtype};
      const auto found = run_pair(pair, true, threads_of(3), 1).all;
      const auto plain = run_pair(pair, false, threads_of(3), 1).all;
      for (size_t i = 0; i < plain.size(); ++i) {
        EXPECT_EQ(found[i].scalar_type(), dtype);
        EXPECT_LT(apart(found[i], plain[i]), bound) << at::toString(dtype) << " " << i;
      }
    }
}

/// "all_gather of up input over tp [0, 1]: 96" for each call of rank 0.
std::vector<std::string> sent(const Pair& pair, bool overlap) {
  CollectiveLog log;
  testing::RankThreadOptions options = threads_of(pair.ranks);
  options.log = &log;
  run_pair(pair, overlap, options, 0);
  std::vector<std::string> lines;
  for (const CollectiveRecord& call : log.of_rank(0))
    lines.push_back(fmt::format("{} of {} over {} {}: {}", call.operation, call.label, call.group,
                                call.ranks, call.bytes));
  return lines;
}

TEST(OverlappedLayers, SendInPartsWhatTheyWouldSendAtOnce) {
  using Sent = std::vector<std::string>;
  const int64_t row = 2 * kWide * 8;  // bytes of a position: batch, width, bytes
  const auto line = [&](const char* call, int64_t positions) {
    return fmt::format("{} over tp [0, 1]: {}", call, positions * row);
  };
  // Chunks of 5 positions have parts of 2 and 3.
  constexpr const char *kGather = "all_gather of mlp.up input",
                       *kScatter = "reduce_scatter (sum) of mlp.down output",
                       *kReduce = "all_reduce (sum) of mlp.down output";
  EXPECT_EQ(sent({2, true, 10, 2}, true),
            (Sent{line(kGather, 2), line(kGather, 3), line(kScatter, 4), line(kScatter, 6),
                  line("all_gather of gradient of mlp.down output", 5),
                  line("all_gather of mlp.up input again", 5),
                  line("reduce_scatter (sum) of gradient of mlp.up input", 10)}));
  EXPECT_EQ(sent({2, false, 10, 2}, true),
            (Sent{line(kReduce, 5), line(kReduce, 5),
                  line("all_reduce (sum) of gradient of mlp.up input", 10)}));
  EXPECT_EQ(sent({2, true, 10, 2}, false),
            (Sent{line(kGather, 5), line(kScatter, 10),
                  line("all_gather of gradient of mlp.down output", 5),
                  line("all_gather of mlp.up input again", 5),
                  line("reduce_scatter (sum) of gradient of mlp.up input", 10)}));
  // One position per rank, as in text generation.
  EXPECT_EQ(sent({2, false, 1, 2}, true),
            (Sent{line(kReduce, 1), line("all_reduce (sum) of gradient of mlp.up input", 1)}));
  EXPECT_EQ(sent({1, false, 10, 2}, true), Sent{});
}

/// The steps of a rank in forward: "all_gather", "product of 24 x 6 rows", ...
thread_local std::vector<std::string>* doings = nullptr;

std::unique_ptr<at::ObserverContext> note_product(const at::RecordFunction& call) {
  const std::string name = call.name();
  if (doings != nullptr && (name == "aten::mm" || name == "aten::bmm"))
    doings->push_back(fmt::format("product of {}", call.inputs()[0].toTensor().sizes().vec()));
  return nullptr;
}

TEST(OverlappedLayers, ProductsStandBetweenTheCommunicationsOfParts) {
  using Doings = std::vector<std::string>;
  for (const bool overlap : {false, true}) {
    std::array<Doings, 3> of_rank;
    testing::RankThreadOptions options = threads_of(3);
    options.observer = [&](const CollectiveRecord& call) {
      of_rank.at(static_cast<size_t>(call.rank)).push_back(call.operation);
    };
    options.adjust = [&](int64_t rank, ParallelStateOptions&) {
      doings = &of_rank.at(static_cast<size_t>(rank));
    };
    const auto handle = at::addGlobalCallback(at::RecordFunctionCallback(&note_product)
                                                  .needsInputs(true)
                                                  .scopes({at::RecordScope::FUNCTION}));
    run_pair({3, true, 24, 1}, overlap, options, 0, /*backward=*/false);
    at::removeCallback(handle);
    const std::string gather = "all_gather", scatter = "reduce_scatter (sum)";
    if (!overlap) {
      EXPECT_EQ(of_rank[1], (Doings{gather, "product of [24, 6]", "product of [24, 4]", scatter}));
      continue;
    }
    // All parts are sent before the first product, which multiplies the own chunk. Parts that have
    // arrived are multiplied for the ranks before and after.
    const Doings gathers(2, gather);
    const auto expect = [&](size_t rank, const Doings& products_of_part) {
      Doings expected = gathers;
      expected.push_back("product of [8, 6]");
      for (int part = 0; part < 2; ++part)
        expected.insert(expected.end(), products_of_part.begin(), products_of_part.end());
      for (int part = 0; part < 2; ++part)
        expected.insert(expected.end(), {"product of [3, 4, 4]", scatter});
      EXPECT_EQ(of_rank[rank], expected) << rank;
    };
    expect(0, {"product of [2, 4, 6]"});
    expect(1, {"product of [4, 6]", "product of [4, 6]"});
    expect(2, {"product of [2, 4, 6]"});
  }
}

/// Rank 1 starts its first communication of a layer only after rank 0 has reached `reached_by`.
void expect_reached_without_rank_1(bool sequence, const std::string& label, const char* reached_by,
                                   int64_t times) {
  std::promise<void> reached;
  std::shared_future<void> rank_0_is_there = reached.get_future().share();
  std::vector<std::string> rank_0;
  bool held = false;
  testing::RankThreadOptions options = threads_of(2);
  const auto count = [&](const std::string& doing) {
    rank_0.push_back(doing);
    if (std::count(rank_0.begin(), rank_0.end(), reached_by) == times && doing == reached_by)
      reached.set_value();
  };
  options.observer = [&](const CollectiveRecord& call) {
    if (call.label != label) return;
    if (call.rank == 0) return count(call.operation);
    if (std::exchange(held, true)) return;
    EXPECT_EQ(rank_0_is_there.wait_for(std::chrono::seconds(10)), std::future_status::ready)
        << "rank 0 waits for rank 1 before it has come to " << reached_by << " " << times;
  };
  run_pair({2, sequence, 16, 1}, true, options, 0, /*backward=*/false);
}

TEST(OverlappedLayers, PartsOfTheOutputSetOutWhileEarlierOnesAreUnderWay) {
  expect_reached_without_rank_1(true, "mlp.down output", "reduce_scatter (sum)", 2);
  expect_reached_without_rank_1(false, "mlp.down output", "all_reduce (sum)", 2);
}

TEST(OverlappedLayers, TheOwnChunkIsMultipliedBeforeAnythingHasArrived) {
  std::promise<void> multiplied;
  std::shared_future<void> own_is_multiplied = multiplied.get_future().share();
  testing::RankThreadOptions options = threads_of(2);
  bool held = false;
  options.observer = [&](const CollectiveRecord& call) {
    if (call.rank == 0 || call.label != "mlp.up input" || std::exchange(held, true)) return;
    EXPECT_EQ(own_is_multiplied.wait_for(std::chrono::seconds(10)), std::future_status::ready)
        << "rank 0 waits for rank 1 before its first product";
  };
  static std::function<void()> on_product;
  static thread_local bool is_rank_0 = false;
  on_product = [&, told = false]() mutable {
    if (is_rank_0 && !std::exchange(told, true)) multiplied.set_value();
  };
  options.adjust = [&](int64_t rank, ParallelStateOptions&) { is_rank_0 = rank == 0; };
  const auto handle = at::addGlobalCallback(
      at::RecordFunctionCallback(
          [](const at::RecordFunction&) -> std::unique_ptr<at::ObserverContext> { return nullptr; },
          [](const at::RecordFunction& call, at::ObserverContext*) {
            if (is_rank_0 && call.name() == std::string("aten::mm")) on_product();
          })
          .scopes({at::RecordScope::FUNCTION}));
  run_pair({2, true, 16, 1}, true, options, 0, /*backward=*/false);
  at::removeCallback(handle);
}

TEST(OverlappedLayers, RefuseWhatDoesNotFitByTheLayersName) {
  run_ranks(
      2,
      [&](const ParallelState& state) {
        const auto refused = [&](const at::Tensor& x, LinearInput input, LinearOutput output,
                                 const char* part) {
          EXPECT_TRUE(throws_with<UsageError>(
              [&] {
                parallel_linear(x, at::ones({3, 4}), {},
                                {.group = state.world(),
                                 .input = input,
                                 .output = output,
                                 .overlap = true,
                                 .label = "mlp.fc"});
              },
              part));
        };
        refused(at::ones({3, 1, 4}), LinearInput::own, LinearOutput::sequence_chunk,
                "mlp.fc: found a sequence of 3 over group");
        refused(at::ones({4, 1, 4}), LinearInput::sequence_chunk, LinearOutput::summed,
                "mlp.fc: found an input that is gathered and an output that is summed, allowed: "
                "one of the two");
        refused(at::ones({5}), LinearInput::own, LinearOutput::summed,
                "mlp.fc: found an input [5] of Float, allowed: [..., 4] of Float");
        refused(at::ones({4}), LinearInput::own, LinearOutput::sequence_chunk,
                "mlp.fc: found an input [4] of Float, allowed: [sequence, ..., 4]");
      },
      threads_of(2));
}

}  // namespace
}  // namespace lockstep
