#include "lockstep/datasets/document_encoder.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "lockstep/datasets/document_batch.h"

namespace lockstep {
namespace {

// An .idx counts up to 2^31 - 1 tokens; the limit is lower here.
TEST(DocumentEncoder, DocumentsOfTooManyTokensAreBad) {
  ByteTokenizer tokenizer;
  DocumentBatch batch;
  for (const std::string text : {"abc", "abcd", "ab"}) {
    const std::string line = "{\"text\": \"" + text + "\"}";
    const auto number = static_cast<int64_t>(batch.documents.size() + 1);
    batch.documents.push_back({batch.bytes.size(), line.size(), InputForm::json_lines, 0, number});
    batch.bytes += line;
  }
  const EncodedBatch encoded = encode_batch(
      batch, {.encoder = {.most_tokens = 3}, .skip_bad = true, .inputs = {"a.jsonl"}}, tokenizer);
  EXPECT_EQ(encoded.outputs[0].lengths, (std::vector<int64_t>{3, 2}));
  EXPECT_EQ(encoded.tokens, 5);
  ASSERT_EQ(encoded.bad.size(), 1U);
  EXPECT_TRUE(encoded.bad[0].message().starts_with(
      "'a.jsonl': line 2: found a document of more than 3 tokens, allowed: up to 3, because"))
      << encoded.bad[0].message();
}

// A text that is too long is given up before its end.
TEST(DocumentEncoder, NothingMoreOfATooLongTextIsTokenized) {
  class Sink : public DocumentSink {
   public:
    void append(size_t, std::span<const int64_t> ids) override { tokens += ids.size(); }
    void drop(size_t) override { tokens = 0; }
    void end(size_t, bool) override { ++ended; }
    size_t tokens = 0;
    int ended = 0;
  } sink;
  ByteTokenizer tokenizer;
  constexpr size_t kPiece = 1 << 20;
  DocumentEncoder encoder({.append_eod = true, .most_tokens = 2 * kPiece}, tokenizer, sink);
  encoder.begin_document(InputForm::text);
  for (int i = 0; i < 5; ++i) {
    EXPECT_EQ(encoder.problem_so_far().has_value(), i > 2);
    encoder.feed(std::string(kPiece, 'a'));
  }
  EXPECT_LT(sink.tokens, 3 * kPiece);
  EXPECT_TRUE(encoder.end_document().has_value());
  EXPECT_EQ(sink.tokens, 0U);
  EXPECT_EQ(sink.ended, 0);
  EXPECT_EQ(encoder.num_tokens(), 0);
  encoder.begin_document(InputForm::text);
  encoder.feed("b");
  EXPECT_EQ(encoder.end_document(), std::nullopt);
  EXPECT_EQ(encoder.num_tokens(), 2);
}

}  // namespace
}  // namespace lockstep
