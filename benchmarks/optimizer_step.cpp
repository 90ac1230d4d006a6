// One optimizer step (norm, clipping and AdamW): ours on flat buffers against libtorch's fused
// AdamW, round by round in one program on one core.
//
// The rival is the fastest that libtorch offers for lists of tensors: _foreach_norm, one norm of
// the norms, _foreach_mul_ by the clip coefficient, _fused_adamw_ and, for bf16 parameters with
// fp32 master weights, _foreach_copy_ into them. Ours is Optimizer::step(). A third contender adds
// one flat fp32 tensor to another (a += b, 12 bytes per element), which shows the memory bandwidth;
// its memory is allocated like our buffers.
//
// Bytes per element that a step must move if the tensors do not fit in the caches: ours 4 (norm) +
// 28 (gradient, weight and moments read; weight and moments written), plus 2 for the bf16 weight;
// libtorch 8 more to scale the gradients, and 4 more to read the weights that it rounds. So if both
// run at full memory speed, ours can be faster at most by the ratio of these bytes. A limit that
// this rules out is replaced by 85 % of the speed of our bytes at the bandwidth of a += b.
//
// `optimizer_step large` (small) measures one size only.

#include <algorithm>
#include <cstdio>
#include <optional>
#include <string>

#include <ATen/ATen.h>
#include <ATen/Parallel.h>

#include "lockstep/benchmarks/interleaved.h"
#include "lockstep/core/flat_tensor.h"
#include "lockstep/distributed/finalize_model_grads.h"
#include "lockstep/optimizer/optimizer.h"

namespace lockstep::benchmarks {
namespace {

struct Case {
  const char* name;
  int64_t parameters;
  int64_t numel;  ///< elements of each
  at::ScalarType dtype;
  size_t rounds;
  double faster;   ///< how much faster than libtorch ours should be
  bool in_memory;  ///< the tensors do not fit in the caches

  /// Bytes per element that a step must move.
  double our_bytes() const { return dtype == at::kFloat ? 32 : 34; }
  double their_bytes() const { return dtype == at::kFloat ? 40 : 46; }
};

constexpr Case kCases[] = {{"large", 8, int64_t{1} << 22, at::kFloat, 30, 2.5, true},
                           {"large", 8, int64_t{1} << 22, at::kBFloat16, 30, 2.5, true},
                           {"small", 1000, 1000, at::kFloat, 200, 5, false},
                           {"small", 1000, 1000, at::kBFloat16, 200, 5, false}};
constexpr size_t kWarmups = 3, kBlocks = 5;
constexpr double kRate = 1e-4, kBeta1 = 0.9, kBeta2 = 0.999, kDecay = 0.01, kEps = 1e-8,
                 kOfBandwidth = 0.85;
constexpr double kClip = 1e-3;  // so small that every step clips

/// Wrapped parameters whose gradients are final.
class Ours {
 public:
  explicit Ours(const Case& which) {
    for (int64_t i = 0; i < which.parameters; ++i)
      parameters_.push_back({"parameter" + std::to_string(i),
                             at::full({which.numel}, 0.5, which.dtype).requires_grad_(true),
                             {}});
    ddp_ = std::make_unique<DistributedDataParallel>(parameters_, ParallelState::single_process());
    for (const auto& param : parameters_) param.tensor.sum().backward();
    finalize_model_grads({ddp_.get()}, at::ones({}));
    OptimizerConfig config;
    config.lr = kRate;
    config.weight_decay = kDecay;
    config.clip_grad = kClip;
    optimizer_ = std::make_unique<Optimizer>(std::vector{ddp_.get()}, config);
  }
  void step() { optimizer_->step(); }
  at::Tensor first_parameter() const { return parameters_.front().tensor; }

 private:
  std::vector<NamedParameter> parameters_;
  std::unique_ptr<DistributedDataParallel> ddp_;
  std::unique_ptr<Optimizer> optimizer_;
};

/// The same with lists of tensors.
class Theirs {
 public:
  explicit Theirs(const Case& which) : low_precision_(which.dtype != at::kFloat) {
    for (int64_t i = 0; i < which.parameters; ++i) {
      parameters_.push_back(at::full({which.numel}, 0.5));
      grads_.push_back(at::ones({which.numel}));
      means_.push_back(at::zeros({which.numel}));
      squares_.push_back(at::zeros({which.numel}));
      steps_.push_back(at::zeros({}));
      if (low_precision_) low_.push_back(at::full({which.numel}, 0.5, which.dtype));
    }
  }

