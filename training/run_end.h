#pragma once

#include <cstdint>
#include <string_view>

namespace lockstep {

/// Why a run ends. If ranks want different ends, the one listed later here counts.
enum class RunEnd {
  none,           ///< it continues
  sigint,         ///< a signal asked for it: the state is saved
  sigterm,        ///< likewise
  launcher_lost,  ///< the ranks' store ended with their launcher: the state is saved
  diverged,  ///< a loss that is not a number, or train.max_skipped_steps skipped steps in a row
  done       ///< train.train_iters is reached
};

/// Whether the run was asked to end before train.train_iters.
bool is_stop(RunEnd end);

/// "SIGTERM", "SIGINT", "launcher lost", "divergence", "end".
std::string_view name_of(RunEnd end);

/// The contribution of one of `ranks` ranks to a sum over all of them, from which agreed_end()
/// finds out what the ranks want. The sum is exact for any world in which ranks^3 is below 2^53.
double encode_run_end(RunEnd wish, int64_t ranks);
RunEnd agreed_end(double sum, int64_t ranks);

}  // namespace lockstep
