#include <algorithm>
#include <thread>

#include "lockstep/kernels/adamw.h"
#include "lockstep/kernels/sum_of_squares.h"
#include "lockstep/tests/device/lagging_graphs.h"

// Values, order and counts of replays, compared with the same operators on the CPU.

namespace lockstep::testing {
namespace {

/// Runs a test with twenty seeds, which give different delays.
class LaggingGraphs : public LaggingDevice {
 protected:
  static void for_each_seed(const std::function<void(uint64_t)>& body) {
    for (uint64_t seed = 1; seed <= kSeeds; ++seed) {
      if (seed % 2 == 0)
        restart_lazy(seed);
      else
        restart(seed);
      body(seed);
    }
  }
};

at::Tensor chain(const at::Tensor& x) {
  at::Tensor y = x;
  for (int i = 1; i <= 12; ++i) y = at::tanh(y * 1.5 + i * 0.1) - x / (i + 1.0);
  return y;
}

TEST_F(LaggingGraphs, ACaptureRunsNothingAndAReplayIsOneLaunchWithoutAWait) {
  const at::Tensor x = numbers_of(0, {64}).to(lagging_device(0));
  current_stream(0).synchronize();
  reset_device_counts();
  at::Tensor y;
  const Graph graph = captured(0, [&] { y = chain(x); });
  wait_for_all_streams();
  EXPECT_TRUE(host_view(y).isnan().all().item<bool>());
  EXPECT_EQ(device_counts(0).launches, 0);
  for (int64_t replays = 1; replays <= 3; ++replays) {
    graph->replay();
    EXPECT_EQ(device_counts(0).launches, replays);
    EXPECT_EQ(device_counts(0).replays, replays);
  }
  EXPECT_EQ(device_counts(0).waits, 0);
  expect_same_bits(y, chain(numbers_of(0, {64})), "the last replay");
}

TEST_F(LaggingGraphs, ReplaysComputeWithWhatTheirInputsHoldThen) {
  const at::Tensor x = at::zeros({40, 3}, at::TensorOptions(lagging_device(1)));
  at::Tensor y;
  const Graph graph = captured(1, [&] { y = chain(x); });
  for_each_seed([&](uint64_t seed) {
    const at::Tensor input = numbers_of(seed, {40, 3});
    x.copy_(input);
    graph->replay();
    expect_same_bits(y, chain(input), "seed " + std::to_string(seed));
  });
}

struct Layer {
  at::Tensor weight, bias, input;

  static Layer on(c10::Device device) {
    Layer made{numbers_of(100, {24, 16}).to(device), numbers_of(101, {24}).to(device),
               at::zeros({8, 16}, at::TensorOptions(device))};
    for (at::Tensor* const parameter : {&made.weight, &made.bias}) {
      parameter->requires_grad_(true);
      parameter->mutable_grad() = at::zeros_like(*parameter);
    }
    return made;
  }
  /// Accumulates gradients.
  at::Tensor forward_and_backward() const {
    const at::Tensor loss = at::gelu(at::linear(input, weight, bias)).square().sum();
    loss.backward();
    return loss.detach();
  }
};

TEST_F(LaggingGraphs, ForwardAndBackwardThroughAutogradHaveTheBitsOfTheCpu) {
  const Layer expected = Layer::on(at::kCPU), found = Layer::on(lagging_device(2));
  at::Tensor loss;
  const Graph graph = captured(2, [&] { loss = found.forward_and_backward(); });
  reset_device_counts();
  for_each_seed([&](uint64_t seed) {
    const std::string where = "seed " + std::to_string(seed) + ", ";
    const at::Tensor input = numbers_of(seed, {8, 16});
    expected.input.copy_(input);
    found.input.copy_(input);
    graph->replay();
    expect_same_bits(loss, expected.forward_and_backward(), where + "loss");
    expect_same_bits(found.weight.grad(), expected.weight.grad(), where + "weight");
    expect_same_bits(found.bias.grad(), expected.bias.grad(), where + "bias");
  });
}

struct Update {
  at::Tensor master, grad, first, second, low, control, squares;
  kernels::UpdateSegments segments = {{0, 300}, {400, 1000}};

