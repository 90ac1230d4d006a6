#include "lockstep/training/link_trials.h"

#include <algorithm>
#include <array>

#include <ATen/ATen.h>
#include <ATen/Parallel.h>

#include "lockstep/parallel_state/collectives.h"
#include "lockstep/parallel_state/parallel_state.h"
#include "lockstep/parallel_state/self_test.h"
#include "lockstep/planner/ring_bytes.h"
#include "lockstep/training/stop_watch.h"

namespace lockstep {
namespace {

using Kind = CollectiveOperation::Kind;

constexpr const char* kLabel = "calibration";
constexpr int64_t kRanks = 2;
constexpr std::array<int64_t, 7> kBytes = {256, 4096, 32768, 131072, 524288, 2 << 20, 8 << 20};
constexpr int64_t kBlock = 8;    // calls in a row of the same kind
constexpr double kLeast = 1e-6;  // of an operation, if the computing varies by more

/// The work of a rank between two operations of a step.
class Computation {
 public:
  virtual ~Computation() = default;
  virtual void run() = 0;
};

/// Half a millisecond of matrix products, and passes over memory that caches do not hold. It varies
/// little, so that short operations can be told from it.
class Passes : public Computation {
 public:
  explicit Passes(const ParallelState& state) {
    const double each = median_seconds(0.05, [this] { run(); });
    const at::Tensor slowest = at::full({1}, each, at::kDouble);
    all_reduce(state.world(), slowest, ReduceOp::max, kLabel).wait();
    count_ = static_cast<int64_t>(0.5e-3 / slowest.item<double>()) + 1;
  }

  void run() override {
    for (int64_t i = 0; i < count_; ++i) {
      at::mm(matrix_, matrix_);
      const int64_t piece = next_++ % kPieces;
      sum_.copy_(memory_[piece]).add_(memory_[kPieces - 1 - piece]);
    }
  }

 private:
  static constexpr int64_t kPieces = 96;
  at::Tensor matrix_ = at::rand({128, 128});
  at::Tensor memory_ = at::rand({kPieces, 1 << 17}), sum_ = at::rand({1 << 17});
  int64_t next_ = 0, count_ = 1;
};

/// Forward and backward of a small layer: as many different kernels as a step has. While a thread
/// sleeps, their code leaves the caches, too, which a computation of few kernels would not notice.
class Layer : public Computation {
 public:
  void run() override {
    const at::AutoGradMode with_grad(true);
    at::Tensor x = input_;
    const at::Tensor packed = at::linear(norm(x), qkv_).view({kSequences, kTokens, 3, kHeads, -1});
    const auto part = [&](int64_t which) { return packed.select(2, which).transpose(1, 2); };
    const at::Tensor attention =
        at::scaled_dot_product_attention(part(0), part(1), part(2), {}, 0.0, /*is_causal=*/true);
    x = x + at::linear(attention.transpose(1, 2).reshape(x.sizes()), out_);
    x = x + at::linear(at::gelu(at::linear(norm(x), up_, bias_)), down_);
    x.square().mean().backward();
    for (at::Tensor* parameter : {&qkv_, &out_, &up_, &bias_, &down_, &scale_})
      parameter->mutable_grad() = at::Tensor();
  }

 private:
  static constexpr int64_t kSequences = 2, kTokens = 32, kHeads = 4, kWidth = 64, kInner = 192;
  static at::Tensor parameter(at::IntArrayRef sizes) {
    return at::full(sizes, 1.0 / kInner).set_requires_grad(true);
  }
  at::Tensor norm(const at::Tensor& x) const { return at::layer_norm(x, {kWidth}, scale_); }

  at::Tensor input_ = at::rand({kSequences, kTokens, kWidth});
  at::Tensor qkv_ = parameter({3 * kWidth, kWidth}), out_ = parameter({kWidth, kWidth});
  at::Tensor up_ = parameter({kInner, kWidth}), bias_ = parameter({kInner});
  at::Tensor down_ = parameter({kWidth, kInner}), scale_ = parameter({kWidth});
};

/// One of the two ranks.
class LinkRank {
 public:
  LinkRank(const ParallelState& state, Computation& computation)
      : group_(state.world()), rank_(state.rank()), computation_(computation) {}

  Machine::Link measure() {
    Machine::Link link;
    for (const auto& [name, kind] : kKinds) {
      Machine::Times times = {.name = name, .dtype = {}, .points = {}};
      for (const int64_t bytes : kBytes) {
        const auto sent = static_cast<double>(ring_bytes(kind, bytes, kRanks));
        times.points.push_back({sent, seconds(kind, bytes)});
      }
      link.collectives.push_back(std::move(times));
    }
    link.occupancy = occupancy();
    average(link);
    const std::vector<Machine::Point>& reductions = link.collectives.front().points;
    link.latency_s = reductions.front().seconds / 2;  // an all-reduce of two ranks has two steps
    link.bytes_per_s = reductions.back().work / reductions.back().seconds;
    return link;
  }

 private:
  static constexpr std::array<std::pair<const char*, Kind>, 7> kKinds = {
      {{"all_reduce", Kind::all_reduce},
       {"reduce_scatter", Kind::reduce_scatter},
       {"all_gather", Kind::all_gather},
       {"all_to_all", Kind::all_to_all},
       {"broadcast", Kind::broadcast},
       {"send", Kind::send},
       {"exchange", Kind::exchange}}};

