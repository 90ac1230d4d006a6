#include "lockstep/datasets/sample_marks.h"

#include <gtest/gtest.h>

#include "lockstep/core/config_io.h"
#include "lockstep/core/error.h"
#include "lockstep/datasets/indexed_dataset_writer.h"
#include "lockstep/tests/support/temporary_folder.h"
#include "lockstep/tests/support/throws_with.h"

namespace lockstep {
namespace {

using testing::TemporaryFolder;
using testing::throws_with;
using Ids = std::vector<int64_t>;

constexpr DocumentRules kAll = {0, true, true, true};

// megatron_data_test.py compares it with Megatron Core's function.
TEST(SampleMarksTest, ADocumentReachesToItsEnd) {
  const SampleMarks marks = mark_documents(Ids{5, 6, 0, 7, 0, 0, 8, 9, 1}, kAll);
  EXPECT_EQ(marks.documents, (Ids{3, 2, 1, 2}));
  EXPECT_EQ(marks.positions, (Ids{0, 1, 2, 0, 1, 0, 0, 1}));
  EXPECT_EQ(marks.loss, (std::vector<uint8_t>{1, 1, 0, 1, 0, 0, 1, 1}));
}

TEST(SampleMarksTest, TheLastIdIsALabelAlone) {
  EXPECT_EQ(mark_documents(Ids{5, 6, 0}, kAll).documents, Ids{2});
  EXPECT_EQ(mark_documents(Ids{5, 0, 0}, kAll).documents, Ids{2});
  EXPECT_EQ(mark_documents(Ids{0, 5, 0}, kAll).documents, (Ids{1, 1}));
}

TEST(SampleMarksTest, EachMarkIsForItself) {
  const Ids ids = {5, 0, 6, 7};
  EXPECT_EQ(mark_documents(ids, {0, true, false, false}), (SampleMarks{.positions = {0, 1, 0}}));
  EXPECT_EQ(mark_documents(ids, {0, false, true, false}), (SampleMarks{.documents = {2, 1}}));
  EXPECT_EQ(mark_documents(ids, {0, false, false, true}), (SampleMarks{.loss = {1, 0, 1}}));
  EXPECT_EQ(mark_documents(ids, {0, false, false, false}), SampleMarks());
}

TEST(SampleMarksTest, PositionsNeedAllTokens) {
  EXPECT_EQ(positions_in_documents(Ids{2, 3}, 5), (Ids{0, 1, 0, 1, 2}));
  EXPECT_TRUE(throws_with<UsageError>(
      [] {
        positions_in_documents(Ids{2, 3}, 6);
      },
      "found 5 tokens in all, allowed: 6"));
}

class MarkedSamplesTest : public ::testing::Test {
 protected:
  SampleSources open(const std::vector<std::string>& fields, int64_t vocabulary_size = 257) {
    IndexedDatasetWriter writer(folder_.path() / "set", TokenType::uint16);
    for (int64_t document = 0; document < 40; ++document) {
      for (const Ids& sequence : document_) {
        writer.append(sequence);
        writer.end_sequence();
      }
      writer.end_document();
    }
    writer.finish();
    std::vector<std::string> all = {"data.path=" + (folder_.path() / "set").string()};
    all.insert(all.end(), fields.begin(), fields.end());
    return open_samples(parse_config("", "test", all).data, vocabulary_size, 10, 1);
  }

