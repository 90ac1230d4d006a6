#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>

#include "lockstep/core/error.h"

/// The bytes of files that may be compressed, decompressed while they are read. Needs no libtorch.
namespace lockstep {

enum class Compression { none, gzip, zstd };

/// The compression according to the end of a file's name: ".gz" or ".zst".
Compression compression_of(std::string_view path);

/// The name without that suffix.
std::string_view without_compression(std::string_view path);

/// Compressed bytes that are damaged, or that end too early.
class CompressionError : public FileError {
 public:
  CompressionError(const std::string& path, std::string problem)
      : FileError("'" + path + "': " + problem), problem_(std::move(problem)) {}

  /// The message without the path.
  const std::string& problem() const { return problem_; }

 private:
  std::string problem_;
};

/// Decompresses what a source gives: any number of gzip members or zstd frames, one after another.
/// Zero bytes after a gzip member are padding. Memory: a buffer and the window of the format, at
/// most 128 MiB, which zstd exceeds only if it was told to (--long=28 and more).
class CompressedInput {
 public:
  /// Writes up to `count` bytes to `to`; returns how many, 0 only at the end.
  using Source = std::function<size_t(char* to, size_t count)>;

  /// `path` is used in messages.
  CompressedInput(Compression compression, Source source, std::string path);
  ~CompressedInput();
  CompressedInput(const CompressedInput&) = delete;
  CompressedInput& operator=(const CompressedInput&) = delete;

  /// Reads the next bytes, at most `count`; fewer only at the end or before damage.
  /// CompressionError names the path and the byte of the compressed file; it is thrown once what
  /// the library decompressed before that byte was read (with zstd up to one block may be missing).
  /// What the source throws passes through.
  size_t read(char* to, size_t count);

  /// The result of one call of a decompressor. A problem is a sentence of its library.
  struct Step {
    size_t used = 0;
    size_t made = 0;
    bool ended = false;  ///< a member or frame is complete
    const char* problem = nullptr;
  };
  class Decompressor {
   public:
    virtual ~Decompressor() = default;
    virtual Step run(std::string_view input, char* to, size_t room) = 0;
  };

 private:
  void refill();
  /// At a boundary between members: whether nothing follows.
  bool ends_here();
  [[noreturn]] void fail(const std::string& problem) const;

  Compression compression_;
  Source source_;
  std::string path_;
  std::unique_ptr<Decompressor> decompressor_;
  std::string buffer_;
  std::string_view input_;  ///< what is left of buffer_
  int64_t consumed_ = 0;    ///< bytes of the source that were decompressed
  bool source_ended_ = false;
  bool at_boundary_ = true;
  std::string failure_;  ///< to be thrown by the next read()
};

}  // namespace lockstep
