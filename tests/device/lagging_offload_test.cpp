// recompute() with inputs that wait in host memory: backward ends early, comes in another order, or
// does not come.

#include <functional>
#include <memory>
#include <stdexcept>
#include <utility>
#include <vector>

#include <torch/csrc/autograd/autograd.h>

#include "lockstep/core/error.h"
#include "lockstep/models/activation_offload.h"
#include "lockstep/models/offloaded_layer.h"
#include "lockstep/models/recompute.h"
#include "lockstep/tests/device/lagging_tests.h"
#include "lockstep/tests/support/throws_with.h"

namespace lockstep::testing {
namespace {

using Tensors = std::vector<at::Tensor>;

at::Tensor wave(at::IntArrayRef sizes, double phase) {
  int64_t numel = 1;
  for (const int64_t size : sizes) numel *= size;
  return at::sin(at::arange(numel, at::kFloat) * 0.37 + phase).view(sizes);
}

class LaggingOffload : public LaggingDevice {
 protected:
  /// Compares `gradients` on the device, with an offload, with those on the CPU, without one.
  void expect_those_of_the_cpu(
      const std::function<Tensors(c10::Device, ActivationOffload*)>& gradients) {
    const Tensors expected = gradients(at::kCPU, nullptr);
    for (uint64_t seed = 1; seed <= kSeeds; ++seed) {
      if (seed % 2 == 0)
        restart_lazy(seed);
      else
        restart(seed);
      const c10::Device device = lagging_device(static_cast<int>(seed % kLaggingDevices));
      ActivationOffload offload(device);
      const Tensors found = gradients(device, &offload);
      for (size_t i = 0; i < expected.size(); ++i)
        EXPECT_TRUE(at::equal(found[i], expected[i])) << "seed " << seed << ", weight " << i;
    }
  }

  /// The stream on which the most recent offload fetches: the pool is a ring of 32.
  static c10::Stream fetching_stream() {
    for (int i = 0; i < 31; ++i) pooled_stream(0);
    return pooled_stream(0);
  }

  /// A layer that calls `check` in backward.
  using Layer = std::function<at::Tensor(ActivationOffload& offload, at::Tensor x,
                                         const at::Tensor& weight, std::function<void()> check)>;

  static at::Tensor recomputed(ActivationOffload& offload, const at::Tensor& x,
                               const at::Tensor& weight, const std::function<void()>& check) {
    return recompute(
        [check, weight](const Tensors& in) {
          check();
          return in[0] * weight;
        },
        {x}, &offload);
  }

  static at::Tensor kept_whole(ActivationOffload& offload, at::Tensor x, const at::Tensor& weight,
                               const std::function<void()>& check) {
    return run_offloaded(offload, std::move(x), /*owns_input=*/true, [&](const at::Tensor& in) {
      const at::Tensor y = in * weight;
      y.register_hook([check](const at::Tensor&) { check(); });
      return y + 1;
    });
  }

