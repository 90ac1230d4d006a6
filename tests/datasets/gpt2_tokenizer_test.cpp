#include "lockstep/datasets/gpt2_tokenizer.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <random>

#include "lockstep/core/error.h"
#include "lockstep/datasets/gpt2_vocabulary.h"
#include "lockstep/datasets/piece_cutter.h"
#include "lockstep/tests/support/temporary_folder.h"
#include "lockstep/tests/support/throws_with.h"

namespace lockstep {
namespace {

using Json = nlohmann::json;
using testing::TemporaryFolder;
using testing::throws_with;

/// Written by scripts/golden/gpt2_tokenizer.py: texts, a small vocabulary, and tiktoken's ids.
const Json& golden() {
  static const Json json =
      Json::parse(std::ifstream(LOCKSTEP_SOURCE_DIR "/tests/datasets/gpt2_tokenizer_golden.json"));
  return json;
}

std::string small_merges() {
  std::string lines = "#version: 0.2\n";
  for (const auto& line : golden()["merges"]) lines += line.get<std::string>() + "\n";
  return lines;
}

Gpt2Tokenizer small_tokenizer() {
  return Gpt2Tokenizer(parse_gpt2_vocabulary(golden()["encoder"].dump(), "encoder.json",
                                             small_merges(), "vocab.bpe"));
}

std::string base64(std::string_view bytes) {
  constexpr std::string_view kDigits =
      "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
  std::string text;
  for (size_t i = 0; i < bytes.size(); i += 3) {
    uint32_t bits = 0;
    for (size_t k = 0; k < 3; ++k)
      bits = bits << 8 | (i + k < bytes.size() ? static_cast<unsigned char>(bytes[i + k]) : 0);
    for (size_t k = 0; k < 4; ++k)
      text += i + k > bytes.size() ? '=' : kDigits[bits >> (18 - 6 * k) & 63];
  }
  return text;
}

/// tiktoken's file for the same tokens.
std::string ranks_of(const Gpt2Vocabulary& vocabulary) {
  std::string lines;
  for (size_t id = 0; id < vocabulary.tokens.size(); ++id)
    if (id != vocabulary.end_of_text)
      lines += base64(vocabulary.tokens[id]) + " " + std::to_string(id) + "\n";
  return lines;
}

/// The ids of the small vocabulary in rank order: the bytes, then the results of the merges.
std::vector<uint32_t> ids_by_rank() {
  const Gpt2Vocabulary vocabulary =
      parse_gpt2_vocabulary(golden()["encoder"].dump(), "E", small_merges(), "M");
  std::vector<uint32_t> ids(vocabulary.byte_ids.begin(), vocabulary.byte_ids.end());
  for (const PairMerge& merge : vocabulary.merges) ids.push_back(merge.result);
  return ids;
}

std::string small_ranks() {
  const Gpt2Vocabulary vocabulary =
      parse_gpt2_vocabulary(golden()["encoder"].dump(), "E", small_merges(), "M");
  Gpt2Vocabulary ordered;
  for (const uint32_t id : ids_by_rank()) ordered.tokens.push_back(vocabulary.tokens[id]);
  return ranks_of(ordered);
}

const PieceCutter& gpt2_cutter() {
  static const PieceCutter cutter(parse_split_pattern(kGpt2Pattern, "GPT-2"), "GPT-2");
  return cutter;
}

/// Encodes every text at once, twice: the second time, the short pieces are cached.
void expect_golden(Gpt2Tokenizer& tokenizer, const std::string& vocabulary) {
  for (int round = 0; round < 2; ++round)
    for (const Json& test : golden()["cases"]) {
      const auto text = test["text"].get<std::string>();
      const auto ids = tokenizer.encode(text);
      EXPECT_EQ(ids, test[vocabulary].get<std::vector<int64_t>>()) << text;
      EXPECT_EQ(tokenizer.decode(ids), text);
    }
}

std::vector<int64_t> encode_in_parts(Tokenizer& tokenizer, const std::string& text,
                                     std::mt19937& random) {
  std::vector<int64_t> ids;
  std::string buffer;
  for (size_t place = 0; place < text.size();) {
    const size_t more = std::min<size_t>(random() % 12 + 1, text.size() - place);
    buffer += text.substr(place, more);
    place += more;
    buffer.erase(0, tokenizer.encode_front(buffer, place == text.size(), ids));
  }
  EXPECT_TRUE(buffer.empty());
  return ids;
}

TEST(Gpt2Tokenizer, EqualsTiktokenWithASmallVocabulary) {
  Gpt2Tokenizer tokenizer = small_tokenizer();
  expect_golden(tokenizer, "small");
  EXPECT_GT(golden()["cases"].size(), 50u);
}

TEST(Gpt2Tokenizer, EqualsTiktokenWithGpt2sVocabulary) {
  const std::string folder = LOCKSTEP_SOURCE_DIR "/data/gpt2";
  if (!std::filesystem::exists(folder)) GTEST_SKIP() << "scripts/setup gpt2 fetches it";
  Gpt2Tokenizer tokenizer(folder);
  const TemporaryFolder ranks;
  ranks.write("r50k_base.tiktoken", ranks_of(read_gpt2_vocabulary(folder)));
  Gpt2Tokenizer by_ranks(ranks.path().string());
  for (Gpt2Tokenizer* each : {&tokenizer, &by_ranks}) {
    EXPECT_EQ(each->vocabulary_size(), 50257);
    EXPECT_EQ(each->end_of_document(), 50256);
    expect_golden(*each, "gpt2");
  }
}

TEST(Gpt2Tokenizer, ALongTextComesInParts) {
  std::mt19937 random(3);
  Gpt2Tokenizer tokenizer = small_tokenizer();
  std::string all;
  for (const Json& test : golden()["cases"]) all += test["text"].get<std::string>();
  const auto expected = tokenizer.encode(all);
  for (int round = 0; round < 20; ++round)
    EXPECT_EQ(encode_in_parts(tokenizer, all, random), expected);
  for (const Json& test : golden()["cases"]) {
    const auto text = test["text"].get<std::string>();
    EXPECT_EQ(encode_in_parts(tokenizer, text, random), test["small"].get<std::vector<int64_t>>())
        << text;
  }
}

TEST(Gpt2Tokenizer, AnyBytesSurvive) {
  std::mt19937 random(4);
  Gpt2Tokenizer tokenizer = small_tokenizer();
  const std::string lead = "\xC2\xE1\xF0\xF4\xED\xE0\xFF\x80\xBF '\xA0";
  for (int round = 0; round < 2000; ++round) {
    std::string bytes;
    for (auto n = random() % 40; n > 0; --n)
      bytes.push_back(random() % 2 == 0 ? lead[random() % lead.size()]
                                        : static_cast<char>(random()));
    const auto ids = tokenizer.encode(bytes);
    EXPECT_EQ(tokenizer.decode(ids), bytes);
    EXPECT_EQ(encode_in_parts(tokenizer, bytes, random), ids);
  }
}

/// The definition: merge the neighbours of the lowest rank, the first of several, as long as there
/// are any. For letters that GPT-2's alphabet does not change.
std::vector<int64_t> merge_slowly(const std::string& piece) {
  static const std::vector<std::string> merges = golden()["merges"];
  std::vector<std::string> tokens;
  for (const char c : piece) tokens.emplace_back(1, c);
  while (true) {
    size_t best = merges.size(), place = 0;
    for (size_t i = 0; i + 1 < tokens.size(); ++i) {
      const auto found = std::find(merges.begin(), merges.end(), tokens[i] + " " + tokens[i + 1]);
      const auto rank = static_cast<size_t>(found - merges.begin());
      if (rank < best) place = i;
      best = std::min(best, rank);
    }
    if (best == merges.size()) break;
    tokens[place] += tokens[place + 1];
    tokens.erase(tokens.begin() + static_cast<std::ptrdiff_t>(place) + 1);
  }
  std::vector<int64_t> ids;
  for (const std::string& token : tokens) ids.push_back(golden()["encoder"][token]);
  return ids;
}

TEST(Gpt2Tokenizer, MergesAsDefined) {
  std::mt19937 random(5);
  Gpt2Tokenizer tokenizer = small_tokenizer();
  std::vector<std::string> tokens;
  for (const auto& [token, id] : golden()["encoder"].items())
    if (std::all_of(token.begin(), token.end(), [](char c) { return c >= 'a' && c <= 'z'; }))
      tokens.push_back(token);
  for (int round = 0; round < 1500; ++round) {
    std::string word;
    for (auto n = random() % 12 + 1; n > 0; --n) word += tokens[random() % tokens.size()];
    ASSERT_EQ(tokenizer.encode(word), merge_slowly(word)) << word;
  }
}

TEST(Gpt2Tokenizer, APieceOfAMillionBytes) {
  Gpt2Tokenizer tokenizer = small_tokenizer();
  const std::string text(1 << 20, 'a');
  EXPECT_EQ(gpt2_cutter().first(text, /*last=*/true).length, text.size());
  const auto ids = tokenizer.encode(text);
  EXPECT_LT(ids.size(), text.size());
  EXPECT_EQ(tokenizer.decode(ids), text);
}

TEST(Gpt2Pieces, BytesThatAreNoUtf8AreOtherCharacters) {
  const auto pieces = [](std::string_view text) {
    std::vector<std::string> found;
    for (; !text.empty(); text.remove_prefix(found.back().size()))
      found.emplace_back(text.substr(0, gpt2_cutter().first(text, /*last=*/true).length));
    return found;
  };
  using Pieces = std::vector<std::string>;
  EXPECT_EQ(pieces("a\xFF\xC3z"), (Pieces{"a", "\xFF\xC3", "z"}));
  EXPECT_EQ(pieces("\xC0\xAF\xED\xA0\x80."), (Pieces{"\xC0\xAF\xED\xA0\x80."}));
  EXPECT_EQ(pieces("x\xE4\xB8"), (Pieces{"x", "\xE4\xB8"}));
  EXPECT_EQ(pieces("x\xE4\xB8\xAD"), (Pieces{"x\xE4\xB8\xAD"}));
}

class DamagedVocabulary : public ::testing::Test {
 protected:
  ::testing::AssertionResult refused(const std::string& part) const {
    return throws_with<FileError>(
        [&] { parse_gpt2_vocabulary(encoder_.dump(), "E", merges_, "M"); }, part);
  }

