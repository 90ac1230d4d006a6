// One data-parallel step, backward and gradient sync: ours against c10d::Reducer, in one program,
// round by round, on one and on two ranks (threads over Gloo).
//
// Three rivals take the same backward over the same parameters: plain libtorch, which accumulates
// into gradients that are there; ours; c10d::Reducer with gradients as views of its buckets. Both
// reducers have the same buckets and average over the ranks. Each is timed with the zeroing of one
// flat tensor of all gradients: ours in zero_grad_buffer(), which counts whole, the others' beside
// their gradients, which are zeroed one by one off the clock. No forward is timed. Overhead is the
// step's time minus that of plain libtorch; a step ends when it has ended on every rank. On two
// ranks most of it is the communication itself, so a fourth rival takes plain libtorch and then one
// bare all-reduce for each bucket, without overlap: what is above it is the reducer's own cost.

#include <barrier>
#include <cstdio>
#include <thread>

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "lockstep/benchmarks/interleaved.h"
#include "lockstep/distributed/distributed_data_parallel.h"
#include "lockstep/parallel_state/backends.h"
#include "lockstep/tests/support/c10d_reducer.h"

namespace lockstep::benchmarks {
namespace {

struct Case {
  const char* name;
  int64_t parameters;
  int64_t numel;  ///< elements of each
  int64_t parameters_per_bucket;
  size_t rounds;
};

constexpr Case kSmall = {"small", 2000, 16, 2000, 200};
constexpr Case kLarge = {"large", 8, int64_t{1} << 21, 2, 40};
constexpr size_t kWarmups = 5, kBlocks = 5;

/// Parameters and a loss that gives each a gradient of its own.
struct Model {
  explicit Model(const Case& which) {
    for (int64_t i = 0; i < which.parameters; ++i) {
      parameters.push_back(at::full({which.numel}, 0.5).requires_grad_(true));
      inputs.push_back(at::full({which.numel}, 1.0 / static_cast<double>(i + 1)));
    }
  }
  at::Tensor loss() const {
    std::vector<at::Tensor> terms;
    for (size_t i = 0; i < parameters.size(); ++i) terms.push_back(parameters[i].dot(inputs[i]));
    return at::stack(terms).sum();
  }
  /// Not timed.
  void zero_grad() const {
    for (const at::Tensor& p : parameters)
      if (p.grad().defined()) p.grad().zero_();
  }
  std::vector<at::Tensor> parameters, inputs;
};

std::vector<NamedParameter> named(const Model& model) {
  std::vector<NamedParameter> result;
  for (size_t i = 0; i < model.parameters.size(); ++i)
    result.push_back({"parameter" + std::to_string(i), model.parameters[i], {}});
  return result;
}

/// Buckets of the Reducer: as ours, last parameter first.
std::vector<std::vector<size_t>> reducer_buckets(const Case& which) {
  std::vector<std::vector<size_t>> buckets;
  for (int64_t i = which.parameters - 1; i >= 0; --i) {
    if ((which.parameters - 1 - i) % which.parameters_per_bucket == 0) buckets.emplace_back();
    buckets.back().push_back(static_cast<size_t>(i));
  }
  return buckets;
}

/// A c10d group for the Reducer, which needs one even for a single rank.
c10::intrusive_ptr<c10d::ProcessGroup> make_group(const c10::intrusive_ptr<c10d::Store>& store,
                                                  int rank, int world) {
  using Type = c10d::ProcessGroup::BackendType;
  BackendSpec spec;
  spec.store = store;
  spec.group_name = "reducer";
  for (int i = 0; i < world; ++i) spec.ranks.push_back(i);
  spec.rank = rank;
  spec.timeout = std::chrono::seconds(60);
  auto group = c10::make_intrusive<c10d::ProcessGroup>(store, rank, world);
  group->setBackend(c10::kCPU, Type::GLOO, make_gloo_backend(spec));
  group->setDefaultBackend(Type::GLOO);
  group->setGroupName(spec.group_name);
  return group;
}

/// Seconds of each rival in each round: plain, ours, c10d::Reducer, plain with bare all-reduces.
using Rivals = std::vector<Samples>;

struct World {
  explicit World(int ranks) : size(ranks), meet(ranks) {}
  int size;
  std::barrier<> meet;
  c10::intrusive_ptr<c10d::HashStore> ours = c10::make_intrusive<c10d::HashStore>();
  c10::intrusive_ptr<c10d::HashStore> theirs = c10::make_intrusive<c10d::HashStore>();
};

Rivals measure_rank(const Case& which, World& world, int rank) {
  const Model plain(which), with_ours(which), with_reducer(which);
  ParallelStateOptions options;
  options.sizes.world_size = world.size;
  const ParallelState state(world.ours, rank, options);
  DistributedDataParallelConfig config;
  config.bucket_size = which.numel * which.parameters_per_bucket;
  config.calculate_per_token_loss = false;
  DistributedDataParallel ddp(named(with_ours), state, config);
  const auto group = make_group(world.theirs, rank, world.size);
  c10d::Reducer reducer =
      testing::make_c10d_reducer(with_reducer.parameters, reducer_buckets(which), group);

  const at::Tensor flat = at::zeros({which.parameters * which.numel});
  std::vector<at::Tensor> buckets = at::split(flat, which.parameters_per_bucket * which.numel);
  const auto timed = [&](const Model& model, const std::function<void(const at::Tensor&)>& step) {
    const at::Tensor loss = model.loss();
    world.meet.arrive_and_wait();
    return seconds_of([&] {
      step(loss);
      world.meet.arrive_and_wait();
    });
  };
  Rivals rivals(4);
  for (size_t round = 0; round < which.rounds + kWarmups; ++round) {
    plain.zero_grad();
    with_reducer.zero_grad();
    const std::function<double()> steps[] = {[&] {
                                               return timed(plain, [&](const at::Tensor& loss) {
                                                 flat.zero_();
                                                 loss.backward();
                                               });
                                             },
                                             [&] {
                                               return timed(with_ours, [&](const at::Tensor& loss) {
                                                 ddp.zero_grad_buffer();
                                                 loss.backward();
                                                 ddp.finish_grad_sync();
                                               });
                                             },
                                             [&] {
                                               return timed(with_reducer,
                                                            [&](const at::Tensor& loss) {
                                                              flat.zero_();
                                                              reducer.prepare_for_forward();
                                                              reducer.prepare_for_backward({loss});
                                                              loss.backward();
                                                            });
                                             },
                                             [&] {
                                               return timed(plain, [&](const at::Tensor& loss) {
                                                 flat.zero_();
                                                 loss.backward();
                                                 for (at::Tensor& bucket : buckets) {
                                                   std::vector<at::Tensor> tensors = {bucket};
                                                   group->allreduce(tensors)->wait();
                                                 }
                                               });
                                             }};
    double seconds[4];
    for (size_t i = 0; i < 4; ++i) {  // each rival follows each of the others in turn
      const size_t rival = (i + round) % 4;
      seconds[rival] = steps[rival]();
    }
    if (round >= kWarmups)
      for (size_t i = 0; i < rivals.size(); ++i) rivals[i].push_back(seconds[i]);
  }
  for (size_t i = 0; i < with_ours.parameters.size(); ++i)
    TORCH_CHECK(at::equal(with_ours.parameters[i].grad(), with_reducer.parameters[i].grad()),
                "the two reducers differ in parameter ", i);
  return rivals;
}

Rivals measure(const Case& which, int ranks) {
  World world(ranks);
  std::vector<std::thread> others;
  for (int rank = 1; rank < ranks; ++rank)
    others.emplace_back([&, rank] { measure_rank(which, world, rank); });
  Rivals rivals = measure_rank(which, world, 0);
  for (std::thread& thread : others) thread.join();
  return rivals;
}

void report(const Case& which, int ranks) {
  const Rivals rivals = measure(which, ranks);
  const auto show = [&](const char* what, double factor,
                        const std::function<double(const std::vector<double>&)>& statistic) {
    const Estimate e = estimate(rivals, kBlocks, statistic);
    std::printf("  %-44s %9.3f   [%.3f, %.3f]\n", what, e.value * factor, e.low * factor,
                e.high * factor);
  };
  std::printf("%lld %s parameters of %lld elements, %d rank%s, %zu rounds\n",
              static_cast<long long>(which.parameters), which.name,
              static_cast<long long>(which.numel), ranks, ranks == 1 ? "" : "s", which.rounds);
  const double per_parameter = 1e6 / static_cast<double>(which.parameters);
  show("plain backward, ms", 1e3, [](const auto& m) { return m[0]; });
  show("ours, ms", 1e3, [](const auto& m) { return m[1]; });
  show("c10d::Reducer, ms", 1e3, [](const auto& m) { return m[2]; });
  show("plain backward and bare all-reduces, ms", 1e3, [](const auto& m) { return m[3]; });
  show("overhead of ours, us per parameter", per_parameter,
       [](const auto& m) { return m[1] - m[0]; });
  show("overhead of c10d::Reducer, us per parameter", per_parameter,
       [](const auto& m) { return m[2] - m[0]; });
  show("ratio of overheads, ours / c10d::Reducer", 1,
       [](const auto& m) { return (m[1] - m[0]) / (m[2] - m[0]); });
  show("the same above bare all-reduces", 1,
       [](const auto& m) { return (m[1] - m[3]) / (m[2] - m[3]); });
  show("ratio of steps, ours / c10d::Reducer", 1, [](const auto& m) { return m[1] / m[2]; });
}

}  // namespace
}  // namespace lockstep::benchmarks

int main() {
  using namespace lockstep::benchmarks;
  at::set_num_threads(1);
  lockstep::prepare_rank_threads();
  std::printf("Data-parallel step. Median over all rounds [lowest and highest of %zu blocks]\n\n",
              kBlocks);
  for (const Case& which : {kSmall, kLarge})
    for (const int ranks : {1, 2}) report(which, ranks);
}
