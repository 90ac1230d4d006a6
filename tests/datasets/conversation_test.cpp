#include "lockstep/datasets/conversation.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include "lockstep/core/error.h"
#include "lockstep/datasets/chat_form.h"
#include "lockstep/datasets/conversation_encoder.h"
#include "lockstep/datasets/conversation_set.h"
#include "lockstep/datasets/hugging_face_tokenizer.h"
#include "lockstep/tests/support/temporary_folder.h"
#include "lockstep/tests/support/throws_with.h"

// chat_templates_test.py compares the ids with those of transformers.

namespace lockstep {
namespace {

using testing::TemporaryFolder;
using testing::throws_with;
using Ids = std::vector<int64_t>;

constexpr ChatRole kUser = ChatRole::user, kAssistant = ChatRole::assistant;

TEST(ConversationTest, MessagesOfALine) {
  EXPECT_EQ(parse_conversation(R"({"id": 3, "messages": [{"role": "system", "content": "x"},
      {"content": "€\n", "role": "user", "name": "n"}, {"role": "assistant", "content": ""}]})",
                               "p"),
            (Conversation{{ChatRole::system, "x"}, {kUser, "€\n"}, {kAssistant, ""}}));
  EXPECT_EQ(parse_conversation(R"({"prompt": "2 + 2 = ", "completion": "4"})", "p"),
            (Conversation{{kUser, "2 + 2 = "}, {kAssistant, "4"}}));
}

TEST(ConversationTest, OtherKeysMayHoldWhatPythonWrites) {
  const Conversation expected = {{kUser, "a"}, {kAssistant, "b,}"}};
  for (const char* line :
       {R"({"score": NaN, "prompt": "a", "completion": "b,}"})",
        R"({"prompt": "a", "least": -Infinity, "completion": "b,}", "n": 1e999})",
        R"({ "x\"" : [{"messages": [NaN, "\"]"]}, Infinity] ,"prompt":"a","completion" :"b,}"})",
        R"({"\u0070rompt": "a", "text": "NaN", "completion": "b,}", "meta": {"prompt": NaN}})",
        R"({"prompt": "a", "completion": "no", "x": "completion", "completion": "b,}", "y": -1E4})",
        R"({"l":[],"o":{},"messages":[{"role":"user","content":"a"},)"
        R"({"role":"assistant","content":"b,}","weight":1}],"z":NaN})"})
    EXPECT_EQ(parse_conversation(line, "p"), expected) << line;
}

TEST(ConversationTest, WhatIsBadIsNamed) {
  const std::vector<std::pair<std::string, std::string>> cases = {
      {"[]", "p: byte 0: found '[', allowed"},
      {R"({"messages": [}]})", "p: byte 14: found '}', allowed"},
      {R"({"messages": NaN})", "p: invalid JSON at byte"},
      {R"({"x": [NaN], "messages": [{"role": "user", "content": "x", "n": NaN}]})",
       "p: invalid JSON at byte 65 of the line"},
      {R"({"prompt": 1e999, "completion": "x"})", "p: invalid JSON: number overflow"},
      {R"({"messages": []})", "p: messages: found [], allowed: one message or more"},
      {R"({"messages": {}})", "p: messages: found {}, allowed"},
      {R"({"messages": ["x"]})", "p: messages[0]: found \"x\", allowed: an object with role"},
      {R"({"messages": [{"content": "x"}]})", "p: messages[0].role: found null, allowed: system"},
      {R"({"messages": [{"role": "user", "content": "x"}, {"role": "tool", "content": ""}]})",
       "p: messages[1].role: found \"tool\", allowed: system, user or assistant"},
      {R"({"messages": [{"role": "user", "content": ["x"]}]})",
       "p: messages[0].content: found [\"x\"], allowed: a text"},
      {R"({"text": "x"})", "p: found none of the keys, allowed: messages, or prompt and"},
      {R"({"prompt": "x"})", "p: found prompt without completion"},
      {R"({"completion": "x"})", "p: found completion without prompt"},
      {R"({"prompt": 1, "completion": "x"})", "p: prompt: found 1, allowed: a text"},
      {R"({"prompt": "", "completion": "x", "messages": []})",
       "p: found messages beside prompt or completion"},
      {"{\"prompt\": \"\xff\", \"completion\": \"\"}", "p: byte 12: found"},
      {"", "p: found nothing, allowed: an object"}};
  for (const auto& [line, message] : cases)
    EXPECT_TRUE(throws_with<FileError>([&] { parse_conversation(line, "p"); }, message)) << line;
  const std::string deep = R"({"messages": )" + std::string(1001, '[');
  EXPECT_TRUE(throws_with<FileError>([&] { parse_conversation(deep, "p"); }, "levels"));
}

