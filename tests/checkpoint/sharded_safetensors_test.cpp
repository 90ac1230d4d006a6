#include "lockstep/checkpoint/sharded_safetensors.h"

#include <gtest/gtest.h>
#include <sched.h>
#include <sys/mount.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <exception>
#include <filesystem>
#include <functional>

#include "lockstep/checkpoint/export_folder.h"
#include "lockstep/checkpoint/safetensors_index.h"
#include "lockstep/checkpoint/weights_writer.h"
#include "lockstep/core/error.h"
#include "lockstep/tests/support/temporary_folder.h"
#include "lockstep/tests/support/throws_with.h"

namespace lockstep {
namespace {

using testing::TemporaryFolder;
using testing::throws_with;

TEST(FileSize, HasUnitsOf1000AndOf1024) {
  const auto bytes = [](const std::string& text) { return parse_file_size(text, "--size"); };
  EXPECT_EQ(bytes("5GB"), 5'000'000'000);
  EXPECT_EQ(bytes("500MB"), 500'000'000);
  EXPECT_EQ(bytes("2GiB"), int64_t{2} << 30);
  EXPECT_EQ(bytes("3kib"), 3072);
  EXPECT_EQ(bytes("1.5KB"), 1500);
  EXPECT_EQ(bytes("1TB"), 1'000'000'000'000);
  EXPECT_EQ(bytes("7B"), 7);
  EXPECT_EQ(bytes("4096"), 4096);
  for (const char* const bad :
       {"", "GB", "0", "0.4B", "-1GB", "5 GB", "5GBs", "5XB", "5G", "nan", "inf", "9999999999TB"})
    EXPECT_TRUE(throws_with<ConfigError>([&] { bytes(bad); },
                                         "--size: found '" + std::string(bad) + "', allowed: "))
        << bad;
}

// As in split_torch_state_dict_into_shards of huggingface_hub 2.4.0: a tensor larger than a shard
// does not close the current shard.
TEST(AssignShards, LargeTensorsStandAlone) {
  using Shards = std::vector<size_t>;
  EXPECT_EQ(assign_shards({4, 4, 4}, 8), (Shards{0, 0, 1}));
  EXPECT_EQ(assign_shards({4, 9, 4, 4}, 8), (Shards{1, 0, 1, 2}));
  EXPECT_EQ(assign_shards({9, 9}, 8), (Shards{0, 1}));
  EXPECT_EQ(assign_shards({8, 0, 1}, 8), (Shards{0, 0, 1}));
  EXPECT_EQ(assign_shards({}, 8), (Shards{}));
}

TEST(WeightsFiles, AreKnownByTheirNames) {
  for (const char* const name :
       {"model.safetensors", "model.safetensors.index.json", "model-00001-of-00003.safetensors"})
    EXPECT_TRUE(is_weights_file(name)) << name;
  for (const char* const name :
       {"config.json", "my-model.safetensors", "model-1-of-3.safetensors", "tokenizer.json"})
    EXPECT_FALSE(is_weights_file(name)) << name;
}

TEST(ShardedSafetensors, WritesFilesAndAnIndex) {
  const TemporaryFolder folder;
  const auto path_of = [&](const std::string& name) { return (folder.path() / name).string(); };
  ShardedSafetensors files({{.name = "a", .dtype = "U8", .shape = {4}},
                            {.name = "b", .dtype = "BF16", .shape = {3, 3}},
                            {.name = "c", .dtype = "F32", .shape = {}}},
                           8);
  const std::vector<std::string> names = {"model-00001-of-00002.safetensors",
                                          "model-00002-of-00002.safetensors",
                                          "model.safetensors.index.json"};
  EXPECT_EQ(files.file_names(), names);
  EXPECT_TRUE(throws_with<UsageError>([&] { files.write("12345", path_of); },
                                      "tensor 'a': found 5 bytes, allowed: 4"));
  files.write("aaaa", path_of);
  EXPECT_TRUE(throws_with<UsageError>([&] { files.finish(path_of); }, "found 1 tensors"));
  files.write(std::string(18, 'b'), path_of);
  files.write("cccc", path_of);
  EXPECT_TRUE(throws_with<UsageError>([&] { files.write("d", path_of); }, "more tensors than 3"));
  files.finish(path_of);
  EXPECT_EQ(folder.read(names[2]),
            "{\n  \"metadata\": {\n    \"total_size\": 26\n  },\n  \"weight_map\": {\n"
            "    \"a\": \"" +
                names[1] + "\",\n    \"b\": \"" + names[0] + "\",\n    \"c\": \"" + names[1] +
                "\"\n  }\n}\n");
  const std::string shard = folder.read(names[1]);
  EXPECT_EQ(shard.substr(shard.size() - 8), "aaaacccc");
  EXPECT_EQ(folder.read(names[0]).substr(folder.read(names[0]).size() - 18), std::string(18, 'b'));
}

TEST(SafetensorsIndex, IsReadStrictly) {
  const auto parse = [](const std::string& text) { return parse_safetensors_index(text, "i"); };
  EXPECT_EQ(parse(R"({"metadata": {"total_size": 1e300}, "weight_map": {"w": "f"}})"),
            (WeightMap{{"w", "f"}}));
  EXPECT_EQ(parse(format_safetensors_index({{"w", "f"}, {"v", "f"}}, 3)),
            (WeightMap{{"w", "f"}, {"v", "f"}}));
  for (const char* const text :
       {"", "{", "[]", "{}", "3", R"({"weight_map": 3})", R"({"weight_map": {"a": 3}})",
        R"({"weight_map": []})", "{\"weight_map\": {\"\xff\": \"f\"}}"})
    EXPECT_TRUE(throws_with<FileError>([&] { parse(text); }, "'i': ")) << text;
  EXPECT_TRUE(throws_with<FileError>([&] { parse(R"({"weight_map": {}})"); }, "names no tensor"));
  EXPECT_TRUE(throws_with<FileError>([&] { parse(R"({"weight_map": {"a": "f", "a": "g"}})"); },
                                     "'i': 'a' is listed twice"));
  for (const std::string name : {"../one", "/etc/passwd", "a/b", "..", ".", ""})
    EXPECT_TRUE(throws_with<FileError>([&] { parse(R"({"weight_map": {"a": ")" + name + "\"}}"); },
                                       "' is outside the folder"))
        << name;
  EXPECT_TRUE(throws_with<FileError>([&] { parse(R"({"weight_map": {"a": "f\u0000g"}})"); },
                                     "'i': tensor 'a': file 'f"));
}

/// The names of a folder's entries.
std::string listing(const std::filesystem::path& folder) {
  std::vector<std::string> names;
  for (const auto& entry : std::filesystem::directory_iterator(folder))
    names.push_back(entry.path().filename());
  std::sort(names.begin(), names.end());
  std::string text;
  for (const std::string& name : names) text += name + " ";
  return text;
}

TEST(ExportFolder, LeavesNoShardOfAnEarlierExport) {
  const TemporaryFolder folder;
  const std::string out = folder.path() / "out";
  const auto export_files = [&](const std::vector<std::string>& names) {
    ExportFolder files(out, names, "--hf", is_weights_file);
    for (const std::string& name : names) write_file(files.file(name), {name});
    EXPECT_EQ(files.publish(), "");
  };
  const std::vector<std::string> sharded = {"model-00001-of-00002.safetensors",
                                            "model-00002-of-00002.safetensors",
                                            "model.safetensors.index.json", "config.json"};
  const std::string all = sharded[0] + " " + sharded[1] + " ";
  for (const bool with_others : {false, true}) {
    std::filesystem::remove_all(out);
    const std::string other = with_others ? "notes.txt " : "";
    if (with_others) {
      std::filesystem::create_directory(out);
      folder.write("out/notes.txt", "mine");
    }
    export_files(sharded);
    EXPECT_EQ(listing(out), "config.json " + all + "model.safetensors.index.json " + other);
    export_files({"model.safetensors", "config.json"});
    EXPECT_EQ(listing(out), "config.json model.safetensors " + other);
    export_files(sharded);
    EXPECT_EQ(listing(out), "config.json " + all + "model.safetensors.index.json " + other);
  }
}

constexpr int kNotPossible = 77;

/// The status of a process that exports `first` and then `second` to `out` once `begin` has
/// returned true: 0, kNotPossible if it returns false, otherwise 1.
int status_of_exports(const std::string& out, const std::function<bool()>& begin) {
  const pid_t child = ::fork();
  if (child == 0) {
    int status = begin() ? 0 : kNotPossible;
    if (status == 0) try {
        for (const char* const text : {"first", "second"}) {
          ExportFolder files(out, {"model.safetensors", "config.json"}, "--hf");
          for (const char* const name : {"model.safetensors", "config.json"})
            write_file(files.file(name), {text});
          files.publish();
        }
      } catch (const std::exception& error) {
        std::fprintf(stderr, "%s\n", error.what());
        status = 1;
      }
    ::_exit(status);
  }
  int status = 0;
  ::waitpid(child, &status, 0);
  return WIFEXITED(status) ? WEXITSTATUS(status) : 1;
}

// A folder of the user in one of somebody else.
TEST(ExportFolder, MayLieInAFolderThatCannotBeReadOrWritten) {
  using std::filesystem::perms;
  constexpr unsigned kUser = 65534;
  const TemporaryFolder folder;
  const std::filesystem::path parent = folder.path() / "parent", out = parent / "out";
  std::filesystem::create_directories(out);
  std::filesystem::permissions(folder.path(), perms{0755});
  std::filesystem::permissions(out, perms::all);
  for (const perms mode : {perms{0555}, perms{0333}, perms{0111}}) {
    std::filesystem::permissions(parent, mode);
    const int status = status_of_exports(out, [&] {
      return (::geteuid() != 0 || ::setuid(kUser) == 0) && ::access(out.c_str(), W_OK) == 0;
    });
    std::filesystem::permissions(parent, perms::all);
    if (status == kNotPossible) GTEST_SKIP() << "another user cannot reach " << out;
    ASSERT_EQ(status, 0);
    EXPECT_EQ(listing(parent), "out ");
    EXPECT_EQ(listing(out), "config.json model.safetensors ");
    EXPECT_EQ(folder.read("parent/out/model.safetensors"), "second");
  }
}

TEST(ExportFolder, MayBeMountedFromTheFileSystemOfItsParent) {
  const TemporaryFolder folder;
  const std::filesystem::path parent = folder.path() / "parent", out = parent / "out";
  const std::string volume = folder.path() / "volume";
  std::filesystem::create_directories(out);
  std::filesystem::create_directory(volume);
  const int status = status_of_exports(out, [&] {
    return ::unshare(CLONE_NEWNS) == 0 &&
           ::mount("none", "/", nullptr, MS_REC | MS_PRIVATE, nullptr) == 0 &&
           ::mount(volume.c_str(), out.c_str(), nullptr, MS_BIND, nullptr) == 0;
  });
  if (status == kNotPossible) GTEST_SKIP() << "this user cannot mount a folder";
  ASSERT_EQ(status, 0);
  EXPECT_EQ(listing(volume), "config.json model.safetensors ");
  EXPECT_EQ(folder.read("volume/config.json"), "second");
  EXPECT_EQ(listing(parent), "out ");
  EXPECT_EQ(listing(out), "");
}

TEST(WeightsWriter, ThatCannotBeginLeavesNothing) {
  const TemporaryFolder folder;
  const std::string steps = folder.path() / "steps";
  const auto begin = [&] { WeightsWriter(steps, Config{}, {{"w", "F99", {2}}}); };
  EXPECT_TRUE(throws_with<ConfigError>(begin, "unknown dtype 'F99'"));
  EXPECT_FALSE(std::filesystem::exists(steps));
  std::filesystem::create_directory(steps);
  folder.write("steps/notes.txt", "mine");
  EXPECT_TRUE(throws_with<ConfigError>(begin, "unknown dtype 'F99'"));
  EXPECT_EQ(listing(steps), "notes.txt ");
}

}  // namespace
}  // namespace lockstep
