#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "lockstep/checkpoint/checkpoint_folder.h"
#include "lockstep/checkpoint/checkpoint_source.h"
#include "lockstep/checkpoint/manifest.h"

/// Reading and writing the files of a checkpoint with a checksum for each block of kChecksumBlock
/// bytes. Needs no libtorch.
namespace lockstep {

/// Reads parts of a file and checks what it reads. Not thread-safe.
class ShardReader {
 public:
  /// FileError with the path: the file is missing, is not a regular file (a symbolic link is not),
  /// or does not have the size of `expected`.
  ShardReader(const std::string& folder, ManifestFile expected);
  /// The same for a file that is already open.
  ShardReader(std::unique_ptr<CheckpointFileBytes> opened, ManifestFile expected);

  /// Reads bytes offset ... offset + count - 1 into `out`, by reading the blocks that hold them.
  /// FileError with the path, `what` they are and the byte range of the first block whose checksum
  /// does not match.
  void read(int64_t offset, int64_t count, char* out, std::string_view what);

  /// Checks all blocks; returns the first block whose checksum does not match, -1 if there is none.
  int64_t find_damage();

  const std::string& path() const { return opened_->path(); }
  const ManifestFile& file() const { return expected_; }
  /// Bytes read from it so far.
  int64_t bytes_read() const { return bytes_read_; }

 private:
  int64_t block_size(int64_t block) const;
  void read_bytes(int64_t offset, int64_t count, char* out);
  bool block_fits(int64_t block, std::string_view bytes) const;
  std::string_view load_block(int64_t block, std::string_view what);
  [[noreturn]] void fail_block(int64_t block, std::string_view what) const;

  std::unique_ptr<CheckpointFileBytes> opened_;
  ManifestFile expected_;
  std::string buffer_;     ///< the last block that was partly read
  int64_t buffered_ = -1;  ///< its number
  int64_t bytes_read_ = 0;
};

/// FileError if `stop` is set: nobody wants the checkpoint any more. It may be null.
void throw_if_cancelled(const std::atomic<bool>* stop);

/// Writes a file of a checkpoint from front to back. Errors as for FileWriter, and of
/// throw_if_cancelled(), which is asked before each block and before finish() waits for the disk.
class ShardWriter {
 public:
  ShardWriter(const std::string& folder, const std::string& name,
              const std::atomic<bool>* stop = nullptr);

  void write(std::string_view bytes);
  /// Waits until everything is on disk.
  ManifestFile finish();

 private:
  const std::atomic<bool>* stop_;
  FileWriter file_;
  ManifestFile written_;
};

/// A part of a tensor, as it is written.
struct ShardContent {
  std::string name;  ///< ManifestTensor::name
  std::string state;
  std::string dtype;
  TensorPart part;
  const void* data = nullptr;  ///< of the part, contiguous; must live until it is written
  int64_t bytes = 0;
};

/// What was written: the file, and where each content is in it.
struct WrittenShard {
  ManifestFile file;
  std::vector<int64_t> offsets;  ///< in bytes, in the order of the contents
};

/// Writes `contents` as the safetensors file `name` of `folder` and waits until it is on disk. The
/// name of a part of a tensor contains its place, that of a whole tensor is just its key(). `stop`
/// ends it early, see ShardWriter. FileError: no file is left, whose blocks a full disk needs.
WrittenShard write_shard(const std::string& folder, const std::string& name,
                         const std::vector<ShardContent>& contents,
                         const std::atomic<bool>* stop = nullptr);

/// Likewise writes a text as a file of `folder`.
ManifestFile write_text_file(const std::string& folder, const std::string& name,
                             const std::string& text);

/// Name of a part in its file: "decoder.weight", "decoder.weight[0:4, 0:8]#0:16".
std::string shard_entry_name(std::string_view key, const TensorPart& part);

}  // namespace lockstep
