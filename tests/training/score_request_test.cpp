#include "lockstep/training/score_request.h"

#include <gtest/gtest.h>

#include "lockstep/core/error.h"
#include "lockstep/tests/support/temporary_folder.h"
#include "lockstep/tests/support/throws_with.h"

namespace lockstep {
namespace {

using testing::throws_with;

TEST(ScoreRequests, AreAnObjectALine) {
  const auto requests = parse_score_requests(
      "{\"id\": 7, \"context\": \"a\\n\", \"continuation\": \"\\u00e9\"}\r\n"
      "{\"continuation\": \"\", \"context\": \"\"}",
      "f");
  ASSERT_EQ(requests.size(), 2u);
  EXPECT_EQ(requests[0].context, "a\n");
  EXPECT_EQ(requests[0].continuation, "é");
  EXPECT_EQ(format_score(requests[0], -0.5, true),
            "{\"id\":7,\"context\":\"a\\n\",\"continuation\":\"é\",\"logprob\":-0.5,"
            "\"is_greedy\":true}");
  EXPECT_TRUE(parse_score_requests("", "f").empty());
}

TEST(ScoreRequests, BlankLinesArePassedOverAndCounted) {
  const std::string good = "{\"context\": \"a\", \"continuation\": \"b\"}\n";
  const auto requests = parse_score_requests("\n" + good + " \t\r\n" + good + "\r\n", "f");
  ASSERT_EQ(requests.size(), 2u);
  EXPECT_EQ(requests[0].line_number, 2);
  EXPECT_EQ(requests[1].line_number, 4);
  EXPECT_EQ(requests[1].continuation, "b");
  EXPECT_TRUE(throws_with<FileError>([&] { parse_score_requests("\n" + good + "\n[]", "f"); },
                                     "'f': line 4: found array"));
}

TEST(ScoreRequests, ABadLineIsNamed) {
  const std::string good = "{\"context\": \"a\", \"continuation\": \"b\"}\n";
  for (const auto& [line, part] :
       {std::pair<std::string, std::string>{"{", "invalid JSON at byte 2 of the line"},
        {"{\"context\": \"\xff\", \"continuation\": \"b\"}", "invalid JSON"},
        {"[]", "found array, allowed: an object"},
        {"{\"context\": \"a\"}", "'continuation' is missing"},
        {"{\"context\": 3, \"continuation\": \"b\"}", "'context': found number, allowed: a text"},
        {"{\"context\": \"a\", \"continuation\": null}", "'continuation': found null"}})
    EXPECT_TRUE(throws_with<FileError>(
        [&] { parse_score_requests(good + line + "\n" + good, "f"); }, "'f': line 2: " + part))
        << line;
}

ScoreTokens encode(const std::string& context, const std::string& continuation,
                   int64_t seq_length = 16, int64_t vocab_size = 257) {
  ByteTokenizer bytes;
  return encode_score_request({"", context, continuation}, bytes, seq_length, vocab_size);
}

TEST(ScoreTokens, AreThoseOfLmEvaluationHarness) {
  using Ids = std::vector<int64_t>;
  EXPECT_EQ(encode("ab", "cd").ids, (Ids{'a', 'b', 'c', 'd'}));
  EXPECT_EQ(encode("ab", "cd").scored, 2);
  // Trailing spaces move to the continuation: single bytes, and two bytes of UTF-8.
  EXPECT_EQ(encode("ab \n", "c").scored, 3);
  EXPECT_EQ(encode("ab\u00a0", "c").scored, 3);
  EXPECT_EQ(encode("", "cd").ids, (Ids{256, 'c', 'd'}));
  EXPECT_EQ(encode("", "cd").scored, 2);
  EXPECT_EQ(encode("  ", "c").ids, (Ids{256, ' ', ' ', 'c'}));
  EXPECT_EQ(encode("  ", "c").scored, 3);
  // A window of 4 tokens predicts 4, so that 5 ids stay.
  EXPECT_EQ(encode("abcdef", "gh", 4).ids, (Ids{'d', 'e', 'f', 'g', 'h'}));
  EXPECT_EQ(encode("a", "bcde", 4).ids, (Ids{'a', 'b', 'c', 'd', 'e'}));
  EXPECT_EQ(encode("", "bcde", 4).ids, (Ids{256, 'b', 'c', 'd', 'e'}));
  // Of a longer continuation only the last 4 tokens are scored.
  EXPECT_EQ(encode("a", "bcdef", 4).ids, (Ids{'b', 'c', 'd', 'e', 'f'}));
  EXPECT_EQ(encode("a", "bcdef", 4).scored, 4);
  EXPECT_EQ(encode("", "bcdefg", 4).ids, (Ids{'c', 'd', 'e', 'f', 'g'}));
  EXPECT_EQ(encode("", "bcdefg", 4).scored, 4);
}

TEST(ScoreTokens, OfAnEmptyContinuationAreNone) {
  using Ids = std::vector<int64_t>;
  EXPECT_EQ(encode("ab", "").ids, (Ids{'a', 'b'}));
  EXPECT_EQ(encode("ab", "").scored, 0);
  EXPECT_EQ(encode("", "").ids, (Ids{256}));
  EXPECT_EQ(encode("", "").scored, 0);
  EXPECT_EQ(encode("abcdef", "", 4).scored, 0);
  // The space moves to the continuation.
  EXPECT_EQ(encode("ab ", "").scored, 1);
}

TEST(ScoreTokens, RefuseWhatCannotBeScored) {
  EXPECT_TRUE(throws_with<ConfigError>(
      [] { encode("", "a", 4, 256); },
      "token id: found 256, in the place of an empty context, allowed: less than 256 "
      "(model.vocab_size)"));
  EXPECT_TRUE(throws_with<ConfigError>([] { encode("a", "\xff", 4, 200); }, "found 255, allowed"));
}

/// Merges only "ab", so that a context's last token may depend on its continuation.
class MergingTokenizer : public ByteTokenizer {
 public:
  size_t encode_front(std::string_view text, bool /*last*/, std::vector<int64_t>& ids) override {
    for (size_t i = 0; i < text.size(); ++i)
      if (text.substr(i, 2) == "ab") {
        ids.push_back(1);
        ++i;
      } else {
        ids.push_back(text[i]);
      }
    return text.size();
  }
};

/// lm-evaluation-harness takes the tokenizer's bos_token before its eos_token.
TEST(ScoreTokens, BeginWithTheTokenThatBeginsTexts) {
  const testing::TemporaryFolder folder;
  folder.write(
      "tokenizer.json",
      R"({"model": {"type": "BPE", "merges": [], "vocab": {"a": 0, "<s>": 1, "</s>": 2}}})");
  const auto first_id = [&](const std::string& config) {
    folder.write("tokenizer_config.json", config);
    const auto tokenizer =
        make_tokenizer("hf:" + (folder.path() / "tokenizer.json").string(), "it");
    return encode_score_request({"", "", "a"}, *tokenizer, 16, 3).ids.front();
  };
  EXPECT_EQ(first_id("{}"), 2);
  EXPECT_EQ(first_id(R"({"bos_token": null, "eos_token": "</s>"})"), 2);
  EXPECT_EQ(first_id(R"({"bos_token": "<s>", "eos_token": "</s>"})"), 1);
  EXPECT_EQ(first_id(R"({"bos_token": {"content": "<s>"}})"), 1);
  EXPECT_EQ(first_id(R"({"bos_token": "not a token"})"), 2);
}

TEST(ScoreTokens, OfBothTextsAreEncodedTogether) {
  MergingTokenizer tokenizer;
  const ScoreTokens tokens = encode_score_request({"", "ca", "bd"}, tokenizer, 16, 257);
  EXPECT_EQ(tokens.ids, (std::vector<int64_t>{'c', 1, 'd'}));
  EXPECT_EQ(tokens.scored, 1);
  EXPECT_TRUE(throws_with<ConfigError>(
      [&] {
        encode_score_request({"", "ca", "b"}, tokenizer, 16, 257);
      },
      "continuation: found 'b', which adds no token to the context"));
}

}  // namespace
}  // namespace lockstep
