// 500 random models on two to four ranks: all fronts and PyTorch's own reducer give the same
// gradients. Gradients are sums of integers that are divisible by the number of ranks, so every
// order of additions and divisions gives the same bits, and an oracle can compute them
// independently.

#include <gtest/gtest.h>

#include <map>
#include <random>

#include <ATen/ATen.h>
#include <torch/csrc/autograd/variable.h>

#include "lockstep/distributed/all_reduce_grads.h"
#include "lockstep/distributed/distributed_data_parallel.h"
#include "lockstep/distributed/gradient_synchronizer.h"
#include "lockstep/distributed/reducer.h"
#include "lockstep/tests/support/c10d_reducer.h"
#include "lockstep/tests/support/rank_threads.h"

namespace lockstep {
namespace {

using testing::CollectiveLog;
using testing::run_ranks;

constexpr int kSteps = 2;

/// A model; the same seed gives the same model on every rank.
class RandomModel {
 public:
  RandomModel(uint32_t seed, int64_t rank) : random_(seed), rank_(rank) {
    microbatches = 1 + below(3);
    bucket_elements = 1 + below(400);
    bucket_view = chance(2);
    const int64_t count = 1 + below(8);
    for (int64_t i = 0; i < count; ++i) {
      std::vector<int64_t> shape = {1 + below(12)};
      if (chance(2)) shape.push_back(1 + below(12));
      dtypes_.push_back(chance(3) ? at::kDouble : at::kFloat);
      shapes_.push_back(std::move(shape));
      uses_.push_back(1 + below(2));
    }
    group_of_.resize(static_cast<size_t>(count));
    for (size_t& group : group_of_) group = static_cast<size_t>(below(2));
    for (int64_t i = count - 1; i >= 0; --i) {
      const bool fits =
          !buckets.empty() && dtypes_[buckets.back().back()] == dtypes_[static_cast<size_t>(i)];
      if (!fits || chance(3)) buckets.emplace_back();
      buckets.back().push_back(static_cast<size_t>(i));
    }
  }

  /// New parameters of this model.
  std::vector<at::Tensor> parameters() const {
    std::vector<at::Tensor> tensors;
    for (size_t i = 0; i < shapes_.size(); ++i)
      tensors.push_back(at::ones(shapes_[i], dtypes_[i]).requires_grad_(true));
    return tensors;
  }

  at::Tensor loss(const std::vector<at::Tensor>& tensors, int step, int64_t microbatch) const {
    at::Tensor sum = at::zeros({}, at::kDouble);
    for (size_t i = 0; i < tensors.size(); ++i)
      for (int64_t use = 0; use < uses_[i]; ++use)
        sum = sum + (tensors[i] * coefficients(i, rank_, step, microbatch).to(dtypes_[i]))
                        .sum()
                        .to(at::kDouble);
    return sum;
  }

  /// The gradient of parameter `i` in a step, averaged over `world` ranks.
  at::Tensor expected(size_t i, int64_t world, int step) const {
    at::Tensor sum = at::zeros(shapes_[i], at::kDouble);
    for (int64_t rank = 0; rank < world; ++rank)
      for (int64_t m = 0; m < microbatches; ++m) sum += coefficients(i, rank, step, m) * uses_[i];
    return (sum / world).to(dtypes_[i]);
  }

  std::vector<NamedParameter> named(const std::vector<at::Tensor>& tensors) const {
    std::vector<NamedParameter> result;
    for (size_t i = 0; i < tensors.size(); ++i)
      result.push_back({"p" + std::to_string(i), tensors[i], {}});
    return result;
  }

  /// The tensors as DTensors replicated over `mesh`, in two parameter groups.
  std::vector<MeshParameters> grouped(const std::vector<at::Tensor>& tensors,
                                      const DeviceMesh& mesh) const {
    std::vector<MeshParameter> lists[2];
    for (size_t i = 0; i < tensors.size(); ++i)
      lists[group_of_[i]].emplace_back(DTensor::from_local(tensors[i], mesh, {Replicate{}}));
    return {lists[0], lists[1]};
  }

