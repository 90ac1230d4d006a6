#include "lockstep/checkpoint/safetensors_header.h"

#include <gtest/gtest.h>

#include <random>

#include "lockstep/core/error.h"
#include "lockstep/tests/support/throws_with.h"

namespace lockstep {
namespace {

using testing::throws_with;

/// The header that Hugging Face's safetensors library writes for these two tensors.
const std::string kJson =
    R"({"__metadata__":{"format":"pt"},"b":{"dtype":"I64","shape":[1,3],"data_offsets":[0,24]},)"
    R"("a":{"dtype":"BF16","shape":[2],"data_offsets":[24,28]}})";

TEST(SafetensorsHeader, WritesWhatTheReferenceWrites) {
  const SafetensorsHeader header{
      .entries = {{"b", "I64", {1, 3}, 0, 24}, {"a", "BF16", {2}, 24, 28}},
      .metadata = {{"format", "pt"}}};
  std::string expected("\x90\0\0\0\0\0\0\0", 8);
  expected += kJson;
  EXPECT_EQ(format_safetensors_header(header), expected);
}

TEST(SafetensorsHeader, ReadsWhatTheReferenceWrites) {
  const SafetensorsHeader header = parse_safetensors_header(kJson, 28, "file");
  ASSERT_EQ(header.entries.size(), 2u);
  EXPECT_EQ(header.entries[0].name, "b");
  EXPECT_EQ(header.entries[1].dtype, "BF16");
  EXPECT_EQ(header.entries[1].shape, std::vector<int64_t>{2});
  EXPECT_EQ(header.entries[1].begin, 24);
  EXPECT_EQ(header.metadata.at("format"), "pt");
}

TEST(SafetensorsHeader, LengthIsPaddedToEightBytes) {
  for (size_t length = 1; length < 12; ++length) {
    const SafetensorsHeader header{.entries = {{std::string(length, 'x'), "U8", {1}, 0, 1}},
                                   .metadata = {}};
    const std::string text = format_safetensors_header(header);
    EXPECT_EQ(text.size() % 8, 0u);
    EXPECT_EQ(parse_safetensors_length(text, static_cast<int64_t>(text.size()) + 1, "file"),
              static_cast<int64_t>(text.size()) - 8);
  }
}

TEST(SafetensorsHeader, DamageIsNamed) {
  const auto refuses = [](const std::string& json, const std::string& part) {
    return throws_with<FileError>([&] { parse_safetensors_header(json, 4, "weights"); }, part);
  };
  const auto tensor = [](const std::string& body) { return R"({"w":{)" + body + "}}"; };
  EXPECT_TRUE(refuses("", "weights"));
  EXPECT_TRUE(refuses("[]", "not a JSON object"));
  EXPECT_TRUE(refuses("{\"w\":", "damaged"));
  EXPECT_TRUE(refuses(R"({"w":3})", "tensor 'w'"));
  EXPECT_TRUE(refuses(tensor(R"("dtype":"F32","shape":[1])"), "data_offsets"));
  EXPECT_TRUE(refuses(tensor(R"("dtype":"F99","shape":[1],"data_offsets":[0,4])"), "'F99'"));
  EXPECT_TRUE(refuses(tensor(R"("dtype":"F32","shape":[-1],"data_offsets":[0,4])"), "found -1"));
  EXPECT_TRUE(refuses(tensor(R"("dtype":"F32","shape":[1e30],"data_offsets":[0,4])"),
                      "shape: found [1e+30], allowed: a list of whole numbers"));
  EXPECT_TRUE(refuses(tensor(R"("dtype":"F32","shape":[1],"data_offsets":[0,4.5])"),
                      "data_offsets: found [0,4.5], allowed: a list of whole numbers"));
  EXPECT_TRUE(refuses(tensor(R"("dtype":"F32","shape":[2],"data_offsets":[0,4])"), "of 8 bytes"));
  EXPECT_TRUE(refuses(tensor(R"("dtype":"F32","shape":[1],"data_offsets":[4,0])"), "[4, 0]"));
  EXPECT_TRUE(refuses(tensor(R"("dtype":"U8","shape":[3],"data_offsets":[1,4])"), "allowed: 0"));
  EXPECT_TRUE(refuses(tensor(R"("dtype":"U8","shape":[3],"data_offsets":[0,3])"), "the file at 4"));
  EXPECT_TRUE(refuses(
      tensor(R"("dtype":"F32","shape":[4294967296,4294967296],"data_offsets":[0,4])"), "64 bits"));
  EXPECT_TRUE(refuses(R"({"w":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},)"
                      R"("w":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}})",
                      "twice"));
  EXPECT_TRUE(throws_with<FileError>([] { parse_safetensors_length("abc", 3, "w"); }, "3 bytes"));
  EXPECT_TRUE(throws_with<FileError>(
      [] { parse_safetensors_length(std::string(8, '\xff'), 1 << 20, "w"); }, "a header of"));
}

TEST(SafetensorsHeader, EveryByteThatIsFlippedOrCutIsFoundOrBelongsToAName) {
  const auto reads = [](const std::string& json) {
    try {
      const SafetensorsHeader header = parse_safetensors_header(json, 28, "file");
      EXPECT_EQ(header.entries.size(), 2u);
      EXPECT_EQ(header.entries[0].end, 24);
      EXPECT_EQ(header.entries[1].end, 28);
      return true;
    } catch (const FileError& error) {
      EXPECT_NE(std::string(error.what()).find("'file'"), std::string::npos) << error.what();
      return false;
    }
  };
  int taken = 0;
  for (size_t i = 0; i < kJson.size(); ++i) {
    EXPECT_FALSE(reads(kJson.substr(0, i)));
    for (int bit = 0; bit < 8; ++bit) {
      std::string damaged = kJson;
      damaged[i] = static_cast<char>(damaged[i] ^ (1 << bit));
      taken += reads(damaged) ? 1 : 0;
    }
  }
  EXPECT_LT(taken, 150);
}

TEST(SafetensorsHeader, MutatedHeadersAreReadOrRefused) {
  std::mt19937 random(1);
  int refused = 0;
  for (int i = 0; i < 20000; ++i) {
    std::string json = kJson;
    for (unsigned n = random() % 3 + 1; n > 0; --n) {
      const size_t place = random() % json.size();
      if (random() % 3 == 0)
        json.erase(place, random() % 4 + 1);
      else
        json[place] = static_cast<char>(random());
    }
    try {
      const auto header = parse_safetensors_header(json, 28, "file");
      int64_t end = 0;
      for (const auto& entry : header.entries) end = std::max(end, entry.end);
      EXPECT_EQ(end, 28);
    } catch (const FileError&) {
      ++refused;
    }
  }
  EXPECT_GT(refused, 15000);
}

}  // namespace
}  // namespace lockstep
