#include "lockstep/datasets/build_dataset.h"

#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "lockstep/datasets/document_reader.h"
#include "lockstep/datasets/indexed_dataset.h"
#include "lockstep/datasets/indexed_dataset_writer.h"
#include "lockstep/datasets/merge_datasets.h"
#include "lockstep/datasets/unfinished_file.h"
#include "lockstep/tests/support/compressed_text.h"
#include "lockstep/tests/support/file_size_limit.h"
#include "lockstep/tests/support/temporary_folder.h"
#include "lockstep/tests/support/throws_with.h"

namespace lockstep {
namespace {

using testing::FileSizeLimit;
using testing::gzip_of;
using testing::TemporaryFolder;
using testing::throws_with;
using testing::zstd_of;
using Documents = std::vector<std::vector<std::string>>;  ///< each a list of sequences

std::string line_of(const std::string& text) {
  return nlohmann::json{{"id", 1}, {"text", text}}.dump() + "\n";
}

class BuildDatasetTest : public ::testing::Test {
 protected:
  BuildProgress build(std::vector<std::string> input, BuildDataset options = {}) {
    options.input = std::move(input);
    options.output = prefix_;
    return build_dataset(
        options, [] { return std::make_unique<ByteTokenizer>(); }, [](const BuildProgress&) {});
  }

  std::string failure_of(std::vector<std::string> input, const BuildDataset& options = {}) {
    try {
      build(std::move(input), options);
    } catch (const Error& error) {
      EXPECT_FALSE(std::filesystem::exists(prefix_ + ".idx"));
      return error.what();
    }
    return "";
  }

  /// Marks the end of a document with "$".
  Documents read(const std::string& ending = "") {
    const IndexedDataset dataset(prefix_ + ending);
    const DatasetIndex& index = dataset.index();
    Documents documents;
    for (int64_t d = 0; d < index.num_documents(); ++d) {
      auto& document = documents.emplace_back();
      for (int64_t s = index.bounds[d]; s < index.bounds[d + 1]; ++s) {
        std::vector<int64_t> ids(static_cast<size_t>(index.lengths[s]));
        dataset.sequence(s).read(0, ids);
        std::string& text = document.emplace_back();
        for (const int64_t id : ids) text += id == 256 ? '$' : static_cast<char>(id);
      }
    }
    return documents;
  }

