#include "lockstep/datasets/blend.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <utility>

#include "lockstep/core/check.h"

namespace lockstep {
namespace {

constexpr size_t kMostDatasets = std::numeric_limits<int16_t>::max();

/// NumPy's sum, whose rounding decides between data sets that lag behind equally.
double numpy_sum(std::span<const double> values) {
  constexpr size_t kLanes = 8, kBlock = 128;
  const size_t size = values.size();
  if (size > kBlock) {
    const size_t half = size / 2 / kLanes * kLanes;
    return numpy_sum(values.first(half)) + numpy_sum(values.subspan(half));
  }
  double sum = 0;
  size_t i = 0;
  if (size >= kLanes) {
    double lanes[kLanes] = {};
    for (; i + kLanes <= size; i += kLanes)
      for (size_t k = 0; k < kLanes; ++k) lanes[k] += values[i + k];
    sum = ((lanes[0] + lanes[1]) + (lanes[2] + lanes[3])) +
          ((lanes[4] + lanes[5]) + (lanes[6] + lanes[7]));
  }
  for (; i < size; ++i) sum += values[i];
  return sum;
}

void check_count(size_t count) {
  require<UsageError>(count >= 1 && count <= kMostDatasets,
                      "blend: found {} data sets, allowed: 1 to {}", count, kMostDatasets);
}

/// Draws samples one by one, each from the data set that lags most among those that `may_draw`.
class Blender {
 public:
  Blender(std::vector<double> shares, std::vector<int64_t> drawn)
      : shares_(std::move(shares)),
        drawn_(std::move(drawn)),
        before_(std::accumulate(drawn_.begin(), drawn_.end(), int64_t(0))) {}

  std::vector<BlendedSample> take() { return std::move(samples_); }

  int64_t drawn(size_t dataset) const { return drawn_[dataset]; }

  template <class MayDraw>
  void draw(MayDraw may_draw) {
    const auto size = static_cast<int64_t>(samples_.size());
    const auto place = static_cast<double>(std::max<int64_t>(before_ + size, 1));
    size_t chosen = 0;
    double most = -std::numeric_limits<double>::infinity();
    for (size_t i = 0; i < shares_.size(); ++i) {
      const double lag = shares_[i] * place - static_cast<double>(drawn_[i]);
      if (lag <= most || !may_draw(i)) continue;
      most = lag;
      chosen = i;
    }
    samples_.push_back({static_cast<int16_t>(chosen), drawn_[chosen]++});
  }

 private:
  std::vector<double> shares_;
  std::vector<int64_t> drawn_;
  int64_t before_;  ///< samples before samples_
  std::vector<BlendedSample> samples_;
};

}  // namespace

std::vector<double> normalize_weights(std::span<const double> weights) {
  check_count(weights.size());
  const double sum = numpy_sum(weights);
  const bool good = std::all_of(weights.begin(), weights.end(), [](double w) { return w >= 0; });
  require<UsageError>(good && sum > 0 && std::isfinite(sum),
                      "blend: found weights [{}], allowed: >= 0, with a sum > 0",
                      fmt::join(weights, ", "));
  std::vector<double> shares(weights.begin(), weights.end());
  for (int pass = 0; pass < 2; ++pass) {
    const double total = numpy_sum(shares);
    for (double& share : shares) share /= total;
  }
  return shares;
}

std::vector<BlendedSample> continue_blend(std::span<const double> weights, std::span<int64_t> drawn,
                                          int64_t size) {
  check_count(weights.size());
  require<UsageError>(drawn.size() == weights.size(), "blend: found {} counts for {} weights",
                      drawn.size(), weights.size());
  Blender blender({weights.begin(), weights.end()}, {drawn.begin(), drawn.end()});
  for (int64_t i = 0; i < size; ++i) blender.draw([](size_t) { return true; });
  for (size_t i = 0; i < drawn.size(); ++i) drawn[i] = blender.drawn(i);
  return blender.take();
}

std::vector<BlendedSample> blend(std::span<const double> weights, int64_t size) {
  std::vector<int64_t> drawn(weights.size());
  return continue_blend(weights, drawn, size);
}

std::vector<BlendedSample> blend_all(std::span<const int64_t> sizes) {
  check_count(sizes.size());
  int64_t total = 0;
  for (const int64_t size : sizes) {
    require<UsageError>(size >= 0, "blend: found a data set of {} samples, allowed: >= 0", size);
    total += size;
  }
  std::vector<double> shares;
  for (const int64_t size : sizes)
    shares.push_back(static_cast<double>(size) / static_cast<double>(total));
  Blender blender(std::move(shares), std::vector<int64_t>(sizes.size()));
  for (int64_t i = 0; i < total; ++i)
    blender.draw([&](size_t dataset) { return blender.drawn(dataset) < sizes[dataset]; });
  return blender.take();
}

}  // namespace lockstep
