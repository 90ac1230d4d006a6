#include <gtest/gtest.h>

#include <filesystem>

#include "lockstep/checkpoint/companion_files.h"
#include "lockstep/core/error.h"
#include "lockstep/datasets/build_dataset.h"
#include "lockstep/datasets/indexed_dataset.h"
#include "lockstep/datasets/sentencepiece_tokenizer.h"
#include "lockstep/tests/support/temporary_folder.h"
#include "lockstep/tests/support/throws_with.h"

namespace lockstep {
namespace {

using testing::TemporaryFolder;
using testing::throws_with;

/// Trains a small model with train_sentencepiece, which is built next to the tests.
class SentencepieceTest : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!has_sentencepiece()) GTEST_SKIP() << "this build has no SentencePiece";
#ifdef __SANITIZE_ADDRESS__
    GTEST_SKIP() << "the sanitizer cannot keep two versions of protobuf apart";
#endif
    std::string text;
    for (int i = 0; i < 400; ++i)
      text += "The quick brown fox number " + std::to_string(i) + " jumps over the lazy dog.\n";
    folder_.write("text", text);
    model_ = train("small");
  }

  /// The path of a model; `options` are arguments of train_sentencepiece.
  std::string train(const std::string& name, const std::string& options = "") {
    const std::string prefix = folder_.path() / name;
    const std::string command = LOCKSTEP_TRAIN_SENTENCEPIECE " '" + folder_.path().string() +
                                "/text' '" + prefix + "' " + options;
    EXPECT_EQ(std::system(command.c_str()), 0);
    return prefix + ".model";
  }

  TemporaryFolder folder_;
  std::string model_;
};

TEST_F(SentencepieceTest, EncodesAndDecodes) {
  const auto tokenizer = make_tokenizer("sentencepiece:" + model_, "field");
  const int64_t size = tokenizer->vocabulary_size();
  EXPECT_GT(size, 40);
  EXPECT_LE(size, 90);
  EXPECT_EQ(tokenizer->end_of_document(), 2);
  EXPECT_EQ(tokenizer->begin_of_text(), 1);
  const std::string text = "The lazy fox jumps over number 123.";
  const auto ids = tokenizer->encode(text);
  EXPECT_LT(ids.size(), text.size());
  EXPECT_EQ(tokenizer->decode(ids), text);
  // Pieces depend on the whole text, so encode_front() returns nothing before its end.
  std::vector<int64_t> front;
  EXPECT_EQ(tokenizer->encode_front(text, /*last=*/false, front), 0u);
  EXPECT_TRUE(front.empty());
  EXPECT_TRUE(throws_with<UsageError>([&] { tokenizer->decode({size}); },
                                      "found " + std::to_string(size) + ", allowed: 0 to"));
}

TEST_F(SentencepieceTest, DecodesTokenByToken) {
  const std::string texts[] = {"The lazy fox jumps over number 123.", "\xC3\xA9 fox",
                               "The \xE6\x97\xA5\xE6\x9C\xAC fox"};
  const std::string bytes = train("bytes", "'--vocab_size=346 --byte_fallback=true'");
  for (const std::string& model : {model_, bytes}) {
    const auto tokenizer = make_tokenizer("sentencepiece:" + model, "field");
    for (const std::string& text : texts) {
      const auto ids = tokenizer->encode(text);
      std::string joined;
      for (const int64_t id : ids) joined += tokenizer->decode_more({id});
      EXPECT_EQ(joined, " " + tokenizer->decode(ids));
      EXPECT_EQ(tokenizer->decode_more(ids), joined);
      if (model == bytes) {
        EXPECT_EQ(joined, " " + text);
      }
    }
    EXPECT_EQ(tokenizer->decode_more({tokenizer->end_of_document()}), "");
    const int64_t size = tokenizer->vocabulary_size();
    EXPECT_THROW(tokenizer->decode_more({size}), UsageError);
  }
}

TEST_F(SentencepieceTest, BuildsDatasets) {
  const auto tokenizer = make_tokenizer("sentencepiece:" + model_, "field");
  const auto done = build_dataset(
      {.input = {folder_.path() / "text"}, .output = folder_.path() / "set", .append_eod = true},
      [&] { return make_tokenizer("sentencepiece:" + model_, "field"); },
      [](const BuildProgress&) {});
  const IndexedDataset dataset(folder_.path() / "set");
  std::vector<int64_t> ids(static_cast<size_t>(done.tokens));
  dataset.tokens().read(0, ids);
  EXPECT_EQ(ids.back(), 2);
  ids.pop_back();
  EXPECT_EQ(ids, tokenizer->encode(folder_.read("text")));
}

TEST_F(SentencepieceTest, NamesWhatIsWrong) {
  const auto open = [&](const std::string& path) {
    return [=] { make_tokenizer("sentencepiece:" + path, "field"); };
  };
  EXPECT_TRUE(throws_with<FileError>(open(folder_.path() / "none"), "none' cannot be read"));
  EXPECT_TRUE(
      throws_with<FileError>(open(folder_.path() / "text"), "is not a SentencePiece model"));
  EXPECT_TRUE(
      throws_with<FileError>(open(folder_.write("empty", "")), "is not a SentencePiece model"));
}

TEST_F(SentencepieceTest, AnImportTellsOfTokensThatTheModelLacks) {
  const std::string in = folder_.path() / "in", out = folder_.path() / "out";
  std::filesystem::create_directory(in);
  std::filesystem::copy_file(model_, in + "/tokenizer.model");
  const int64_t size = make_tokenizer("sentencepiece:" + model_, "field")->vocabulary_size();
  const std::string file = "'" + in + "/added_tokens.json'";
  const auto note = [&](const std::string& added) {
    folder_.write("in/added_tokens.json", added);
    const KeptTokenizer kept = choose_tokenizer(in, out, /*is_gpt2=*/false);
    EXPECT_EQ(kept.name, "sentencepiece:" + out + "/hugging_face/tokenizer.model");
    return kept.note;
  };
  EXPECT_EQ(note(R"({"</s>": 2, "known": )" + std::to_string(size - 1) + "}"), "");
  const std::string chat = R"({"known": 3, "<|im_end|>": )" + std::to_string(size) +
                           R"(, "<|im_start|>": )" + std::to_string(size + 1) + "}";
  const std::string lacks = "data.tokenizer is sentencepiece: " + file +
                            ": found 2 tokens that tokenizer.model lacks, such as '<|im_end|>'; "
                            "texts with them need a tokenizer.json";
  EXPECT_EQ(note(chat), lacks);
  folder_.write("in/tokenizer.json", "{}");
  EXPECT_EQ(note(chat).find(lacks + " (here: '" + in + "/tokenizer.json'"), 0U) << note(chat);
  EXPECT_EQ(note("{").find(file + " is damaged: "), 0U) << note("{");
  EXPECT_EQ(note("[]").find(file + ": found [], allowed: "), 0U) << note("[]");
}

TEST(Sentencepiece, IsRefusedByNameWhereItIsNot) {
  if (has_sentencepiece()) GTEST_SKIP() << "this build has SentencePiece";
  EXPECT_TRUE(
      throws_with<ConfigError>([] { make_tokenizer("sentencepiece:x", "data.tokenizer"); },
                               "data.tokenizer: found sentencepiece, but this build has no"));
}

}  // namespace
}  // namespace lockstep
