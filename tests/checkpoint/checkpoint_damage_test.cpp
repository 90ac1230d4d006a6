#include <gtest/gtest.h>
#include <sys/resource.h>

#include <algorithm>
#include <filesystem>

#include "lockstep/checkpoint/checkpoint_folder.h"
#include "lockstep/checkpoint/checkpoint_reader.h"
#include "lockstep/checkpoint/shard_file.h"
#include "lockstep/core/config_io.h"
#include "lockstep/core/error.h"
#include "lockstep/core/integers.h"
#include "lockstep/datasets/crc32.h"
#include "lockstep/tests/support/temporary_folder.h"
#include "lockstep/tests/support/throws_with.h"

namespace lockstep {
namespace {

using testing::TemporaryFolder;
using testing::throws_with;

/// A checkpoint of two ranks: "w" [4, 6] is cut by columns, its "exp_avg" also into flat ranges,
/// and "b" [3] is whole.
class CheckpointDamageTest : public ::testing::Test {
 protected:
  CheckpointDamageTest() {
    for (size_t i = 0; i < std::size(values_); ++i) values_[i] = 0.5F + static_cast<float>(i);
    const PartialCheckpoint partial(folder_.path(), 7);
    partial.begin();
    std::vector<Manifest> parts(2);
    for (int64_t rank = 0; rank < 2; ++rank) {
      const TensorBox half = box_of({4, 3}, {{1, rank, 2}});
      std::vector<ShardContent> contents = {content("w", "", {half, {0, 12}}, rank * 12),
                                            content("w", "exp_avg", {half, {0, 5}}, 24),
                                            content("w", "exp_avg", {half, {5, 12}}, 29)};
      if (rank == 1) contents.push_back(content("b", "", {whole_box({3}), {0, 3}}, 0));
      Manifest& part = parts[static_cast<size_t>(rank)];
      const std::string name = rank == 0 ? "rank_00000.safetensors" : "rank_00001.safetensors";
      const WrittenShard shard = write_shard(partial.file("."), name, contents);
      part.files.push_back(shard.file);
      for (size_t i = 0; i < contents.size(); ++i)
        part.tensors.push_back({contents[i].name,
                                contents[i].state,
                                "F32",
                                contents[i].part.box.shape,
                                {{0, shard.offsets[i], contents[i].part}}});
    }
    Manifest whole;
    whole.iteration = 7;
    whole.consumed_samples = 70;
    whole.scaler = ManifestScaler{2, 3, 1};
    whole.skipped_steps = 5;
    whole.metrics_checksum = 0xfedcba98;
    whole.files.push_back(
        write_text_file(partial.file("."), kConfigName, print_config(parse_config("", "test"))));
    manifest_ = join_manifests(whole, parts);
    text_ = format_manifest(manifest_);
    partial.commit(text_);
    step_ = partial.path();
  }

  ShardContent content(const std::string& name, const std::string& state, const TensorPart& part,
                       int64_t first) const {
    return {name, state, "F32", part, values_ + first, part.range.numel() * 4};
  }

  void write_manifest(const std::string& text) const {
    folder_.write("step_7/manifest.textproto", text);
  }

  /// The manifest with `from` replaced by `to`, and a matching checksum.
  std::string edited(const std::string& from, const std::string& to) const {
    std::string body = text_.substr(0, text_.rfind("# crc32"));
    const auto at = body.find(from);
    EXPECT_NE(at, std::string::npos) << from;
    if (at != std::string::npos) body.replace(at, from.size(), to);
    return body + fmt_checksum(body);
  }

  static std::string fmt_checksum(const std::string& body) {
    char line[32];
    std::snprintf(line, sizeof line, "# crc32 %08x\n", crc32(body));
    return line;
  }

