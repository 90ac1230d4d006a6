#pragma once

#include <zlib.h>
#include <zstd.h>

#include <stdexcept>
#include <string>

namespace lockstep::testing {

/// A gzip member.
inline std::string gzip_of(const std::string& text) {
  constexpr int kWindow = 15, kGzip = 16, kMemory = 8;
  z_stream stream = {};
  if (::deflateInit2(&stream, Z_BEST_SPEED, Z_DEFLATED, kWindow + kGzip, kMemory,
                     Z_DEFAULT_STRATEGY) != Z_OK)
    throw std::runtime_error("deflateInit2");
  std::string bytes(::deflateBound(&stream, text.size()) + 64, '\0');
  stream.next_in = reinterpret_cast<Bytef*>(const_cast<char*>(text.data()));
  stream.avail_in = static_cast<uInt>(text.size());
  stream.next_out = reinterpret_cast<Bytef*>(bytes.data());
  stream.avail_out = static_cast<uInt>(bytes.size());
  const int result = ::deflate(&stream, Z_FINISH);
  bytes.resize(stream.total_out);
  ::deflateEnd(&stream);
  if (result != Z_STREAM_END) throw std::runtime_error("deflate");
  return bytes;
}

/// A zstd frame with a checksum, as the program zstd writes it.
inline std::string zstd_of(const std::string& text) {
  std::string bytes(::ZSTD_compressBound(text.size()), '\0');
  ZSTD_CCtx* const context = ::ZSTD_createCCtx();
  ::ZSTD_CCtx_setParameter(context, ZSTD_c_checksumFlag, 1);
  const size_t size =
      ::ZSTD_compress2(context, bytes.data(), bytes.size(), text.data(), text.size());
  ::ZSTD_freeCCtx(context);
  if (::ZSTD_isError(size)) throw std::runtime_error("ZSTD_compress");
  bytes.resize(size);
  return bytes;
}

}  // namespace lockstep::testing
