#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <barrier>
#include <chrono>
#include <exception>
#include <string>
#include <vector>

#include "lockstep/core/exception_text.h"
#include "lockstep/tests/support/rank_threads.h"

namespace lockstep::testing {

/// The message that each rank threw from `body`, "" for none. No rank leaves until all are through,
/// and only `body` can report an error: ranks that wait for one that has thrown learn of it only if
/// the call that threw tells them, or at the timeout.
inline std::vector<std::string> errors_at_timeout(int64_t world, const RankBody& body,
                                                  RankThreadOptions options) {
  std::vector<std::string> errors(static_cast<size_t>(world));
  std::barrier all_through(static_cast<std::ptrdiff_t>(world));
  run_ranks(
      world,
      [&](const ParallelState& state) {
        std::string& error = errors[static_cast<size_t>(state.rank())];
        try {
          body(state);
        } catch (const std::exception& thrown) {
          error = thrown.what();
        } catch (...) {
          error = text_of_exception();
        }
        all_through.arrive_and_wait();
      },
      std::move(options));
  return errors;
}

/// The same for ranks that need no timeout to end: it is at least a minute, and half of it is a
/// failure.
inline std::vector<std::string> errors_of_open_ranks(int64_t world, const RankBody& body,
                                                     RankThreadOptions options = {}) {
  options.timeout = std::max<std::chrono::milliseconds>(options.timeout, std::chrono::minutes(1));
  const auto start = std::chrono::steady_clock::now();
  std::vector<std::string> errors = errors_at_timeout(world, body, options);
  EXPECT_LT(std::chrono::steady_clock::now() - start, options.timeout / 2)
      << "ranks waited for the timeout";
  return errors;
}

/// Expects every rank's error to contain `part`.
inline void expect_all_contain(const std::vector<std::string>& errors, const std::string& part,
                               const std::string& what) {
  for (size_t rank = 0; rank < errors.size(); ++rank)
    EXPECT_NE(errors[rank].find(part), std::string::npos)
        << what << ", rank " << rank << ": '" << errors[rank] << "', expected '" << part << "'";
}

}  // namespace lockstep::testing