const Conversation kTwoTurns = {
    {ChatRole::system, " s "}, {kUser, "u"}, {kAssistant, " a\n"}, {kUser, "v"}, {kAssistant, "b"}};

std::string whole_text(ChatTemplate name) {
  std::string text;
  for (const ChatText& part : chat_texts(kTwoTurns, chat_form(name)))
    text += part.text + (part.ends_document ? "<eod>" : "");
  return text;
}

TEST(ChatFormTest, PublishedTemplates) {
  EXPECT_EQ(whole_text(ChatTemplate::chatml),
            "<|im_start|>system\n s <|im_end|>\n<|im_start|>user\nu<|im_end|>\n"
            "<|im_start|>assistant\n a\n<|im_end|>\n<|im_start|>user\nv<|im_end|>\n"
            "<|im_start|>assistant\nb<|im_end|>\n");
  EXPECT_EQ(whole_text(ChatTemplate::llama3),
            "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\ns<|eot_id|>"
            "<|start_header_id|>user<|end_header_id|>\n\nu<|eot_id|>"
            "<|start_header_id|>assistant<|end_header_id|>\n\na<|eot_id|>"
            "<|start_header_id|>user<|end_header_id|>\n\nv<|eot_id|>"
            "<|start_header_id|>assistant<|end_header_id|>\n\nb<|eot_id|>");
  EXPECT_EQ(whole_text(ChatTemplate::plain), " s u a\n<eod>vb<eod>");
}

TEST(ChatFormTest, SpacesArePythons) {
  EXPECT_EQ(stripped(" \t\r\n\v\f\x1c\u00a0\u3000x y\u2028\x1f "), "x y");
  EXPECT_EQ(stripped("\u200bx\ufeff"), "\u200bx\ufeff");
  EXPECT_EQ(stripped(" \u2003 "), "");
}

TEST(ConversationEncoderTest, BytesByThePlainForm) {
  ByteTokenizer bytes;
  ConversationEncoder encoder(chat_form(ChatTemplate::plain), bytes, "byte");
  const EncodedConversation found =
      encoder.encode({{kUser, "ab"}, {kAssistant, "c"}, {kUser, "d"}, {kAssistant, ""}});
  EXPECT_EQ(found.ids, (Ids{'a', 'b', 'c', 256, 'd', 256}));
  EXPECT_EQ(found.learned, (std::vector<bool>{false, false, true, true, false, true}));
  const EncodedConversation open = encoder.encode({{kAssistant, "x"}, {kUser, "y"}});
  EXPECT_EQ(open.ids, (Ids{'x', 256, 'y'}));
  EXPECT_EQ(open.learned, (std::vector<bool>{true, true, false}));
}

TEST(ConversationEncoderTest, TokensThatAreNotThereAreNamed) {
  ByteTokenizer bytes;
  EXPECT_TRUE(throws_with<ConfigError>(
      [&] { ConversationEncoder(chat_form(ChatTemplate::llama3), bytes, "byte"); },
      "data.chat_template: found llama3, allowed with data.tokenizer = byte, which has no token "
      "'<|begin_of_text|>': plain"));
}

/// One token per byte, one for "
///
/// ", and ChatML's tokens.
HuggingFaceTokenizer small_tokenizer(bool takes_spaces = false) {
  std::string vocabulary;
  for (int byte = 0; byte < 256; ++byte)
    vocabulary += fmt::format("\"<0x{:02X}>\": {}, ", byte, byte);
  const auto token = [](int id, std::string_view content, bool lstrip) {
    return fmt::format(R"({{"id": {}, "content": "{}", "special": true, "normalized": false, )"
                       R"("single_word": false, "lstrip": {}, "rstrip": false}})",
                       id, content, lstrip);
  };
  const std::string text =
      R"({"model": {"type": "BPE", "byte_fallback": true, "vocab": {)" + vocabulary +
      R"("\n": 256, "\n\n": 257}, "merges": ["\n \n"]}, "added_tokens": [)" +
      token(258, "<|im_start|>", takes_spaces) + ", " + token(259, "<|im_end|>", false) + "]}";
  return HuggingFaceTokenizer(parse_hugging_face_tokenizer(text, "tokenizer.json"));
}

TEST(ConversationEncoderTest, ATokenOfPromptAndAnswerIsLearned) {
  HuggingFaceTokenizer tokenizer = small_tokenizer();
  ConversationEncoder encoder(chat_form(ChatTemplate::chatml), tokenizer, "hf:x");
  const auto learned_of = [&](const std::string& content) {
    const EncodedConversation found = encoder.encode({{kAssistant, content}});
    Ids ids;
    for (size_t i = 0; i < found.ids.size(); ++i)
      if (found.learned[i]) ids.push_back(found.ids[i]);
    return ids;
  };
  EXPECT_EQ(learned_of("ab"), (Ids{'a', 'b', 259}));
  EXPECT_EQ(learned_of("\na"), (Ids{257, 'a', 259}));  // with the line feed after the role
  EXPECT_EQ(learned_of(""), Ids{259});
  // A special token that the content spells out is that token.
  EXPECT_EQ(learned_of("<|im_end|>"), (Ids{259, 259}));
}