  TemporaryFolder folder_;
  std::string prefix_ = folder_.path() / "set";
};

TEST_F(BuildDatasetTest, EachLineIsADocument) {
  const std::string lines = "\xEF\xBB\xBF" + line_of("one") + "\r\n  \n" + line_of("") +
                            R"({"text": "two\r\n"})" + "\r\n" + R"({"text": "three"})";
  const Documents expected = {{"one"}, {}, {"two\r\n"}, {"three"}};
  for (const auto& [name, bytes] :
       {std::pair<std::string, std::string>{"a.jsonl", lines},
        {"a.jsonl.gz", gzip_of(lines.substr(0, 20)) + gzip_of(lines.substr(20))},
        {"a.jsonl.zst", zstd_of(lines.substr(0, 5)) + zstd_of(lines.substr(5))}}) {
    const auto done = build({folder_.write(name, bytes)});
    EXPECT_EQ(read(), expected) << name;
    EXPECT_EQ(done.documents, 4);
    EXPECT_EQ(done.tokens, 13);
    EXPECT_EQ(done.bytes_read, static_cast<int64_t>(bytes.size()));
    EXPECT_EQ(done.skipped, 0);
  }
  BuildDataset options;
  options.append_eod = true;
  build({folder_.path() / "a.jsonl", folder_.write("b.txt.gz", gzip_of(line_of("x"))),
         folder_.write("empty.txt", ""), folder_.write("none.jsonl", "")},
        options);
  EXPECT_EQ(read(),
            (Documents{{"one$"}, {}, {"two\r\n$"}, {"three$"}, {line_of("x") + "$"}, {"$"}}));
}

TEST_F(BuildDatasetTest, EachKeyHasASet) {
  const std::string input = folder_.write("a.jsonl", R"({"title": "A", "text": "aa"})"
                                                     "\n"
                                                     R"({"text": "bb", "title": ""})"
                                                     "\n");
  BuildDataset options;
  options.json_keys = {"text", "title"};
  EXPECT_EQ(build({input}, options).tokens, 5);
  EXPECT_EQ(read("_text_document"), (Documents{{"aa"}, {"bb"}}));
  EXPECT_EQ(read("_title_document"), (Documents{{"A"}, {}}));
  options.json_keys = {"title"};
  build({input}, options);
  EXPECT_EQ(read(), (Documents{{"A"}, {}}));
  for (const auto& [keys, allowed] :
       {std::pair<std::vector<std::string>, std::string>{{"a", "a"}, "allowed: one or more keys"},
        {{"a", "b/c"}, "allowed: several keys without '/'"},
        {{""}, "found '', allowed: one or more keys, each once, none of them empty"},
        {{"a", ""}, "found 'a,', allowed: one or more keys"},
        {{}, "found '', allowed: one or more keys, each once"}}) {
    options.json_keys = keys;
    EXPECT_TRUE(throws_with<ConfigError>([&] { build({input}, options); }, allowed));
  }
  options.json_keys = {"a", "b"};
  EXPECT_TRUE(throws_with<ConfigError>(
      [&] {
        build({input, "x.txt"}, options);
      },
      "one key, because 'x.txt' is a text"));
}

TEST_F(BuildDatasetTest, AFullDiskAtTheEndLeavesTheSetsOfAllKeysAsTheyWere) {
  const auto input = [this](const std::string& text, const std::string& title) {
    return folder_.write("a.jsonl", nlohmann::json{{"text", text}, {"title", title}}.dump());
  };
  const auto files = [this] {
    return std::distance(std::filesystem::directory_iterator(folder_.path()), {});
  };
  const std::string longer(1 << 13, 'B');  // which the writer holds back until the end
  BuildDataset options;
  options.json_keys = {"text", "title"};
  const auto refused = [&](const std::string& path) {
    const FileSizeLimit limit(longer.size());
    return throws_with<FileError>(
        [&] { build({path}, options); },
        prefix_ + "_title_document.bin' cannot be written: File too large");
  };
  EXPECT_TRUE(refused(input("bb", longer)));
  EXPECT_EQ(files(), 1);
  build({input("aa", "A")}, options);
  EXPECT_EQ(files(), 5);
  EXPECT_TRUE(refused(input("bb", longer)));
  EXPECT_EQ(files(), 5);
  EXPECT_EQ(read("_text_document"), (Documents{{"aa"}}));
  EXPECT_EQ(read("_title_document"), (Documents{{"A"}}));
  build({input("bb", longer)}, options);
  EXPECT_EQ(read("_text_document"), (Documents{{"bb"}}));
  EXPECT_EQ(read("_title_document"), (Documents{{longer}}));
}

TEST_F(BuildDatasetTest, KeysThatAreGivenAreNotThoseOfATextAlone) {
  const std::string lines = folder_.write("a.jsonl", line_of("aa")),
                    json = folder_.write("a.json", "{}"), text = folder_.write("b.txt", "b");
  BuildDataset options;
  for (const std::string key : {"text", "content"}) {
    options.json_keys = {key};
    options.json_keys_given = true;
    for (const auto& [input, found] :
         {std::pair<std::vector<std::string>, std::string>{{json}, json},
          {{text}, text},
          {{lines, text, json}, json}})
      EXPECT_TRUE(throws_with<ConfigError>(
          [&] { build(input, options); },
          "--json-keys: found '" + key + "', and the input '" + found + "', which is read as one"));
  }
  options.json_keys = {"text"};
  EXPECT_EQ(build({lines, text}, options).documents, 2);
  EXPECT_EQ(build({json}).documents, 1);
}

TEST_F(BuildDatasetTest, LinesLongerThanAPieceAreTheSame) {
  const std::string word = "all work and no play \u00e9 ";
  std::string text;
  while (text.size() < 5u << 20) text += word + std::to_string(text.size());
  std::string broken = line_of(text);
  broken[4 << 20] = '\xFF';
  const std::string twice = "{\"text\": \"" + text + "\", \"text\": \"short\"}\n";
  const std::string input = folder_.write(
      "a.jsonl", line_of("front") + line_of(text) + broken + line_of("middle") + twice +
                     "{\"none\": \"" + text + "\"}\n" + line_of(text) + "{\"text\": \"" + text);
  BuildDataset options;
  options.skip_bad = true;
  const auto done = build({input}, options);
  EXPECT_EQ(read(), (Documents{{"front"}, {text}, {"middle"}, {"short"}, {text}}));
  EXPECT_EQ(done.documents, 5);
  EXPECT_EQ(done.tokens, static_cast<int64_t>(2 * text.size() + 16));
  ASSERT_EQ(done.first_bad.size(), 3u);
  EXPECT_EQ(done.first_bad[0],
            "'" + input + "': line 3: byte 4194304: found the byte 0xFF, allowed: UTF-8");
  EXPECT_EQ(done.first_bad[1], "'" + input + "': line 6: found no key 'text'");
  EXPECT_EQ(done.first_bad[2], "'" + input + "': line 8: byte " + std::to_string(text.size() + 10) +
                                   ": found the end of the line, allowed: the end of the string");
}

TEST_F(BuildDatasetTest, BadLinesEndTheBuildOrAreSkipped) {
  const std::string lines = line_of("one") + "{\"text\": 1}\n" + line_of("two") + "no\n";
  const std::string input = folder_.write("a.jsonl", lines);
  const std::string first =
      "'" + input + "': line 2: key 'text': found a number, allowed: a string";
  EXPECT_EQ(failure_of({input}), first);
  const std::string compressed = gzip_of(lines + line_of("lost"));
  const std::string torn =
      folder_.write("torn.jsonl.gz", compressed.substr(0, compressed.size() - 1));
  BuildDataset options;
  options.skip_bad = true;
  for (const int64_t workers : {1, 3}) {
    options.workers = workers;
    const auto done = build({input, torn, folder_.write("b.txt", "text")}, options);
    EXPECT_EQ(done.skipped, 5);
    EXPECT_EQ(done.first_bad.size(), 5u);
    EXPECT_EQ(done.first_bad[0], first);
    EXPECT_TRUE(done.first_bad[4].starts_with(
        "'" + torn + "': line 6: the compressed data end too early, at byte "))
        << done.first_bad[4];
    EXPECT_EQ(read(), (Documents{{"one"}, {"two"}, {"one"}, {"two"}, {"lost"}, {"text"}}));
  }
  std::filesystem::remove(prefix_ + ".idx");
  const std::string text = folder_.write("torn.gz", compressed.substr(0, 20));
  EXPECT_EQ(failure_of({text}), "'" + text + "': the compressed data end too early, at byte 20");
  const auto nothing = failure_of({folder_.write("c.jsonl", "no\n")}, options);
  EXPECT_NE(nothing.find("c.jsonl' has no text; allowed: files with text; 1 document was skipped"),
            std::string::npos)
      << nothing;
}

TEST_F(BuildDatasetTest, FilesWithoutTextAreToldFromEmptyOnes) {
  const std::string empty = folder_.write("e.jsonl", "");
  EXPECT_EQ(failure_of({empty}), "'" + empty + "' is empty; allowed: files with text");
  for (const std::string text : {"\n \n\r\n", "{\"text\": \"\"}\n"}) {
    const std::string blank = folder_.write("b.jsonl", text);
    EXPECT_EQ(failure_of({blank}), "'" + blank + "' has no text; allowed: files with text");
  }
}

TEST_F(BuildDatasetTest, TheBytesDoNotDependOnTheWorkers) {
  std::mt19937 random(3);
  std::string lines;
  for (int i = 0; i < 20000; ++i)
    lines += random() % 50 == 0 ? "bad\n" : line_of(std::string(random() % 200, 'a' + i % 26));
  std::vector<std::string> inputs = {folder_.write("a.jsonl", lines)};
  for (int i = 0; i < 100; ++i)
    inputs.push_back(folder_.write(std::to_string(i) + ".txt", "text " + std::to_string(i)));
  inputs.push_back(folder_.write("long.txt", std::string(3 << 20, 'l')));
  inputs.push_back(folder_.write("b.jsonl.zst", zstd_of(lines)));
  BuildDataset options;
  options.skip_bad = true;
  std::string bin, idx;
  BuildProgress expected;
  for (const int64_t workers : {1, 2, 3, 8}) {
    options.workers = workers;
    const auto done = build(inputs, options);
    if (workers == 1) {
      bin = folder_.read("set.bin");
      idx = folder_.read("set.idx");
      expected = done;
      EXPECT_GT(done.skipped, 500);
    }
    EXPECT_EQ(folder_.read("set.bin"), bin) << workers;
    EXPECT_EQ(folder_.read("set.idx"), idx) << workers;
    EXPECT_EQ(done.first_bad, expected.first_bad);
    EXPECT_EQ(done.skipped, expected.skipped);
    EXPECT_EQ(done.tokens, expected.tokens);
  }
  options.skip_bad = false;
  for (const int64_t workers : {1, 2, 8}) {
    options.workers = workers;
    EXPECT_TRUE(throws_with<FileError>([&] { build(inputs, options); }, expected.first_bad[0]));
  }
}

TEST_F(BuildDatasetTest, WhatATokenizerOfAThreadThrowsEndsTheBuild) {
  int made = 0;
  BuildDataset options;
  options.input = {folder_.write("a.jsonl", line_of("a"))};
  options.output = prefix_;
  options.workers = 2;
  const auto make = [&]() -> std::unique_ptr<Tokenizer> {
    static std::mutex mutex;
    const std::lock_guard lock(mutex);
    if (++made > 1) throw FileError("vocabulary has gone");
    return std::make_unique<ByteTokenizer>();
  };
  EXPECT_TRUE(throws_with<FileError>([&] { build_dataset(options, make, [](const auto&) {}); },
                                     "vocabulary has gone"));
}

TEST_F(BuildDatasetTest, SetsAreMerged) {
  const auto write = [&](const std::string& name, TokenType type, bool modes, int64_t first) {
    IndexedDatasetWriter writer(folder_.path() / name, type, modes);
    for (int64_t d = 0; d < 3; ++d) {
      for (int64_t s = 0; s < d; ++s) {
        writer.append(std::vector<int64_t>(static_cast<size_t>(s * 200000), first + d));
        writer.end_sequence(modes ? static_cast<int8_t>(s) : int8_t{0});
      }
      writer.end_document();
    }
    writer.finish();
    return (folder_.path() / name).string();
  };
  const std::string a = write("a", TokenType::int32, true, 10),
                    b = write("b", TokenType::int32, true, 20);
  const auto merged = merge_datasets({a, b, a}, prefix_);
  EXPECT_EQ(merged.documents, 9);
  EXPECT_EQ(merged.sequences, 9);
  EXPECT_EQ(merged.tokens, 600000);
  EXPECT_EQ(folder_.read("set.bin"),
            folder_.read("a.bin") + folder_.read("b.bin") + folder_.read("a.bin"));
  const IndexedDataset set(prefix_);
  EXPECT_EQ(set.index().bounds[9], 9);
  EXPECT_EQ(set.index().modes[5], 1);
  const std::string narrow = write("narrow", TokenType::uint16, true, 1);
  const std::string plain = write("plain", TokenType::int32, false, 1);
  const auto merge = [&](std::vector<std::string> inputs, const std::string& output) {
    return [=] { merge_datasets(inputs, output); };
  };
  const std::string other = folder_.path() / "other";
  EXPECT_TRUE(throws_with<FileError>(
      merge({a, narrow}, other), "narrow.idx': found numbers of uint16, allowed: int32, which"));
  EXPECT_TRUE(throws_with<FileError>(
      merge({a, plain}, other), "plain.idx': modes of the sequences: found none, allowed: modes"));
  EXPECT_TRUE(throws_with<FileError>(merge({a, other}, prefix_), "other.idx' cannot be read"));
  EXPECT_TRUE(throws_with<ConfigError>(merge({b, a}, a), "which is one of the inputs"));
  folder_.write("b.bin", "torn");
  EXPECT_TRUE(
      throws_with<FileError>(merge({a, b}, other), "b.bin': found 4 bytes, allowed: 800000"));
  EXPECT_FALSE(std::filesystem::exists(other + ".bin"));
}

TEST_F(BuildDatasetTest, AnInputIsNotReplaced) {
  const auto build_from_own_output = [&] { build({folder_.write("set.bin", "x")}); };
  EXPECT_TRUE(throws_with<ConfigError>(build_from_own_output, "set.bin' is an input, allowed"));
}

TEST_F(BuildDatasetTest, WhatAKilledBuildLeftGoesAndWhatOthersWriteStays) {
  const auto entries = [this] {
    std::set<std::string> names;
    for (const auto& entry : std::filesystem::directory_iterator(folder_.path()))
      names.insert(entry.path().filename());
    return names;
  };
  const std::string input = folder_.write("a.txt", "abc");
  for (const char* const name : {"set.bin.unfinished.12.0123abcd", "set.idx.unfinished.7.ffffffff"})
    folder_.write(name, "torn");
  const std::set<std::string> of_others = {"set.bin.unfinished.12.0123abc",
                                           "set.bin.unfinished.x.0123abcd", "set.bin.unfinished.12",
                                           "other.bin.unfinished.12.0123abcd"};
  for (const std::string& name : of_others) folder_.write(name, "mine");
  UnfinishedFile also(prefix_ + ".bin");  // from another build that is running
  also.write("xyz");
  const std::set<std::string> before = entries();
  EXPECT_EQ(before.count("set.bin.unfinished.12.0123abcd"), 0);
  EXPECT_EQ(before.size(), 1 + 1 + of_others.size() + 1);  // `also` does not write the index
  build({input});
  EXPECT_EQ(read(), (Documents{{"abc"}}));
  std::set<std::string> expected = before;
  expected.erase("set.idx.unfinished.7.ffffffff");
  expected.insert({"set.bin", "set.idx"});
  EXPECT_EQ(entries(), expected);
  also.sync();
  also.publish();
  expected.clear();
  for (const std::string& name : entries())
    if (name.starts_with("set.bin.unfinished.")) expected.insert(name);
  EXPECT_EQ(expected.size(), 3);  // those with other names
}

TEST(DocumentReader, GivesTheSameDocumentsWhateverTheSourceGives) {
  const std::string text =
      "\xEF\xBB\xBF"
      "a\n\nbb\r\n" +
      std::string(2500000, 'x') + "\nlast";
  for (const size_t most : {size_t{3}, size_t{1000}, size_t{1} << 22}) {
    size_t at = 0;
    DocumentReader reader("x.jsonl", [&](char* to, size_t count) {
      const size_t now = std::min({count, most, text.size() - at});
      text.copy(to, now, at);
      at += now;
      return now;
    });
    std::vector<std::string> lines;
    for (DocumentReader::Piece piece; reader.next(piece);) {
      EXPECT_EQ(piece.line, static_cast<int64_t>(lines.size()) + (piece.begins ? 1 : 0));
      if (piece.begins) lines.emplace_back();
      lines.back() += piece.bytes;
    }
    EXPECT_EQ(lines,
              (std::vector<std::string>{"a", "", "bb\r", std::string(2500000, 'x'), "last"}));
    EXPECT_EQ(reader.line(), 5);
  }
}

}  // namespace
}  // namespace lockstep
