#include "lockstep/datasets/compressed_input.h"

#include <zlib.h>
#include <zstd.h>

#include <algorithm>
#include <new>
#include <utility>

#include "lockstep/core/check.h"

namespace lockstep {
namespace {

constexpr size_t kCompressedAtOnce = 1 << 16;
constexpr size_t kRoomAtMost = 1 << 30;  // zlib counts in 32 bits
constexpr std::string_view kGzipEnd = ".gz", kZstdEnd = ".zst";

class GzipDecompressor : public CompressedInput::Decompressor {
 public:
  GzipDecompressor() {
    constexpr int kLargestWindow = 15, kGzipHeader = 16;
    if (::inflateInit2(&stream_, kLargestWindow + kGzipHeader) != Z_OK) throw std::bad_alloc();
  }
  ~GzipDecompressor() override { ::inflateEnd(&stream_); }
  GzipDecompressor(const GzipDecompressor&) = delete;
  GzipDecompressor& operator=(const GzipDecompressor&) = delete;

  CompressedInput::Step run(std::string_view input, char* to, size_t room) override {
    room = std::min(room, kRoomAtMost);
    stream_.next_in = reinterpret_cast<Bytef*>(const_cast<char*>(input.data()));
    stream_.avail_in = static_cast<uInt>(input.size());
    stream_.next_out = reinterpret_cast<Bytef*>(to);
    stream_.avail_out = static_cast<uInt>(room);
    const int result = ::inflate(&stream_, Z_NO_FLUSH);
    if (result == Z_MEM_ERROR) throw std::bad_alloc();
    CompressedInput::Step step = {.used = input.size() - stream_.avail_in,
                                  .made = room - stream_.avail_out,
                                  .ended = result == Z_STREAM_END};
    if (step.ended)
      ::inflateReset(&stream_);
    else if (result != Z_OK && result != Z_BUF_ERROR)
      step.problem = stream_.msg != nullptr ? stream_.msg : ::zError(result);
    return step;
  }

 private:
  z_stream stream_ = {};
};

class ZstdDecompressor : public CompressedInput::Decompressor {
 public:
  ZstdDecompressor() : stream_(::ZSTD_createDStream(), &::ZSTD_freeDStream) {
    if (!stream_) throw std::bad_alloc();
  }

  CompressedInput::Step run(std::string_view input, char* to, size_t room) override {
    ZSTD_inBuffer in = {input.data(), input.size(), 0};
    ZSTD_outBuffer out = {to, room, 0};
    const size_t result = ::ZSTD_decompressStream(stream_.get(), &out, &in);
    // On an error, zstd may count all input and all room as used up.
    if (::ZSTD_isError(result) != 0)
      return {.used = 0, .made = 0, .problem = ::ZSTD_getErrorName(result)};
    return {.used = in.pos, .made = out.pos, .ended = result == 0};
  }

 private:
  std::unique_ptr<ZSTD_DStream, size_t (*)(ZSTD_DStream*)> stream_;
};

std::unique_ptr<CompressedInput::Decompressor> make_decompressor(Compression compression) {
  if (compression == Compression::gzip) return std::make_unique<GzipDecompressor>();
  if (compression == Compression::zstd) return std::make_unique<ZstdDecompressor>();
  return nullptr;
}

}  // namespace

Compression compression_of(std::string_view path) {
  if (path.ends_with(kGzipEnd)) return Compression::gzip;
  return path.ends_with(kZstdEnd) ? Compression::zstd : Compression::none;
}

std::string_view without_compression(std::string_view path) {
  if (path.ends_with(kGzipEnd))
    path.remove_suffix(kGzipEnd.size());
  else if (path.ends_with(kZstdEnd))
    path.remove_suffix(kZstdEnd.size());
  return path;
}

CompressedInput::CompressedInput(Compression compression, Source source, std::string path)
    : compression_(compression),
      source_(std::move(source)),
      path_(std::move(path)),
      decompressor_(make_decompressor(compression)) {}

CompressedInput::~CompressedInput() = default;

void CompressedInput::refill() {
  if (!input_.empty() || source_ended_) return;
  buffer_.resize(kCompressedAtOnce);
  const size_t count = source_(buffer_.data(), buffer_.size());
  input_ = std::string_view(buffer_).substr(0, count);
  source_ended_ = count == 0;
}

bool CompressedInput::ends_here() {
  const bool padded = compression_ == Compression::gzip && consumed_ > 0;
  for (refill(); padded && !input_.empty() && input_.front() == '\0'; refill()) {
    const size_t zeros = std::min(input_.find_first_not_of('\0'), input_.size());
    input_.remove_prefix(zeros);
    consumed_ += static_cast<int64_t>(zeros);
  }
  return input_.empty() && consumed_ > 0;
}

void CompressedInput::fail(const std::string& problem) const {
  throw CompressionError(path_, problem);
}

size_t CompressedInput::read(char* to, size_t count) {
  if (!decompressor_) return source_(to, count);
  if (!failure_.empty()) fail(failure_);
  size_t made = 0;
  while (made < count && failure_.empty()) {
    if (at_boundary_ && ends_here()) break;
    refill();
    const Step step = decompressor_->run(input_, to + made, count - made);
    input_.remove_prefix(step.used);
    consumed_ += static_cast<int64_t>(step.used);
    made += step.made;
    at_boundary_ = step.ended;
    const bool stuck = step.used == 0 && step.made == 0 && !step.ended;
    if (step.problem != nullptr)
      failure_ =
          fmt::format("the compressed data are damaged at byte {}: {}", consumed_, step.problem);
    else if (stuck && source_ended_)
      failure_ = fmt::format("the compressed data end too early, at byte {}", consumed_);
  }
  if (made == 0 && !failure_.empty()) fail(failure_);
  return made;
}

}  // namespace lockstep
