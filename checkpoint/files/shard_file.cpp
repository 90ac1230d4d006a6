#include "lockstep/checkpoint/shard_file.h"

#include <algorithm>
#include <cstring>
#include <filesystem>

#include "lockstep/checkpoint/safetensors_header.h"
#include "lockstep/core/check.h"
#include "lockstep/core/input_file.h"
#include "lockstep/core/integers.h"
#include "lockstep/datasets/crc32.h"

namespace lockstep {
namespace {

class FileOnDisk : public CheckpointFileBytes {
 public:
  explicit FileOnDisk(std::string path) : file_(std::move(path), {.follow_links = false}) {}

  const std::string& path() const override { return file_.path(); }
  int64_t size() const override { return file_.size(); }
  void read_at(int64_t offset, char* to, size_t count) const override {
    file_.read_at(offset, to, count);
  }

 private:
  InputFile file_;
};

ManifestFile write_checked(const std::string& folder, const std::string& name,
                           const std::vector<std::string_view>& pieces,
                           const std::atomic<bool>* stop = nullptr) {
  ShardWriter file(folder, name, stop);
  try {
    for (const std::string_view piece : pieces) file.write(piece);
    return file.finish();
  } catch (const FileError&) {
    std::error_code ignored;
    std::filesystem::remove(folder + "/" + name, ignored);
    throw;
  }
}

}  // namespace

void throw_if_cancelled(const std::atomic<bool>* stop) {
  if (stop && *stop) fail<FileError>("the save was given up");
}

ShardWriter::ShardWriter(const std::string& folder, const std::string& name,
                         const std::atomic<bool>* stop)
    : stop_(stop), file_(folder + "/" + name), written_{name, 0, {}} {}

/// Writes each part right after its checksum, while it is still in the processor's cache.
void ShardWriter::write(std::string_view bytes) {
  while (!bytes.empty()) {
    throw_if_cancelled(stop_);
    const int64_t inside = written_.size % kChecksumBlock;
    const std::string_view part = bytes.substr(0, static_cast<size_t>(kChecksumBlock - inside));
    if (inside == 0) written_.block_crc32.push_back(0);
    written_.block_crc32.back() = crc32(part, written_.block_crc32.back());
    file_.write(part);
    written_.size += static_cast<int64_t>(part.size());
    bytes.remove_prefix(part.size());
  }
}

ManifestFile ShardWriter::finish() {
  throw_if_cancelled(stop_);
  file_.finish();
  return written_;
}

ShardReader::ShardReader(const std::string& folder, ManifestFile expected)
    : ShardReader(std::make_unique<FileOnDisk>(folder + "/" + expected.name), expected) {}

ShardReader::ShardReader(std::unique_ptr<CheckpointFileBytes> opened, ManifestFile expected)
    : opened_(std::move(opened)), expected_(std::move(expected)) {
  require<FileError>(opened_->size() == expected_.size,
                     "'{}': found {} bytes, allowed: {}, as the manifest says", path(),
                     opened_->size(), expected_.size);
}

int64_t ShardReader::block_size(int64_t block) const {
  return std::min(kChecksumBlock, expected_.size - block * kChecksumBlock);
}

void ShardReader::read_bytes(int64_t offset, int64_t count, char* out) {
  opened_->read_at(offset, out, static_cast<size_t>(count));
  bytes_read_ += count;
}

bool ShardReader::block_fits(int64_t block, std::string_view bytes) const {
  return crc32(bytes) == expected_.block_crc32[static_cast<size_t>(block)];
}

void ShardReader::fail_block(int64_t block, std::string_view what) const {
  const int64_t begin = block * kChecksumBlock;
  fail<FileError>("'{}': {}: bytes {} to {} do not match the checksum in the manifest", path(),
                  what, begin, begin + block_size(block) - 1);
}

std::string_view ShardReader::load_block(int64_t block, std::string_view what) {
  if (buffered_ != block) {
    buffered_ = -1;
    buffer_.resize(static_cast<size_t>(block_size(block)));
    read_bytes(block * kChecksumBlock, block_size(block), buffer_.data());
    if (!block_fits(block, buffer_)) fail_block(block, what);
    buffered_ = block;
  }
  return buffer_;
}

void ShardReader::read(int64_t offset, int64_t count, char* out, std::string_view what) {
  require<UsageError>(offset >= 0 && count >= 0 && count <= expected_.size - offset,
                      "'{}': bytes {} to {} of {}", path(), offset, offset + count, expected_.size);
  while (count > 0) {
    const int64_t block = offset / kChecksumBlock, inside = offset % kChecksumBlock;
    const int64_t part = std::min(count, block_size(block) - inside);
    if (part == block_size(block) && buffered_ != block) {
      read_bytes(offset, part, out);
      if (!block_fits(block, {out, static_cast<size_t>(part)})) fail_block(block, what);
    } else {
      std::memcpy(out, load_block(block, what).data() + inside, static_cast<size_t>(part));
    }
    out += part;
    offset += part;
    count -= part;
  }
}

int64_t ShardReader::find_damage() {
  buffered_ = -1;
  for (int64_t block = 0; block < ceil_div(expected_.size, kChecksumBlock); ++block) {
    buffer_.resize(static_cast<size_t>(block_size(block)));
    read_bytes(block * kChecksumBlock, block_size(block), buffer_.data());
    if (!block_fits(block, buffer_)) return block;
  }
  return -1;
}

std::string shard_entry_name(std::string_view key, const TensorPart& part) {
  std::string name(key);
  if (!part.box.is_whole()) name += to_string(part.box);
  if (part.range.numel() != part.box.numel())
    name += fmt::format("#{}:{}", part.range.first, part.range.last);
  return name;
}

WrittenShard write_shard(const std::string& folder, const std::string& name,
                         const std::vector<ShardContent>& contents, const std::atomic<bool>* stop) {
  SafetensorsHeader header{.entries = {}, .metadata = {{"format", "pt"}}};
  std::vector<std::string_view> pieces = {""};
  WrittenShard written;
  int64_t offset = 0;
  for (const ShardContent& content : contents) {
    const bool whole_block = content.part.range.numel() == content.part.box.numel();
    header.entries.push_back(
        {shard_entry_name(tensor_key(content.name, content.state), content.part), content.dtype,
         whole_block ? content.part.box.size : std::vector<int64_t>{content.part.range.numel()},
         offset, offset + content.bytes});
    pieces.emplace_back(static_cast<const char*>(content.data), static_cast<size_t>(content.bytes));
    written.offsets.push_back(offset);
    offset += content.bytes;
  }
  const std::string text = format_safetensors_header(header);
  for (int64_t& begin : written.offsets) begin += static_cast<int64_t>(text.size());
  pieces.front() = text;
  written.file = write_checked(folder, name, pieces, stop);
  return written;
}

ManifestFile write_text_file(const std::string& folder, const std::string& name,
                             const std::string& text) {
  return write_checked(folder, name, {text});
}

}  // namespace lockstep
