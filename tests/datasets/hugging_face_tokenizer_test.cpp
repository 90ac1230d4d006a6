#include "lockstep/datasets/hugging_face_tokenizer.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <random>
#include <thread>

#include "lockstep/core/error.h"
#include "lockstep/datasets/build_dataset.h"
#include "lockstep/datasets/indexed_dataset.h"
#include "lockstep/tests/fuzz/hugging_face_sample.h"
#include "lockstep/tests/support/temporary_folder.h"
#include "lockstep/tests/support/throws_with.h"

namespace lockstep {
namespace {

using HfJson = nlohmann::json;
using testing::throws_with;

HuggingFaceTokenizer hf_tokenizer(const HfJson& json) {
  return HuggingFaceTokenizer(parse_hugging_face_tokenizer(json.dump(), "T"));
}

::testing::AssertionResult hf_refused(const HfJson& json, const std::string& part) {
  return throws_with<FileError>([&] { hf_tokenizer(json); }, part);
}

/// Checks that a file is refused after one of its values has changed.
class DamagedTokenizer : public ::testing::Test {
 protected:
  ::testing::AssertionResult refused(const std::string& pointer, const HfJson& value,
                                     const std::string& part) const {
    HfJson json = good_;
    json[HfJson::json_pointer(pointer)] = value;
    return hf_refused(json, part);
  }

