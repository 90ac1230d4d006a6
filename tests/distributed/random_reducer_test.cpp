// 400 random loops with Reducer, against plain averages and against c10d::Reducer: usage differs
// between ranks and changes between micro-batches, with and without no_sync.

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <ATen/ATen.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/csrc/distributed/c10d/logger.hpp>
#include <torch/csrc/distributed/c10d/reducer.hpp>

#include "lockstep/distributed/reducer.h"
#include "lockstep/tests/distributed/drawn_mesh.h"

namespace lockstep {
namespace {

using testing::Draw;
using testing::DrawnParam;
using testing::gradient_tolerance;
using testing::GridPlace;
using testing::Moment;
using testing::RandomCase;
using testing::Usage;

constexpr int64_t kLoopSteps = 3;

/// A random case.
struct DrawnLoop {
  DrawnLoop(uint32_t seed, int64_t world) : world(world) {
    Draw draw(seed);
    draw_options(draw);
    microbatches = draw.between(1, 3);
    for (int64_t step = 0; step < kLoopSteps; ++step) zeroed.push_back(!draw.one_in(3));
    with_outputs = !draw.one_in(3);
    DrawnParam anchor{.number = 0, .shape = {3}};
    anchor.axes = {{testing::AxisRole::sum}};
    params.push_back(anchor);
    const int64_t count = draw.between(1, 8);
    for (int64_t i = 0; i < count; ++i) add_param(draw);
    for (int64_t i = count; i >= 0; --i) {
      const auto dtype_of = [&](size_t index) { return params[index].dtype; };
      const auto index = static_cast<size_t>(i);
      const bool fits =
          !c10d_buckets.empty() && dtype_of(c10d_buckets.back().back()) == dtype_of(index);
      if (!fits || draw.one_in(3)) c10d_buckets.emplace_back();
      c10d_buckets.back().push_back(index);
    }
  }

  GridPlace place(int64_t rank) const { return {{world}, {rank}}; }

  bool is_used_by(const DrawnParam& param, int64_t rank, int64_t step) const {
    for (int64_t m = 0; m < microbatches; ++m)
      if (is_used(param, place(rank), 0, {step, m, microbatches})) return true;
    return false;
  }
  /// The number of ranks that use the parameter in a step.
  int32_t users(const DrawnParam& param, int64_t step) const {
    int32_t count = 0;
    for (int64_t rank = 0; rank < world; ++rank) count += is_used_by(param, rank, step);
    return count;
  }
  at::Tensor loss(const std::vector<at::Tensor>& tensors, int64_t rank,
                  const Moment& moment) const {
    at::Tensor loss = at::zeros({}, at::kDouble);
    for (size_t i = 0; i < tensors.size(); ++i) {
      const at::Tensor term = loss_of(params[i], tensors[i], place(rank), 0, moment);
      if (term.defined()) loss = loss + term;
    }
    return loss;
  }
  std::vector<at::Tensor> tensors() const {
    std::vector<at::Tensor> tensors;
    for (const DrawnParam& param : params) tensors.push_back(testing::leaf_of(param, place(0)));
    return tensors;
  }

  std::string text() const {
    std::string result = fmt::format(
        "  ranks {}, micro-batches {}, zeroed {}, caps {}, find unused {}, skip {}, static {}, "
        "view {}, rebuild {}, outputs {}\n",
        world, microbatches, zeroed, options.bucket_bytes_caps, options.find_unused_parameters,
        options.skip_all_reduce_unused_params, options.static_graph,
        options.gradient_as_bucket_view, options.rebuild_buckets, with_outputs);
    for (const DrawnParam& param : params) result += "  " + param.text() + "\n";
    return result;
  }

  int64_t world, microbatches;
  ReducerOptions options;
  std::vector<bool> zeroed;  ///< whether gradients are zeroed before each step
  bool with_outputs;
  std::vector<DrawnParam> params;
  std::vector<std::vector<size_t>> c10d_buckets;

