#include "lockstep/datasets/indexed_dataset.h"

#include <gtest/gtest.h>
#include <sys/stat.h>

#include <algorithm>
#include <fstream>
#include <nlohmann/json.hpp>

#include "lockstep/core/error.h"
#include "lockstep/datasets/indexed_dataset_writer.h"
#include "lockstep/tests/support/temporary_folder.h"
#include "lockstep/tests/support/throws_with.h"

namespace lockstep {
namespace {

using Json = nlohmann::json;
using testing::TemporaryFolder;
using testing::throws_with;

/// Cases from scripts/golden/indexed_dataset.py, written by Megatron Core.
const Json& dataset_golden() {
  static const Json cases =
      Json::parse(std::ifstream(LOCKSTEP_SOURCE_DIR "/tests/datasets/indexed_dataset_golden.json"));
  return cases;
}

std::string from_hex(const std::string& digits) {
  std::string bytes;
  for (size_t i = 0; i < digits.size(); i += 2)
    bytes.push_back(static_cast<char>(std::stoi(digits.substr(i, 2), nullptr, 16)));
  return bytes;
}

TokenType type_of(const Json& test) {
  for (uint8_t code = 1; code <= 8; ++code)
    if (token_type_name(static_cast<TokenType>(code)) == test["dtype"].get<std::string>())
      return static_cast<TokenType>(code);
  throw std::runtime_error("no such dtype");
}

bool is_float(TokenType type) { return type == TokenType::float32 || type == TokenType::float64; }

std::string packed_floats(const Json& sequence, TokenType type) {
  std::string bytes;
  for (const auto& value : sequence) {
    const auto real = value.get<double>();
    const auto single = static_cast<float>(real);
    if (type == TokenType::float32)
      bytes.append(reinterpret_cast<const char*>(&single), sizeof single);
    else
      bytes.append(reinterpret_cast<const char*>(&real), sizeof real);
  }
  return bytes;
}

void write(const Json& test, const std::string& prefix) {
  const TokenType type = type_of(test);
  IndexedDatasetWriter writer(prefix, type, !test["modes"].is_null());
  for (size_t d = 0; d < test["documents"].size(); ++d) {
    const Json& document = test["documents"][d];
    for (size_t s = 0; s < document.size(); ++s) {
      if (is_float(type))
        writer.append_packed(packed_floats(document[s], type));
      else
        writer.append(document[s].get<std::vector<int64_t>>());
      writer.end_sequence(test["modes"].is_null() ? int8_t(0) : test["modes"][d][s].get<int8_t>());
    }
    writer.end_document();
  }
  writer.finish();
}

std::vector<int64_t> ids_of(const PackedTokens& tokens) {
  std::vector<int64_t> ids(static_cast<size_t>(tokens.size));
  tokens.read(0, ids);
  return ids;
}

TEST(IndexedDataset, WritesWhatMegatronWrites) {
  const TemporaryFolder folder;
  for (const Json& test : dataset_golden()) {
    write(test, folder.path() / "set");
    EXPECT_EQ(folder.read("set.idx"), from_hex(test["idx"])) << test["name"];
    EXPECT_EQ(folder.read("set.bin"), from_hex(test["bin"])) << test["name"];
  }
  EXPECT_EQ(dataset_golden().size(), 12u);
}

TEST(IndexedDataset, ReadsWhatMegatronWrites) {
  const TemporaryFolder folder;
  for (const Json& test : dataset_golden()) {
    folder.write("set.idx", from_hex(test["idx"]));
    folder.write("set.bin", from_hex(test["bin"]));
    const IndexedDataset set(folder.path() / "set");
    const DatasetIndex& index = set.index();
    ASSERT_EQ(index.type, type_of(test)) << test["name"];
    const Json& documents = test["documents"];
    ASSERT_EQ(index.num_documents(), static_cast<int64_t>(documents.size())) << test["name"];
    int64_t sequence = 0, tokens = 0;
    for (size_t d = 0; d < documents.size(); ++d) {
      EXPECT_EQ(index.bounds[static_cast<int64_t>(d)], sequence);
      for (size_t s = 0; s < documents[d].size(); ++s, ++sequence) {
        const PackedTokens found = set.sequence(sequence);
        tokens += found.size;
        if (is_float(index.type))
          EXPECT_EQ(found.bytes(0, found.size), packed_floats(documents[d][s], index.type));
        else
          EXPECT_EQ(ids_of(found), documents[d][s].get<std::vector<int64_t>>()) << test["name"];
        if (!test["modes"].is_null()) {
          EXPECT_EQ(index.modes[sequence], test["modes"][d][s].get<int8_t>());
        }
      }
    }
    EXPECT_EQ(index.num_sequences(), sequence);
    EXPECT_EQ(index.num_tokens, tokens);
    EXPECT_EQ(set.tokens().size, tokens);
  }
}

TEST(IndexedDataset, TypeOfAVocabulary) {
  EXPECT_EQ(token_type_of_vocabulary(257), TokenType::uint16);
  EXPECT_EQ(token_type_of_vocabulary(65499), TokenType::uint16);
  EXPECT_EQ(token_type_of_vocabulary(65500), TokenType::int32);
}

/// A small data set whose files the tests damage.
class DamagedDataset : public ::testing::Test {
 protected:
  DamagedDataset() {
    const Json& test = dataset_golden()[0];
    idx_ = from_hex(test["idx"]);
    bin_ = from_hex(test["bin"]);
  }

