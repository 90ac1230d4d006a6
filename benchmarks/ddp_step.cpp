// One data-parallel step, backward and gradient sync: our front ends against c10d::Reducer, in one
// program, round by round, on one and on two ranks (threads over Gloo).
//
// The rivals run the same backward over the same parameters: plain libtorch, which accumulates into
// existing gradients; DistributedDataParallel, GradientSynchronizer and Reducer; c10d::Reducer with
// gradients as views of its buckets. All reducers have the same buckets and average over the ranks.
// Each is timed with the zeroing of one flat tensor of all gradients. Ours zero in their own call,
// which counts fully. The others zero it in addition to their gradients, which are zeroed one by
// one off the clock. No forward is timed. Overhead is the step's time minus that of plain libtorch;
// a step ends when it has ended on every rank. On two ranks, most of the overhead is the
// communication itself. So another rival runs plain libtorch and then one bare all-reduce for each
// bucket, without overlap: the difference to it is the reducer's own cost.
//
// `ddp_step tiny` (small, large) measures one size only. `ddp_step count RIVAL` runs ten steps of
// one rival over 5,000 parameters on one rank, for callgrind: (instructions of RIVAL - of plain) /
// 50,000 is the overhead per parameter and step.

#include <barrier>
#include <cstdio>
#include <string>
#include <thread>

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "lockstep/benchmarks/interleaved.h"
#include "lockstep/distributed/distributed_data_parallel.h"
#include "lockstep/distributed/gradient_synchronizer.h"
#include "lockstep/distributed/reducer.h"
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

constexpr Case kTiny = {"tiny", 5000, 4, 5000, 30};
constexpr Case kSmall = {"small", 2000, 16, 2000, 200};
constexpr Case kLarge = {"large", 8, int64_t{1} << 21, 2, 40};
constexpr size_t kWarmups = 5, kBlocks = 5;

/// Parameters, and a loss with a different gradient for each.
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

/// The Reducer's buckets: like ours, last parameter first.
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

struct World {
  explicit World(int ranks) : size(ranks), meet(ranks) {}
  int size;
  std::barrier<> meet;
  c10::intrusive_ptr<c10d::HashStore> ours = c10::make_intrusive<c10d::HashStore>();
  c10::intrusive_ptr<c10d::HashStore> theirs = c10::make_intrusive<c10d::HashStore>();
};

/// A way to run the step. `step` gets the loss of `model`; it is timed.
struct Rival {
  const char* name;
  Model model;
  std::function<void(const at::Tensor&)> step;
  std::function<void()> zero_grad = {};  ///< not timed
};

/// The state that the rivals of one rank need.
struct Bench {
  Bench(const Case& which, World& world, int rank)
      : state(world.ours, rank, options(world.size)),
        group(make_group(world.theirs, rank, world.size)),
        flat(at::zeros({which.parameters * which.numel})),
        buckets(at::split(flat, which.parameters_per_bucket * which.numel)) {
    add_plain(which);
    add_ddp(which);
    add_synchronizer(which);
    add_reducer(which);
    add_c10d(which);
    add_bare(which);
  }

  static ParallelStateOptions options(int world_size) {
    ParallelStateOptions result;
    result.sizes.world_size = world_size;
    return result;
  }

  Rival& add(const char* name, const Case& which) {
    rivals.push_back(std::make_unique<Rival>(Rival{name, Model(which), {}}));
    return *rivals.back();
  }

  void add_plain(const Case& which) {
    Rival& rival = add("plain", which);
    rival.zero_grad = [&rival] { rival.model.zero_grad(); };
    rival.step = [this](const at::Tensor& loss) {
      flat.zero_();
      loss.backward();
    };
  }

  void add_ddp(const Case& which) {
    Rival& rival = add("DistributedDataParallel", which);
    DistributedDataParallelConfig config;
    config.bucket_size = which.numel * which.parameters_per_bucket;
    config.calculate_per_token_loss = false;
    ddp = std::make_unique<DistributedDataParallel>(named(rival.model), state, config);
    rival.step = [this](const at::Tensor& loss) {
      ddp->zero_grad_buffer();
      loss.backward();
      ddp->finish_grad_sync();
    };
  }