  TemporaryFolder folder_;
  std::vector<Ids> document_ = {{7, 8, 9, 256}};
};

TEST_F(MarkedSamplesTest, TrainingAndValidationAreMarked) {
  const SampleSources plain = open({}), marked = open({"data.reset_attention_mask=true"});
  Ids ids(11), same(11);
  for (const auto source : {&SampleSources::training, &SampleSources::validation}) {
    (plain.*source)->read(0, ids);
    (marked.*source)->read(0, same);
    EXPECT_EQ(ids, same);
    EXPECT_EQ((plain.*source)->marks(0, ids), SampleMarks());
    const SampleMarks marks = (marked.*source)->marks(0, ids);
    EXPECT_EQ(marks, mark_documents(ids, {256, false, true, false}));
    EXPECT_GE(marks.documents.size(), 3U);
  }
  EXPECT_EQ(plain.validation->size(), marked.validation->size());
}

TEST_F(MarkedSamplesTest, ATokenizerThatIsNotThatOfTheDataIsTold) {
  constexpr int64_t kGpt2 = 50257;
  const std::vector<std::string> fields = {"data.eod_mask_loss=true"};
  for (const std::vector<Ids>& document :
       {std::vector<Ids>{{7, 8, 9, 256}}, {{7, 8}, {30000, 256}}, {{7, 8, 30000, 256}, {}}}) {
    document_ = document;
    EXPECT_TRUE(open(fields, kGpt2).notes.empty());
  }
  document_ = {{7, 8, 9, 256}, {10, 11}};
  EXPECT_EQ(open(fields).notes,
            std::vector<std::string>{"data.eod_mask_loss: of the first 40 documents of '" +
                                     (folder_.path() / "set").string() +
                                     "' none ends with 256, the end of a document of byte "
                                     "(data.tokenizer)"});
  // GPT-2's " t" is 256, and its end of a document 50256.
  document_ = {{1169, 256, 4178, 50256}};
  const std::vector<std::string> notes = open(fields, kGpt2).notes;
  ASSERT_EQ(notes.size(), 1u);
  EXPECT_TRUE(
      notes[0].ends_with("(data.tokenizer); they have the id 50256, which that tokenizer lacks"))
      << notes[0];
  EXPECT_TRUE(open({}, kGpt2).notes.empty());
}

TEST_F(MarkedSamplesTest, ATextFileWithoutEndsOfDocumentsIsTold) {
  const std::string text = folder_.write("text", std::string(200, 'a'));
  const std::string other = folder_.write("other", std::string(200, 'b'));
  const auto note = [](const std::string& field, const std::string& path) {
    return std::vector<std::string>{
        field + ": the text file '" + path +
        "' does not have 256, the end of a document of byte (data.tokenizer); `lockstep data build "
        "--append-eod` makes a data set with ends"};
  };
  const auto notes = [&](const std::vector<std::string>& paths, const std::string& field) {
    std::vector<std::string> fields = {field + "=true"};
    fields.insert(fields.end(), paths.begin(), paths.end());
    return open(fields).notes;
  };
  for (const std::string field :
       {"data.reset_position_ids", "data.reset_attention_mask", "data.eod_mask_loss"})
    EXPECT_EQ(notes({"data.path=" + text}, field), note(field, text));
  EXPECT_EQ(notes({"data.valid_path=" + other}, "data.eod_mask_loss"),
            note("data.eod_mask_loss", other));
  EXPECT_EQ(notes({"data.test_path=" + other, "data.valid_path=" + text}, "data.eod_mask_loss"),
            note("data.eod_mask_loss", text));
  EXPECT_TRUE(open({"data.path=" + text}).notes.empty());
}

TEST_F(MarkedSamplesTest, WhatCannotBeIsRefusedByName) {
  EXPECT_TRUE(throws_with<ConfigError>([&] { open({"data.eod_mask_loss=true"}, 256); },
                                       "model.vocab_size: found 256, allowed with "
                                       "data.eod_mask_loss: more than 256, the end of a document"));
  for (const std::string field :
       {"data.reset_position_ids", "data.reset_attention_mask", "data.eod_mask_loss"})
    EXPECT_TRUE(throws_with<ConfigError>(
        [&] {
          parse_config("", "test", {"data.mock=true", field + "=true"});
        },
        field + ": found true, allowed with data.mock: false"));
}

}  // namespace
}  // namespace lockstep