  int64_t bytes() const {
    int64_t bytes = 0;
    for (const at::Tensor& tensor : parameters()) bytes += static_cast<int64_t>(tensor.nbytes());
    return bytes;
  }

  int64_t microbatches, bucket_elements;
  bool bucket_view;
  std::vector<std::vector<size_t>> buckets;  ///< for c10d: one dtype each, last parameters first

 private:
  int64_t below(int64_t bound) {
    return static_cast<int64_t>(random_() % static_cast<uint32_t>(bound));
  }
  bool chance(int64_t in) { return below(in) == 0; }

  at::Tensor coefficients(size_t i, int64_t rank, int step, int64_t microbatch) const {
    const int64_t shift = static_cast<int64_t>(i) * 3 + rank * 5 + microbatch * 7 + step;
    const at::Tensor numbers = at::arange(c10::multiply_integers(shapes_[i])) * (rank + 1) + shift;
    return ((numbers.remainder(5) - 2) * 12).view(shapes_[i]);
  }

  std::mt19937 random_;
  int64_t rank_;
  std::vector<std::vector<int64_t>> shapes_;
  std::vector<at::ScalarType> dtypes_;
  std::vector<int64_t> uses_;
  std::vector<size_t> group_of_;
};

/// The gradients of all steps.
using Gradients = std::vector<std::vector<at::Tensor>>;

void note(Gradients& gradients, const std::vector<at::Tensor>& tensors) {
  gradients.emplace_back();
  for (const at::Tensor& tensor : tensors) gradients.back().push_back(tensor.grad().clone());
}

Gradients through_ddp(const RandomModel& model, const ParallelState& state) {
  DistributedDataParallelConfig config;
  config.bucket_size = model.bucket_elements;
  config.calculate_per_token_loss = false;
  const std::vector<at::Tensor> tensors = model.parameters();
  DistributedDataParallel ddp(model.named(tensors), state, config);
  Gradients gradients;
  for (int step = 0; step < kSteps; ++step) {
    ddp.zero_grad_buffer();
    for (int64_t m = 0; m < model.microbatches; ++m) {
      std::optional<DistributedDataParallel::NoSyncGuard> guard;
      if (m + 1 < model.microbatches) guard.emplace(ddp.no_sync());
      model.loss(tensors, step, m).backward();
    }
    ddp.finish_grad_sync();
    note(gradients, tensors);
  }
  return gradients;
}

Gradients through_synchronizer(const RandomModel& model, const ParallelState& state) {
  const DeviceMesh mesh(state, {state.world_size()}, {"dp"});
  const std::vector<at::Tensor> tensors = model.parameters();
  GradientSynchronizer sync(model.grouped(tensors, mesh),
                            4. * static_cast<double>(model.bucket_elements) / (1 << 20),
                            model.microbatches, {.reduction = GradientReduction::mean});
  sync.bind();
  Gradients gradients;
  for (int step = 0; step < kSteps; ++step) {
    for (int64_t m = 0; m < model.microbatches; ++m) model.loss(tensors, step, m).backward();
    sync.wait();
    note(gradients, tensors);
    sync.zero_grad();
  }
  return gradients;
}

Gradients through_all_reduce(const RandomModel& model, const ParallelState& state) {
  const DeviceMesh mesh(state, {1, state.world_size()}, {"dp", "cp"});
  const std::vector<at::Tensor> tensors = model.parameters();
  Gradients gradients;
  for (int step = 0; step < kSteps; ++step) {
    for (const at::Tensor& tensor : tensors) tensor.mutable_grad().reset();
    for (int64_t m = 0; m < model.microbatches; ++m) model.loss(tensors, step, m).backward();
    all_reduce_grads(tensors, mesh, /*use_ddp=*/step == 1);
    note(gradients, tensors);
  }
  return gradients;
}

Gradients through_reducer(const RandomModel& model, const ParallelState& state) {
  const std::vector<at::Tensor> tensors = model.parameters();
  ReducerOptions options;
  options.bucket_bytes_caps = {4 * model.bucket_elements};
  options.gradient_as_bucket_view = model.bucket_view;
  Reducer reducer(model.named(tensors), state.group(GroupKind::dp_cp), options);
  Gradients gradients;
  for (int step = 0; step < kSteps; ++step) {
    reducer.zero_grad_buffer();
    for (int64_t m = 0; m < model.microbatches; ++m) {
      Reducer::NoSyncGuard guard;
      if (m + 1 < model.microbatches) guard = reducer.no_sync();
      reducer.prepare_for_forward();
      const at::Tensor loss = model.loss(tensors, step, m);
      reducer.prepare_for_backward({loss});
      loss.backward();
    }
    note(gradients, tensors);
  }
  return gradients;
}

Gradients through_c10d(const RandomModel& model, const ParallelState& state) {
  const std::vector<at::Tensor> tensors = model.parameters();
  c10d::Reducer reducer =
      testing::make_c10d_reducer(tensors, model.buckets, state.group(GroupKind::dp_cp));
  Gradients gradients;
  for (int step = 0; step < kSteps; ++step) {
    for (const at::Tensor& tensor : tensors)
      if (tensor.grad().defined()) tensor.mutable_grad().zero_();
    for (int64_t m = 0; m + 1 < model.microbatches; ++m)
      model.loss(tensors, step, m).backward();  // without prepare_for_backward: accumulates
    reducer.prepare_for_forward();
    const at::Tensor loss = model.loss(tensors, step, model.microbatches - 1);
    reducer.prepare_for_backward({});
    loss.backward();
    note(gradients, tensors);
  }
  return gradients;
}

void expect_gradients(const RandomModel& model, int64_t world, const Gradients& gradients,
                      const std::string& what) {
  ASSERT_EQ(gradients.size(), static_cast<size_t>(kSteps)) << what;
  for (int step = 0; step < kSteps; ++step)
    for (size_t i = 0; i < gradients[static_cast<size_t>(step)].size(); ++i)
      EXPECT_TRUE(
          at::equal(gradients[static_cast<size_t>(step)][i], model.expected(i, world, step)))
          << what << ", step " << step << ", parameter " << i;
}

/// Bytes of gradients that a rank has sent since its call number `first`.
int64_t summed_bytes(const CollectiveLog& log, int64_t rank, size_t first) {
  int64_t bytes = 0;
  const auto calls = log.of_rank(rank);
  for (size_t i = first; i < calls.size(); ++i)
    if (calls[i].operation == "all_reduce (sum)") bytes += calls[i].bytes;
  return bytes;
}

TEST(Fronts, FiveHundredRandomModelsHaveTheSameGradientsThroughAllOfThem) {
  using Front = Gradients (*)(const RandomModel&, const ParallelState&);
  const std::vector<std::pair<const char*, Front>> fronts = {
      {"DistributedDataParallel", through_ddp},
      {"GradientSynchronizer", through_synchronizer},
      {"all_reduce_grads", through_all_reduce},
      {"Reducer", through_reducer},
      {"c10d::Reducer", through_c10d}};
  constexpr uint32_t kPart = 20;
  uint32_t seed = 0;
  for (int part = 0; part < 25; ++part, seed += kPart) {  // each with its own log
    const int64_t world = 2 + part % 3;
    CollectiveLog log;
    run_ranks(world,
              [&](const ParallelState& state) {
                for (uint32_t i = 0; i < kPart; ++i) {
                  const RandomModel model(seed + i, state.rank());
                  for (const auto& [name, run] : fronts) {
                    const std::string what =
                        std::string(name) + ", seed " + std::to_string(seed + i);
                    const size_t before = log.of_rank(state.rank()).size();
                    expect_gradients(model, world, run(model, state), what);
                    // The log does not see c10d::Reducer.
                    const int64_t sent = run == through_c10d ? 0 : kSteps * model.bytes();
                    EXPECT_EQ(summed_bytes(log, state.rank(), before), sent) << what;
                  }
                }
              },
              {.log = &log});
  }
}

}  // namespace
}  // namespace lockstep