  void add_synchronizer(const Case& which) {
    Rival& rival = add("GradientSynchronizer", which);
    const DeviceMesh mesh(state, {state.world_size()}, {"dp"});
    std::vector<MeshParameter> params;
    for (const at::Tensor& param : rival.model.parameters)
      params.emplace_back(DTensor::from_local(param, mesh, {Replicate{}}));
    const auto bytes = static_cast<double>(which.numel * which.parameters_per_bucket * 4);
    GradientSynchronizerOptions mean;
    mean.reduction = GradientReduction::mean;
    sync = std::make_unique<GradientSynchronizer>(std::vector<MeshParameters>{params},
                                                  bytes / (1 << 20), 1, mean);
    sync->bind();
    rival.step = [this](const at::Tensor& loss) {
      sync->zero_grad();
      loss.backward();
      sync->wait();
    };
  }

  void add_reducer(const Case& which) {
    Rival& rival = add("Reducer", which);
    ReducerOptions with_buckets;
    with_buckets.bucket_indices = reducer_buckets(which);
    with_buckets.rebuild_buckets = false;
    reducer =
        std::make_unique<Reducer>(named(rival.model), state.group(GroupKind::dp_cp), with_buckets);
    rival.step = [this](const at::Tensor& loss) {
      reducer->zero_grad_buffer();
      reducer->prepare_for_forward();
      reducer->prepare_for_backward({loss});
      loss.backward();
    };
  }

  void add_c10d(const Case& which) {
    Rival& rival = add("c10d::Reducer", which);
    c10d_reducer.reset(new c10d::Reducer(
        testing::make_c10d_reducer(rival.model.parameters, reducer_buckets(which), group)));
    rival.zero_grad = [&rival] { rival.model.zero_grad(); };
    rival.step = [this](const at::Tensor& loss) {
      flat.zero_();
      c10d_reducer->prepare_for_forward();
      c10d_reducer->prepare_for_backward({loss});
      loss.backward();
    };
  }

  void add_bare(const Case& which) {
    Rival& rival = add("plain and bare all-reduces", which);
    rival.zero_grad = [&rival] { rival.model.zero_grad(); };
    rival.step = [this](const at::Tensor& loss) {
      flat.zero_();
      loss.backward();
      for (at::Tensor& bucket : buckets) {
        std::vector<at::Tensor> tensors = {bucket};
        group->allreduce(tensors)->wait();
      }
    };
  }

  ParallelState state;
  c10::intrusive_ptr<c10d::ProcessGroup> group;
  at::Tensor flat;
  std::vector<at::Tensor> buckets;
  std::vector<std::unique_ptr<Rival>> rivals;
  std::unique_ptr<DistributedDataParallel> ddp;
  std::unique_ptr<GradientSynchronizer> sync;
  std::unique_ptr<Reducer> reducer;
  std::unique_ptr<c10d::Reducer> c10d_reducer;
};

constexpr size_t kPlain = 0, kOurs = 1, kC10d = 4, kBare = 5, kRivals = 6;

/// Returns the seconds of each rival in each round.
std::vector<Samples> measure_rank(const Case& which, World& world, int rank) {
  Bench bench(which, world, rank);
  std::vector<Samples> samples(kRivals);
  for (size_t round = 0; round < which.rounds + kWarmups; ++round)
    for (size_t i = 0; i < kRivals; ++i) {  // rotates the order of the rivals
      const size_t number = (i + round) % kRivals;
      Rival& rival = *bench.rivals[number];
      if (rival.zero_grad) rival.zero_grad();
      const at::Tensor loss = rival.model.loss();
      world.meet.arrive_and_wait();
      const double seconds = seconds_of([&] {
        rival.step(loss);
        world.meet.arrive_and_wait();
      });
      if (round >= kWarmups) samples[number].push_back(seconds);
    }
  for (size_t number = kOurs; number < kC10d; ++number)
    for (size_t i = 0; i < bench.rivals[number]->model.parameters.size(); ++i)
      TORCH_CHECK(at::equal(bench.rivals[number]->model.parameters[i].grad(),
                            bench.rivals[kC10d]->model.parameters[i].grad()),
                  bench.rivals[number]->name, " and c10d::Reducer differ in parameter ", i);
  return samples;
}

