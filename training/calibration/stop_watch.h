#pragma once

// Internal.

#include <algorithm>
#include <chrono>
#include <functional>
#include <vector>

namespace lockstep {

/// Seconds that `call` takes.
inline double seconds_of(const std::function<void()>& call) {
  const auto begin = std::chrono::steady_clock::now();
  call();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

/// The median; for an even count, the upper of the two in the middle.
inline double median_of(std::vector<double> numbers) {
  const auto middle = numbers.begin() + static_cast<std::ptrdiff_t>(numbers.size() / 2);
  std::nth_element(numbers.begin(), middle, numbers.end());
  return *middle;
}

/// Median time of the calls that fit into `seconds`, at least five, after two warm-up calls.
inline double median_seconds(double seconds, const std::function<void()>& call) {
  for (int i = 0; i < 2; ++i) call();
  std::vector<double> samples;
  for (double spent = 0; spent < seconds || samples.size() < 5; spent += samples.back())
    samples.push_back(seconds_of(call));
  return median_of(std::move(samples));
}

}  // namespace lockstep