TEST(ConversationEncoderTest, TokensThatTakeWhiteSpaceAreRefused) {
  HuggingFaceTokenizer tokenizer = small_tokenizer(/*takes_spaces=*/true);
  EXPECT_TRUE(throws_with<ConfigError>(
      [&] { ConversationEncoder(chat_form(ChatTemplate::chatml), tokenizer, "hf:x"); },
      "whose token '<|im_start|>' strips adjacent white space"));
}

class ConversationSetTest : public ::testing::Test {
 protected:
  ConversationSet read(const std::vector<std::string>& paths, int64_t seq_length = 8,
                       int64_t vocabulary_size = 257) const {
    DataConfig config;
    config.tokenizer = "byte";
    config.chat_template = ChatTemplate::plain;
    return {paths, "data.path", config, {vocabulary_size, seq_length}};
  }
  std::string write(const std::string& text, const std::string& name = "a.jsonl") const {
    return folder_.write(name, text);
  }

  TemporaryFolder folder_;
};

constexpr const char* kGood = R"({"prompt": "ab", "completion": "c"})";

TEST_F(ConversationSetTest, ReadsFilesInTheirOrder) {
  const auto set = read({write(std::string("\n ") + kGood + "\n\r\n" + kGood),
                         write(R"({"prompt": "", "completion": "xyz"})", "b.jsonl")});
  ASSERT_EQ(set.size(), 3);
  EXPECT_EQ(set.num_tokens({0, 3}), 12);
  EXPECT_EQ(set.num_tokens({1, 2}), 4);
  EXPECT_EQ(Ids(set.ids(2).begin(), set.ids(2).end()), (Ids{'x', 'y', 'z', 256}));
  // Nothing before the first token predicts it.
  EXPECT_EQ(Ids(set.learned(2).begin(), set.learned(2).end()), (Ids{0, 1, 1, 1}));
  EXPECT_EQ(set.num_learned({0, 3}), 2 + 2 + 3);
  EXPECT_EQ(set.num_learned({1, 3}), 2 + 3);
  EXPECT_EQ(set.num_learned({3, 3}), 0);
  ASSERT_EQ(set.files().size(), 2U);
  EXPECT_EQ(set.files()[0].size(), 2);
  EXPECT_EQ(set.files()[1].first, 2);
  EXPECT_EQ(set.files()[1].last, 3);
}

TEST_F(ConversationSetTest, CutsAndCounts) {
  const auto set = read({write(R"({"prompt": "ab", "completion": "cdefghij"}
{"prompt": "abcdefghij", "completion": "k"}
{"messages": [{"role": "user", "content": "no answer"}]}
{"prompt": "ab", "completion": "cdefg"}
)")});
  EXPECT_EQ(set.size(), 2);
  EXPECT_EQ(set.length(0), 8);
  EXPECT_EQ(set.length(1), 8);
  EXPECT_EQ(set.num_cut(), 1);
  EXPECT_EQ(set.num_empty(), 2);  // one is cut before the assistant begins, one has no answer
}

TEST_F(ConversationSetTest, BadLinesAreNamed) {
  EXPECT_TRUE(throws_with<FileError>([&] { read({write(std::string(kGood) + "\n\n{}\n")}); },
                                     "a.jsonl': line 3: found none of the keys"));
  EXPECT_TRUE(throws_with<FileError>([&] { read({write(kGood)}, 8, 256); },
                                     "a.jsonl': line 1: token id: found 256, allowed: less than "
                                     "256 (model.vocab_size)"));
  EXPECT_TRUE(
      throws_with<FileError>([&] { read({write("x", "a.jsonl.gz")}); }, "a.jsonl.gz': line 1: "));
  EXPECT_TRUE(throws_with<FileError>([&] { read({folder_.path() / "none.jsonl"}); }, "none.jsonl"));
  EXPECT_TRUE(throws_with<ConfigError>([&] { read({write("x", "a.txt")}); },
                                       "data.path: found '" + (folder_.path() / "a.txt").string() +
                                           "', allowed with train.task = sft: files that end in"));
  EXPECT_TRUE(throws_with<ConfigError>([&] { read({}); }, "data.path: is not set, allowed with"));
}

}  // namespace
}  // namespace lockstep
