#pragma once

#include <cstdint>
#include <functional>
#include <random>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include "lockstep/parallel_state/parallel_state.h"

/// Cases that are drawn from a seed and run on ranks as threads. What is wrong with a case is told
/// with its seed and with what was drawn; an error of one case does not keep the others from
/// running.
///
/// LOCKSTEP_RANDOM_SEED=n runs the case of one seed alone, LOCKSTEP_RANDOM_CASES=n another number
/// of cases.
namespace lockstep::testing {

/// Draws from a seed, the same on every rank and machine.
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

  /// Notes where `found` is not `wanted` [the same shape]: to the last bit if `tolerance` is 0,
  /// otherwise by more than that much.
  void compare(const at::Tensor& found, const at::Tensor& wanted, double tolerance,
               const std::string& what);
  /// The same relative to `wanted`.
  void compare(double found, double wanted, double tolerance, const std::string& what);
  /// Notes `what` unless `holds`.
  void require(bool holds, const std::string& what);
  template <class T>
  void require_equal(const T& found, const T& wanted, const std::string& what) {
    require(found == wanted, what);
  }

  const uint32_t seed;
  /// What this rank has called since the case began.
  const std::vector<CollectiveRecord>& calls;
  /// What was drawn, for failures. To be set first.
  std::string text;
  std::vector<std::string> findings;
};

using CaseBody = std::function<void(const ParallelState&, RandomCase&)>;

/// Runs the cases of the seeds 0 ... count - 1; `worlds` take them in turn, and the ranks of a
/// world meet once for all of its cases.
void run_random_cases(uint32_t count, const std::vector<ParallelSizes>& worlds,
                      const CaseBody& body);

}  // namespace lockstep::testing
