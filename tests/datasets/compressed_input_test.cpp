#include "lockstep/datasets/compressed_input.h"

#include <gtest/gtest.h>
#include <zlib.h>
#include <zstd.h>

#include <algorithm>
#include <string>

#include "lockstep/tests/support/compressed_text.h"
#include "lockstep/tests/support/throws_with.h"

namespace lockstep {
namespace {

using testing::gzip_of;
using testing::throws_with;
using testing::zstd_of;

/// A source that gives at most `most` bytes at a time.
CompressedInput::Source source_of(std::string bytes, size_t most) {
  return [bytes = std::move(bytes), most, at = size_t{0}](char* to, size_t count) mutable {
    const size_t now = std::min({count, most, bytes.size() - at});
    bytes.copy(to, now, at);
    at += now;
    return now;
  };
}

std::string decompressed(const std::string& bytes, const std::string& path, size_t at_once = 1000) {
  CompressedInput input(compression_of(path), source_of(bytes, at_once), path);
  std::string text;
  std::string part(at_once, '\0');
  for (size_t got = 0; (got = input.read(part.data(), at_once)) > 0;) text += part.substr(0, got);
  EXPECT_EQ(input.read(part.data(), at_once), 0u);
  return text;
}

std::string long_text() {
  std::string text;
  for (int i = 0; i < 20000; ++i) text += std::to_string(i * 7919) + (i % 9 ? " " : "\n");
  return text;
}

TEST(CompressedInput, TellsByTheName) {
  EXPECT_EQ(compression_of("a.jsonl.gz"), Compression::gzip);
  EXPECT_EQ(compression_of("a.zst"), Compression::zstd);
  EXPECT_EQ(compression_of("a.gz.txt"), Compression::none);
  EXPECT_EQ(without_compression("a.jsonl.zst"), "a.jsonl");
  EXPECT_EQ(without_compression("a.jsonl"), "a.jsonl");
  EXPECT_EQ(decompressed("as it is", "a"), "as it is");
}

TEST(CompressedInput, ReadsMembersAndFramesOneAfterAnother) {
  const std::string text = long_text(), more = "and more";
  for (const size_t at_once : {1, 7, 1 << 20}) {
    EXPECT_EQ(decompressed(gzip_of(text), "a.gz", at_once), text);
    EXPECT_EQ(decompressed(gzip_of(text) + gzip_of("") + gzip_of(more), "a.gz", at_once),
              text + more);
    EXPECT_EQ(decompressed(gzip_of(text) + std::string(700, '\0') + gzip_of(more), "a.gz", at_once),
              text + more);
    EXPECT_EQ(decompressed(zstd_of(text) + zstd_of("") + zstd_of(more), "a.zst", at_once),
              text + more);
    const std::string skippable("\x50\x2A\x4D\x18\x03\0\0\0abc", 11);
    EXPECT_EQ(decompressed(zstd_of(text) + skippable + zstd_of(more), "a.zst", at_once),
              text + more);
  }
}

TEST(CompressedInput, GivesAllInFrontOfADamageAndThenNamesThePlace) {
  const std::string text = long_text();
  for (const char* path : {"a.gz", "a.zst"}) {
    const bool gzip = compression_of(path) == Compression::gzip;
    const std::string whole = gzip ? gzip_of(text) : zstd_of(text);
    const auto read = [&](const std::string& bytes) {
      return [&, bytes] { decompressed(bytes, path); };
    };
    for (size_t size : {size_t{0}, size_t{1}, whole.size() / 2, whole.size() - 1})
      EXPECT_TRUE(throws_with<CompressionError>(
          read(whole.substr(0, size)), "'" + std::string(path) +
                                           "': the compressed data end too early, at byte " +
                                           std::to_string(size)));
    EXPECT_TRUE(throws_with<CompressionError>(read(whole + "garbage"), "are damaged at byte"));
    EXPECT_TRUE(throws_with<CompressionError>(read("plain text"), "are damaged at byte"));
    std::string flipped = whole;
    flipped[whole.size() / 2] = static_cast<char>(flipped[whole.size() / 2] ^ 0x10);
    EXPECT_THROW(decompressed(flipped, path), CompressionError);
    CompressedInput input(compression_of(path), source_of(whole.substr(0, whole.size() - 1), 64),
                          path);
    std::string all(2 * text.size(), '\0');
    all.resize(input.read(all.data(), all.size()));
    EXPECT_GT(all.size(), text.size() / 2);
    EXPECT_TRUE(text.starts_with(all));
    EXPECT_THROW(input.read(all.data(), 1), CompressionError);
    EXPECT_THROW(input.read(all.data(), 1), CompressionError);
  }
}

TEST(CompressedInput, GivesNothingOfAFrameWhoseHeaderIsDamaged) {
  const std::string text = "in front";
  std::string damaged = zstd_of("behind");
  damaged[4] = static_cast<char>(damaged[4] | 0x08);  // a reserved bit of the frame header
  for (const size_t room : {size_t{16}, size_t{1} << 16}) {
    CompressedInput input(Compression::zstd, source_of(zstd_of(text) + damaged, 64), "a.zst");
    std::string all(room, '?');
    all.resize(input.read(all.data(), all.size()));
    EXPECT_EQ(all, text);
    EXPECT_TRUE(
        throws_with<CompressionError>([&] { input.read(all.data(), 1); }, "are damaged at byte"));
  }
}

TEST(CompressedInput, ErrorsOfTheSourcePassThrough) {
  CompressedInput input(
      Compression::gzip, [](char*, size_t) -> size_t { throw FileError("disk"); }, "a.gz");
  char byte = 0;
  EXPECT_TRUE(throws_with<FileError>([&] { input.read(&byte, 1); }, "disk"));
}

}  // namespace
}  // namespace lockstep
