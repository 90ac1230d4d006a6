#pragma once

#include <cstdint>
#include <functional>
#include <random>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include "lockstep/parallel_state/parallel_state.h"

/// Cases that are drawn from a seed and run on ranks as threads. A failure reports the seed and the
/// drawn case. An error in one case does not stop the others.
///
/// LOCKSTEP_RANDOM_SEED=n runs only the case of that seed. LOCKSTEP_RANDOM_CASES=n sets the number
/// of cases.
namespace lockstep::testing {

/// Random numbers from a seed, equal on every rank and machine.
class Draw {
 public:
  explicit Draw(uint32_t seed) : random_(seed) {}

  /// 0 <= number < bound
  int64_t below(int64_t bound) {
    return static_cast<int64_t>(random_() % static_cast<uint32_t>(bound));
  }
  /// first <= number <= last
  int64_t between(int64_t first, int64_t last) { return first + below(last - first + 1); }
  bool one_in(int64_t count) { return below(count) == 0; }
  template <class T>
  T of(const std::vector<T>& choices) {
    return choices[static_cast<size_t>(below(static_cast<int64_t>(choices.size())))];
  }

 private:
  std::mt19937 random_;
};

/// One case on one rank.
class RandomCase {
 public:
  RandomCase(uint32_t seed, std::vector<CollectiveRecord>* calls) : seed(seed), calls(*calls) {}

  /// Records a failure where `found` differs from `wanted` [the same shape]: in any bit if
  /// `tolerance` is 0, otherwise by more than `tolerance`.
  void compare(const at::Tensor& found, const at::Tensor& wanted, double tolerance,
               const std::string& what);
  /// The same relative to `wanted`.
  void compare(double found, double wanted, double tolerance, const std::string& what);
  /// Records a failure `what` unless `holds`.
  void require(bool holds, const std::string& what);
  template <class T>
  void require_equal(const T& found, const T& wanted, const std::string& what) {
    require(found == wanted, what);
  }

  const uint32_t seed;
  /// The calls of this rank since the case began.
  const std::vector<CollectiveRecord>& calls;
  /// The drawn case, for failures. Must be set first.
  std::string text;
  std::vector<std::string> findings;
};

using CaseBody = std::function<void(const ParallelState&, RandomCase&)>;

/// Runs the cases with seeds 0 ... count - 1, distributed round-robin over `worlds`. The ranks of a
/// world meet once for all of its cases.
void run_random_cases(uint32_t count, const std::vector<ParallelSizes>& worlds,
                      const CaseBody& body);

}  // namespace lockstep::testing