  /// Expects that new tensors keep their values in the memory that an early end of backward has
  /// freed, although a prefetch arrives later.
  static void expect_no_late_write(
      const Layer& make,
      const std::function<void(const Tensors& weights, const at::Tensor& loss)>& end_early,
      const std::shared_ptr<bool>& fails) {
    constexpr int64_t kNumel = 1024;
    const c10::Device device = lagging_device(0);
    ActivationOffload offload(device);
    std::unique_ptr<Gate> gate;
    {
      Tensors weights;
      at::Tensor x = wave({kNumel}, 5).to(device);
      for (int layer = 0; layer < 4; ++layer) {
        weights.push_back(wave({kNumel}, layer).to(device).requires_grad_(true));
        x = make(offload, std::move(x), weights.back(), [fails, layer] {
          if (*fails && layer == 2) throw std::runtime_error("thrown");
        });
      }
      const at::Tensor loss = x.sum();
      wait_for_all_streams();
      gate = std::make_unique<Gate>(fetching_stream());
      end_early(weights, loss);
    }
    Tensors fresh;
    for (int i = 0; i < 12; ++i) fresh.push_back(at::full({kNumel}, 7.F, device));
    gate->release();
    wait_for_all_streams();
    for (const at::Tensor& tensor : fresh)
      EXPECT_TRUE(at::equal(tensor.cpu(), at::full({kNumel}, 7.F)));
  }
};

TEST_F(LaggingOffload, ABackwardThatThrowsLeavesNoWriteBehind) {
  for (const Layer& make : {Layer(recomputed), Layer(kept_whole)}) {
    const auto fails = std::make_shared<bool>(false);
    expect_no_late_write(
        make,
        [&](const Tensors&, const at::Tensor& loss) {
          *fails = true;
          EXPECT_ANY_THROW(loss.backward());
        },
        fails);
  }
}

TEST_F(LaggingOffload, ABackwardOfTheLastLayerLeavesNoWriteBehind) {
  for (const Layer& make : {Layer(recomputed), Layer(kept_whole)})
    expect_no_late_write(
        make,
        [](const Tensors& weights, const at::Tensor& loss) {
          torch::autograd::grad({loss}, {weights.back()});
        },
        std::make_shared<bool>(false));
}

/// Two backwards over each of three forwards. All forwards end before the first backward begins.
Tensors whole_layer_gradients(c10::Device device, ActivationOffload* offload) {
  Tensors weights, losses;
  for (int i = 0; i < 5; ++i)
    weights.push_back((wave({16, 16}, i) * 0.3).to(device).requires_grad_(true));
  for (int pass = 0; pass < 3; ++pass) {
    at::Tensor y = wave({4, 16}, pass).to(device).requires_grad_(true);
    if (offload) offload->begin_pass();
    for (size_t i = 0; i < weights.size(); ++i) {
      const auto layer = [&](const at::Tensor& in) {
        const at::Tensor inner = at::tanh(at::matmul(in, weights[i]));
        return inner * inner.t().t() + in.sin();
      };
      y = offload ? run_offloaded(*offload, std::exchange(y, {}), i > 0, layer) : layer(y);
    }
    losses.push_back(y.square().sum());
  }
  for (const at::Tensor& loss : losses) {
    loss.backward({}, /*retain_graph=*/true);
    loss.backward();
  }
  Tensors gradients;
  for (const at::Tensor& weight : weights) gradients.push_back(weight.grad().cpu());
  return gradients;
}

TEST_F(LaggingOffload, WholeLayersHaveTheGradientsOfLayersThatStay) {
  expect_those_of_the_cpu(whole_layer_gradients);
}

TEST_F(LaggingOffload, WhatALayerKeepsIsAwayAndWhatOthersHaveMadeStays) {
  ActivationOffload offload(lagging_device(0));
  const at::Tensor weight = at::full({64}, 3.F).to(lagging_device(0)).requires_grad_(true);
  at::Tensor x = at::full({64}, 2.F).to(lagging_device(0)), inside, y = x;
  for (int i = 0; i < 2; ++i)
    y = run_offloaded(offload, std::exchange(y, {}), i > 0, [&](const at::Tensor& in) {
      const at::Tensor product = in * weight;
      if (i == 0) inside = product.detach();
      return product.square();
    });
  EXPECT_EQ(inside.storage().data(), nullptr);
  EXPECT_EQ(x.cpu()[0].item<float>(), 2);       // made outside of the layers
  EXPECT_EQ(weight.cpu()[0].item<float>(), 3);  // a parameter
  y.sum().backward();
  EXPECT_EQ(inside.cpu()[0].item<float>(), 6);
}

/// Gradients of weights that are used by recomputed functions inside recomputed functions.
Tensors nested_gradients(c10::Device device, ActivationOffload* offload) {
  Tensors weights;
  for (int i = 0; i < 6; ++i)
    weights.push_back((wave({16, 16}, i) * 0.3).to(device).requires_grad_(true));
  for (int pass = 0; pass < 3; ++pass) {
    at::Tensor y = wave({4, 16}, pass).to(device);
    if (offload) offload->begin_pass();
    for (size_t outer = 0; outer < 6; outer += 2)
      y = recompute(
          [&weights, offload, outer](const Tensors& in) {
            at::Tensor z = in[0];
            for (size_t i = outer; i < outer + 2; ++i)
              z = recompute(
                  [weight = weights[i]](const Tensors& inner) {
                    return at::tanh(at::matmul(inner[0], weight)) + inner[0];
                  },
                  {z}, offload);
            return z;
          },
          {y}, offload);
    y.square().sum().backward();
  }
  Tensors gradients;
  for (const at::Tensor& weight : weights) gradients.push_back(weight.grad().cpu());
  return gradients;
}

TEST_F(LaggingOffload, FunctionsInsideFunctionsHaveTheirOwnInputs) {
  expect_those_of_the_cpu(nested_gradients);
}

/// Two passes without begin_pass(), and backward in the order of forward.
TEST_F(LaggingOffload, BackwardInTheOrderOfForwardFindsItsInputs) {
  for (uint64_t seed = 1; seed <= kSeeds; ++seed) {
    restart(seed);
    ActivationOffload offload(lagging_device(0));
    Tensors inputs, values;
    for (int i = 0; i < 6; ++i) {
      inputs.push_back(at::full({64}, i + 1.0, lagging_device(0)).requires_grad_(true));
      values.push_back(
          recompute([](const Tensors& in) { return in[0].pow(3); }, {inputs.back() * 2}, &offload));
    }
    for (size_t i = 0; i < values.size(); ++i) {
      values[i].sum().backward();
      const double x = static_cast<double>(i) + 1;
      EXPECT_TRUE(at::equal(inputs[i].grad().cpu(), at::full({64}, 24 * x * x))) << seed;
    }
  }
}

TEST_F(LaggingOffload, AnInputThatIsChangedInPlaceIsRefused) {
  for (const bool keeps_another : {false, true}) {
    ActivationOffload offload(lagging_device(0));
    const auto square = [](const Tensors& in) { return in[0].square(); };
    const at::Tensor weight = at::ones({8}, lagging_device(0)).requires_grad_(true);
    const at::Tensor x = weight * 2;
    const at::Tensor y = recompute(square, {x}, &offload);
    x.detach().mul_(100);
    EXPECT_TRUE(throws_with<UsageError>(
        [&] {
          if (keeps_another)
            recompute(square, {weight}, &offload);
          else
            y.sum().backward();
        },
        "an input of shape [8] that was changed in place"));
  }
}

TEST_F(LaggingOffload, InputsOfOtherDevicesStayWhereTheyAre) {
  ActivationOffload offload(lagging_device(0));
  const at::Tensor x = at::full({4}, 3.0, lagging_device(0)).requires_grad_(true);
  const at::Tensor host = at::full({1}, 2.0), other = at::full({4}, 5.0, lagging_device(1));
  const at::Tensor y = recompute(
      [](const Tensors& in) {
        EXPECT_EQ(in[2].device(), lagging_device(1));
        return in[0] * in[1].item<double>() + in[2].to(in[0].device());
      },
      {x, host, other}, &offload);
  y.sum().backward();
  EXPECT_TRUE(at::equal(x.grad().cpu(), at::full({4}, 2.0)));
}

TEST_F(LaggingOffload, ABackwardThatMayComeAgainFindsItsInputsAgain) {
  ActivationOffload offload(lagging_device(0));
  const at::Tensor x = at::full({8}, 2.0, lagging_device(0)).requires_grad_(true);
  const at::Tensor loss =
      recompute([](const Tensors& in) { return in[0].square(); }, {x}, &offload).sum();
  for (int times = 1; times <= 3; ++times) {
    loss.backward({}, /*retain_graph=*/times < 3);
    EXPECT_TRUE(at::equal(x.grad().cpu(), at::full({8}, 4.0 * times)));
  }
  EXPECT_ANY_THROW(loss.backward());
}

}  // namespace
}  // namespace lockstep::testing
