#include "lockstep/parallel_state/hybrid_context.h"

#include <gtest/gtest.h>

#include "lockstep/core/error.h"

namespace lockstep {
namespace {

using Sizes = std::vector<int64_t>;

TEST(HybridContext, G23) {
  EXPECT_EQ(hybrid_context_sizes(8), (Sizes{2, 4}));
  const std::pair<int64_t, int64_t> ranks[] = {{1, 1},    {1024, 1}, {1025, 2}, {2048, 2},
                                               {3000, 4}, {4096, 4}, {5000, 8}};
  for (const auto& [length, expected] : ranks)
    EXPECT_EQ(hybrid_context_ranks(length, 1024), expected) << length;
}

TEST(HybridContext, SmallAndOddGroups) {
  EXPECT_EQ(hybrid_context_sizes(1), Sizes{});
  EXPECT_EQ(hybrid_context_sizes(2), Sizes{});
  EXPECT_EQ(hybrid_context_sizes(6), (Sizes{2, 4}));
  EXPECT_THROW(hybrid_context_sizes(0), ConfigError);
  EXPECT_THROW(hybrid_context_ranks(0, 1024), ConfigError);
  EXPECT_THROW(hybrid_context_ranks(1, 0), ConfigError);
}

}  // namespace
}  // namespace lockstep
