#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace lockstep {

/// One bucket in the last sampled iteration. Times in ns since backward began, by the host's clock;
/// 0 if no iteration was sampled.
struct ReducerBucketTimes {
  std::string label;
  int64_t bytes = 0;
  int64_t launched = 0;  ///< its reduction started
  int64_t finished = 0;  ///< this rank had waited for it; it may have ended earlier
  int64_t overlap = 0;   ///< between launch and the end of backward's computation
};

/// What a Reducer knows about itself, under the names of PyTorch's DDPLoggingData. Times are in ns
/// by the host's clock; lists are texts "4, 8"; flags are 0 or 1.
struct ReducerLoggingData {
  std::map<std::string, std::string> strings;
  std::map<std::string, int64_t> integers;
  std::vector<ReducerBucketTimes> buckets;

  /// A line for each field and bucket, for logs.
  std::string to_string() const;
};

}  // namespace lockstep