  static Update on(c10::Device device) {
    const auto zeros = [&](at::ScalarType dtype) {
      return at::zeros({1000}, at::TensorOptions(dtype).device(device));
    };
    return {numbers_of(7, {1000}).to(device),
            zeros(at::kFloat),
            zeros(at::kFloat),
            zeros(at::kFloat),
            zeros(at::kBFloat16),
            at::tensor({0.5, 1.0}, at::kDouble).to(device),
            {}};
  }
  void step() {
    squares = kernels::sum_of_squares(grad);
    kernels::adamw(master, grad, first, second, low, segments,
                   {.learning_rate = 0.01, .beta1 = 0.9, .beta2 = 0.99, .eps = 1e-8}, control);
  }
};

TEST_F(LaggingGraphs, KernelsOfTheOptimizerHaveTheBitsOfTheCpu) {
  Update expected = Update::on(at::kCPU), found = Update::on(lagging_device(0));
  found.step();  // uploads the segments
  expected.step();
  const Graph graph = captured(0, [&] { found.step(); });
  for_each_seed([&](uint64_t seed) {
    const at::Tensor grad = numbers_of(seed, {1000});
    expected.grad.copy_(grad);
    found.grad.copy_(grad);
    expected.step();
    graph->replay();
    const std::string where = "seed " + std::to_string(seed) + ", ";
    expect_same_bits(found.master, expected.master, where + "master");
    expect_same_bits(found.low, expected.low, where + "bf16");
    expect_same_bits(found.squares, expected.squares, where + "squares");
  });
}

TEST_F(LaggingGraphs, EventsOrderTheStreamsOfAReplay) {
  const at::Tensor x = at::zeros({16}, at::TensorOptions(lagging_device(0)));
  const c10::Stream side = new_stream(0);
  at::Tensor left, right, sum;
  const Graph graph = captured(0, [&] {
    const c10::Stream origin = current_stream(0);
    const at::Tensor first = chain(x);
    come_behind(side, origin);
    {
      const c10::StreamGuard guard(side);
      left = chain(first * 2);
    }
    right = chain(first * 3);
    come_behind(origin, side);
    sum = left + right;
  });
  EXPECT_TRUE(is_idle(side));
  for_each_seed([&](uint64_t seed) {
    const at::Tensor input = numbers_of(seed, {16});
    x.copy_(input);
    graph->replay();
    const at::Tensor first = chain(input);
    expect_same_bits(sum, chain(first * 2) + chain(first * 3), "seed " + std::to_string(seed));
  });
}

TEST_F(LaggingGraphs, StreamsOfAReplayRunSideBySideWithoutAnEvent) {
  restart(1, std::chrono::microseconds(0));
  const at::Tensor x = at::zeros({16}, at::TensorOptions(lagging_device(0)));
  const c10::Stream side = new_stream(0);
  const auto open = std::make_shared<std::atomic<bool>>(false);
  at::Tensor y;
  const Graph graph = captured(0, [&] {
    const c10::Stream origin = current_stream(0);
    come_behind(side, origin);
    const auto last = std::chrono::steady_clock::now() + std::chrono::minutes(1);
    enqueue(side, "waits for the origin", [open, last] {
      while (!*open && std::chrono::steady_clock::now() < last) std::this_thread::yield();
    });
    y = x + 1;
    enqueue(origin, "lets the side go on", [open] { *open = true; });
    come_behind(origin, side);
  });
  graph->replay();
  expect_same_bits(y, at::ones({16}), "the origin's");
  EXPECT_TRUE(*open);
}

TEST_F(LaggingGraphs, AReplayComesBehindTheCurrentStreamAndTheCurrentStreamBehindIt) {
  const at::Tensor x = at::zeros({16}).to(lagging_device(0));
  const c10::Stream side = new_stream(0);
  at::Tensor y;
  const Graph graph = captured(0, [&] {
    const c10::Stream origin = current_stream(0);
    come_behind(side, origin);
    {
      const c10::StreamGuard guard(side);
      y = chain(x);
    }
    come_behind(origin, side);
  });
  for_each_seed([&](uint64_t seed) {
    const c10::StreamGuard guard(new_stream(0));
    at::Tensor input = x.new_zeros({16});
    for (int i = 0; i < 20; ++i) input = input + 0.25;
    x.copy_(input);
    graph->replay();
    const at::Tensor read = y * 2;
    x.zero_();
    expect_same_bits(read, chain(at::full({16}, 5.0f)) * 2, "seed " + std::to_string(seed));
  });
}

TEST_F(LaggingGraphs, ReplaysOfAGraphOnTwoStreamsFollowEachOther) {
  const at::Tensor x = at::ones({16}, at::TensorOptions(lagging_device(0)));
  const Graph graph = captured(0, [&] {
    for (int i = 0; i < 5; ++i) x.mul_(1.5).add_(1);
  });
  current_stream(0).synchronize();
  at::Tensor expected = at::ones({16});
  for (int i = 0; i < 10; ++i) {
    const c10::StreamGuard guard(new_stream(0));
    graph->replay();
  }
  for (int i = 0; i < 50; ++i) expected.mul_(1.5).add_(1);
  wait_for_all_streams();
  expect_same_bits(x, expected, "ten replays");
}

TEST_F(LaggingGraphs, PinnedMemoryIsReadAtTheReplay) {
  at::Tensor host = at::empty({32}, at::TensorOptions().pinned_memory(true));
  const at::Tensor back = at::empty({32}, at::TensorOptions().pinned_memory(true));
  const Graph graph = captured(0, [&] {
    const at::Tensor x = host.to(lagging_device(0), /*non_blocking=*/true);
    back.copy_(x * 2, /*non_blocking=*/true);
  });
  for (uint64_t seed = 1; seed <= 5; ++seed) {
    host.copy_(numbers_of(seed, {32}));
    graph->replay();
    current_stream(0).synchronize();
    EXPECT_TRUE(at::equal(back, numbers_of(seed, {32}) * 2)) << seed;
  }
}

TEST_F(LaggingGraphs, OtherStreamsAndDevicesWorkWhileOneIsCaptured) {
  const at::Tensor x = at::zeros({32}, at::TensorOptions(lagging_device(0)));
  at::Tensor y;
  const Graph graph = captured(0, [&] {
    y = chain(x);
    std::vector<std::thread> threads;
    for (int device = 0; device < kLaggingDevices; ++device)
      threads.emplace_back([device] {
        const at::Tensor input = numbers_of(static_cast<uint64_t>(device), {32});
        expect_same_bits(chain(input.to(lagging_device(device))), chain(input),
                         "device " + std::to_string(device));
        if (device > 0) wait_for_device(static_cast<c10::DeviceIndex>(device), "the test");
      });
    for (std::thread& thread : threads) thread.join();
  });
  x.fill_(0.5);
  graph->replay();
  expect_same_bits(y, chain(at::full({32}, 0.5f)), "the replay");
}

TEST_F(LaggingGraphs, DevicesAreCapturedAndReplayedAtOnce) {
  std::vector<std::thread> threads;
  for (int device = 0; device < kLaggingDevices; ++device)
    threads.emplace_back([device] {
      const Layer expected = Layer::on(at::kCPU), found = Layer::on(lagging_device(device));
      at::Tensor loss;
      const Graph graph = captured(device, [&] { loss = found.forward_and_backward(); });
      for (uint64_t seed = 1; seed <= 5; ++seed) {
        for (const Layer* const layer : {&expected, &found})
          layer->input.copy_(numbers_of(seed, {8, 16}));
        graph->replay();
        expect_same_bits(loss, expected.forward_and_backward(), "loss");
      }
      expect_same_bits(found.weight.grad(), expected.weight.grad(), "weight");
    });
  for (std::thread& thread : threads) thread.join();
}

TEST_F(LaggingGraphs, AnErrorOfAReplayedKernelIsTheDevicesError) {
  const at::Tensor table = at::ones({4, 2}, at::TensorOptions(lagging_device(0)));
  const at::Tensor rows = at::zeros({3}, at::TensorOptions(at::kLong).device(lagging_device(0)));
  at::Tensor y;
  const Graph graph = captured(0, [&] { y = at::index_select(table, 0, rows) + 1; });
  graph->replay();
  expect_same_bits(y, at::full({3, 2}, 2.0f), "rows that are there");
  rows.fill_(9);
  graph->replay();
  EXPECT_THROW(current_stream(0).synchronize(), c10::Error);
  ASSERT_TRUE(device_error(0).has_value());
  EXPECT_NE(device_error(0)->find("aten::index_select"), std::string::npos) << *device_error(0);
}

}  // namespace
}  // namespace lockstep::testing
