#include "lockstep/tests/distributed/random_cases.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <map>
#include <mutex>
#include <optional>

#include <ATen/ATen.h>

#include "lockstep/tests/support/rank_threads.h"

namespace lockstep::testing {
namespace {

constexpr size_t kToldFindings = 4;   // per case
constexpr size_t kToldCases = 8;      // per world
constexpr size_t kThrowingCases = 3;  // before a world is given up

/// The failed cases of one world.
class WrongCases {
 public:
  void add(const RandomCase& one, const std::string& finding) {
    const std::lock_guard<std::mutex> lock(mutex_);
    Wrong& wrong = wrong_[one.seed];
    wrong.text = one.text;
    if (wrong.findings.size() < kToldFindings) wrong.findings.push_back(finding);
  }
  void add(const RandomCase& one, int64_t rank) {
    for (const std::string& finding : one.findings)
      add(one, fmt::format("rank {}: {}", rank, finding));
  }

  void tell() const {
    size_t told = 0;
    for (const auto& [seed, wrong] : wrong_) {
      if (++told > kToldCases) break;
      ADD_FAILURE() << fmt::format("LOCKSTEP_RANDOM_SEED={}\n  {}\n{}", seed,
                                   fmt::join(wrong.findings, "\n  "), wrong.text);
    }
    if (wrong_.size() > kToldCases) ADD_FAILURE() << wrong_.size() << " cases of this world";
  }

 private:
  struct Wrong {
    std::string text;
    std::vector<std::string> findings;
  };
  std::mutex mutex_;
  std::map<uint32_t, Wrong> wrong_;
};

/// Errors that no case is named with: ranks that did not meet, exceptions of another type.
void tell_errors_outside_cases(const std::vector<std::string>& errors) {
  for (size_t rank = 0; rank < errors.size(); ++rank)
    if (!errors[rank].empty())
      ADD_FAILURE() << fmt::format("rank {} threw outside of the cases: {}", rank, errors[rank]);
}

/// Runs the cases `seeds`, starting at index `first`, until one throws. Returns the index of that
/// case.
std::optional<size_t> run_until_one_throws(const ParallelSizes& sizes,
                                           const std::vector<uint32_t>& seeds, size_t first,
                                           const CaseBody& body, WrongCases& wrong) {
  std::mutex mutex;
  std::optional<size_t> thrown;
  std::vector<std::vector<CollectiveRecord>> calls(static_cast<size_t>(sizes.world_size));
  const auto calls_of = [&](int64_t rank) -> auto& { return calls[static_cast<size_t>(rank)]; };
  RankThreadOptions options;
  options.sizes = sizes;
  options.timeout = std::chrono::seconds(10);
  options.observer = [&](const CollectiveRecord& call) { calls_of(call.rank).push_back(call); };
  const auto run_case = [&](const ParallelState& state, size_t index) {
    calls_of(state.rank()).clear();
    RandomCase one(seeds[index], &calls_of(state.rank()));
    try {
      body(state, one);
    } catch (const std::exception& error) {
      const std::lock_guard<std::mutex> lock(mutex);
      if (!thrown) wrong.add(one, fmt::format("rank {} threw: {}", state.rank(), error.what()));
      if (!thrown) thrown = index;
      throw;
    }
    wrong.add(one, state.rank());
  };
  const std::vector<std::string> errors = errors_of_ranks(
      sizes.world_size,
      [&](const ParallelState& state) {
        for (size_t index = first; index < seeds.size(); ++index) run_case(state, index);
      },
      options);
  if (!thrown) tell_errors_outside_cases(errors);
  return thrown;
}

std::optional<uint32_t> number_from(const char* variable) {
  const char* const text = std::getenv(variable);
  if (text == nullptr) return std::nullopt;
  return static_cast<uint32_t>(std::stoul(text));
}

/// The seeds that world `world` of `worlds` runs.
std::vector<uint32_t> seeds_of(size_t world, size_t worlds, uint32_t count) {
  const auto only = number_from("LOCKSTEP_RANDOM_SEED");
  count = number_from("LOCKSTEP_RANDOM_CASES").value_or(count);
  if (only) count = *only + 1;
  std::vector<uint32_t> seeds;
  for (uint32_t seed = only.value_or(0); seed < count; ++seed)
    if (seed % worlds == world) seeds.push_back(seed);
  return seeds;
}

}  // namespace

void RandomCase::compare(const at::Tensor& found, const at::Tensor& wanted, double tolerance,
                         const std::string& what) {
  if (!found.defined() || found.sizes() != wanted.sizes()) {
    findings.push_back(what + (found.defined() ? ": another shape" : ": undefined"));
    return;
  }
  if (wanted.numel() == 0) return;
  const at::Tensor wide = found.detach().to(at::kDouble), right = wanted.to(at::kDouble);
  if (at::equal(wide, right)) return;
  const at::Tensor difference = (wide - right).abs().flatten();
  if (difference.max().item<double>() <= tolerance) return;
  const int64_t at = difference.argmax().item<int64_t>();
  findings.push_back(fmt::format("{}: {} of {} elements differ, element {} is {} instead of {}",
                                 what, wide.ne(right).sum().item<int64_t>(), wide.numel(), at,
                                 wide.flatten()[at].item<double>(),
                                 right.flatten()[at].item<double>()));
}

void RandomCase::compare(double found, double wanted, double tolerance, const std::string& what) {
  if (std::abs(found - wanted) <= tolerance * std::abs(wanted)) return;
  findings.push_back(fmt::format("{} is {} instead of {}", what, found, wanted));
}

void RandomCase::require(bool holds, const std::string& what) {
  if (!holds) findings.push_back(what);
}

void run_random_cases(uint32_t count, const std::vector<ParallelSizes>& worlds,
                      const CaseBody& body) {
  for (size_t world = 0; world < worlds.size(); ++world) {
    const std::vector<uint32_t> seeds = seeds_of(world, worlds.size(), count);
    WrongCases wrong;
    size_t throwing = 0;
    for (size_t first = 0; first < seeds.size() && throwing < kThrowingCases; ++throwing) {
      const auto thrown = run_until_one_throws(worlds[world], seeds, first, body, wrong);
      if (!thrown) break;
      first = *thrown + 1;
    }
    wrong.tell();
    if (throwing == kThrowingCases) ADD_FAILURE() << "the other cases of this world were not run";
  }
}

}  // namespace lockstep::testing