  /// The time that one operation with an input of `bytes` on each rank adds to the computing before
  /// it. Both ranks make equally many. In a step ranks do not arrive together, and the first one
  /// must be woken.
  double seconds(Kind kind, int64_t bytes) {
    const at::Tensor input = at::full({bytes / 4}, 0.0, at::kFloat);  // sums stay 0
    const at::Tensor output = at::rand({(kind == Kind::all_gather ? kRanks : 1) * bytes / 4});
    const int64_t count = std::clamp<int64_t>((40 << 20) / bytes, 8, 200);
    std::vector<double> alone, both;
    for (int64_t left = count; left > 0; left -= kBlock) {
      add_block(alone, std::min(left, kBlock), [&] { computation_.run(); });
      add_block(both, std::min(left, kBlock), [&] {
        computation_.run();
        run(kind, input, output);
      });
    }
    barrier(group_, kLabel);
    const double added = median_of(std::move(both)) - median_of(std::move(alone));
    return std::max(kLeast, added / rounds(kind));
  }

  /// Adds the times of `count` calls that follow on the same call: what a wait does to caches and
  /// so to the next computation is part of an operation's cost.
  static void add_block(std::vector<double>& times, int64_t count,
                        const std::function<void()>& call) {
    call();
    for (int64_t i = 0; i < count; ++i) times.push_back(seconds_of(call));
  }

  /// The number of operations in one run().
  static double rounds(Kind kind) { return kind == Kind::send || kind == Kind::broadcast ? 2 : 1; }

  void run(Kind kind, const at::Tensor& input, const at::Tensor& output) {
    switch (kind) {
      case Kind::all_reduce:
        all_reduce(group_, input, ReduceOp::sum, kLabel).wait();
        break;
      case Kind::reduce_scatter:
        reduce_scatter(group_, output.slice(0, 0, output.numel() / kRanks), input, ReduceOp::sum,
                       kLabel)
            .wait();
        break;
      case Kind::all_gather:
        all_gather(group_, output, input, kLabel).wait();
        break;
      case Kind::all_to_all:
        all_to_all(group_, output, input, kLabel).wait();
        break;
      case Kind::broadcast:  // there and back, because the source need not wait
        for (int64_t source = 0; source < kRanks; ++source)
          broadcast(group_, input, source, kLabel).wait();
        break;
      case Kind::send:
        for (int64_t from = 0; from < kRanks; ++from)
          (rank_ == from ? send(group_, input, 1 - rank_, kLabel)
                         : receive(group_, output, 1 - rank_, kLabel))
              .wait();
        break;
      default:
        exchange(group_, input, 1 - rank_, output, 1 - rank_, kLabel).wait();
        break;
    }
  }

  /// Averages over both ranks, which do not arrive at the same time.
  void average(Machine::Link& link) const {
    std::vector<double*> numbers = {&link.occupancy};
    for (Machine::Times& times : link.collectives)
      for (Machine::Point& point : times.points) numbers.push_back(&point.seconds);
    std::vector<double> sums;
    for (const double* number : numbers) sums.push_back(*number);
    all_reduce(group_, at::from_blob(sums.data(), static_cast<int64_t>(sums.size()), at::kDouble),
               ReduceOp::sum, kLabel)
        .wait();
    for (size_t i = 0; i < sums.size(); ++i) *numbers[i] = sums[i] / kRanks;
  }

  /// The larger number of both ranks, rounded up.
  int64_t agreed(double number) const {
    const at::Tensor largest = at::full({1}, number, at::kDouble);
    all_reduce(group_, largest, ReduceOp::max, kLabel).wait();
    return static_cast<int64_t>(largest.item<double>()) + 1;
  }

  /// How much longer kernels take while they cover an all-reduce, as a share of it.
  double occupancy() {
    const at::Tensor reduced = at::full({kBytes.back() / 4}, 0.0, at::kFloat),
                     matrix = at::rand({256, 256});
    const auto reduce = [&] { return all_reduce(group_, reduced, ReduceOp::sum, kLabel); };
    const auto product = [&] { at::mm(matrix, matrix); };
    std::vector<double> alone, shares;
    for (int i = 0; i < 3; ++i) alone.push_back(seconds_of([&] { reduce().wait(); }));
    const double each = median_seconds(0.05, product);
    // Both ranks cover it with equally many products.
    const int64_t products = agreed(3 * median_of(alone) / each);
    const auto cover = [&] {
      for (int64_t i = 0; i < products; ++i) product();
    };
    for (int i = 0; i < 8; ++i) {
      barrier(group_, kLabel);
      const double bare = seconds_of(cover), both = seconds_of([&] {
                                               Work work = reduce();
                                               cover();
                                               work.wait();
                                             });
      shares.push_back((both - bare) / median_of(alone));
    }
    return std::clamp(median_of(std::move(shares)), 0.0, 1.0);
  }

  ProcessGroup group_;
  int64_t rank_;
  Computation& computation_;
};

}  // namespace

Machine::Link measure_between_hosts(const ParallelState& state) {
  const at::NoGradGuard no_grad;
  Layer layer;
  return LinkRank(state, layer).measure();
}

Machine::Link measure_inside_host(int threads) {
  std::array<Machine::Link, kRanks> links;
  run_two_ranks([&](const ParallelState& state) {
    at::set_num_threads(threads);
    const at::NoGradGuard no_grad;
    Passes passes(state);
    links[static_cast<size_t>(state.rank())] = LinkRank(state, passes).measure();
  });
  return links[0];
}

}  // namespace lockstep