  void SetUp() override { ASSERT_EQ(dataset_golden()[0]["name"], "two documents"); }

  template <class T>
  std::string with(size_t offset, T value) const {
    std::string bytes = idx_;
    std::memcpy(bytes.data() + offset, &value, sizeof value);
    return bytes;
  }

  ::testing::AssertionResult refuses(const std::string& idx, const std::string& part) const {
    return throws_with<FileError>([&] { parse_dataset_index(idx, "a.idx"); }, "'a.idx': " + part);
  }

  ::testing::AssertionResult pair_refused(const std::string& idx, const std::string& bin,
                                          const std::string& part) const {
    folder_.write("a.idx", idx);
    folder_.write("a.bin", bin);
    return throws_with<FileError>([&] { IndexedDataset(folder_.path() / "a"); }, part);
  }

  TemporaryFolder folder_;
  std::string idx_;
  std::string bin_;
};

TEST_F(DamagedDataset, EachFieldIsNamed) {
  // Header 0, 9, 17, 18, 26; lengths [3, 2] at 34, pointers [0, 6] at 42, bounds [0, 1, 2] at 58.
  ASSERT_EQ(idx_.size(), 82u);
  EXPECT_TRUE(refuses(with<char>(3, 'x'), "byte 0: magic"));
  EXPECT_TRUE(refuses(with<uint64_t>(9, 2), "byte 9: version: found 2, allowed: 1"));
  EXPECT_TRUE(refuses(with<uint8_t>(17, 0), "byte 17: dtype code: found 0, allowed: 1 to 8"));
  EXPECT_TRUE(refuses(with<uint8_t>(17, 9), "byte 17: dtype code: found 9"));
  EXPECT_TRUE(refuses(with<uint64_t>(18, uint64_t(1) << 40), "byte 34: lengths of the sequences"));
  EXPECT_TRUE(refuses(with<uint64_t>(18, ~uint64_t(0)), "byte 34: lengths of the sequences"));
  EXPECT_TRUE(refuses(with<uint64_t>(18, 6), "byte 58: pointers of the sequences: found the end"));
  EXPECT_TRUE(refuses(with<uint64_t>(18, 1), "byte 70: found 12 bytes after"));
  EXPECT_TRUE(refuses(with<uint64_t>(26, 0), "byte 26: number of document bounds: found 0"));
  EXPECT_TRUE(refuses(with<uint64_t>(26, ~uint64_t(0)), "byte 58: document bounds: found the end"));
  EXPECT_TRUE(refuses(with<int32_t>(38, -2), "byte 38: length of sequence 1: found -2"));
  EXPECT_TRUE(refuses(with<int32_t>(34, 4), "byte 50: pointer of sequence 1: found 6, allowed: 8"));
  EXPECT_TRUE(refuses(with<int64_t>(50, 4), "byte 50: pointer of sequence 1: found 4, allowed: 6"));
  EXPECT_TRUE(refuses(with<int64_t>(42, -1), "byte 42: pointer of sequence 0: found -1"));
  EXPECT_TRUE(refuses(with<int64_t>(58, 1), "byte 58: document bound 0: found 1, allowed: 0 to 0"));
  EXPECT_TRUE(refuses(with<int64_t>(66, 3), "byte 66: document bound 1: found 3, allowed: 0 to 2"));
  EXPECT_TRUE(refuses(with<int64_t>(74, 0), "byte 74: document bound 2: found 0, allowed: 1 to 2"));
  EXPECT_TRUE(refuses(with<int64_t>(74, 1), "byte 74: the last document bound: found 1"));
  EXPECT_TRUE(refuses(idx_ + "x", "byte 82: found 1 bytes after the document bounds"));
  EXPECT_TRUE(refuses(idx_ + std::string(4096, '\0'), "byte 82: found 4096 bytes"));
}

TEST_F(DamagedDataset, CutAnywhere) {
  const std::pair<size_t, const char*> fields[] = {{9, "magic"},
                                                   {17, "version"},
                                                   {18, "dtype code"},
                                                   {26, "number of sequences"},
                                                   {34, "number of document bounds"},
                                                   {42, "lengths of the sequences"},
                                                   {58, "pointers of the sequences"},
                                                   {82, "document bounds"}};
  for (size_t size = 0; size < idx_.size(); ++size) {
    const auto* field = fields;
    while (field->first <= size) ++field;
    EXPECT_TRUE(refuses(idx_.substr(0, size), "byte")) << size;
    EXPECT_TRUE(refuses(idx_.substr(0, size),
                        "byte " + std::to_string(field == fields ? 0 : (field - 1)->first) + ": " +
                            field->second + ": found the end of the file at byte " +
                            std::to_string(size)));
  }
}

TEST_F(DamagedDataset, EveryByteChanged) {
  int loaded = 0;
  for (const Json& test : dataset_golden()) {
    const std::string good = from_hex(test["idx"]);
    for (size_t place = 0; place < good.size(); ++place)
      for (int value = 0; value < 256; ++value) {
        std::string bytes = good;
        bytes[place] = static_cast<char>(value);
        try {
          const DatasetIndex index = parse_dataset_index(bytes, "a.idx");
          int64_t end = 0;
          for (int64_t i = 0; i < index.num_sequences(); ++i) {
            EXPECT_EQ(index.pointers[i], end);
            end += index.lengths[i] * token_type_bytes(index.type);
          }
          EXPECT_EQ(end, index.bin_bytes());
          EXPECT_EQ(index.bounds[index.num_documents()], index.num_sequences());
          loaded += bytes != good;
        } catch (const FileError&) {
        }
      }
  }
  // Another length of the last sequence, other inner bounds, other modes, other types of the same
  // size: these indices are consistent. Most need a `.bin` of another size.
  EXPECT_GT(loaded, 100);
  EXPECT_LT(loaded, 20000);
}

TEST_F(DamagedDataset, ThePairMustFit) {
  EXPECT_TRUE(pair_refused(idx_, bin_ + "x", "a.bin': found 11 bytes, allowed: 10"));
  EXPECT_TRUE(pair_refused(idx_, bin_.substr(0, 9), "found 9 bytes, allowed: 10"));
  EXPECT_TRUE(pair_refused("", bin_, "a.idx': byte 0: magic: found the end"));
  std::filesystem::remove(folder_.path() / "a.bin");
  folder_.write("a.idx", idx_);
  const auto open = [&] { IndexedDataset(folder_.path() / "a"); };
  EXPECT_TRUE(throws_with<FileError>(open, "a.bin' cannot be read: No such file"));
  std::filesystem::create_directory(folder_.path() / "a.bin");
  EXPECT_TRUE(throws_with<FileError>(open, "a.bin' cannot be read: found no regular file"));
  std::filesystem::remove(folder_.path() / "a.idx");
  ASSERT_EQ(::mkfifo((folder_.path() / "a.idx").c_str(), 0600), 0);
  EXPECT_TRUE(throws_with<FileError>(open, "a.idx' cannot be read: found no regular file"));
  std::filesystem::remove(folder_.path() / "a.idx");
  std::filesystem::create_symlink("a.idx", folder_.path() / "a.idx");
  EXPECT_TRUE(throws_with<FileError>(open, "Too many levels of symbolic links"));
}

TEST(IndexedDataset, LongReadsAreThoseOfAnyParts) {
  const TemporaryFolder folder;
  for (const TokenType type : {TokenType::uint8, TokenType::uint16, TokenType::int32}) {
    std::vector<int64_t> ids(50000);
    for (size_t i = 0; i < ids.size(); ++i) ids[i] = static_cast<int64_t>(i * i % 251);
    IndexedDatasetWriter writer(folder.path() / "set", type);
    writer.append(ids);
    writer.end_sequence();
    writer.end_document();
    writer.finish();
    const IndexedDataset set(folder.path() / "set");
    for (const auto& [begin, end] :
         {std::pair{0, 50000}, {1, 40000}, {7777, 7778}, {16383, 49153}}) {
      std::vector<int64_t> found(static_cast<size_t>(end - begin));
      set.tokens().part(begin, 50000).read(0, found);
      EXPECT_TRUE(std::equal(found.begin(), found.end(), ids.begin() + begin)) << begin;
      set.sequence(0).read(begin, found);
      EXPECT_TRUE(std::equal(found.begin(), found.end(), ids.begin() + begin)) << begin;
    }
  }
}

TEST_F(DamagedDataset, AShorterBinIsNamedWhileItIsRead) {
  folder_.write("a.idx", idx_);
  folder_.write("a.bin", bin_);
  const IndexedDataset set(folder_.path() / "a");
  const std::vector<int64_t> before = ids_of(set.tokens());
  std::filesystem::resize_file(folder_.path() / "a.idx", 3);
  EXPECT_EQ(ids_of(set.tokens()), before);
  std::filesystem::resize_file(folder_.path() / "a.bin", 3);
  EXPECT_TRUE(throws_with<FileError>([&] { ids_of(set.tokens()); },
                                     "a.bin' cannot be read at byte 3: it was truncated"));
}

TEST(IndexedDatasetWriter, UntilTheEndThereIsNoPair) {
  const TemporaryFolder folder;
  const std::string prefix = folder.path() / "set";
  const auto files = [&] {
    const std::filesystem::directory_iterator begin(folder.path());
    return std::distance(begin, {});
  };
  {
    IndexedDatasetWriter writer(prefix, TokenType::uint16);
    writer.append(std::vector<int64_t>{1, 2});
    writer.end_sequence();
    writer.end_document();
    EXPECT_TRUE(throws_with<FileError>([&] { IndexedDataset{prefix}; }, "No such file"));
  }
  EXPECT_EQ(files(), 0);
  for (const int64_t id : {5, 6}) {
    IndexedDatasetWriter writer(prefix, TokenType::uint16);
    writer.append(std::vector<int64_t>{id});
    writer.end_sequence();
    writer.end_document();
    if (id == 6) {
      EXPECT_EQ(ids_of(IndexedDataset(prefix).tokens()), std::vector<int64_t>{5});
    }
    writer.finish();
    EXPECT_EQ(ids_of(IndexedDataset(prefix).tokens()), std::vector<int64_t>{id});
  }
  EXPECT_EQ(files(), 2);
}

TEST(IndexedDatasetWriter, NamesWhatIsWrong) {
  const TemporaryFolder folder;
  const std::string prefix = folder.path() / "set";
  EXPECT_TRUE(throws_with<FileError>(
      [&] { IndexedDatasetWriter(folder.path() / "none/set", TokenType::uint16); },
      "none/set.bin' cannot be created: No such file"));
  IndexedDatasetWriter writer(prefix, TokenType::uint16);
  const auto append = [&](int64_t id) { writer.append(std::vector{id}); };
  EXPECT_TRUE(throws_with<UsageError>([&] { append(-1); }, "found -1, allowed: what uint16 holds"));
  IndexedDatasetWriter open(prefix, TokenType::float32);
  EXPECT_TRUE(throws_with<UsageError>([&] { open.append(std::vector<int64_t>{1}); }, "float32"));
  EXPECT_TRUE(throws_with<UsageError>([&] { open.append_packed("abc"); }, "found 3 bytes"));
  open.append_packed("abcd");
  EXPECT_TRUE(throws_with<UsageError>([&] { open.end_document(); }, "inside sequence 0"));
  EXPECT_TRUE(
      throws_with<UsageError>([&] { open.end_sequence(1); }, "mode of sequence 0: found 1"));
  open.end_sequence();
  EXPECT_TRUE(throws_with<UsageError>([&] { open.finish(); }, "sequence 0 is in no document"));
}

}  // namespace
}  // namespace lockstep
