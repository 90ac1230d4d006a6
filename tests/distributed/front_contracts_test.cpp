// What the fronts accept where one might expect otherwise.

#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <limits>

#include <ATen/ATen.h>
#include <torch/csrc/autograd/variable.h>

#include "lockstep/core/error.h"
#include "lockstep/distributed/distributed_data_parallel.h"
#include "lockstep/distributed/gradient_synchronizer.h"
#include "lockstep/distributed/param_and_grad_buffer.h"
#include "lockstep/tests/distributed/reducer_nets.h"
#include "lockstep/tests/support/mesh_params.h"
#include "lockstep/tests/support/throws_with.h"

namespace lockstep {
namespace {

using testing::all_equal_to;
using testing::backward_of;
using testing::grad_is;
using testing::linear_loss;
using testing::named_zeros;
using testing::ones_on;
using testing::reduce;
using testing::run_ranks;
using testing::throws_with;

/// The first micro-batch uses alpha and the second one beta. If `crosswise`, it is the other way
/// round on rank 1.
void alternate(const ParallelState& state, bool crosswise, const at::Tensor& alpha,
               const at::Tensor& beta) {
  const bool swapped = crosswise && state.rank() == 1;
  ((swapped ? beta : alpha) * (1. + state.rank())).sum().backward();
  ((swapped ? alpha : beta) * (3. + state.rank())).sum().backward();
}

TEST(FrontContracts, UnusedParametersMayAlternateBetweenMicrobatches) {
  for (const bool crosswise : {false, true}) {
    const double of_alpha = crosswise ? 1 + 4 : 1 + 2, of_beta = crosswise ? 2 + 3 : 3 + 4;
    run_ranks(2, [&](const ParallelState& state) {
      const DeviceMesh mesh(state, {2}, {"dp"});
      const MeshParameters params = {ones_on(mesh, {2}, {Replicate{}}, "alpha"),
                                     ones_on(mesh, {3}, {Replicate{}}, "beta")};
      GradientSynchronizer sync({params}, 1. / (1 << 20), 2, {.allow_unused_parameters = true});
      sync.bind();
      for (int step = 0; step < 2; ++step) {
        alternate(state, crosswise, params[0].tensor, params[1].tensor);
        EXPECT_EQ(sync.state_text(), "accumulating 1/2");
        sync.wait();
        EXPECT_TRUE(grad_is(params[0], of_alpha));
        EXPECT_TRUE(grad_is(params[1], of_beta));
        sync.zero_grad();
      }
      // One backward of two is still too early for wait().
      (params[0].tensor.sum() + params[1].tensor.sum()).backward();
      EXPECT_TRUE(throws_with<UsageError>([&] { sync.wait(); }, "came before the last of 2"));
      params[0].tensor.sum().backward();
      sync.wait();
      EXPECT_TRUE(grad_is(params[0], 4));
      EXPECT_TRUE(grad_is(params[1], 2));
    });
    run_ranks(2, [&](const ParallelState& state) {
      const std::vector<NamedParameter> list = named_zeros({2, 3});
      DistributedDataParallelConfig config;
      config.allow_unused_parameters = true;
      config.calculate_per_token_loss = false;
      DistributedDataParallel ddp(list, state, config);
      ddp.set_num_microbatches(2);
      for (int step = 0; step < 2; ++step) {
        ddp.zero_grad_buffer();
        alternate(state, crosswise, list[0].tensor, list[1].tensor);
        ddp.finish_grad_sync();
        EXPECT_TRUE(all_equal_to(list[0].tensor.grad(), of_alpha / 2));
        EXPECT_TRUE(all_equal_to(list[1].tensor.grad(), of_beta / 2));
      }
    });
  }
}

/// Changes to param.grad() between two micro-batches.
const std::vector<std::pair<const char*, std::function<void(at::Tensor& grad)>>> kMeddlings = {
    {"nothing", [](at::Tensor&) {}},
    {"replaced by a copy", [](at::Tensor& grad) { grad = grad.clone(); }},
    {"scaled out of place", [](at::Tensor& grad) { grad = grad * 3; }},
    {"undefined", [](at::Tensor& grad) { grad.reset(); }}};

TEST(FrontContracts, BetweenMicrobatchesWhatTheCallerMakesOfAGradientHoldsAsInPlainAutograd) {
  for (const auto& [what, meddle] : kMeddlings) {
    const auto two_backwards = [&meddling = meddle](const at::Tensor& weight) {
      (weight * 2).sum().backward();
      meddling(weight.mutable_grad());
      (weight * 2).sum().backward();
    };
    const at::Tensor plain = at::ones({2}).requires_grad_(true);
    two_backwards(plain);
    const double expected = plain.grad()[0].item<double>();
    run_ranks(2, [&, &text = what](const ParallelState& state) {
      const MeshParameters params = {
          ones_on(DeviceMesh(state, {2}, {"dp"}), {2}, {Replicate{}}, "weight")};
      GradientSynchronizer sync({params}, 1, 2, {.reduction = GradientReduction::mean});
      sync.bind();
      two_backwards(params[0].tensor);
      sync.wait();
      EXPECT_TRUE(grad_is(params[0], expected)) << "GradientSynchronizer, " << text;

      const NamedParameter weight = named_zeros({2})[0];
      DistributedDataParallelConfig config;
      config.calculate_per_token_loss = false;
      DistributedDataParallel ddp({weight}, state, config);
      ddp.set_num_microbatches(2);
      two_backwards(weight.tensor);
      ddp.finish_grad_sync();
      EXPECT_TRUE(all_equal_to(weight.tensor.grad(), expected)) << "DDP, " << text;
    });
  }
}

TEST(FrontContracts, ScalingBetweenMicrobatchesScalesWhatTheCallerMadeOfAGradient) {
  for (const auto& [what, meddle] : kMeddlings) {
    const at::Tensor plain = at::ones({2}).requires_grad_(true);
    (plain * 2).sum().backward();
    meddle(plain.mutable_grad());
    if (plain.grad().defined()) plain.mutable_grad() = plain.grad() * 0.5;
    (plain * 2).sum().backward();
    const double expected = plain.grad()[0].item<double>();
    for (const bool sharded : {false, true})
      run_ranks(2, [&, &meddling = meddle, &text = what](const ParallelState& state) {
        const NamedParameter weight = named_zeros({2})[0];
        DistributedDataParallelConfig config;
        config.calculate_per_token_loss = false;
        config.use_distributed_optimizer = sharded;
        DistributedDataParallel ddp({weight}, state, config);
        {
          const auto guard = ddp.no_sync();
          (weight.tensor * 2).sum().backward();
        }
        meddling(weight.tensor.mutable_grad());
        ddp.scale_gradients(0.5);
        (weight.tensor * 2).sum().backward();
        ddp.finish_grad_sync();
        const ParamAndGradBuffer& buffer = *ddp.buffers().front();
        for (const ElementRange& owned : buffer.owned()) {
          const int64_t end = std::min<int64_t>(owned.end, weight.tensor.numel());
          if (owned.start < end) {
            EXPECT_TRUE(all_equal_to(buffer.held_grads({owned.start, end}), expected)) << text;
          }
        }
      });
  }
}

TEST(FrontContracts, AParameterThatIsRegisteredAfterWrappingIsLeftAlone) {
  struct Growing : torch::nn::Module {
    at::Tensor add(const char* name) { return register_parameter(name, at::ones({2})); }
  };
  run_ranks(2, [](const ParallelState& state) {
    Growing net;
    const at::Tensor first = net.add("first");
    DistributedDataParallelConfig config;
    config.calculate_per_token_loss = false;
    DistributedDataParallel ddp(net, state, config);
    const at::Tensor late = net.add("late");
    ((first + late) * (1. + state.rank())).sum().backward();
    ddp.finish_grad_sync();
    EXPECT_TRUE(all_equal_to(first.grad(), 1.5));
    EXPECT_TRUE(all_equal_to(late.grad(), 1. + state.rank()));
    ASSERT_EQ(ddp.buckets().size(), 1u);
    EXPECT_EQ(ddp.buckets()[0].parameters, std::vector<std::string>{"first"});
  });
}

TEST(FrontContracts, AParameterThatIsUnfrozenLaterIsNamed) {
  const char* const text = "requires a gradient, but was frozen when it was wrapped";
  const ParallelState state = ParallelState::single_process();
  const DeviceMesh mesh(state, {1}, {"dp"});
  const MeshParameters params = {ones_on(mesh, {2}, {Replicate{}}, "a"),
                                 ones_on(mesh, {2}, {Replicate{}}, "b")};
  params[1].tensor.set_requires_grad(false);
  GradientSynchronizer sync({params}, 1, 1);
  sync.bind();
  backward_of({params[0]}, 1);
  sync.wait();
  sync.zero_grad();
  params[1].tensor.set_requires_grad(true);
  backward_of(params, 1);
  EXPECT_TRUE(throws_with<UsageError>([&] { sync.wait(); }, std::string("parameter 'b' ") + text));
  sync.unbind();
  sync.bind();
  EXPECT_EQ(sync.buckets().front().numel, 4);

  const std::vector<NamedParameter> list = named_zeros({2, 2});
  at::Tensor(list[1].tensor).set_requires_grad(false);
  Reducer reducer(list, testing::replicas(state));
  reduce(reducer, [&] { return linear_loss(list, {0}, 1); });
  at::Tensor(list[1].tensor).set_requires_grad(true);
  EXPECT_TRUE(throws_with<UsageError>([&] { reducer.prepare_for_forward(); },
                                      std::string("parameter 'p1' ") + text));
}

/// A step that `finish` ends is refused while `weight` is frozen, and only then.
void expect_refused_while_frozen(const at::Tensor& weight, const std::function<void()>& backward,
                                 const std::function<void()>& finish) {
  weight.set_requires_grad(false);
  backward();
  EXPECT_TRUE(throws_with<UsageError>(
      finish, "parameter 'b' requires no gradient, but was trained when it was wrapped"));
  weight.set_requires_grad(true);
  EXPECT_NO_THROW(finish());
}

TEST(FrontContracts, AParameterThatIsFrozenLaterIsNamed) {
  const ParallelState state = ParallelState::single_process();
  const DeviceMesh mesh(state, {1}, {"dp"});
  const MeshParameters params = {ones_on(mesh, {2}, {Replicate{}}, "a"),
                                 ones_on(mesh, {2}, {Replicate{}}, "b")};
  GradientSynchronizer sync({params}, 1, 1, {.allow_unused_parameters = true});
  sync.bind();
  expect_refused_while_frozen(
      params[1].tensor, [&] { backward_of(params, 1); }, [&] { sync.wait(); });
  sync.unbind();

  std::vector<NamedParameter> list = named_zeros({2, 2});
  list[1].name = "b";
  DistributedDataParallelConfig config;
  config.allow_unused_parameters = true;
  DistributedDataParallel ddp(list, state, config);
  expect_refused_while_frozen(
      list[1].tensor,
      [&] {
        linear_loss(list, {0, 1}, 1).backward();
      },
      [&] { ddp.finish_grad_sync(); });
}

/// Has a buffer and a frozen parameter of one element in memory each, unless `whole`.
struct Expanded : torch::nn::Module {
  explicit Expanded(double value, bool whole = false) {
    register_parameter("weight", at::ones({2}));
    const auto wide = [&] { return at::full({1, 1}, value).expand({2, 3}); };
    buffer = register_buffer("buffer", whole ? at::arange(6, at::kFloat).view({2, 3}) : wide());
    frozen = register_parameter("frozen", whole ? wide().clone() : wide(), /*requires_grad=*/false);
  }
  at::Tensor buffer, frozen;
};

/// With `whole` the first of several ranks has them whole.
void expect_values_of_first_rank(const ParallelState& state, double value, bool whole) {
  const bool all_expanded = !whole || state.world_size() == 1;
  const bool is_whole = !all_expanded && state.rank() == 0;
  Expanded wrapped(value + state.rank(), is_whole), reduced(value + state.rank(), is_whole);
  DistributedDataParallel ddp(wrapped, state);
  Reducer reducer(reduced, testing::replicas(state));
  const at::Tensor same = at::full({2, 3}, value);
  for (const Expanded* net : {&wrapped, &reduced}) {
    EXPECT_TRUE(at::allclose(net->frozen, same, 0, 0, /*equal_nan=*/true)) << value;
    EXPECT_EQ(net->frozen.stride(0) == 0, !is_whole) << value;
    EXPECT_TRUE(at::allclose(net->buffer,
                             all_expanded ? same : at::arange(6, at::kFloat).view({2, 3}), 0, 0,
                             /*equal_nan=*/true))
        << value;
    EXPECT_EQ(net->buffer.stride(0) == 0, all_expanded) << value;
  }
}

TEST(FrontContracts, ExpandedBuffersAndFrozenParametersGetTheValuesOfTheFirstRank) {
  for (const int64_t ranks : {1, 2})
    for (const double value : {5., std::numeric_limits<double>::quiet_NaN()})
      for (const bool whole : {false, true})
        run_ranks(ranks, [&](const ParallelState& state) {
          expect_values_of_first_rank(state, value, whole);
        });
}

TEST(FrontContracts, AnExpandedBufferThatSharesMemoryWithATrainedParameterIsNamed) {
  struct Sharing : torch::nn::Module {
    Sharing() {
      const at::Tensor storage = at::ones({4});
      register_parameter("weight", storage.narrow(0, 1, 2));
      register_buffer("buffer", storage.narrow(0, 0, 3).expand({2, 3}));
    }
  } net;
  EXPECT_TRUE(throws_with<UsageError>(
      [&] { DistributedDataParallel(net, ParallelState::single_process()); },
      "buffer 'buffer' and parameter 'weight' share memory"));
}

TEST(FrontContracts, AChannelsLastParameterIsContiguousAfterWrappingWithItsValues) {
  const at::Tensor values = at::randn({2, 3, 4, 5});
  const at::Tensor weight =
      values.clone().contiguous(at::MemoryFormat::ChannelsLast).requires_grad_(true);
  DistributedDataParallel ddp(std::vector<NamedParameter>{{"weight", weight, {}}},
                              ParallelState::single_process());
  EXPECT_TRUE(weight.is_contiguous());
  EXPECT_TRUE(at::equal(weight, values));
}

}  // namespace
}  // namespace lockstep
