#pragma once

#include <cstdint>
#include <string>

#include "lockstep/parallel_state/parallel_state.h"

namespace lockstep {

/// The iterations of a run that --profile asks for, both included.
struct ProfileRange {
  int64_t first = 0;
  int64_t last = 0;
};

/// Parses "5:7". ConfigError naming --profile if it is not two numbers, if the first is below 1 or
/// above the second, or if the second is beyond `train_iters`.
ProfileRange parse_profile_range(const std::string& text, int64_t train_iters);

/// Records iterations of this process with libtorch's profiler: operators, the names of TraceScope
/// (tasks, collectives with group and bytes, the optimizer's step) on all threads, and on CUDA the
/// kernels. At the end of the last one it writes FOLDER/rank_R.json, a trace in the Chrome format
/// that Perfetto opens. A process can have one at a time.
class ProfileWindow {
 public:
  /// Makes `folder`. FileError.
  ProfileWindow(const ProfileRange& range, std::string folder, const ParallelState& state);
  /// Discards what was not written.
  ~ProfileWindow();
  ProfileWindow(const ProfileWindow&) = delete;
  ProfileWindow& operator=(const ProfileWindow&) = delete;

  /// Call it before each iteration, from 1 on: recording begins once the iteration is in the range.
  void before(int64_t iteration);
  /// Call it after each iteration has ended: writes the trace after the last one. If that fails,
  /// problem() says why, and the run continues.
  void after(int64_t iteration);
  /// Call it at the end of the run: if the run did not reach the end of the range, writes what was
  /// recorded.
  void finish();

  /// Whether the trace ends with that iteration; no other iteration may be in flight then.
  bool ends_after(int64_t iteration) const { return recording_ && iteration >= range_.last; }
  const std::string& path() const { return path_; }
  bool is_written() const { return written_; }
  /// Why there is no trace although iterations were recorded; empty otherwise.
  const std::string& problem() const { return problem_; }

 private:
  ProfileRange range_;
  const ParallelState& state_;
  std::string path_;
  std::string problem_;
  bool recording_ = false, done_ = false, written_ = false;
};

}  // namespace lockstep