  HfJson good_ = fuzz::byte_level_sample();
};

TEST_F(DamagedTokenizer, ModelsAreNamed) {
  EXPECT_TRUE(
      refused("/model/type", "Unigram", "'T': model.type: found \"Unigram\", allowed: BPE"));
  EXPECT_TRUE(refused("/model/dropout", 0.1, "'T': model.dropout: found 0.1, allowed: null or 0"));
  EXPECT_TRUE(refused("/model/end_of_word_suffix", "</w>", "model.end_of_word_suffix: found"));
  EXPECT_TRUE(refused("/model/continuing_subword_prefix", "##", "model.continuing_subword_prefix"));
  EXPECT_TRUE(refused("/model/vocab", {1, 2}, "'T': model.vocab: found [1,2], allowed: an object"));
  EXPECT_TRUE(
      refused("/model/vocab/a", -1, "'T': model.vocab: token 'a': id: found -1, allowed: 0"));
  EXPECT_TRUE(refused("/model/vocab/a", 98, "id: found 98, which 'a' has"));
  EXPECT_TRUE(refused("/model/vocab/a", 999999, "id: found 999999, allowed: 0 to"));
  EXPECT_TRUE(
      refused("/model/merges/1", "a b c", "'T': model.merges[1]: found \"a b c\", allowed"));
  EXPECT_TRUE(refused("/model/merges/1", {"a"}, "model.merges[1]: found [\"a\"], allowed: two"));
  EXPECT_TRUE(
      refused("/model/merges/0", {"t", 1}, "model.merges[0][1]: found 1, allowed: a string"));
  EXPECT_TRUE(refused("/model/merges/0", "a q", "model.merges[0]: found \"a q\", allowed: tokens"));
  EXPECT_TRUE(refused("/model/ignore_merges", 1, "model.ignore_merges: found 1, allowed: true or"));
  HfJson json = good_;
  HfJson& vocab = json["model"]["vocab"];
  vocab.erase("\u0100");  // of byte 0
  vocab["another"] = 0;
  EXPECT_NO_THROW(hf_tokenizer(json));
  json["model"]["byte_fallback"] = true;
  EXPECT_NO_THROW(hf_tokenizer(json));
  vocab.erase("another");
  vocab["<0x00>"] = 0;
  EXPECT_TRUE(hf_refused(json, "'T': model.byte_fallback: found true, allowed: false where bytes"));
}

// The ids of PyPI's tokenizers 0.23.3. "\u0120" is a space and "\u010A" a line feed.
TEST(HuggingFaceTokenizer, BytesWithoutATokenAreUnknownOrLeftOut) {
  const auto encode = [](const std::string& text, bool unknown, bool fuse) {
    HfJson json = {{"version", "1.0"},
                   {"added_tokens", HfJson::array()},
                   {"normalizer", nullptr},
                   {"pre_tokenizer",
                    {{"type", "ByteLevel"}, {"add_prefix_space", false}, {"use_regex", true}}},
                   {"decoder", {{"type", "ByteLevel"}}},
                   {"model", fuzz::byte_level_sample()["model"]}};
    HfJson& model = json["model"];
    model["vocab"] = {{"<unk>", 0},  {"a", 1},  {"b", 2},           {"\u0120", 3},
                      {"\u010A", 4}, {"ab", 5}, {"\u010A\u010A", 6}};
    model["merges"] = {"a b", "\u010A \u010A"};
    model["unk_token"] = unknown ? HfJson("<unk>") : HfJson();
    model["fuse_unk"] = fuse;
    return hf_tokenizer(json).encode(text);
  };
  using Ids = std::vector<int64_t>;
  EXPECT_EQ(encode("axb", false, false), Ids{5});
  EXPECT_EQ(encode("axb", true, false), (Ids{1, 0, 2}));
  EXPECT_EQ(encode("\n\r\n\r", false, false), Ids{6});
  EXPECT_EQ(encode("\n\r\n\r", true, true), (Ids{4, 0, 4, 0}));
  EXPECT_EQ(encode("a\u00e9b", false, false), Ids{5});
  EXPECT_EQ(encode("a\u00e9b", true, false), (Ids{1, 0, 0, 2}));
  EXPECT_EQ(encode("a\u00e9b", true, true), (Ids{1, 0, 2}));
  EXPECT_EQ(encode("\u00e9", false, false), Ids{});
  EXPECT_EQ(encode("ab \u00e9", true, true), (Ids{5, 3, 0}));
}

TEST_F(DamagedTokenizer, StepsAreNamed) {
  const std::string split = "/pre_tokenizer/pretokenizers/0";
  EXPECT_TRUE(refused(split + "/type", "Whitespace",
                      "'T': pre_tokenizer.pretokenizers[0].type: found \"Whitespace\", allowed:"));
  EXPECT_TRUE(
      refused(split + "/behavior", "Removed", "behavior: found \"Removed\", allowed: Isol"));
  EXPECT_TRUE(refused(split + "/pattern/Regex", "a(?=b)",
                      "'T': pre_tokenizer.pretokenizers[0].pattern.Regex: found a group of this "
                      "kind at byte 2 of 'a(?=b)', allowed:"));
  EXPECT_TRUE(refused("/pre_tokenizer/pretokenizers/1/add_prefix_space", true,
                      "add_prefix_space: found true, allowed: false where another step"));
  EXPECT_TRUE(refused("/pre_tokenizer/pretokenizers/0/type", "ByteLevel",
                      "pretokenizers[1].type: found \"ByteLevel\", allowed: nothing after"));
  EXPECT_TRUE(refused("/normalizer/type", "NFKC", "'T': normalizer.type: found \"NFKC\", allowed"));
  EXPECT_TRUE(refused("/normalizer", {{"type", "Replace"}, {"pattern", {{"Regex", "a"}}}},
                      "'T': normalizer.pattern: found {\"Regex\":\"a\"}, allowed: {\"String\""));
  EXPECT_TRUE(refused("/decoder/type", "WordPiece", "'T': decoder.type: found \"WordPiece\""));
  EXPECT_TRUE(refused("/post_processor/type", "New", "'T': post_processor.type: found \"New\""));
}

TEST_F(DamagedTokenizer, MetaspaceDecodesAlone) {
  const auto decoder = [](const std::string& steps) {
    return HfJson::parse(R"({"type": "Sequence", "decoders": [{"type": "Metaspace"}, )" + steps +
                         "]}");
  };
  const std::string fallback = R"({"type": "ByteFallback"})", fuse = R"({"type": "Fuse"})",
                    strip = R"({"type": "Strip", "content": " ", "start": 1, "stop": 0})";
  const std::string allowed = "allowed: ByteLevel or Metaspace alone";
  EXPECT_TRUE(refused("/decoder", decoder(fallback + ", " + fuse + ", " + strip),
                      "'T': decoder.decoders[1].type: found \"ByteFallback\", " + allowed));
  EXPECT_TRUE(refused("/decoder", decoder(fuse + ", " + strip),
                      "'T': decoder.decoders[2].type: found \"Strip\", " + allowed));
  HfJson fused = fuzz::sentence_sample();
  fused["decoder"] = decoder(fuse);
  HuggingFaceTokenizer tokenizer = hf_tokenizer(fused);
  EXPECT_EQ(tokenizer.decode(tokenizer.encode("the  the")), "the  the");
}

TEST_F(DamagedTokenizer, AddedTokensAreNamed) {
  EXPECT_TRUE(refused("/added_tokens/1/id", 5, "'T': added_tokens[1].id: found 5, allowed: 26"));
  EXPECT_TRUE(
      refused("/added_tokens/0/content", "", "added_tokens[0].content: found \"\", allowed"));
  EXPECT_TRUE(refused("/added_tokens/0/lstrip", nullptr, "added_tokens[0].lstrip: found null"));
  EXPECT_TRUE(
      refused("/added_tokens/2/single_word", true, "single_word: found true, allowed: fal"));
  EXPECT_TRUE(
      refused("/added_tokens", {{"a", 1}}, "'T': added_tokens: found {\"a\":1}, allowed: an"));
  good_["added_tokens"].push_back(good_["added_tokens"][1]);
  EXPECT_EQ(hf_tokenizer(good_).encode("a <mask>").size(), 2U);
  EXPECT_TRUE(refused("/added_tokens/3/lstrip", false,
                      "'T': added_tokens[3].content: found \"<mask>\", allowed: a content that "
                      "added_tokens[1] lacks, or an equal entry"));
}

HfJson with_added_tokens(const HfJson& vocab, const std::vector<std::pair<int, HfJson>>& added) {
  HfJson json = {{"model", {{"type", "BPE"}, {"vocab", vocab}, {"merges", HfJson::array()}}}};
  for (const auto& [id, content] : added) {
    json["added_tokens"].push_back(fuzz::sentence_sample()["added_tokens"][0]);
    json["added_tokens"].back().update({{"id", id}, {"content", content}});
  }
  return json;
}

/// The ids match PyPI's tokenizers 0.23.3.
TEST(HuggingFaceTokenizer, AddedTokensFillTheGapsOfTheVocabulary) {
  const HfJson vocab = {{"a", 0}, {"b", 1}, {"</s>", 5}};
  EXPECT_TRUE(hf_refused(with_added_tokens(vocab, {{5, "</s>"}, {6, "<x>"}}),
                         "'T': added_tokens[1].id: found 6, allowed: 3"));
  HfJson json = with_added_tokens(vocab, {{3, "<x>"}, {5, "</s>"}, {4, "<y>"}});
  EXPECT_EQ(hf_tokenizer(json).encode("<y>a<x></s>"), (std::vector<int64_t>{4, 0, 3, 5}));
  json = with_added_tokens(vocab, {{3, "<x>"}, {4, "<y>"}, {5, "<z>"}});
  EXPECT_TRUE(hf_refused(json, "added_tokens[2].id: found 5, allowed: an id that no other token"));
}

TEST(HuggingFaceTokenizer, DamagedFilesAreNamed) {
  const auto refused = [](const std::string& text, const std::string& part) {
    return throws_with<FileError>([&] { parse_hugging_face_tokenizer(text, "T"); }, part);
  };
  const std::string good = fuzz::byte_level_sample().dump();
  EXPECT_TRUE(refused(good.substr(0, 1000), "'T' is damaged: parse error at line"));
  EXPECT_TRUE(refused(good.substr(0, 1000), "column 1001"));
  EXPECT_TRUE(refused("[]", "'T': found [], allowed: an object"));
  EXPECT_TRUE(refused("{}", "'T': model: found null, allowed: an object"));
  HfJson sentences = fuzz::sentence_sample();
  sentences["model"]["vocab"].erase("<0x41>");
  EXPECT_TRUE(hf_refused(sentences,
                         "'T': model.byte_fallback: found true, allowed: false where "
                         "model.vocab has 255 of the tokens <0x00> to <0xFF>"));
  sentences = fuzz::sentence_sample();
  sentences["model"]["unk_token"] = "<none>";
  EXPECT_TRUE(hf_refused(sentences, "'T': model.unk_token: found \"<none>\", allowed: null or a"));
  sentences["model"]["unk_token"] = "h";
  EXPECT_TRUE(hf_refused(sentences, "'T': model.merges[1]: found \"h e\", allowed: tokens"));
}

TEST(HuggingFaceTokenizer, MutationsAreReadOrRefused) {
  std::mt19937 random(24);
  int refused = 0;
  for (const HfJson& sample : {fuzz::byte_level_sample(), fuzz::sentence_sample()})
    for (int i = 0; i < 500; ++i) {
      std::string text = sample.dump();
      const size_t place = random() % text.size();
      if (i % 3 == 0)
        text.erase(place, random() % 4 + 1);
      else
        text[place] = static_cast<char>(random());
      try {
        HuggingFaceTokenizer(parse_hugging_face_tokenizer(text, "T")).encode("the t\xC3\xA9xt's");
      } catch (const FileError&) {
        ++refused;
      }
    }
  EXPECT_GT(refused, 300);
}

/// Tries every way to cut a text into two parts, and into single bytes.
TEST(HuggingFaceTokenizer, PartsGiveTheWholeWhereverTheyEnd) {
  const std::string texts[] = {
      "the  <mask>  the caf\xC3\xA9 cafe\xCC\x81 \xE6\x9D\xB1\r\n\n  <|endof <|endoftext|>the's'",
      "</s>   the \xFF\xE6\x9D \xF0\x9F\x98\x80\xE2\x96\x81\xE2\x96\x81</s </s>\n the",
      "a\xCC\xA7\xCC\x81\xCC\xA7 \xE1\x84\x80\xE1\x85\xA1\xE1\x86\xA8  thethethe 12 ''"};
  for (const HfJson& sample : {fuzz::byte_level_sample(), fuzz::sentence_sample()}) {
    HuggingFaceTokenizer tokenizer = hf_tokenizer(sample);
    for (const std::string& text : texts) {
      const auto whole = tokenizer.encode(text);
      std::vector<int64_t> bytes;
      std::string buffer;
      for (size_t i = 0; i < text.size(); ++i) {
        buffer += text[i];
        buffer.erase(0, tokenizer.encode_front(buffer, i + 1 == text.size(), bytes));
      }
      EXPECT_EQ(bytes, whole) << text;
      for (size_t cut = 0; cut <= text.size(); ++cut) {
        std::vector<int64_t> ids;
        const size_t used = tokenizer.encode_front(text.substr(0, cut), false, ids);
        tokenizer.encode_front(text.substr(used), true, ids);
        EXPECT_EQ(ids, whole) << text << " cut at " << cut;
      }
    }
  }
}

/// The ids match PyPI's tokenizers 0.23.3.
TEST(HuggingFaceTokenizer, WhiteSpaceThatATokenTakesMayBeTheFrontOfTheNext) {
  HfJson json = fuzz::byte_level_sample();
  const auto first = json["model"]["vocab"].size();
  json["added_tokens"] = HfJson::array();
  const auto add = [&](const char* content, bool lstrip, bool rstrip) {
    const auto id = static_cast<int64_t>(first + json["added_tokens"].size());
    json["added_tokens"].push_back({{"id", id},
                                    {"content", content},
                                    {"single_word", false},
                                    {"lstrip", lstrip},
                                    {"rstrip", rstrip},
                                    {"normalized", true},
                                    {"special", false}});
    return id;
  };
  const int64_t right = add("<R>", false, true), name = add("  N", false, false),
                lines = add("\n\n", false, false), left = add("<L>", true, false),
                both = add(" <B>", true, true);
  HuggingFaceTokenizer tokenizer = hf_tokenizer(json);
  using Ids = std::vector<int64_t>;
  for (const auto& [text, expected] : std::vector<std::pair<std::string, Ids>>{
           {"<R>  N x", {right, name, ' ', 'x'}},
           {"<R>   Nx", {right, name, 'x'}},
           {"<R>\n\n\n\n\nx", {right, lines, lines, '\n', 'x'}},
           {"<R>\n\n", {right, lines}},
           {"<R>\n", {right}},
           {"<R>  <L>", {right, left}},
           {"<R>  <B>  Nx", {right, both, name, 'x'}},
           {"<R>\n\n\n\n<L>\n\nx", {right, lines, lines, left, lines, 'x'}},
           {"<R>\n\n  N", {right, lines, name}}}) {
    EXPECT_EQ(tokenizer.encode(text), expected) << text;
    for (size_t cut = 0; cut <= text.size(); ++cut) {
      Ids ids;
      tokenizer.restart();
      const size_t used = tokenizer.encode_front(text.substr(0, cut), false, ids);
      tokenizer.encode_front(text.substr(used), true, ids);
      EXPECT_EQ(ids, expected) << text << " cut at " << cut;
    }
  }
}

/// The ids match PyPI's tokenizers 0.23.3.
TEST(HuggingFaceTokenizer, CharactersThatAreLeftOutDoNotKeepOthersApart) {
  HuggingFaceTokenizer tokenizer = hf_tokenizer(HfJson::parse(
      R"({"model": {"type": "BPE", "vocab": {"a": 0, "b": 1, "ab": 2}, "merges": [["a", "b"]]}})"));
  using Ids = std::vector<int64_t>;
  for (const auto& [text, expected] :
       std::vector<std::pair<std::string, Ids>>{{"a\u00E9b", {2}},
                                                {"a\u00E9\u00E9b", {2}},
                                                {"\u00E9ab", {2}},
                                                {"ab\u00E9ab", {2, 2}},
                                                {"ba\u00E9b", {1, 2}},
                                                {"a\u00E9", Ids{0}},
                                                {"\u00E9\u00E9", Ids{}}}) {
    EXPECT_EQ(tokenizer.encode(text), expected) << text;
    for (size_t cut = 0; cut <= text.size(); ++cut) {
      Ids ids;
      tokenizer.restart();
      const size_t used = tokenizer.encode_front(text.substr(0, cut), false, ids);
      tokenizer.encode_front(text.substr(used), true, ids);
      EXPECT_EQ(ids, expected) << text << " cut at " << cut;
    }
  }
}

TEST(HuggingFaceTokenizer, MemoryIsBounded) {
  std::string text;
  for (int i = 0; i < 20000; ++i) text += i % 97 == 0 ? "e\xCC\x81 12\n" : " the cat's hat";
  for (const HfJson& sample : {fuzz::byte_level_sample(), fuzz::sentence_sample()}) {
    HuggingFaceTokenizer tokenizer = hf_tokenizer(sample);
    const auto whole = tokenizer.encode(text);
    std::vector<int64_t> ids;
    std::string buffer;
    size_t most = 0;
    for (size_t place = 0; place < text.size(); place += 100) {
      buffer += text.substr(place, 100);
      buffer.erase(0, tokenizer.encode_front(buffer, place + 100 >= text.size(), ids));
      most = std::max(most, buffer.size());
    }
    EXPECT_EQ(ids, whole);
    EXPECT_LT(most, 40U);
  }
}

TEST(HuggingFaceTokenizer, DecodesATextAndItsContinuation) {
  HuggingFaceTokenizer sentences = hf_tokenizer(fuzz::sentence_sample());
  const auto ids = sentences.encode("the \xC3\xA9\xE6\x9D\xB1 the");
  EXPECT_EQ(sentences.decode(ids), "the \xC3\xA9\xE6\x9D\xB1 the");
  EXPECT_EQ(sentences.decode_more(ids), " the \xC3\xA9\xE6\x9D\xB1 the");
  HuggingFaceTokenizer bytes = hf_tokenizer(fuzz::byte_level_sample());
  EXPECT_EQ(bytes.decode(bytes.encode("the\n <|endoftext|>e\xCC\x81")),
            "the\n <|endoftext|>\xC3\xA9");
  EXPECT_TRUE(throws_with<UsageError>([&] { bytes.decode({-1}); }, "token id: found -1, allowed"));
  EXPECT_TRUE(throws_with<UsageError>([&] { bytes.decode({5000}); }, "found 5000, allowed: 0 to"));
}

TEST(HuggingFaceTokenizer, TheConfigurationNamesTheEndOfDocuments) {
  const testing::TemporaryFolder folder;
  folder.write("tokenizer.json", fuzz::byte_level_sample().dump());
  const std::string path = (folder.path() / "tokenizer.json").string();
  const auto tokenizer = make_tokenizer("hf:" + path, "field");
  EXPECT_EQ(tokenizer->decode({tokenizer->end_of_document()}), "<|endoftext|>");
  folder.write("tokenizer_config.json", R"({"eos_token": {"content": "<mask>"}})");
  EXPECT_EQ(HuggingFaceTokenizer(path).end_of_document(), tokenizer->end_of_document() + 1);
  folder.write("tokenizer_config.json", R"({"eos_token": "none"})");
  EXPECT_TRUE(throws_with<FileError>([&] { HuggingFaceTokenizer{path}; },
                                     "tokenizer_config.json': eos_token: found \"none\", allowed"));
  folder.write("tokenizer_config.json", "{");
  EXPECT_TRUE(throws_with<FileError>([&] { HuggingFaceTokenizer{path}; }, "is damaged"));
  HfJson none = fuzz::byte_level_sample();
  none["added_tokens"] = HfJson::array();
  EXPECT_TRUE(
      throws_with<FileError>([&] { hf_tokenizer(none).end_of_document(); },
                             "'T': found no token that ends documents; allowed: eos_token"));
}

TEST(HuggingFaceTokenizer, ADocumentThatIsSkippedLeavesNothingBehind) {
  const testing::TemporaryFolder folder;
  std::string text;
  while (text.size() < size_t{5} << 20) text += "the ";
  const std::string prefix = folder.path() / "set";
  const auto lines =
      folder.write("a.jsonl", "{\"text\": \"" + text + "\xFF\"}\n" + "{\"text\": \"the\"}\n");
  const auto make = [] {
    return std::make_unique<HuggingFaceTokenizer>(hf_tokenizer(fuzz::sentence_sample()));
  };
  const auto done = build_dataset({.input = {lines}, .output = prefix, .skip_bad = true}, make,
                                  [](const BuildProgress&) {});
  EXPECT_EQ(done.skipped, 1);
  const std::vector<int64_t> expected = make()->encode("the");
  std::vector<int64_t> found(expected.size());
  ASSERT_EQ(done.tokens, static_cast<int64_t>(expected.size()));
  IndexedDataset(prefix).sequence(0).read(0, found);
  EXPECT_EQ(found, expected);
}

TEST(HuggingFaceTokenizer, ThreadsShareTheTables) {
  const auto tokenizer =
      std::make_unique<HuggingFaceTokenizer>(hf_tokenizer(fuzz::sentence_sample()));
  std::string text;
  for (int i = 0; i < 3000; ++i) text += " the" + std::string(static_cast<size_t>(i % 7), 'h');
  const auto expected = tokenizer->encode(text);
  std::vector<std::vector<int64_t>> found(4);
  std::vector<std::thread> threads;
  for (auto& ids : found)
    threads.emplace_back([&ids, &text, own = std::shared_ptr<Tokenizer>(tokenizer->clone())] {
      ids = own->encode(text);
    });
  for (std::thread& thread : threads) thread.join();
  for (const auto& ids : found) EXPECT_EQ(ids, expected);
}

}  // namespace
}  // namespace lockstep