  void step() {
    const at::Tensor norm = at::stack(at::_foreach_norm(grads_)).norm();
    const double coefficient = kClip / (norm.item<double>() + 1e-6);
    // Clipping changes the gradients; the next step needs the same ones, so restore_gradients()
    // undoes it, untimed.
    if (coefficient < 1) at::_foreach_mul_(grads_, coefficient);
    at::_foreach_add_(steps_, 1);
    at::_fused_adamw_(parameters_, grads_, means_, squares_, {}, steps_, kRate, kBeta1, kBeta2,
                      kDecay, kEps, /*amsgrad=*/false, /*maximize=*/false);
    if (low_precision_) at::_foreach_copy_(low_, parameters_);
  }
  void restore_gradients() {
    for (at::Tensor& grad : grads_) grad.fill_(1);
  }
  at::Tensor first_parameter() const { return low_precision_ ? low_[0] : parameters_[0]; }

 private:
  bool low_precision_;
  std::vector<at::Tensor> parameters_, grads_, means_, squares_, steps_, low_;
};

void report(const Case& which) {
  const at::NoGradGuard no_grad;
  std::unique_ptr<Ours> ours;
  {
    const at::AutoGradMode enable(true);
    ours = std::make_unique<Ours>(which);
  }
  Theirs theirs(which);
  const int64_t elements = which.parameters * which.numel;
  const at::TensorOptions fp32(at::kFloat);
  at::Tensor a = flat_zeros(elements, fp32);
  const at::Tensor b = flat_zeros(elements, fp32).fill_(1);
  std::vector<Samples> samples(3);
  for (size_t round = 0; round < which.rounds + kWarmups; ++round) {
    theirs.restore_gradients();
    const std::function<double()> runs[] = {[&] { return seconds_of([&] { ours->step(); }); },
                                            [&] { return seconds_of([&] { theirs.step(); }); },
                                            [&] { return seconds_of([&] { a.add_(b); }); }};
    for (size_t i = 0; i < 3; ++i) {
      const size_t which_run = (i + round) % 3;
      const double seconds = runs[which_run]();
      if (round >= kWarmups) samples[which_run].push_back(seconds);
    }
  }
  TORCH_CHECK(at::allclose(ours->first_parameter().to(at::kFloat),
                           theirs.first_parameter().to(at::kFloat), 1e-4, 1e-6),
              "the two optimizers differ");
  const auto show = [&](const char* what, const auto& statistic,
                        std::optional<double> at_least = {}) {
    const Estimate e = estimate(samples, kBlocks, statistic);
    std::printf("  %-52s %8.3f   [%.3f, %.3f]", what, e.value, e.low, e.high);
    if (at_least)
      std::printf("   limit: >= %.2f, %s", *at_least, e.value >= *at_least ? "met" : "MISSED");
    std::printf("\n");
    return e.value;
  };
  const auto n = static_cast<double>(elements);
  const double ours_bytes = which.our_bytes(), their_bytes = which.their_bytes();
  std::printf("%lld %s parameters of %lld elements, %s, %zu rounds\n",
              static_cast<long long>(which.parameters), which.name,
              static_cast<long long>(which.numel), at::toString(which.dtype), which.rounds);
  show("ours, ns an element", [&](const auto& m) { return m[0] / n * 1e9; });
  show("libtorch, ns an element", [&](const auto& m) { return m[1] / n * 1e9; });
  show("a += b, GB/s", [&](const auto& m) { return 12 * n / m[2] / 1e9; });
  show("ours, GB/s", [&](const auto& m) { return ours_bytes * n / m[0] / 1e9; });
  show("libtorch, GB/s", [&](const auto& m) { return their_bytes * n / m[1] / 1e9; });
  show(
      "bandwidth of ours / that of a += b",
      [&](const auto& m) { return ours_bytes / m[0] / (12 / m[2]); }, kOfBandwidth);
  const double allowed = show("libtorch / ours if ours had the bandwidth of a += b",
                              [&](const auto& m) { return m[1] / (ours_bytes / 12 * m[2]); });
  show(
      "libtorch / ours", [](const auto& m) { return m[1] / m[0]; },
      which.in_memory ? std::min(which.faster, kOfBandwidth * allowed) : which.faster);
}

}  // namespace
}  // namespace lockstep::benchmarks

int main(int argc, char** argv) {
  using namespace lockstep::benchmarks;
  at::set_num_threads(1);
  std::printf("Optimizer step. Median over all rounds [lowest and highest of %zu blocks]\n\n",
              kBlocks);
  for (const Case& which : kCases)
    if (argc < 2 || std::string(argv[1]) == which.name) report(which);
}