 private:
  void draw_options(Draw& draw) {
    options.find_unused_parameters = !draw.one_in(3);
    options.skip_all_reduce_unused_params = options.find_unused_parameters && draw.one_in(3);
    options.static_graph = !options.find_unused_parameters && draw.one_in(3);
    options.gradient_as_bucket_view = draw.one_in(2);
    options.rebuild_buckets = draw.one_in(2);
    options.bucket_bytes_caps = {draw.between(1, 300), draw.between(1, 2000)};
    if (draw.one_in(3)) options.initial_bucket_bytes_caps = {draw.between(1, 1000)};
  }

  void add_param(Draw& draw) {
    std::vector<Usage> usages = {Usage::always};
    if (!options.static_graph) usages.push_back(Usage::in_the_last);
    if (options.find_unused_parameters)
      usages.assign({Usage::always, Usage::now_and_then, Usage::now_and_then, Usage::in_the_last});
    DrawnParam param = draw_param(draw, static_cast<int64_t>(params.size()), usages);
    param.axes = {{testing::AxisRole::sum}};
    params.push_back(std::move(param));
  }
};

/// The gradients after every step, including undefined ones.
using LoopGradients = std::vector<std::vector<at::Tensor>>;

void note_gradients(LoopGradients& gradients, const std::vector<at::Tensor>& tensors) {
  gradients.emplace_back();
  for (const at::Tensor& tensor : tensors)
    gradients.back().push_back(tensor.grad().defined() ? tensor.grad().clone() : at::Tensor());
}

LoopGradients loop_with_ours(const DrawnLoop& loop, const ParallelState& state, RandomCase& one) {
  const std::vector<at::Tensor> tensors = loop.tensors();
  std::vector<NamedParameter> named;
  for (size_t i = 0; i < tensors.size(); ++i)
    named.push_back({loop.params[i].name(), tensors[i], {}});
  Reducer reducer(named, state.group(GroupKind::dp_cp), loop.options);
  LoopGradients gradients;
  for (int64_t step = 0; step < kLoopSteps; ++step) {
    if (loop.zeroed[static_cast<size_t>(step)]) reducer.zero_grad_buffer();
    for (int64_t m = 0; m < loop.microbatches; ++m) {
      Reducer::NoSyncGuard guard;
      if (m + 1 < loop.microbatches) guard = reducer.no_sync();
      reducer.prepare_for_forward();
      const at::Tensor loss = loop.loss(tensors, state.rank(), {step, m, loop.microbatches});
      reducer.prepare_for_backward(loop.with_outputs ? std::vector{loss}
                                                     : std::vector<at::Tensor>());
      loss.backward();
    }
    note_gradients(gradients, tensors);
    for (size_t i = 0; i < tensors.size() && loop.options.find_unused_parameters; ++i)
      one.require(reducer.used_counts()[i] == loop.users(loop.params[i], step),
                  fmt::format("used_counts() of p{} in step {}", i, step));
  }
  return gradients;
}

std::shared_ptr<c10d::Reducer> c10d_reducer_of(const DrawnLoop& loop,
                                               const std::vector<at::Tensor>& tensors,
                                               const ProcessGroup& group) {
  constexpr int64_t kNoCap = int64_t{1} << 60;
  return std::make_shared<c10d::Reducer>(
      tensors, loop.c10d_buckets,
      c10::intrusive_ptr<c10d::ProcessGroup>::unsafe_reclaim_from_nonowning(group.c10d_group()),
      /*expect_sparse_gradients=*/std::vector<bool>(tensors.size(), false),
      /*bucket_bytes_cap=*/kNoCap, loop.options.find_unused_parameters,
      loop.options.gradient_as_bucket_view,
      /*param_names=*/std::unordered_map<size_t, std::string>{}, /*first_bucket_bytes_cap=*/kNoCap,
      /*skip_all_reduce_unused_params=*/false, /*use_python_reducer=*/false,
      /*bucket_bytes_cap_list=*/std::vector<int64_t>{});
}

LoopGradients loop_with_c10d(const DrawnLoop& loop, const ParallelState& state) {
  const std::vector<at::Tensor> tensors = loop.tensors();
  const auto reducer = c10d_reducer_of(loop, tensors, state.group(GroupKind::dp_cp));
  const auto logger = std::make_shared<c10d::Logger>(reducer);  // needed with unused parameters
  reducer->set_logger(logger);
  LoopGradients gradients;
  for (int64_t step = 0; step < kLoopSteps; ++step) {
    for (const at::Tensor& tensor : tensors)
      if (loop.zeroed[static_cast<size_t>(step)] && tensor.grad().defined())
        tensor.mutable_grad().zero_();
    for (int64_t m = 0; m < loop.microbatches; ++m) {
      const at::Tensor loss = loop.loss(tensors, state.rank(), {step, m, loop.microbatches});
      const bool reduced = m + 1 == loop.microbatches;  // otherwise it accumulates
      if (reduced) reducer->prepare_for_forward();
      if (reduced) reducer->prepare_for_backward({loss});
      loss.backward();
    }
    note_gradients(gradients, tensors);
  }
  return gradients;
}

/// Averages. Gradients of parameters that no rank has used keep their values.
LoopGradients averages(const DrawnLoop& loop) {
  std::vector<at::Tensor> held(loop.params.size());
  LoopGradients gradients;
  for (int64_t step = 0; step < kLoopSteps; ++step) {
    for (size_t i = 0; i < held.size(); ++i) {
      const DrawnParam& param = loop.params[i];
      if (loop.zeroed[static_cast<size_t>(step)] && held[i].defined())
        held[i] = at::zeros_like(held[i]);
      if (loop.users(param, step) == 0) continue;
      const at::Tensor mean =
          reduced_gradient(param, loop.place(0), 0, step, loop.microbatches) / loop.world;
      held[i] = held[i].defined() ? held[i] + mean : mean;
    }
    gradients.push_back(held);
  }
  return gradients;
}

void compare_gradients(const DrawnLoop& loop, const LoopGradients& found,
                       const LoopGradients& wanted, const std::string& what, RandomCase& one) {
  for (size_t step = 0; step < found.size(); ++step)
    for (size_t i = 0; i < loop.params.size(); ++i) {
      const at::Tensor& right = wanted[step][i];
      const std::string name = fmt::format("gradient of p{} in step {}, against {}", i, step, what);
      if (!right.defined()) {
        one.require(!found[step][i].defined(), name + ": none was expected");
        continue;
      }
      double tolerance = gradient_tolerance(loop.params[i].dtype, loop.world);
      if (tolerance > 0 && loop.params[i].dtype == at::kBFloat16) tolerance = 2;
      one.compare(found[step][i], right, tolerance, name);
    }
}

TEST(RandomReducer, GradientsOfFourHundredLoopsEqualAveragesAndThoseOfC10d) {
  std::vector<ParallelSizes> worlds;
  for (const int64_t ranks : {1, 2, 2, 3, 4, 4, 5, 8}) {
    worlds.emplace_back();
    worlds.back().world_size = ranks;
  }
  testing::run_random_cases(400, worlds, [](const ParallelState& state, RandomCase& one) {
    const DrawnLoop loop(one.seed, state.world_size());
    one.text = loop.text();
    const LoopGradients found = loop_with_ours(loop, state, one);
    compare_gradients(loop, found, averages(loop), "averages", one);
    const bool narrow = std::any_of(loop.params.begin(), loop.params.end(),
                                    [](auto& param) { return param.dtype == at::kBFloat16; });
    if (loop.world > 1 && !narrow)
      compare_gradients(loop, found, loop_with_c10d(loop, state), "c10d::Reducer", one);
  });
}

}  // namespace
}  // namespace lockstep
