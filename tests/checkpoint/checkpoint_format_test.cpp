#include <gtest/gtest.h>

#include <filesystem>
#include <random>

#include "lockstep/checkpoint/checkpoint_folder.h"
#include "lockstep/checkpoint/checkpoint_reader.h"
#include "lockstep/checkpoint/manifest.h"
#include "lockstep/checkpoint/save_plan.h"
#include "lockstep/checkpoint/shard_file.h"
#include "lockstep/core/config_io.h"
#include "lockstep/core/error.h"
#include "lockstep/tests/support/temporary_folder.h"
#include "lockstep/tests/support/throws_with.h"

namespace lockstep {
namespace {

using testing::TemporaryFolder;
using testing::throws_with;
using Sizes = std::vector<int64_t>;

// Golden case of Megatron Core's ShardedTensor.from_rank_offsets: data (3, 7, 9) under a prepended
// axis, cut (axis 0: part 0 of 10), (axis 2: part 3 of 6).
TEST(TensorBox, IsMegatronCoresShardedTensor) {
  const TensorBox box = box_of({1, 3, 7, 9}, {{0, 0, 10}, {2, 3, 6}});
  EXPECT_EQ(box.shape, (Sizes{10, 3, 42, 9}));
  EXPECT_EQ(box.start, (Sizes{0, 0, 21, 0}));
  EXPECT_EQ(box.size, (Sizes{1, 3, 7, 9}));
}

TEST(TensorBox, OfTwoCutsOfOneDimensionTheFirstCutsFirst) {
  // Part 1 of 2, and of that part 2 of 3: of 24 elements, those from 5 * 4 on.
  const TensorBox box = box_of({4}, {{0, 1, 2}, {0, 2, 3}});
  EXPECT_EQ(box.shape, (Sizes{24}));
  EXPECT_EQ(box.start, (Sizes{20}));
  EXPECT_TRUE(throws_with<UsageError>([] { box_of({4}, {{1, 0, 2}}); }, "of dimension 1"));
  EXPECT_TRUE(throws_with<UsageError>([] { box_of({4}, {{0, 2, 2}}); }, "shard 2 of 2"));
}

/// Global index of each element of a flattened block.
Sizes global_indices(const TensorBox& box) {
  Sizes indices;
  for (int64_t i = 0; i < box.numel(); ++i) {
    int64_t rest = i, global = 0, stride = 1;
    for (size_t d = box.size.size(); d-- > 0;) {
      global += (box.start[d] + rest % box.size[d]) * stride;
      rest /= box.size[d];
      stride *= box.shape[d];
    }
    indices.push_back(global);
  }
  return indices;
}

TEST(TensorBox, OverlapsAreThoseOfTheElementsInTwoThousandRandomPairs) {
  std::mt19937 random(7);
  const auto number = [&](int64_t low, int64_t high) {
    return std::uniform_int_distribution<int64_t>(low, high)(random);
  };
  const auto part_of = [&](const Sizes& shape) {
    TensorPart part{{shape, {}, {}}, {}};
    for (const int64_t length : shape) {
      const bool whole = number(0, 1) == 0;
      part.box.start.push_back(whole ? 0 : number(0, length - 1));
      part.box.size.push_back(whole ? length : number(1, length - part.box.start.back()));
    }
    const bool all = number(0, 2) == 0;
    part.range.first = all ? 0 : number(0, part.box.numel());
    part.range.last = all ? part.box.numel() : number(part.range.first, part.box.numel());
    return part;
  };
  int64_t found_in_all = 0;
  for (int round = 0; round < 2000; ++round) {
    Sizes shape;
    for (int64_t dims = number(0, 4); dims > 0; --dims) shape.push_back(number(1, 5));
    const TensorPart target = part_of(shape), source = part_of(shape);
    const Sizes of_target = global_indices(target.box), of_source = global_indices(source.box);
    std::map<int64_t, int64_t> expected, found;  // position in target -> position in source
    for (int64_t t = target.range.first; t < target.range.last; ++t)
      for (int64_t s = source.range.first; s < source.range.last; ++s)
        if (of_target[static_cast<size_t>(t)] == of_source[static_cast<size_t>(s)]) expected[t] = s;
    for_each_overlap(target, source, [&](int64_t t, int64_t s, int64_t count) {
      for (int64_t i = 0; i < count; ++i) EXPECT_TRUE(found.emplace(t + i, s + i).second);
    });
    ASSERT_EQ(found, expected) << round;
    found_in_all += static_cast<int64_t>(found.size());
  }
  EXPECT_GT(found_in_all, 1000);
}

TEST(TensorBox, TilingErrorsAreNamed) {
  const auto part = [](Sizes start, Sizes size, int64_t first, int64_t last) {
    return TensorPart{{{4, 6}, std::move(start), std::move(size)}, {first, last}};
  };
  const auto left = part({0, 0}, {4, 3}, 0, 12), right = part({0, 3}, {4, 3}, 0, 12);
  EXPECT_EQ(tiling_error({4, 6}, {left, right}), "");
  EXPECT_EQ(tiling_error({4, 6}, {left, part({0, 3}, {4, 3}, 0, 5), part({0, 3}, {4, 3}, 5, 12)}),
            "");
  EXPECT_NE(tiling_error({4, 6}, {left}), "");
  EXPECT_NE(tiling_error({4, 6}, {left, left, right}), "");
  EXPECT_NE(tiling_error({4, 6}, {left, right, part({0, 0}, {4, 6}, 0, 24)}), "");
  EXPECT_EQ(tiling_error({4, 6}, {left, part({0, 3}, {4, 3}, 0, 5), part({0, 3}, {4, 3}, 6, 12)}),
            "elements 5 to 5 of block [0:4, 3:6] are missing");
  EXPECT_EQ(tiling_error({4, 6}, {left, part({0, 3}, {4, 3}, 0, 5), part({0, 3}, {4, 3}, 4, 12)}),
            "element 4 of block [0:4, 3:6] appears twice");
  EXPECT_EQ(tiling_error({4, 6}, {}), "no part of it is there");
}

// The golden case of Megatron Core's test of its fully parallel save: 8 ranks, tp 2. Even ranks
// hold the first part of the keys that tp cuts, odd ranks the second.
TEST(SavePlan, IsMegatronCoresFullyParallelSave) {
  const Sizes all = {0, 1, 2, 3, 4, 5, 6, 7}, even = {0, 2, 4, 6}, odd = {1, 3, 5, 7};
  std::vector<SaveUnit> units = {{"key_TP_repl1.0", 40, even},
                                 {"key_TP_repl1.1", 40, odd},
                                 {"key_TP_repl2.0", 40, even},
                                 {"key_TP_repl2.1", 40, odd},
                                 {"keyC", 400, all},
                                 {"keyD", 4000, all},
                                 {"keyE", 400, all}};
  for (int64_t rank = 0; rank < 8; ++rank)
    units.push_back({"keyB." + std::to_string(rank), 80, {rank}});
  EXPECT_EQ(assign_writers(units, 8), (Sizes{0, 1, 2, 3, 5, 4, 6, 0, 1, 2, 3, 4, 5, 6, 7}));
}

TEST(SavePlan, CopiesThatAreCutElsewhereAreWrittenOnce) {
  const auto kept = [](const std::vector<std::string>& keys) {
    std::vector<SaveUnit> units;
    for (const std::string& key : keys) units.push_back({key, 8, {0}});
    std::vector<std::string> rest;
    for (const SaveUnit& unit : without_overlaps(units)) rest.push_back(unit.key);
    return rest;
  };
  using Keys = std::vector<std::string>;
  const Keys parts = {"a#0:4",      "a#4:9",      "b",         "c[0:2]#0:3",
                      "c[0:2]#3:8", "c[2:4]#0:5", "c[2:4]#5:8"};
  EXPECT_EQ(kept(parts), parts);
  EXPECT_EQ(kept({"a#0:4", "a#0:6", "a#4:9", "a#6:9"}), (Keys{"a#0:6", "a#6:9"}));
  EXPECT_EQ(kept({"a#0:4", "a#3:9", "a#0:3", "a#4:9", "b#0:9"}), (Keys{"a#0:4", "a#4:9", "b#0:9"}));
  EXPECT_EQ(kept({"a", "a#0:4", "a#4:9"}), (Keys{"a"}));
  const Keys gap = {"a#0:4", "a#5:9"}, odd = {"a#", "a#1", "a#1:", "a#:2", "a#1:2x"};
  EXPECT_EQ(kept(gap), gap);  // the manifest's check will report it
  EXPECT_EQ(kept(odd), odd);
}

TEST(SavePlan, MergesWhatTheRanksHold) {
  const std::vector<HeldUnit> first = {{"a b", 8}, {"c", 4}}, second = {{"c", 4}};
  const auto units =
      merge_units({parse_held_units(format_held_units(first)), parse_held_units("4 c\n")});
  ASSERT_EQ(units.size(), 2u);
  EXPECT_EQ(units[0].key, "a b");
  EXPECT_EQ(units[0].bytes, 8);
  EXPECT_EQ(units[1].holders, (Sizes{0, 1}));
  EXPECT_TRUE(throws_with<FileError>([] { parse_held_units("4 c\nx"); }, "after 1 entries"));
}

/// Leaves the files of a write that is interrupted before its manifest.
void leave_unfinished(const std::string& folder, int64_t iteration) {
  const PartialCheckpoint partial(folder, iteration);
  std::filesystem::create_directories(partial.file(""));
  write_file(partial.file("rank_00000.safetensors"), {"half"});
}

void save_empty(const std::string& folder, int64_t iteration, const KeptSteps& kept = {}) {
  const PartialCheckpoint partial(folder, iteration);
  partial.begin();
  Manifest manifest;
  manifest.iteration = iteration;
  partial.commit(format_manifest(manifest), kept);
}

std::vector<std::string> names(const std::string& folder) {
  std::vector<std::string> list;
  for (const std::string& path : complete_checkpoints(folder))
    list.push_back(std::filesystem::path(path).filename());
  return list;
}

using Names = std::vector<std::string>;

TEST(CheckpointFolder, TheNewestIsTheOneThatWasSavedLast) {
  const TemporaryFolder folder;
  const std::string path = folder.path();
  EXPECT_FALSE(has_checkpoint(path));
  for (const int64_t iteration : {500, 60, 70}) save_empty(path, iteration);
  EXPECT_EQ(names(path), (Names{"step_70", "step_60", "step_500"}));
  EXPECT_EQ(find_checkpoint(path), path + "/step_70");
  EXPECT_EQ(find_checkpoint(path + "/step_60"), path + "/step_60");
  save_empty(path, 60);  // again
  EXPECT_EQ(names(path), (Names{"step_60", "step_70", "step_500"}));
  std::filesystem::remove(folder.path() / "latest");
  EXPECT_EQ(names(path), (Names{"step_500", "step_70", "step_60"}));
  folder.write("latest", "step_9\n../step_3\nstep_70x step_70");
  EXPECT_EQ(names(path).front(), "step_70");
}

TEST(CheckpointFolder, ALatestThatHasLostItsFirstNameIsToldOf) {
  const TemporaryFolder folder;
  const std::string path = folder.path();
  EXPECT_EQ(doubt_about_newest(path), "");
  EXPECT_EQ(doubt_about_newest(path + "/no"), "");
  for (const int64_t iteration : {10, 20, 30}) save_empty(path, iteration);
  EXPECT_EQ(doubt_about_newest(path), "");
  for (const char* damaged : {"step_38", "rtep_30", "step_30x"}) {
    folder.write("latest", std::string(damaged) + "\nstep_20\nstep_10\n");
    EXPECT_EQ(find_checkpoint(path), path + "/step_20");
    EXPECT_EQ(doubt_about_newest(path),
              "'" + path + "/latest' begins with '" + damaged +
                  "', which is not there, so step_20 counts as the newest; step_30 is complete "
                  "too, but not listed. If the file is damaged, remove it: then the highest step "
                  "counts");
    EXPECT_EQ(doubt_about_newest(path + "/step_10"), "");
  }
  // `latest` as a save leaves it that ends before replacing it, or after a person removes folders.
  for (const char* good : {"step_20\nstep_10\n", "step_40\nstep_30\nstep_20\n", "8\n", ""}) {
    folder.write("latest", good);
    EXPECT_EQ(doubt_about_newest(path), "") << good;
  }
}

TEST(CheckpointFolder, InterruptedSavesNeverCountAndGoWithTheNextOne) {
  const TemporaryFolder folder;
  const std::string path = folder.path();
  leave_unfinished(path, 90);
  EXPECT_FALSE(has_checkpoint(path));
  EXPECT_TRUE(throws_with<FileError>([&] { find_checkpoint(path); }, "no complete step_N/"));
  EXPECT_TRUE(
      throws_with<FileError>([&] { find_checkpoint(path + "/no"); }, "/no' is not a folder"));
  save_empty(path, 10);
  leave_unfinished(path, 20);
  std::filesystem::create_directories(folder.path() / "step_30");
  EXPECT_EQ(names(path), (Names{"step_10"}));
  save_empty(path, 40);
  EXPECT_FALSE(std::filesystem::exists(folder.path() / "step_20.partial"));
}

TEST(CheckpointFolder, WhatIsNoCheckpointIsNeverReplaced) {
  const TemporaryFolder folder;
  const std::string path = folder.path();
  std::filesystem::create_directory(folder.path() / "step_5");
  folder.write("step_5/rank_00000.safetensors", "weights of three weeks");
  folder.write("step_6", "a file");
  std::filesystem::create_symlink("nowhere", folder.path() / "step_7");
  for (const int64_t iteration : {5, 6, 7})
    EXPECT_TRUE(throws_with<FileError>(
        [&] { save_empty(path, iteration); },
        "'" + path + "/step_" + std::to_string(iteration) + "': found something without a"));
  EXPECT_EQ(folder.read("step_5/rank_00000.safetensors"), "weights of three weeks");
  EXPECT_EQ(folder.read("step_6"), "a file");
  EXPECT_TRUE(std::filesystem::is_symlink(folder.path() / "step_7"));
  save_empty(path, 8);
  EXPECT_EQ(names(path), (Names{"step_8"}));
}

TEST(CheckpointFolder, KeepsTheNewest) {
  const TemporaryFolder folder;
  const std::string path = folder.path();
  for (const int64_t iteration : {1, 2, 3, 4}) save_empty(path, iteration, {.keep = 2});
  EXPECT_EQ(names(path), (Names{"step_4", "step_3"}));
  EXPECT_FALSE(std::filesystem::exists(folder.path() / "step_1"));
}

/// Saves a step and puts the folder back into its state before the save replaced `latest`.
void save_unlisted(const TemporaryFolder& folder, int64_t iteration) {
  const std::string before = folder.read("latest");
  save_empty(folder.path(), iteration);
  std::filesystem::rename(folder.path() / "latest", folder.path() / "latest.partial");
  folder.write("latest", before);
}

/// In a run that resumes from memory, and so does not save the step again.
TEST(CheckpointFolder, ASaveThatWasKilledBeforeItWasListedIsNewerThanThoseBefore) {
  const TemporaryFolder folder;
  const std::string path = folder.path();
  for (const int64_t iteration : {3, 5, 10}) save_empty(path, iteration);
  folder.write("latest", "step_10\nstep_5\n");
  for (const int64_t iteration : {15, 18}) save_unlisted(folder, iteration);
  EXPECT_EQ(names(path), (Names{"step_10", "step_5", "step_18", "step_15", "step_3"}));
  save_empty(path, 20);
  EXPECT_EQ(names(path), (Names{"step_20", "step_18", "step_15", "step_10", "step_5", "step_3"}));
  save_empty(path, 25, {.keep = 3});
  EXPECT_EQ(names(path), (Names{"step_25", "step_20", "step_18"}));
}

TEST(CheckpointFolder, AListThatASaveDidNotGetToUseIsLeftAside) {
  const TemporaryFolder folder;
  const std::string path = folder.path();
  for (const int64_t iteration : {10, 3, 30}) save_empty(path, iteration);
  for (const char* const unused : {"step_40\nstep_3\n", "step_3", "x\n", "step_10\n", ""}) {
    folder.write("latest", "step_30\nstep_10\n");
    folder.write("latest.partial", unused);
    save_empty(path, 50);
    EXPECT_EQ(names(path), (Names{"step_50", "step_30", "step_10", "step_3"})) << unused;
  }
}

TEST(CheckpointFolder, KeepsTheOriginUntilTheRunHasSavedOneThatIsOldEnough) {
  const TemporaryFolder folder;
  const std::string path = folder.path();
  for (const int64_t iteration : {1, 2, 3, 4, 5}) save_empty(path, iteration);
  std::set<int64_t> saved;
  KeptSteps kept = {.keep = 1, .unproven = true, .origin = 3, .saved = &saved};
  save_empty(path, 10, kept);
  EXPECT_EQ(names(path), (Names{"step_10", "step_3"})) << "steps 5 and 4 are of another run";
  save_empty(path, 5);
  save_empty(path, 20, kept);
  EXPECT_EQ(names(path), (Names{"step_20", "step_10"})) << "step 10 is of this run";
  kept.origin = 10;
  saved.clear();
  save_empty(path, 10, kept);
  EXPECT_EQ(names(path), (Names{"step_10"})) << "the origin was replaced";
}

TEST(CheckpointFolder, NewestUntilFollowsTheOrderOfSavingNotOfNumbers) {
  const TemporaryFolder folder;
  const std::string path = folder.path();
  for (const int64_t iteration : {40, 10, 20}) save_empty(path, iteration);  // from 0 again
  const auto all = complete_checkpoints(path);
  EXPECT_EQ(newest_until(all, 100), path + "/step_20");
  EXPECT_EQ(newest_until(all, 19), path + "/step_10");
  EXPECT_EQ(newest_until(all, 9), "");
}

TEST(CheckpointFolder, ACheckpointThatLiesElsewhereLosesItsLinkAlone) {
  const TemporaryFolder folder, elsewhere;
  const std::string path = folder.path();
  save_empty(elsewhere.path(), 1);
  std::filesystem::create_directory_symlink(elsewhere.path() / "step_1", folder.path() / "step_1");
  EXPECT_EQ(names(path), (Names{"step_1"}));
  save_empty(path, 2, {.keep = 1});
  EXPECT_EQ(names(path), (Names{"step_2"}));
  EXPECT_FALSE(std::filesystem::exists(std::filesystem::symlink_status(folder.path() / "step_1")));
  EXPECT_EQ(names(elsewhere.path()), (Names{"step_1"}));
}

// If it counted as empty, a run would start from scratch, or from the wrong step.
TEST(CheckpointFolder, WhatCannotBeReadIsNoEmptyFolder) {
  const TemporaryFolder folder;
  const std::filesystem::path steps = folder.path() / "steps", latest = steps / "latest";
  save_empty(steps.string(), 3);
  save_empty(steps.string(), 2);
  const std::string loop = folder.path() / "loop";
  std::filesystem::create_symlink("loop", loop);
  EXPECT_TRUE(throws_with<FileError>([&] { has_checkpoint(loop); },
                                     "folder '" + loop + "' cannot be read: Too many levels"));
  std::filesystem::rename(latest, steps / "list");
  for (const char* const target : {"list", "step_2", "nowhere"}) {
    std::filesystem::create_symlink(target, latest);
    EXPECT_TRUE(throws_with<FileError>([&] { find_checkpoint(steps.string()); },
                                       "'" + latest.string() + "': found no regular file"));
    EXPECT_THROW(save_empty(steps.string(), 4), FileError);
    std::filesystem::remove(latest);
  }
  EXPECT_EQ(names(steps.string()), (Names{"step_3", "step_2"}));
}

TEST(CheckpointFolder, WhatCannotBeWrittenIsNamed) {
  const TemporaryFolder folder;
  folder.write("file", "");
  const PartialCheckpoint partial(folder.path() / "file", 1);
  EXPECT_TRUE(throws_with<FileError>([&] { partial.begin(); }, "step_1.partial"));
  EXPECT_TRUE(throws_with<FileError>([] { write_file("/dev/full", {"x"}); },
                                     "'/dev/full' cannot be written: found no regular file"));
}

TEST(CheckpointFolder, AFileIsReplacedAndALinkIsNotFollowed) {
  const TemporaryFolder folder;
  const std::string other = folder.write("other", "of somebody else");
  std::filesystem::create_symlink(other, folder.path() / "link");
  std::filesystem::create_hard_link(other, folder.path() / "name");
  for (const char* const name : {"link", "name"}) {
    write_file(folder.path() / name, {"m", "ine"});
    EXPECT_TRUE(
        std::filesystem::is_regular_file(std::filesystem::symlink_status(folder.path() / name)));
    EXPECT_EQ(folder.read(name), "mine");
  }
  EXPECT_EQ(folder.read("other"), "of somebody else");
}

}  // namespace
}  // namespace lockstep