std::vector<Samples> measure(const Case& which, int ranks) {
  World world(ranks);
  std::vector<std::thread> others;
  for (int rank = 1; rank < ranks; ++rank)
    others.emplace_back([&, rank] { measure_rank(which, world, rank); });
  std::vector<Samples> samples = measure_rank(which, world, 0);
  for (std::thread& thread : others) thread.join();
  return samples;
}

void report(const Case& which, int ranks) {
  const std::vector<Samples> samples = measure(which, ranks);
  const auto show = [&](const std::string& what, double factor,
                        const std::function<double(const std::vector<double>&)>& statistic) {
    const Estimate e = estimate(samples, kBlocks, statistic);
    std::printf("  %-58s %9.3f   [%.3f, %.3f]\n", what.c_str(), e.value * factor, e.low * factor,
                e.high * factor);
  };
  std::printf("%lld %s parameters of %lld elements, %d rank%s, %zu rounds\n",
              static_cast<long long>(which.parameters), which.name,
              static_cast<long long>(which.numel), ranks, ranks == 1 ? "" : "s", which.rounds);
  const char* const names[kRivals] = {"plain backward",       "DistributedDataParallel",
                                      "GradientSynchronizer", "Reducer",
                                      "c10d::Reducer",        "plain and bare all-reduces"};
  for (size_t i = 0; i < kRivals; ++i)
    show(std::string(names[i]) + ", ms", 1e3, [i](const auto& m) { return m[i]; });
  for (size_t i = kOurs; i <= kC10d; ++i)
    show(std::string("overhead of ") + names[i] + ", us per parameter",
         1e6 / static_cast<double>(which.parameters),
         [i](const auto& m) { return m[i] - m[kPlain]; });
  for (size_t i = kOurs; i < kC10d; ++i) {
    const std::string pair = std::string(names[i]) + " / c10d::Reducer";
    show("overheads, " + pair, 1,
         [i](const auto& m) { return (m[i] - m[kPlain]) / (m[kC10d] - m[kPlain]); });
    show("above bare all-reduces, " + pair, 1,
         [i](const auto& m) { return (m[i] - m[kBare]) / (m[kC10d] - m[kBare]); });
    show("steps, " + pair, 1, [i](const auto& m) { return m[i] / m[kC10d]; });
  }
}

/// The function that callgrind counts: --toggle-collect='*counted_step*'.
[[gnu::noinline]] void counted_step(const Rival& rival, const at::Tensor& loss) {
  rival.step(loss);
}

/// Runs ten counted steps of one rival, after two warm-up steps.
int count(const std::string& name) {
  World world(1);
  Bench bench(kTiny, world, 0);
  for (const auto& rival : bench.rivals)
    if (name == rival->name) {
      for (int step = 0; step < 12; ++step) {
        if (rival->zero_grad) rival->zero_grad();
        const at::Tensor loss = rival->model.loss();
        step < 2 ? rival->step(loss) : counted_step(*rival, loss);
      }
      return 0;
    }
  std::fprintf(stderr, "ddp_step count: no rival '%s'\n", name.c_str());
  return 2;
}

}  // namespace
}  // namespace lockstep::benchmarks

int main(int argc, char** argv) {
  using namespace lockstep::benchmarks;
  at::set_num_threads(1);
  lockstep::prepare_rank_threads();
  if (argc == 3 && std::string(argv[1]) == "count") return count(argv[2]);
  std::printf("Data-parallel step. Median over all rounds [lowest and highest of %zu blocks]\n\n",
              kBlocks);
  for (const Case& which : {kTiny, kSmall, kLarge})
    for (const int ranks : {1, 2})
      if (argc == 1 || std::string(argv[1]) == which.name) report(which, ranks);
}
