#include "lockstep/core/text_digest.h"

#include <gtest/gtest.h>

namespace lockstep {
namespace {

// The test vectors of FNV-1a, draft-eastlake-fnv.
TEST(TextDigest, IsFnv1a) {
  EXPECT_EQ(text_digest(""), 0xcbf29ce484222325U);
  EXPECT_EQ(text_digest("a"), 0xaf63dc4c8601ec8cU);
  EXPECT_EQ(text_digest("foobar"), 0x85944171f73967e8U);
}

TEST(TextDigest, ContinuesAnEarlierText) {
  EXPECT_EQ(text_digest("bar", text_digest("foo")), text_digest("foobar"));
  EXPECT_EQ(digest_with(kDigestStart, 'a'), text_digest("a"));
  EXPECT_EQ(text_digest("\xff"), digest_with(kDigestStart, 255));
}

}  // namespace
}  // namespace lockstep
