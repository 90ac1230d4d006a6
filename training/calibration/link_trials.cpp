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

constexpr int64_t kRanks = 2;
constexpr std::array<int64_t, 6> kBytes = {256, 4096, 65536, 524288, 2 << 20, 8 << 20};
constexpr double kBetween = 0.5e-3;  // seconds of computing before each operation
constexpr double kLeast = 1e-6;      // of an operation, if the computing varies by more

/// Averages over both ranks, which do not arrive at the same time.
void average(Machine::Link& link, const Machine::Link& other) {
  for (size_t i = 0; i < link.collectives.size(); ++i)
    for (size_t k = 0; k < kBytes.size(); ++k) {
      Machine::Point& point = link.collectives[i].points[k];
      point.seconds = (point.seconds + other.collectives[i].points[k].seconds) / 2;
    }
}

/// The work of a rank between two operations of a step: matrix products, and passes over memory
/// that caches do not hold.
class Computation {
 public:
  void run() {
    for (int64_t i = 0; i < count_; ++i) {
      at::mm(matrix_, matrix_);
      const int64_t piece = next_++ % kPieces;
      sum_.copy_(memory_[piece]).add_(memory_[kPieces - 1 - piece]);
    }
  }
  void repeat(int64_t count) { count_ = count; }

 private:
  static constexpr int64_t kPieces = 96;
  at::Tensor matrix_ = at::rand({128, 128});
  at::Tensor memory_ = at::rand({kPieces, 1 << 17}), sum_ = at::rand({1 << 17});
  int64_t next_ = 0, count_ = 1;
};

/// One of the two ranks.
class LinkRank {
 public:
  explicit LinkRank(const ParallelState& state) : group_(state.world()), rank_(state.rank()) {
    computation_.repeat(agreed(kBetween / median_seconds(0.05, [this] { computation_.run(); })));
  }

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
    for (int64_t i = 0; i < count + 2; ++i) {
      alone.push_back(seconds_of([&] { computation_.run(); }));
      both.push_back(seconds_of([&] {
        computation_.run();
        run(kind, input, output);
      }));
    }
    barrier(group_, "calibration");
    const double added = median_of(std::move(both)) - median_of(std::move(alone));
    return std::max(kLeast, added / rounds(kind));
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
      barrier(group_, "calibration");
      const double bare = seconds_of(cover), both = seconds_of([&] {
                                               Work work = reduce();
                                               cover();
                                               work.wait();
                                             });
      shares.push_back((both - bare) / median_of(alone));
    }
    return std::clamp(median_of(std::move(shares)), 0.0, 1.0);
  }

  static constexpr const char* kLabel = "calibration";
  ProcessGroup group_;
  int64_t rank_;
  Computation computation_;
};

}  // namespace

Machine::Link measure_link(int threads) {
  std::array<Machine::Link, kRanks> links;
  run_two_ranks([&](const ParallelState& state) {
    at::set_num_threads(threads);
    const at::NoGradGuard no_grad;
    links[static_cast<size_t>(state.rank())] = LinkRank(state).measure();
  });
  Machine::Link& link = links[0];
  average(link, links[1]);
  const std::vector<Machine::Point>& reductions = link.collectives.front().points;
  link.latency_s = reductions.front().seconds / 2;  // an all-reduce of two ranks has two steps
  link.bytes_per_s = reductions.back().work / reductions.back().seconds;
  return link;
}

}  // namespace lockstep