  Json encoder_ = golden()["encoder"];
  std::string merges_ = small_merges();
};

TEST_F(DamagedVocabulary, TokensAreNamed) {
  const Json good = encoder_;
  encoder_["a"] = 5000;
  EXPECT_TRUE(refused("'E': token 'a': id: found 5000, allowed: 0 to 405"));
  encoder_["a"] = -1;
  EXPECT_TRUE(refused("id: found -1"));
  encoder_["a"] = "one";
  EXPECT_TRUE(refused("id: found \"one\""));
  encoder_["a"] = good["b"];
  EXPECT_TRUE(refused(", which another token has"));
  encoder_ = good;
  encoder_["中"] = 406;
  EXPECT_TRUE(refused("'E': token '中': found '中', allowed: characters of GPT-2's alphabet"));
  encoder_ = good;
  encoder_.erase("a");
  encoder_["new"] = good["a"];
  EXPECT_TRUE(refused("'E': found no token for byte 97"));
  encoder_ = {1, 2};
  EXPECT_TRUE(refused("'E': found no JSON object"));
  EXPECT_TRUE(throws_with<FileError>([&] { parse_gpt2_vocabulary("{\"a\":", "E", merges_, "M"); },
                                     "'E' is damaged"));
  EXPECT_TRUE(throws_with<FileError>([] { small_tokenizer().end_of_document(); },
                                     "found no token '<|endoftext|>'"));
}

TEST_F(DamagedVocabulary, MergesAreNamed) {
  const std::string good = merges_;
  merges_ = good + "ab\n";
  EXPECT_TRUE(refused("'M': line 152: found 'ab', allowed: two tokens"));
  merges_ = good + "a b c\n";
  EXPECT_TRUE(refused("found 'a b c'"));
  merges_ = good + "q ~\n";
  EXPECT_TRUE(refused("found 'q ~', allowed: tokens of 'E'"));
  merges_ = good + good.substr(good.find('\n') + 1);
  EXPECT_TRUE(refused("twice"));
  merges_ = good + "a \n";
  EXPECT_TRUE(refused("an empty token"));
}

TEST_F(DamagedVocabulary, MutationsAreReadOrRefused) {
  std::mt19937 random(6);
  const std::string encoder = encoder_.dump();
  int refused = 0;
  for (int i = 0; i < 1000; ++i) {
    std::string texts[] = {encoder, merges_};
    std::string& text = texts[i % 2];
    const size_t place = random() % text.size();
    if (random() % 3 == 0)
      text.erase(place, random() % 4 + 1);
    else
      text[place] = static_cast<char>(random());
    try {
      Gpt2Tokenizer tokenizer(parse_gpt2_vocabulary(texts[0], "E", texts[1], "M"));
      EXPECT_EQ(tokenizer.decode(tokenizer.encode("the text's")), "the text's");
    } catch (const FileError&) {
      ++refused;
    }
  }
  EXPECT_GT(refused, 400);
}

TEST(TiktokenRanks, GiveWhatTiktokenGives) {
  Gpt2Tokenizer tokenizer(parse_tiktoken_ranks(small_ranks(), "ranks"));
  const std::vector<uint32_t> small_ids = ids_by_rank();
  for (const Json& test : golden()["cases"]) {
    auto ids = tokenizer.encode(test["text"].get<std::string>());
    for (int64_t& id : ids) id = small_ids[static_cast<size_t>(id)];
    EXPECT_EQ(ids, test["small"].get<std::vector<int64_t>>()) << test["text"];
  }
  EXPECT_EQ(tokenizer.vocabulary_size(), 407);
  EXPECT_EQ(tokenizer.end_of_document(), 406);
  EXPECT_EQ(tokenizer.decode({406}), "<|endoftext|>");
  // The id without a line is the end of text, as in p50k_base.
  std::string lines = small_ranks();
  const size_t last = lines.find(" 405\n");
  lines.replace(last, 5, " 406\n");
  EXPECT_EQ(Gpt2Tokenizer(parse_tiktoken_ranks(lines, "ranks")).end_of_document(), 405);
}

TEST(TiktokenRanks, DamageIsNamed) {
  const std::string good = small_ranks();
  const auto refused = [&](const std::string& lines, const std::string& part) {
    return throws_with<FileError>([&] { parse_tiktoken_ranks(lines, "R"); }, part);
  };
  EXPECT_TRUE(refused(good + "YWJjYWJj\n", "'R': line 407: found 'YWJjYWJj', allowed: a token in"));
  EXPECT_TRUE(refused(good + "YWJjYW?j 406\n", "line 407: found 'YWJjYW?j 406', allowed"));
  EXPECT_TRUE(refused(good + "YWJjYWJ 406\n", "allowed: a token in base64"));
  EXPECT_TRUE(refused(good + "YWJjYWJj -1\n", "allowed: a token in base64"));
  EXPECT_TRUE(refused(good + "YWJjYWJj 1 2\n", "allowed: a token in base64"));
  EXPECT_TRUE(refused(good + " 406\n", "found a token of 0 bytes"));
  EXPECT_TRUE(refused(good + std::string(1368, 'A') + " 406\n", "found a token of 1026 bytes"));
  EXPECT_TRUE(refused(good + "YQ== 406\n", "line 407: found the token 'YQ==' twice"));
  EXPECT_TRUE(refused(good + "YWJjYWJj 405\n", "'R': found the id 405 twice"));
  EXPECT_TRUE(refused(good + "YWJjYWJj 408\n", "found the id 408 among 407 tokens"));
  EXPECT_TRUE(refused(good.substr(good.find('\n') + 1), "'R': found no token for byte 0"));
  EXPECT_TRUE(refused("", "'R': found no token for byte 0"));
}

TEST(MakeTokenizer, ByName) {
  const TemporaryFolder folder;
  std::ofstream(folder.path() / "encoder.json") << golden()["encoder"];
  const std::string name = "gpt2:" + folder.path().string();
  EXPECT_TRUE(throws_with<FileError>([&] { make_tokenizer(name, "field"); }, "vocab.bpe' cannot"));
  folder.write("vocab.bpe", small_merges());
  EXPECT_EQ(make_tokenizer(name, "field")->vocabulary_size(), 406);
  std::filesystem::rename(folder.path() / "encoder.json", folder.path() / "vocab.json");
  std::filesystem::remove(folder.path() / "vocab.bpe");
  EXPECT_TRUE(throws_with<FileError>([&] { make_tokenizer(name, "field"); }, "merges.txt' cannot"));
  folder.write("merges.txt", small_merges());
  EXPECT_EQ(make_tokenizer(name, "field")->vocabulary_size(), 406);
  std::filesystem::remove(folder.path() / "vocab.json");
  std::filesystem::remove(folder.path() / "merges.txt");
  EXPECT_TRUE(throws_with<FileError>([&] { make_tokenizer(name, "field"); },
                                     "/' has no vocabulary of GPT-2's encoding; allowed: encoder"));
  folder.write("p50k_base.tiktoken", small_ranks());
  EXPECT_EQ(make_tokenizer(name, "field")->vocabulary_size(), 407);
  EXPECT_EQ(make_tokenizer("byte", "field")->vocabulary_size(), 257);
  for (const char* wrong : {"", "gpt2", "gpt2:", "bytes", "gpt3:x"})
    EXPECT_TRUE(throws_with<ConfigError>(
        [&] { check_tokenizer_name(wrong, "field"); },
        "field: found '" + std::string(wrong) + "', allowed: byte, gpt2:FOLDER"));
}

}  // namespace
}  // namespace lockstep
