#include <torch/csrc/autograd/variable.h>

#include "lockstep/tests/device/lagging_graphs.h"
#include "lockstep/tests/support/throws_with.h"

// What CUDA refuses in a capture, and who owns the memory of a graph.

namespace lockstep::testing {
namespace {

class LaggingGraphRules : public LaggingDevice {};

at::TensorOptions floats() { return {lagging_device(0)}; }
/// The values are ready when the call returns, on every stream.
at::Tensor ones(int64_t count) { return at::ones({count}).to(lagging_device(0)); }
bool is_all_poison(const at::Tensor& on_host) { return on_host.isnan().all().item<bool>(); }

void wait_briefly() { std::this_thread::sleep_for(std::chrono::milliseconds(3)); }

/// Expects that `body` is refused with `part`, that later launches and the capture's end name it
/// too, and that work after the capture succeeds.
void expect_refused(const std::function<void()>& body, const std::string& part) {
  const at::Tensor x = ones(4);
  const c10::StreamGuard guard(new_stream(0));
  const Graph graph = new_graph();
  graph->begin_capture();
  x.mul_(2);
  EXPECT_TRUE(throws_with<c10::Error>(body, part));
  EXPECT_TRUE(throws_with<c10::Error>([&] { x.mul_(2); }, part)) << "a launch";
  EXPECT_TRUE(throws_with<c10::Error>([&] { graph->end_capture(); }, part)) << "the end";
  EXPECT_TRUE(throws_with<c10::Error>([&] { graph->replay(); }, "without a capture")) << part;
  EXPECT_TRUE(at::equal((x + 1).cpu(), at::full({4}, 2.0f))) << part;
}

TEST_F(LaggingGraphRules, WhatTheHostReadsOrWaitsForIsRefused) {
  const at::Tensor x = ones(4);
  const at::Tensor pageable = at::ones({4}), pinned = at::ones({4}).pin_memory();
  expect_refused([&] { x.sum().item(); }, "aten::_local_scalar_dense");
  expect_refused([&] { x.nonzero(); }, "aten::nonzero");
  expect_refused([&] { x.copy_(pageable, /*non_blocking=*/true); }, "copy from pageable memory");
  expect_refused([&] { x.copy_(pinned); }, "copy from pinned memory");
  expect_refused([&] { x.cpu(); }, "copy to host");
  expect_refused([&] { x.index({at::zeros({1}, at::kLong)}); }, "copy from pageable memory");
  expect_refused([&] { current_stream(0).synchronize(); }, "synchronize stream");
  expect_refused([&] { current_stream(0).query(); }, "query stream");
  expect_refused([&] { wait_for_device(0, "synchronize device"); }, "synchronize device");
}

TEST_F(LaggingGraphRules, TheHostCannotAskForACapturedEvent) {
  const auto recorded = [] {
    c10::Event event(c10::DeviceType::PrivateUse1);
    event.record(current_stream(0));
    return event;
  };
  expect_refused([&] { recorded().query(); }, "query of a captured event");
  expect_refused([&] { recorded().synchronize(); }, "synchronize event of a captured event");
  std::optional<c10::Event> kept;
  const Graph graph = captured(0, [&] { kept.emplace(recorded()); });
  graph->replay();
  EXPECT_TRUE(throws_with<c10::Error>([&] { kept->query(); }, "query of a captured event"));
  EXPECT_TRUE(throws_with<c10::Error>([&] { kept->block(current_stream(0)); }, "has ended"));
}

TEST_F(LaggingGraphRules, RandomNumbersAreRefused) {
  expect_refused([] { at::rand({4}, floats()); }, "the random numbers of aten::uniform_");
  expect_refused([] { at::ones({4}, floats()).bernoulli(); }, "the random numbers of");
}

TEST_F(LaggingGraphRules, TheDefaultStreamIsNotCaptured) {
  const Graph graph = new_graph();
  EXPECT_TRUE(throws_with<c10::Error>([&] { graph->begin_capture(); }, "not the default one"));
  expect_refused([] { come_behind(default_stream(0), current_stream(0)); },
                 "the default stream of lagging:0 waits for a captured event");
}

TEST_F(LaggingGraphRules, AnAccumulatorThatWasMadeOnTheDefaultStreamIsRefused) {
  const at::Tensor weight = ones(4).requires_grad_(true);
  const auto accumulator = torch::autograd::impl::grad_accumulator(weight);
  expect_refused([&] { (weight * 2).sum().backward(); },
                 "the default stream of lagging:0 waits for a captured event");
}

TEST_F(LaggingGraphRules, WorkOfBeforeTheCaptureIsNotWaitedFor) {
  c10::Event before(c10::DeviceType::PrivateUse1);
  before.record(current_stream(0));
  before.synchronize();
  expect_refused([&] { before.block(current_stream(0)); }, "isolation");
  expect_refused([&] { come_behind(current_stream(0), default_stream(0)); }, "isolation");
}

TEST_F(LaggingGraphRules, CapturesDoNotMeet) {
  const c10::Stream other = new_stream(0);
  const Graph second = new_graph();
  {
    const c10::StreamGuard guard(other);
    second->begin_capture();
  }
  expect_refused([&] { come_behind(other, current_stream(0)); }, "another capture than its own");
  const c10::StreamGuard guard(other);
  EXPECT_TRUE(throws_with<c10::Error>([&] { new_graph()->begin_capture(); }, "captured already"));
  second->end_capture();
  second->replay();
}

TEST_F(LaggingGraphRules, WorkThatHasNotJoinedIsNamedAtTheEnd) {
  const at::Tensor x = ones(4);
  const c10::Stream side = new_stream(0);
  const auto fork = [&](bool early_join) {
    come_behind(side, current_stream(0));
    if (early_join) come_behind(current_stream(0), side);
    const c10::StreamGuard guard(side);
    x.mul_(2);
  };
  for (const bool early_join : {false, true})
    EXPECT_TRUE(throws_with<c10::Error>([&] { captured(0, [&] { fork(early_join); }); },
                                        "unjoined work at the end of a capture: aten::mul"));
  const c10::StreamGuard guard(side);
  EXPECT_TRUE(at::equal(x.cpu(), at::ones({4})));  // the side stream is released
}

TEST_F(LaggingGraphRules, AJoinThroughAThirdStreamIsOne) {
  const at::Tensor x = ones(4);
  const c10::Stream second = new_stream(0), third = new_stream(0), idle = new_stream(0);
  const Graph graph = captured(0, [&] {
    const c10::Stream origin = current_stream(0);
    come_behind(idle, origin);
    come_behind(second, origin);
    {
      const c10::StreamGuard guard(second);
      x.mul_(2);
    }
    come_behind(third, second);
    come_behind(origin, third);
  });
  graph->replay();
  EXPECT_TRUE(at::equal(x.cpu(), at::full({4}, 2.0f)));
}

TEST_F(LaggingGraphRules, CallsInAnotherOrderAreRefused) {
  const c10::StreamGuard guard(new_stream(0));
  const Graph graph = new_graph();
  EXPECT_TRUE(throws_with<c10::Error>([&] { graph->replay(); }, "replay() without a capture"));
  EXPECT_TRUE(throws_with<c10::Error>([&] { graph->end_capture(); }, "without begin_capture()"));
  graph->begin_capture();
  EXPECT_TRUE(throws_with<c10::Error>([&] { graph->begin_capture(); }, "captured once"));
  {
    const c10::StreamGuard other(new_stream(0));
    EXPECT_TRUE(throws_with<c10::Error>([&] { graph->end_capture(); }, "where it began"));
  }
  graph->end_capture();
  EXPECT_TRUE(throws_with<c10::Error>([&] { graph->begin_capture(); }, "captured once"));
  expect_refused([&] { graph->replay(); }, "the replay of another graph");
}

TEST_F(LaggingGraphRules, AGraphThatIsDestroyedInItsCaptureFreesTheStream) {
  const at::Tensor x = ones(4);
  current_stream(0).synchronize();
  const c10::StreamGuard guard(new_stream(0));
  {
    const Graph graph = new_graph();
    graph->begin_capture();
    x.mul_(2);
  }
  EXPECT_TRUE(at::equal((x + 1).cpu(), at::full({4}, 2.0f)));
}

TEST_F(LaggingGraphRules, MemoryFreedInTheCaptureIsUsedAgainThereAndNowhereElse) {
  const at::Tensor x = ones(999);
  std::vector<void*> addresses;
  const c10::Stream stream = new_stream(0);
  const c10::StreamGuard guard(stream);
  Graph graph = new_graph();
  graph->begin_capture();
  at::Tensor result = at::zeros({999}, floats());
  for (int i = 1; i <= 3; ++i) {
    const at::Tensor part = x * i;
    addresses.push_back(part.data_ptr());
    result.add_(part);
  }
  graph->end_capture();
  EXPECT_EQ(addresses[1], addresses[0]);
  EXPECT_EQ(addresses[2], addresses[0]);
  const at::Tensor outside = at::zeros({999}, floats());
  EXPECT_NE(outside.data_ptr(), addresses[0]);
  graph->replay();
  EXPECT_TRUE(at::equal(outside.cpu(), at::zeros({999})));
  EXPECT_TRUE(at::equal(result.cpu(), at::full({999}, 6.0f)));
  graph->replay();
  EXPECT_TRUE(at::equal(result.cpu(), at::full({999}, 6.0f)));
  graph.reset();
  const at::Tensor after = at::empty({999}, floats());
  EXPECT_EQ(after.data_ptr(), addresses[0]);
  EXPECT_TRUE(is_all_poison(after.cpu()));
  EXPECT_TRUE(at::equal(result.cpu(), at::full({999}, 6.0f)));  // its owner is alive
}

TEST_F(LaggingGraphRules, AResultThatIsFreedStaysTheGraphs) {
  const at::Tensor x = ones(500);
  const at::Tensor kept = at::empty({500}, floats());
  at::Tensor result;
  const c10::Stream stream = new_stream(0);
  const c10::StreamGuard guard(stream);
  const Graph graph = new_graph();
  graph->begin_capture();
  result = x + 1;
  kept.copy_(result);
  graph->end_capture();
  const void* const address = result.data_ptr();
  for (int i = 0; i < 20; ++i) {
    graph->replay();
    result.reset();
    const at::Tensor outside = at::zeros({500}, floats());
    ASSERT_NE(outside.data_ptr(), address);
    ASSERT_TRUE(at::equal(kept.cpu(), at::full({500}, 2.0f))) << i;
    ASSERT_TRUE(at::equal(outside.cpu(), at::zeros({500}))) << i;
  }
}

TEST_F(LaggingGraphRules, AGraphDestroyedWithAReplayUnderWayEndsItFirst) {
  for (uint64_t seed = 1; seed <= kSeeds; ++seed) {
    restart(seed);
    const at::Tensor x = ones(300), y = at::empty({300}, floats());
    c10::Stream stream = current_stream(0);
    Graph graph = captured(0, [&] {
      stream = current_stream(0);
      y.copy_(x * 2 + 1);
    });
    Gate gate(current_stream(0));
    graph->replay();
    graph.reset();
    const c10::StreamGuard guard(stream);
    const at::Tensor next = at::zeros({300}, floats()), after = at::zeros({300}, floats());
    wait_briefly();
    gate.release();
    wait_for_all_streams();
    EXPECT_TRUE(at::equal(host_view(y), at::full({300}, 3.0f))) << seed;
    EXPECT_TRUE(at::equal(host_view(next), at::zeros({300}))) << "the graph's memory, " << seed;
    EXPECT_TRUE(at::equal(host_view(after), at::zeros({300}))) << "the graph's memory, " << seed;
  }
}

TEST_F(LaggingGraphRules, AReplayFindsPoisonInAnInputThatWasFreed) {
  for (const bool in_capture : {false, true}) {
    at::Tensor x = ones(400);
    at::Tensor y;
    const Graph graph = captured(0, [&] {
      y = x + 1;
      if (in_capture) x.reset();
    });
    x.reset();
    graph->replay();
    EXPECT_TRUE(is_all_poison(y.cpu()));
  }
}

TEST_F(LaggingGraphRules, AReplayFindsPoisonInPinnedMemoryThatWasFreed) {
  at::Tensor host = at::ones({400}).pin_memory();
  at::Tensor y;
  const Graph graph =
      captured(0, [&] { y = host.to(lagging_device(0), /*non_blocking=*/true) + 1; });
  host.reset();
  wait_for_all_streams();
  graph->replay();
  EXPECT_TRUE(is_all_poison(y.cpu()));
}

TEST_F(LaggingGraphRules, MemoryOfTheCapturedStreamThatIsFreedInTheCaptureIsNotPoisonedByReplays) {
  const c10::Stream stream = new_stream(0);
  const c10::StreamGuard guard(stream);
  at::Tensor warm = ones(450);
  const void* const address = warm.data_ptr();
  const Graph graph = new_graph();
  graph->begin_capture();
  warm.reset();
  graph->end_capture();
  const at::Tensor next = ones(450);
  EXPECT_EQ(next.data_ptr(), address);
  graph->replay();
  EXPECT_TRUE(at::equal(next.cpu(), at::ones({450})));
}

TEST_F(LaggingGraphRules, ATensorThatAnotherCapturedStreamReadsTooLateIsPoison) {
  const at::Tensor x = ones(64), y = at::empty({64}, floats());
  const c10::Stream side = new_stream(0);
  for (const bool record : {false, true}) {
    const Graph graph = captured(0, [&] {
      const c10::Stream origin = current_stream(0);
      at::Tensor part = x * 2;
      come_behind(side, origin);
      if (record) part.record_stream(side);
      {
        const c10::StreamGuard guard(side);
        enqueue(side, "late", [] { std::this_thread::sleep_for(std::chrono::milliseconds(50)); });
        y.copy_(part);
      }
      part.reset();
      come_behind(origin, side);
    });
    graph->replay();
    EXPECT_TRUE(at::equal(y.cpu(), at::full({64}, 2.0f)) == record) << record;
  }
}

}  // namespace
}  // namespace lockstep::testing
