// One rank of a job that runs training steps: DistributedDataParallel with DistributedOptimizer
// (`sharded`), with sharded parameters and gradients, too (`parameters`), or with Optimizer
// (`replicated`). scripts/bench_steps starts it, and its rivals in benchmarks/peer_step.py, which
// run the same steps.
//
// Usage: rank_step sharded|parameters|replicated LAYERS WIDTH BATCH BUCKET STEPS, under a launcher.
// Every layer has a [WIDTH, WIDTH] matrix. With BATCH > 0 it multiplies BATCH rows by it and takes
// a tanh; with 0 it adds the sum of its elements, so that a step is almost only communication and
// update. BUCKET is ddp.bucket_size. Rank 0 prints one JSON line: the median milliseconds of a
// step, of its forward and backward alone, of its communication alone (sharded: reduce-scatters,
// then all-gathers; else all-reduces) and of the processor time of that communication; the median
// of the minor page faults of a step; and the peak memory in bytes. With `parameters`, only the
// whole step is timed. Steps follow each other without a pause, so that the all-gathers of one
// overlap the forward of the next.

#include <sys/resource.h>

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <optional>
#include <string>

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <torch/nn/module.h>

#include "lockstep/benchmarks/interleaved.h"
#include "lockstep/distributed/finalize_model_grads.h"
#include "lockstep/optimizer/distributed_optimizer.h"
#include "lockstep/parallel_state/collectives.h"

namespace lockstep::benchmarks {
namespace {

class Net : public torch::nn::Module {
 public:
  Net(int64_t layers, int64_t width) {
    for (int64_t i = 0; i < layers; ++i) {
      const std::string name = "weight" + std::to_string(i);
      at::Tensor weight = at::empty({width, width});
      fill_normal(weight, 0.03, 1, name, {width, width});
      const auto layer = register_module(name, std::make_shared<torch::nn::Module>());
      weights_.push_back(layer->register_parameter("weight", weight));
    }
  }
  at::Tensor loss(at::Tensor x) const {
    const bool multiplies = x.dim() == 2;
    for (const at::Tensor& weight : weights_)
      x = multiplies ? at::tanh(at::linear(x, weight)) : x + weight.sum();
    return x.square().mean();
  }

 private:
  std::vector<at::Tensor> weights_;
};

rusage usage() {
  rusage result = {};
  ::getrusage(RUSAGE_SELF, &result);
  return result;
}

/// Returns the processor seconds of this process, including system time.
double processor_seconds() {
  const auto seconds = [](const timeval& time) {
    return static_cast<double>(time.tv_sec) + 1e-6 * static_cast<double>(time.tv_usec);
  };
  return seconds(usage().ru_utime) + seconds(usage().ru_stime);
}

struct Steps {
  Samples step, compute, communication;
  Samples processor;  ///< during the communication
  Samples faults;     ///< minor page faults of each step
};

class Rank {
 public:
  Rank(const std::string& kind, int64_t layers, int64_t width, int64_t batch, int64_t bucket)
      : state_(read_launch_environment(), ParallelStateOptions{}), net_(layers, width) {
    DistributedDataParallelConfig config;
    config.use_distributed_optimizer = config.overlap_param_gather = kind != "replicated";
    if (kind == "parameters")
      config.data_parallel_sharding_strategy = ShardingStrategy::optim_grads_params;
    config.calculate_per_token_loss = false;
    config.bucket_size = bucket;
    gathers_by_unit_ = kind == "parameters";
    ddp_ = std::make_unique<DistributedDataParallel>(net_, state_, config);
    OptimizerConfig optimizer;
    optimizer.lr = 3e-4;
    optimizer.weight_decay = 0.01;
    optimizer.clip_grad = 0;
    optimizer_ = make_optimizer({ddp_.get()}, optimizer);
    const double phase = 1 + 0.1 * static_cast<double>(state_.rank());
    input_ = batch == 0
                 ? at::full({}, phase)
                 : at::sin(at::arange(batch * width, at::kFloat) * phase).view({batch, width});
  }

  Steps measure(int64_t count) {
    Steps steps;
    for (int64_t i = 0; i < kWarmups; ++i) step();
    for (int64_t i = 0; i < count && !gathers_by_unit_; ++i) {
      ddp_->finish_param_sync();
      meet();
      steps.compute.push_back(seconds_of([&] { backward(/*reduce=*/false); }));
      meet();
      const double before = processor_seconds();
      steps.communication.push_back(seconds_of([&] {
        ddp_->start_grad_sync();
        ddp_->finish_grad_sync();
        ddp_->start_param_sync(/*force_sync=*/true, /*force_dispatch=*/true);
      }));
      steps.processor.push_back(processor_seconds() - before);
    }
    for (int64_t i = 0; i < kWarmups; ++i) step();
    for (int64_t i = 0; i < count; ++i) {
      const int64_t before = usage().ru_minflt;
      steps.step.push_back(seconds_of([&] { step(); }));
      steps.faults.push_back(static_cast<double>(usage().ru_minflt - before));
    }
    if (!gathers_by_unit_) ddp_->finish_param_sync();
    return steps;
  }
  bool first() const { return state_.rank() == 0; }

 private:
  static constexpr int64_t kWarmups = 3;

  void meet() { barrier(state_.world(), "start"); }

  void step() {
    backward(/*reduce=*/true);
    finalize_model_grads({ddp_.get()});
    optimizer_->step();
  }

  void backward(bool reduce) {
    ddp_->zero_grad_buffer();
    std::optional<DistributedDataParallel::NoSyncGuard> guard;
    if (!reduce) guard.emplace(ddp_->no_sync());
    net_.loss(input_).backward();
  }

  ParallelState state_;
  Net net_;
  bool gathers_by_unit_;
  std::unique_ptr<DistributedDataParallel> ddp_;
  std::unique_ptr<Optimizer> optimizer_;
  at::Tensor input_;
};

}  // namespace
}  // namespace lockstep::benchmarks

int main(int argc, char** argv) {
  using namespace lockstep::benchmarks;
  if (argc != 7) return std::fputs("rank_step: six arguments, see the source\n", stderr), 2;
  const std::string kind = argv[1];
  if (kind != "sharded" && kind != "parameters" && kind != "replicated")
    return std::fprintf(stderr, "rank_step: found '%s', allowed: sharded, parameters, replicated\n",
                        argv[1]),
           2;
  at::set_num_threads(1);
  const auto number = [&](int i) { return std::atoll(argv[i]); };
  Rank rank(kind, number(2), number(3), number(4), number(5));
  const Steps steps = rank.measure(number(6));
  const auto milliseconds = [](const Samples& samples) {
    return samples.empty() ? 0 : median(samples) * 1e3;
  };
  if (rank.first())
    std::printf(R"({"step":%.3f,"compute":%.3f,"communication":%.3f,"processor":%.3f,)"
                R"("faults":%lld,"memory":%lld})"
                "\n",
                milliseconds(steps.step), milliseconds(steps.compute),
                milliseconds(steps.communication), milliseconds(steps.processor),
                std::llround(median(steps.faults)),
                static_cast<long long>(usage().ru_maxrss) * 1024);
}
