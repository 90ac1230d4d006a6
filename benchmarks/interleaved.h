#pragma once

#include <algorithm>
#include <chrono>
#include <functional>
#include <vector>

/// Measures rivals side by side: machines are shared, so only times from the same moment compare.
namespace lockstep::benchmarks {

/// Of an even number of values, the mean of the middle two, as in Python.
inline double median(std::vector<double> values) {
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  if (values.size() % 2 == 1) return *middle;
  return (*std::max_element(values.begin(), middle) + *middle) / 2;
}

inline double seconds_of(const std::function<void()>& call) {
  const auto begin = std::chrono::steady_clock::now();
  call();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

/// Samples of one rival, in seconds, one per round.
using Samples = std::vector<double>;

/// A median with the lowest and the highest of the medians over consecutive blocks of rounds, which
/// shows how much the machine's load affected it.
struct Estimate {
  double value = 0, low = 0, high = 0;
};

/// `statistic` over all rounds, and over each of `blocks` blocks; it gets the rivals' medians.
inline Estimate estimate(const std::vector<Samples>& rivals, size_t blocks,
                         const std::function<double(const std::vector<double>&)>& statistic) {
  const auto over = [&](size_t first, size_t last) {
    std::vector<double> medians;
    for (const Samples& samples : rivals)
      medians.push_back(median({samples.begin() + static_cast<std::ptrdiff_t>(first),
                                samples.begin() + static_cast<std::ptrdiff_t>(last)}));
    return statistic(medians);
  };
  const size_t rounds = rivals.front().size(), length = rounds / blocks;
  std::vector<double> parts;
  for (size_t block = 0; block < blocks; ++block)
    parts.push_back(over(block * length, (block + 1) * length));
  const auto [low, high] = std::minmax_element(parts.begin(), parts.end());
  return {over(0, rounds), *low, *high};
}

}  // namespace lockstep::benchmarks