  TemporaryFolder folder_;
  float values_[36];
  Manifest manifest_;
  std::string text_;
  std::string step_;
};

TEST_F(CheckpointDamageTest, TheManifestComesBack) {
  EXPECT_EQ(parse_manifest(text_, "m"), manifest_);
  EXPECT_TRUE(verify_checkpoint(folder_.path()).empty());
}

TEST_F(CheckpointDamageTest, AnyPartIsReadOutOfItsPieces) {
  CheckpointReader reader(folder_.path());
  const ManifestTensor& tensor = *reader.find("w");
  const auto at = [&](int64_t row, int64_t column) {
    return values_[column / 3 * 12 + row * 3 + column % 3];
  };
  float whole[24], rows[12], range[3];
  reader.read(tensor, {whole_box({4, 6}), {0, 24}}, reinterpret_cast<char*>(whole));
  reader.read(tensor, {box_of({2, 6}, {{0, 1, 2}}), {0, 12}}, reinterpret_cast<char*>(rows));
  reader.read(tensor, {whole_box({4, 6}), {8, 11}}, reinterpret_cast<char*>(range));
  for (int64_t i = 0; i < 24; ++i) EXPECT_EQ(whole[i], at(i / 6, i % 6));
  for (int64_t i = 0; i < 12; ++i) EXPECT_EQ(rows[i], at(2 + i / 6, i % 6));
  for (int64_t i = 0; i < 3; ++i) EXPECT_EQ(range[i], at(1, 2 + i));
  const ManifestTensor& state = *reader.find("w", "exp_avg");
  reader.read(state, {whole_box({4, 6}), {0, 24}}, reinterpret_cast<char*>(whole));
  for (int64_t i = 0; i < 24; ++i) EXPECT_EQ(whole[i], values_[24 + i / 6 * 3 + i % 3]);
  EXPECT_EQ(reader.config().model.num_layers, 2);
  EXPECT_EQ(reader.find("w", "exp_avg_sq"), nullptr);
}

TEST_F(CheckpointDamageTest, EveryByteOfTheManifestIsGuarded) {
  for (size_t i = 0; i < text_.size(); ++i) {
    std::string damaged = text_;
    damaged[i] = static_cast<char>(damaged[i] ^ (1 << (i % 8)));
    EXPECT_TRUE(
        throws_with<FileError>([&] { parse_manifest(damaged, "the path"); }, "'the path': "))
        << i;
    EXPECT_TRUE(throws_with<FileError>([&] { parse_manifest(text_.substr(0, i), "the path"); },
                                       "'the path': "))
        << i;
    damaged = text_;
    damaged.erase(i, 1);
    EXPECT_TRUE(
        throws_with<FileError>([&] { parse_manifest(damaged, "the path"); }, "'the path': "))
        << i;
  }
}

/// Someone who edits a manifest may also update the checksum. The manifest is then read as it is,
/// or refused; either way its offsets lie inside the files.
TEST_F(CheckpointDamageTest, EveryFlippedByteUnderAFittingChecksumIsReadOrRefused) {
  const std::string body = text_.substr(0, text_.rfind("# crc32"));
  int refused = 0, taken = 0;
  for (size_t i = 0; i < body.size(); ++i)
    for (const int bit : {0, 1, 4, 7}) {
      std::string damaged = body;
      damaged[i] = static_cast<char>(damaged[i] ^ (1 << bit));
      try {
        const Manifest manifest = parse_manifest(damaged + fmt_checksum(damaged), "the path");
        for (const ManifestTensor& tensor : manifest.tensors)
          for (const ManifestPiece& piece : tensor.pieces)
            ASSERT_LE(piece.offset + piece.part.range.numel(),
                      manifest.files.at(static_cast<size_t>(piece.file)).size);
        ++taken;
      } catch (const FileError& error) {
        ASSERT_TRUE(std::string(error.what()).starts_with("'the path': ")) << error.what();
        ++refused;
      }
    }
  EXPECT_GT(refused, 10 * taken / 3);
}

TEST_F(CheckpointDamageTest, LiesOfTheManifestAreNamed) {
  const auto refuses = [&](const std::string& from, const std::string& to,
                           const std::string& part) {
    const std::string lie = edited(from, to);
    return throws_with<FileError>([&] { parse_manifest(lie, "m"); }, part);
  };
  EXPECT_TRUE(refuses("rank_00001.safetensors", "../rank_1", "file '../rank_1': allowed: a plain"));
  EXPECT_TRUE(refuses("rank_00001.safetensors", "/etc/passwd", "allowed: a plain name"));
  EXPECT_TRUE(refuses("rank_00001.safetensors", "..", "allowed: a plain name"));
  EXPECT_TRUE(refuses("rank_00001", "rank_00000", "file 'rank_00000.safetensors' is listed twice"));
  EXPECT_TRUE(refuses("format_version: 1", "format_version: 2", "newer version"));
  EXPECT_TRUE(refuses("name: \"b\"", "name: \"w\"", "tensor 'w' is listed twice"));
  EXPECT_TRUE(refuses("name: \"w\"", "name: \"\"", "a tensor has no name"));
  EXPECT_TRUE(refuses("\"F32\"", "\"F128\"", "unknown dtype 'F128'"));
  EXPECT_TRUE(refuses("\"F32\"", "\"F64\"", "overlap at byte"));
  EXPECT_TRUE(refuses("shape: [4, 6]", "shape: [4, 7]", "tensor 'w': block [0:4, 3:6] should end"));
  EXPECT_TRUE(refuses("shape: [4, 6]", "shape: [4, 5]", "allowed: inside 5"));
  EXPECT_TRUE(refuses("shape: [4, 6]", "shape: [4, 4611686018427387904]", "64 bits"));
  EXPECT_TRUE(refuses("shape: [4, 6]", "shape: [-4, 6]", "found -4"));
  EXPECT_TRUE(refuses("shape: [4, 6]", "shape: [4]", "a piece of 2 dimensions, allowed: 1"));
  EXPECT_TRUE(
      refuses("start: [0, 3]", "start: [0, 0]", "element 0 of block [0:4, 0:3] appears twice"));
  EXPECT_TRUE(refuses("last: 12", "last: 13", "allowed: inside 12"));
  EXPECT_TRUE(refuses("last: 12", "last: 11", "has 12 elements, of which 11 are there"));
  EXPECT_TRUE(refuses("file: 1", "file: 9", "file number 9"));
  EXPECT_TRUE(refuses("offset: ", "offset: 9", "which has"));
  EXPECT_TRUE(refuses("scale: 2", "scale: nan", "scaler: found nan"));
  EXPECT_TRUE(
      refuses("skipped_steps: 5", "skipped_steps: 8", "skipped_steps: found 8, allowed: 0 "));
  EXPECT_TRUE(refuses("skipped_steps: 5", "skipped_steps: -1", "skipped_steps: found -1"));
  EXPECT_TRUE(refuses("world_size: 1", "world_size: 0", "layout: found 0"));
  EXPECT_TRUE(refuses("iteration: 7", "iterations: 7", "line 2"));
  EXPECT_TRUE(refuses("iteration: 7", "iteration: 7 iteration: 8", "line 2"));
  EXPECT_TRUE(refuses("iteration: 7", "iteration: -7", "found -7"));
}

TEST(JoinManifests, RanksWhosePiecesDifferAreNamed) {
  const auto join = [](const std::string& dtype, const std::vector<int64_t>& shape) {
    std::vector<Manifest> parts(2);
    parts[0].tensors.push_back({"w", "", "F32", {4, 6}, {}});
    parts[1].tensors.push_back({"w", "", dtype, shape, {}});
    return join_manifests({}, parts);
  };
  EXPECT_EQ(join("F32", {4, 6}).tensors.size(), 1u);
  EXPECT_TRUE(throws_with<UsageError>(
      [&] {
        join("BF16", {4, 6});
      },
      "tensor 'w': one rank has F32 [4, 6], another BF16 [4, 6]"));
  EXPECT_TRUE(throws_with<UsageError>([&] { join("F32", {4, 5}); }, "another F32 [4, 5]"));
}

/// "w" has an element in each shard; "far" is before that of the first.
TEST(CheckpointReader, KeepsFewOfManyShardsOpen) {
  constexpr int64_t kShards = 100, kFar = 2 * kChecksumBlock;
  const TemporaryFolder folder;
  const PartialCheckpoint partial(folder.path(), 1);
  partial.begin();
  const std::string far(kFar, 'f');
  const TensorPart all_far = {whole_box({kFar}), {0, kFar}};
  int64_t bytes = 0;
  std::vector<Manifest> parts(kShards);
  for (int64_t rank = 0; rank < kShards; ++rank) {
    const auto value = static_cast<float>(rank);
    const TensorPart one = {box_of({1}, {{0, rank, kShards}}), {0, 1}};
    std::vector<ShardContent> contents = {{"w", "", "F32", one, &value, 4}};
    if (rank == 0) contents.insert(contents.begin(), {"far", "", "U8", all_far, far.data(), kFar});
    const WrittenShard shard =
        write_shard(partial.file("."), "rank_" + std::to_string(rank), contents);
    Manifest& part = parts[static_cast<size_t>(rank)];
    part.files.push_back(shard.file);
    for (size_t i = 0; i < contents.size(); ++i)
      part.tensors.push_back({contents[i].name,
                              "",
                              contents[i].dtype,
                              contents[i].part.box.shape,
                              {{0, shard.offsets[i], contents[i].part}}});
    bytes += shard.file.size;
  }
  partial.commit(format_manifest(join_manifests({}, parts)));
  const auto open_files = [] {
    return std::distance(std::filesystem::directory_iterator("/proc/self/fd"), {});
  };
  const auto before = open_files();
  CheckpointReader reader(folder.path());
  // The first time also the blocks with the headers are read; of "far" there is one more.
  for (const int64_t expected : {bytes - kChecksumBlock, 2 * bytes - 3 * kChecksumBlock}) {
    float found[kShards];
    reader.read(*reader.find("w"), {whole_box({kShards}), {0, kShards}},
                reinterpret_cast<char*>(found));
    for (int64_t i = 0; i < kShards; ++i) EXPECT_EQ(found[i], static_cast<float>(i));
    EXPECT_LE(open_files() - before, 64);
    EXPECT_EQ(reader.bytes_read(), expected);
  }
}

TEST_F(CheckpointDamageTest, EveryByteOfAShardIsGuarded) {
  const std::string whole = folder_.read("step_7/rank_00001.safetensors");
  const auto first_damage = [&] {
    const auto damage = verify_checkpoint(step_);
    return damage.empty() ? std::string() : damage.front().message;
  };
  for (size_t i = 0; i < whole.size(); ++i) {
    std::string damaged = whole;
    damaged[i] = static_cast<char>(damaged[i] ^ (1 << (i % 8)));
    folder_.write("step_7/rank_00001.safetensors", damaged);
    ASSERT_NE(first_damage().find("rank_00001.safetensors': tensor 'w': bytes 0 to"),
              std::string::npos)
        << i << first_damage();
    CheckpointReader reader(step_);
    float out[24];
    EXPECT_TRUE(throws_with<FileError>(
        [&] {
          reader.read(*reader.find("w"), {whole_box({4, 6}), {0, 24}},
                      reinterpret_cast<char*>(out));
        },
        "rank_00001.safetensors': tensor 'w': bytes 0 to"));
    folder_.write("step_7/rank_00001.safetensors", whole.substr(0, i));
    ASSERT_NE(first_damage().find("allowed: " + std::to_string(whole.size())), std::string::npos);
  }
}

/// The checksum matches, but the header of the tensors' file gives another place.
TEST_F(CheckpointDamageTest, LoadingRefusesAPlaceThatVerifyRefuses) {
  const int64_t place = manifest_.find("w", "")->pieces.front().offset;
  for (const int64_t lie : {int64_t{3}, place - 4}) {
    write_manifest(edited("offset: " + std::to_string(place), "offset: " + std::to_string(lie)));
    const std::string expected = "' is not at byte " + std::to_string(lie);
    const auto damage = verify_checkpoint(step_);
    ASSERT_EQ(damage.size(), 1u);
    EXPECT_NE(damage[0].message.find(expected), std::string::npos) << damage[0].message;
    CheckpointReader reader(step_);
    float out[24];
    EXPECT_TRUE(throws_with<FileError>(
        [&] {
          reader.read(*reader.find("w"), {whole_box({4, 6}), {0, 24}},
                      reinterpret_cast<char*>(out));
        },
        expected));
  }
}

TEST_F(CheckpointDamageTest, ARunMayRemoveOrReplaceWhatIsRead) {
  const CheckpointReader reader(folder_.path());
  EXPECT_TRUE(reader.is_unchanged());
  write_manifest(edited("iteration: 7", "iteration: 8"));
  EXPECT_FALSE(reader.is_unchanged());
  write_manifest(text_);
  EXPECT_TRUE(reader.is_unchanged());
  std::filesystem::remove(folder_.path() / "step_7" / "manifest.textproto");
  EXPECT_FALSE(reader.is_unchanged());
}

/// A damaged header, with matching checksums.
TEST_F(CheckpointDamageTest, EveryByteOfAHeaderIsReadOrRefused) {
  const std::string whole = folder_.read("step_7/rank_00001.safetensors");
  const size_t header = whole.find("}}") + 2;
  const std::string sum = std::to_string(crc32(whole));
  int taken = 0;
  for (size_t i = 0; i < header; ++i) {
    const int bit = static_cast<int>(i) % 7;
    std::string damaged = whole;
    damaged[i] = static_cast<char>(damaged[i] ^ (1 << bit));
    folder_.write("step_7/rank_00001.safetensors", damaged);
    write_manifest(edited("[" + sum + "]", "[" + std::to_string(crc32(damaged)) + "]"));
    taken += verify_checkpoint(step_).empty() ? 1 : 0;
  }
  EXPECT_LT(taken, 30);  // only letters in the metadata
}

TEST_F(CheckpointDamageTest, WhatIsNoFileOfTheCheckpointIsRefused) {
  const std::filesystem::path shard = folder_.path() / "step_7" / "rank_00001.safetensors";
  const auto refuses = [&](const std::string& part) {
    const auto damage = verify_checkpoint(step_);
    return damage.size() == 1 && damage[0].message.find(part) != std::string::npos &&
           damage[0].file == shard.string();
  };
  std::filesystem::rename(shard, folder_.path() / "away");
  EXPECT_TRUE(refuses("No such file"));
  std::filesystem::create_symlink(folder_.path() / "away", shard);
  EXPECT_TRUE(refuses("symbolic links"));
  std::filesystem::remove(shard);
  std::filesystem::create_directory(shard);
  EXPECT_TRUE(refuses("no regular file"));
  std::filesystem::remove(shard);
  std::filesystem::copy_file(folder_.path() / "step_7" / "rank_00000.safetensors", shard);
  EXPECT_TRUE(refuses("as the manifest says"));
}

TEST_F(CheckpointDamageTest, ADamagedConfigurationIsNamed) {
  folder_.write("step_7/config.textproto",
                std::string(folder_.read("step_7/config.textproto").size(), ' '));
  CheckpointReader reader(step_);
  EXPECT_TRUE(throws_with<FileError>([&] { reader.config(); }, "config.textproto': the config"));
}

TEST_F(CheckpointDamageTest, AForgedLengthOfTheConfigurationTakesNoMemory) {
  const auto refuses = [&](int64_t size, const std::string& part) {
    Manifest forged = manifest_;
    const auto config =
        std::find_if(forged.files.begin(), forged.files.end(),
                     [](const ManifestFile& file) { return file.name == kConfigName; });
    config->size = size;
    config->block_crc32.assign(static_cast<size_t>(ceil_div(size, kChecksumBlock)), 0);
    write_manifest(format_manifest(forged));
    CheckpointReader reader(step_);
    return throws_with<FileError>([&] { reader.config(); }, part);
  };
  const auto peak_kib = [] {
    struct rusage usage = {};
    ::getrusage(RUSAGE_SELF, &usage);
    return usage.ru_maxrss;
  };
  const auto before = peak_kib();
  const std::string length = std::to_string(folder_.read("step_7/config.textproto").size());
  EXPECT_TRUE(refuses(int64_t{4} << 30, "config.textproto': found " + length +
                                            " bytes, allowed: 4294967296, as the manifest says"));
  EXPECT_LT(peak_kib() - before, 1 << 20);
  std::filesystem::resize_file(folder_.path() / "step_7" / "config.textproto", (64 << 20) + 1);
  EXPECT_TRUE(
      refuses((64 << 20) + 1, "config.textproto': found 67108865 bytes, allowed: up to 67108864"));
}

}  // namespace
}  // namespace lockstep
