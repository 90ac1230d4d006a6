#include "lockstep/datasets/conversation_source.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <numeric>
#include <random>
#include <set>

#include "lockstep/core/config_io.h"
#include "lockstep/core/error.h"
#include "lockstep/tests/support/temporary_folder.h"
#include "lockstep/tests/support/throws_with.h"

namespace lockstep {
namespace {

using testing::TemporaryFolder;
using testing::throws_with;
using Ids = std::vector<int64_t>;

Ids counted(int64_t count) {
  Ids numbers(static_cast<size_t>(count));
  std::iota(numbers.begin(), numbers.end(), 0);
  return numbers;
}

Ids sums_of(const Packing& packing, const Ids& lengths) {
  Ids sums;
  for (int64_t bin = 0; bin < packing.bins(); ++bin) {
    sums.push_back(0);
    for (const int64_t item : packing.of_bin(bin))
      sums.back() += lengths[static_cast<size_t>(item)];
  }
  return sums;
}

/// The rule, taken literally: each item, longest first, goes to the fitting bin with the least
/// room.
int64_t bins_by_the_rule(Ids lengths, int64_t room) {
  std::sort(lengths.rbegin(), lengths.rend());
  Ids left;
  for (const int64_t length : lengths) {
    int64_t* best = nullptr;
    for (int64_t& bin : left)
      if (bin >= length && (best == nullptr || bin < *best)) best = &bin;
    if (best == nullptr) best = &left.emplace_back(room);
    *best -= length;
  }
  return static_cast<int64_t>(left.size());
}

TEST(PackingTest, TheLeastRoomThatFits) {
  const Ids lengths = {3, 7, 2, 5, 8, 1};
  const Packing packing = pack_best_fit(lengths, counted(6), 10);
  EXPECT_EQ(packing.bins(), 3);
  EXPECT_EQ(packing.items, (Ids{4, 2, 1, 0, 3, 5}));  // 8 + 2, 7 + 3, 5 + 1
  EXPECT_EQ(packing.begins, (Ids{0, 2, 4, 6}));
  EXPECT_EQ(pack_best_fit({}, {}, 10).bins(), 0);
}

TEST(PackingTest, EveryItemOnceInAsManyBinsAsTheRuleSaysInAnyOrder) {
  std::mt19937 random(7);
  for (int round = 0; round < 200; ++round) {
    const int64_t room = 1 + static_cast<int64_t>(random() % 60);
    Ids lengths;
    for (size_t i = 0; i < random() % 80; ++i)
      lengths.push_back(1 + static_cast<int64_t>(random() % static_cast<uint64_t>(room)));
    Ids order = counted(static_cast<int64_t>(lengths.size()));
    const int64_t bins = bins_by_the_rule(lengths, room);
    for (int shuffle = 0; shuffle < 3; ++shuffle) {
      const Packing packing = pack_best_fit(lengths, order, room);
      EXPECT_EQ(packing.bins(), bins);
      Ids items = packing.items;
      std::sort(items.begin(), items.end());
      EXPECT_EQ(items, counted(static_cast<int64_t>(lengths.size())));
      for (const int64_t sum : sums_of(packing, lengths)) EXPECT_TRUE(sum >= 1 && sum <= room);
      std::shuffle(order.begin(), order.end(), random);
    }
  }
}

TEST(PackingTest, LengthsThatDoNotFitAreRefused) {
  EXPECT_TRUE(throws_with<UsageError>([] { pack_best_fit(Ids{11}, Ids{0}, 10); },
                                      "found a length of 11, allowed: 1 to 10"));
  EXPECT_TRUE(throws_with<UsageError>([] { pack_best_fit(Ids{0}, Ids{0}, 10); }, "a length of 0"));
}

class ConversationSourceTest : public ::testing::Test {
 protected:
  /// Conversations with a number each, whose answers have 1 to 20 letters.
  static std::string lines(int64_t count, char mark = 'q') {
    std::string text;
    for (int64_t i = 0; i < count; ++i)
      text += fmt::format(R"({{"prompt": "{}{}:", "completion": "{}"}})", mark, i,
                          std::string(static_cast<size_t>(1 + i * i % 20), 'a')) +
              "\n";
    return text;
  }

  SampleSources open(const std::vector<std::string>& fields, uint64_t seed = 1) const {
    std::vector<std::string> all = {"data.path=" + (folder_.path() / "a.jsonl").string(),
                                    "data.chat_template=plain", "train.task=sft"};
    all.insert(all.end(), fields.begin(), fields.end());
    return open_conversations(parse_config("", "test", all).data, 257, kLength, seed);
  }

  std::string both_files() const {
    return fmt::format("data.path=[{}/a.jsonl, {}/b.jsonl]", folder_.path().string(),
                       folder_.path().string());
  }

  static std::pair<Ids, SampleMarks> sample_of(SampleSource& source, int64_t sample) {
    Ids ids(kLength + 1);
    source.read(sample, ids);
    SampleMarks marks = source.marks(sample, ids);
    return {ids, marks};
  }

