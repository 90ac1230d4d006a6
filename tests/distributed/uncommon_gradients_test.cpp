// Gradients that a loop may leave, but seldom does: of other dtypes than their parameters, late, in
// no parameter of a wrapped model, or in copies that are cut differently.

#include <gtest/gtest.h>

#include <ATen/ATen.h>

#include "lockstep/core/error.h"
#include "lockstep/distributed/all_reduce_grads.h"
#include "lockstep/distributed/distributed_data_parallel.h"
#include "lockstep/distributed/finalize_model_grads.h"
#include "lockstep/distributed/gradient_synchronizer.h"
#include "lockstep/optimizer/optimizer.h"
#include "lockstep/tests/distributed/reducer_nets.h"
#include "lockstep/tests/support/described_params.h"
#include "lockstep/tests/support/mesh_params.h"
#include "lockstep/tests/support/throws_with.h"

namespace lockstep {
namespace {

using testing::CollectiveLog;
using testing::DescribedParams;
using testing::errors_of_ranks;
using testing::linear_loss;
using testing::named_zeros;
using testing::no_tokens;
using testing::replicas;
using testing::run_ranks;

/// Averages the gradient of a parameter in bf16 over two ranks. Each rank has a gradient of 2 in
/// its dtype, or none. Returns the parameter.
at::Tensor averaged(const ParallelState& state, std::optional<at::ScalarType> of_first,
                    std::optional<at::ScalarType> of_second) {
  const at::Tensor param = at::ones({3}, at::kBFloat16).requires_grad_(true);
  const auto dtype = state.rank() == 0 ? of_first : of_second;
  if (dtype) param.mutable_grad() = at::full({3}, 2, *dtype);
  all_reduce_grads({MeshParameter(param, "w")}, DeviceMesh(state, {2, 1}, {"dp", "cp"}), false);
  return param;
}

TEST(AllReduceGrads, AMissingGradientGetsTheDtypeOfTheOthers) {
  CollectiveLog log;
  run_ranks(2,
            [](const ParallelState& state) {
              const at::Tensor grad = averaged(state, at::kFloat, std::nullopt).grad();
              EXPECT_EQ(grad.scalar_type(), at::kFloat);
              EXPECT_TRUE(grad.eq(1).all().item<bool>());
            },
            {.log = &log});
  for (const int64_t rank : {0, 1})
    EXPECT_EQ(testing::sent_by(log, rank),
              (std::vector<std::string>{"all_gather [0 1] 8", "all_reduce (max) [0 1] 4",
                                        "all_reduce (sum) [0 1] 12"}));
}

TEST(AllReduceGrads, GradientsOfTwoDtypesAreRefusedByName) {
  for (const std::string& error : errors_of_ranks(
           2, [](const ParallelState& state) { averaged(state, at::kFloat, at::kBFloat16); }))
    EXPECT_NE(error.find("all_reduce_grads: the gradient of 'w' is Float on a rank and BFloat16 on "
                         "another, allowed: one dtype"),
              std::string::npos)
        << error;
}

TEST(Reducer, AGradientInsideNoSyncWhileItsIterationIsOpenIsRefused) {
  const auto errors = errors_of_ranks(2, [](const ParallelState& state) {
    const auto params = named_zeros({2, 3});
    Reducer reducer(params, replicas(state), {.bucket_bytes_caps = {1}});
    reducer.prepare_for_forward();
    const at::Tensor first = linear_loss(params, {1}, 1);
    const at::Tensor second = linear_loss(params, {0}, 2);
    reducer.prepare_for_backward({first, second});
    first.backward();
    const auto guard = reducer.no_sync();
    linear_loss(params, {0}, 4).backward();  // of the bucket that waits for `second`
    linear_loss(params, {1}, 4).backward();  // of the bucket that may be under way
  });
  for (const std::string& error : errors)
    EXPECT_NE(error.find("'p1' received a gradient inside no_sync() while iteration "),
              std::string::npos)
        << error;
}

/// Two wrapped models. On rank 0 only the first micro-batch uses the encoder, on rank 1 only the
/// last one.
void train_with_encoder(const ParallelState& state, bool starts) {
  DistributedDataParallelConfig config;
  config.allow_unused_parameters = true;
  DescribedParams encoder, decoder;
  encoder.add("encoder", {2});
  decoder.add("decoder", {2});
  DistributedDataParallel of_encoder(encoder, state, config), of_decoder(decoder, state, config);
  const auto run = [&](bool uses_encoder) {
    at::Tensor loss = decoder["decoder"].sum();
    if (uses_encoder) loss = loss + (encoder["encoder"] * 4).sum();
    loss.backward();
  };
  {
    const auto encoder_guard = of_encoder.no_sync(), decoder_guard = of_decoder.no_sync();
    run(state.rank() == 0);
  }
  run(state.rank() == 1);
  if (starts) of_encoder.start_grad_sync();
  finalize_model_grads({&of_encoder, &of_decoder}, at::full({}, 2));
  EXPECT_TRUE(encoder.grad("encoder").eq(2).all().item<bool>());
  EXPECT_TRUE(decoder.grad("decoder").eq(1).all().item<bool>());
}

TEST(DistributedDataParallel, ALastBackwardThatReachesNothingIsDeclared) {
  CollectiveLog log;
  run_ranks(2, [](const ParallelState& state) { train_with_encoder(state, /*starts=*/true); },
            {.log = &log});
  for (const int64_t rank : {0, 1}) {
    std::vector<std::string> gradients;
    for (const CollectiveRecord& call : log.of_rank(rank))
      if (call.label.starts_with("bucket")) gradients.push_back(call.label);
    EXPECT_EQ(gradients, (std::vector<std::string>{"bucket 0 ('encoder' to 'encoder')",
                                                   "bucket 0 ('decoder' to 'decoder')"}));
  }
  const auto errors = errors_of_ranks(
      2, [](const ParallelState& state) { train_with_encoder(state, /*starts=*/false); });
  EXPECT_NE(errors[0].find("if a backward of this step reaches none of the parameters, call "
                           "start_grad_sync() after the last one"),
            std::string::npos)
      << errors[0];
  EXPECT_NE(errors[1], "");
}

const ParamDescription kTable{.tie = Tie{"table"}};

DistributedDataParallelConfig sharded(bool pads) {
  DistributedDataParallelConfig config;
  config.use_distributed_optimizer = true;
  config.pad_buckets_for_high_nccl_busbw = pads;
  return config;
}

TEST(TiedGradients, CopiesThatAreCutDifferentlyOnARankAreRefused) {
  const auto errors = errors_of_ranks(2, [](const ParallelState& state) {
    DescribedParams first, second;
    first.add("a", {1000}, kTable);
    second.add("b", {1000}, kTable);
    DistributedDataParallel of_first(first, state, sharded(false)),
        of_second(second, state, sharded(true));
    first.backward([](auto&, auto&) { return 1.0; });
    second.backward([](auto&, auto&) { return 1.0; });
    finalize_model_grads({&of_first, &of_second}, no_tokens());
  });
  for (const std::string& error : errors)
    EXPECT_NE(
        error.find("'a' [1000] and 'b' [1000] are tied as 'table', but differ in shape, dtype "
                   "of the gradient, sharding, padding of buckets"),
        std::string::npos)
        << error;
}

TEST(TiedGradients, CopiesThatStagesCutDifferentlyAreRefused) {
  const auto errors = errors_of_ranks(4,
                                      [](const ParallelState& state) {
                                        DescribedParams net;
                                        net.add("weight", {1000}, kTable);
                                        DistributedDataParallel ddp(
                                            net, state, sharded(/*pads=*/state.rank() >= 2));
                                        const Optimizer optimizer({&ddp}, {});
                                      },
                                      {.sizes = {.pipeline = 2}});
  for (const std::string& error : errors)
    EXPECT_NE(error.find("element 0 of a bucket of 1024 on rank "), std::string::npos) << error;
}

TEST(GradientSynchronizer, UnbindTakesTheGradientOfAParameterThatWasFrozenMeanwhile) {
  run_ranks(2, [](const ParallelState& state) {
    const DeviceMesh mesh(state, {2}, {"dp"});
    const MeshParameter kept = testing::ones_on(mesh, {2}, {Replicate{}}, "kept"),
                        frozen = testing::ones_on(mesh, {2}, {Replicate{}}, "frozen");
    GradientSynchronizer sync({{kept, frozen}}, 1, 1);
    sync.bind();
    frozen.tensor.set_requires_grad(false);
    sync.unbind();
    EXPECT_FALSE(kept.tensor.grad().defined());
    EXPECT_FALSE(frozen.tensor.grad().defined());
  });
}

}  // namespace
}  // namespace lockstep