  static constexpr int64_t kLength = 32;
  TemporaryFolder folder_;
};

TEST_F(ConversationSourceTest, AnEpochHasEveryConversationOnce) {
  folder_.write("a.jsonl", lines(100));
  const SampleSources sources = open({"data.split=1,0"});
  auto& source = dynamic_cast<ConversationSource&>(*sources.training);
  const int64_t samples = source.samples_per_epoch();
  std::vector<std::multiset<std::string>> epochs(2);
  for (int64_t sample = 0; sample < 2 * samples; ++sample) {
    const auto [ids, marks] = sample_of(source, sample);
    EXPECT_EQ(std::accumulate(marks.documents.begin(), marks.documents.end(), int64_t{0}), kLength);
    size_t begin = 0;
    for (const int64_t length : marks.documents) {
      std::string text;
      for (size_t i = begin; i < begin + static_cast<size_t>(length); ++i) {
        EXPECT_EQ(marks.positions[i], static_cast<int64_t>(i - begin));
        if (ids[i] > 0 && ids[i] < 256) text += static_cast<char>(ids[i]);
        // A token's loss is that of predicting the next: the answer's letters and the end after
        // them.
        const bool last = i + 1 == begin + static_cast<size_t>(length);
        const bool next_is_learned = !last && (ids[i + 1] == 'a' || ids[i + 1] == 256);
        EXPECT_EQ(marks.loss[i], next_is_learned ? 1 : 0);
      }
      begin += static_cast<size_t>(length);
      if (!text.empty()) epochs[static_cast<size_t>(sample / samples)].insert(text);
    }
  }
  EXPECT_EQ(epochs[0].size(), 100U);
  EXPECT_EQ(epochs[0], epochs[1]);
  EXPECT_EQ(std::set(epochs[0].begin(), epochs[0].end()).size(), 100U);
}

TEST_F(ConversationSourceTest, SamplesDependOnTheirNumberAndTheSeedAlone) {
  folder_.write("a.jsonl", lines(100));
  const SampleSources one = open({}), other = open({}), seeded = open({}, 2);
  std::map<int64_t, std::pair<Ids, SampleMarks>> seen;
  for (int64_t sample = 0; sample < 200; ++sample) seen[sample] = sample_of(*one.training, sample);
  for (const int64_t sample : {150, 3, 199, 0, 42, 150})
    EXPECT_EQ(sample_of(*other.training, sample), seen[sample]);
  int64_t same = 0;
  for (int64_t sample = 0; sample < 20; ++sample)
    same += sample_of(*seeded.training, sample) == seen[sample];
  EXPECT_LT(same, 5);
  const int64_t epoch = dynamic_cast<ConversationSource&>(*one.training).samples_per_epoch();
  EXPECT_NE(seen[0], seen[epoch]);
}

TEST_F(ConversationSourceTest, ValidationIsOneEpoch) {
  folder_.write("a.jsonl", lines(100));
  folder_.write("b.jsonl", lines(10, 'v'));
  const SampleSources split = open({"data.split=80,20"});
  EXPECT_EQ(split.training->size(), SampleSource::kEndless);
  const auto marks_of_validation = [](const SampleSources& sources) {
    std::set<int64_t> firsts;
    for (int64_t sample = 0; sample < sources.validation->size(); ++sample)
      firsts.insert(sample_of(*sources.validation, sample).first.front());
    return firsts;
  };
  EXPECT_GE(split.validation->size(), 5);
  EXPECT_EQ(marks_of_validation(split), std::set<int64_t>{'q'});
  const SampleSources apart = open({"data.valid_path=" + (folder_.path() / "b.jsonl").string(),
                                    "data.test_path=" + (folder_.path() / "b.jsonl").string()});
  EXPECT_EQ(marks_of_validation(apart), std::set<int64_t>{'v'});
  EXPECT_EQ(apart.test->size(), apart.validation->size());
  ASSERT_EQ(apart.notes.size(), 3U);
  EXPECT_TRUE(apart.notes[1].starts_with("data.valid_path: 10 conversations in "))
      << apart.notes[1];
}

TEST_F(ConversationSourceTest, EachFileIsSplit) {
  folder_.write("a.jsonl", lines(30));
  folder_.write("b.jsonl", lines(10, 'v'));
  const SampleSources sources = open({both_files(), "data.split=80,10,10"});
  const auto prompts_of = [](SampleSource& source, int64_t samples) {
    std::set<std::string> prompts;
    for (int64_t sample = 0; sample < samples; ++sample) {
      const auto [ids, marks] = sample_of(source, sample);
      auto begin = ids.begin();
      for (const int64_t length : marks.documents) {
        const std::string text(begin, begin + length);
        begin += length;
        if (text.find(':') != text.npos) prompts.insert(text.substr(0, text.find(':')));
      }
    }
    return prompts;
  };
  std::set<std::string> expected;
  for (int i = 0; i < 24; ++i) expected.insert(fmt::format("q{}", i));
  for (int i = 0; i < 8; ++i) expected.insert(fmt::format("v{}", i));
  auto& training = dynamic_cast<ConversationSource&>(*sources.training);
  EXPECT_EQ(prompts_of(training, training.samples_per_epoch()), expected);
  EXPECT_EQ(prompts_of(*sources.validation, sources.validation->size()),
            (std::set<std::string>{"q24", "q25", "q26", "v8"}));
  ASSERT_EQ(sources.notes.size(), 1U);
  EXPECT_TRUE(sources.notes[0].starts_with("data.path: 36 conversations in ")) << sources.notes[0];
}

TEST_F(ConversationSourceTest, TheFirstEvaluatedSamplesAreNotThoseOfTheLongestConversations) {
  // Conversations of 17 to 32 tokens, so each fills a sample of 32 by itself.
  std::string text;
  for (size_t length = 17; length <= 32; ++length)
    text += fmt::format("{{\"prompt\": \"v\", \"completion\": \"{}\"}}\n",
                        std::string(length - 2, 'a'));
  folder_.write("a.jsonl", lines(10));
  const std::string path = folder_.write("b.jsonl", text);
  const auto lengths_of = [](SampleSource& source) {
    Ids lengths;
    for (int64_t sample = 0; sample < source.size(); ++sample)
      lengths.push_back(sample_of(source, sample).second.documents.front());
    return lengths;
  };
  const std::vector<std::string> fields = {"data.valid_path=" + path, "data.test_path=" + path};
  const SampleSources sources = open(fields), seeded = open(fields, 2);
  const Ids lengths = lengths_of(*sources.validation);
  Ids each_once(16);
  std::iota(each_once.begin(), each_once.end(), 17);
  EXPECT_TRUE(
      std::is_permutation(lengths.begin(), lengths.end(), each_once.begin(), each_once.end()));
  ASSERT_EQ(lengths.size(), 16U);
  EXPECT_LT(std::accumulate(lengths.begin(), lengths.begin() + 4, int64_t{0}), 32 + 31 + 30 + 29);
  EXPECT_LT(*std::min_element(lengths.begin(), lengths.begin() + 8), 25);  // of the shorter half
  EXPECT_EQ(lengths_of(*sources.test), lengths);
  EXPECT_EQ(lengths_of(*seeded.validation), lengths);
}

TEST_F(ConversationSourceTest, TellsWhatWasCutAndLeftOut) {
  folder_.write("a.jsonl", lines(3) + R"({"prompt": "x", "completion": ")" + std::string(50, 'a') +
                               "\"}\n" +
                               R"({"messages": [{"role": "user", "content": "no answer"}]})");
  EXPECT_EQ(open({"data.split=1,0"}).notes,
            std::vector<std::string>{
                "data.path: 4 conversations in 2 samples of 32 tokens, 81.2 % filled, 65.6 % with "
                "loss; 1 cut at model.seq_length; 1 left out, which have no token of an assistant "
                "within it"});
}

TEST_F(ConversationSourceTest, TellsOfTheConversationsThatAreRead) {
  const auto same = [](int64_t count) {
    std::string text;
    for (int64_t i = 0; i < count; ++i) text += "{\"prompt\": \"ab\", \"completion\": \"cdefg\"}\n";
    return text;
  };
  folder_.write("a.jsonl", same(4));
  const std::vector<std::string> notes = open({"data.split=1,0"}).notes;
  EXPECT_EQ(notes, std::vector<std::string>{
                       "data.path: 4 conversations in 1 sample of 32 tokens, 100.0 % filled, "
                       "75.0 % with loss"});
  folder_.write("a.jsonl", same(8));
  EXPECT_EQ(open({"data.split=50,0,50"}).notes, notes);
  EXPECT_EQ(open({"data.split=25,25,50"}).notes,
            std::vector<std::string>{
                "data.path: 4 conversations in 2 samples of 32 tokens, 50.0 % filled, 37.5 % with "
                "loss"});
  folder_.write("a.jsonl", same(4));
  folder_.write("b.jsonl", same(4));
  EXPECT_EQ(open({both_files(), "data.split=50,0,50"}).notes, notes);
}

TEST_F(ConversationSourceTest, NothingToTrainOnIsAnError) {
  folder_.write("a.jsonl", R"({"messages": [{"role": "user", "content": "no answer"}]})");
  EXPECT_TRUE(throws_with<ConfigError>([&] { open({}); },
                                       "data.path: found 0 conversations with a token of an "
                                       "assistant within model.seq_length (32) and 1 without"));
}

TEST_F(ConversationSourceTest, FieldsThatDoNotGoWithConversations) {
  const auto check = [&](const std::string& field, const std::string& message) {
    EXPECT_TRUE(throws_with<ConfigError>([&] { open({field}); }, message)) << field;
  };
  check("data.mock=true", "data.mock: found true, allowed with train.task = sft: false");
  check("data.blend=1", "data.blend: found '1', allowed with train.task = sft: none");
  check("data.reset_position_ids=true", "data.reset_position_ids: found true, allowed with");
  check("data.reset_attention_mask=true", "data.reset_attention_mask: found true, allowed with");
  check("data.eod_mask_loss=true", "data.eod_mask_loss: found true, allowed with");
  check("data.chat_template=llama3",
        "data.chat_template: found llama3, allowed with data.tokenizer = byte");
}

}  // namespace
}  // namespace lockstep
