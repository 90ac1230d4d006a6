#include "lockstep/training/checkpoint/safetensors.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>

#include <ATen/ATen.h>

#include "lockstep/core/check.h"
#include "lockstep/training/checkpoint/safetensors_header.h"

namespace lockstep {
namespace {

constexpr std::pair<at::ScalarType, const char*> kDtypes[] = {
    {at::kDouble, "F64"}, {at::kFloat, "F32"}, {at::kBFloat16, "BF16"}, {at::kHalf, "F16"},
    {at::kLong, "I64"},   {at::kInt, "I32"},   {at::kShort, "I16"},     {at::kChar, "I8"},
    {at::kByte, "U8"},    {at::kBool, "BOOL"}};

const char* name_of(at::ScalarType dtype) {
  for (const auto& [type, name] : kDtypes)
    if (type == dtype) return name;
  fail<UsageError>("safetensors: tensors of {} cannot be saved", at::toString(dtype));
}

at::ScalarType dtype_of(const std::string& name) {
  for (const auto& [type, text] : kDtypes)
    if (name == text) return type;
  fail<UsageError>("safetensors: unknown dtype '{}'", name);
}

}  // namespace

void write_file(const std::string& path, const std::vector<std::string_view>& pieces) {
  const int file = ::open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);
  bool good = file >= 0;
  for (std::string_view piece : pieces)
    while (good && !piece.empty()) {
      const ssize_t written = ::write(file, piece.data(), piece.size());
      if (written < 0 && errno == EINTR) continue;
      good = written > 0;
      if (good) piece.remove_prefix(static_cast<size_t>(written));
    }
  good = good && ::fsync(file) == 0;
  const std::string reason = good ? "" : std::strerror(errno);
  if (file >= 0) ::close(file);
  require<FileError>(good, "'{}' cannot be written: {}", path, reason);
}

void save_safetensors(const std::string& path,
                      const std::vector<std::pair<std::string, at::Tensor>>& tensors,
                      const std::map<std::string, std::string>& metadata) {
  SafetensorsHeader header{.entries = {}, .metadata = metadata};
  std::vector<at::Tensor> contents;
  std::vector<std::string_view> pieces = {""};
  int64_t offset = 0;
  for (const auto& [name, tensor] : tensors) {
    const at::Tensor& content = contents.emplace_back(tensor.detach().cpu().contiguous());
    const auto bytes = static_cast<int64_t>(content.nbytes());
    header.entries.push_back(
        {name, name_of(content.scalar_type()), content.sizes().vec(), offset, offset + bytes});
    pieces.emplace_back(static_cast<const char*>(content.const_data_ptr()), content.nbytes());
    offset += bytes;
  }
  const std::string text = format_safetensors_header(header);
  pieces.front() = text;
  write_file(path, pieces);
}

std::map<std::string, at::Tensor> load_safetensors(const std::string& path) {
  std::error_code error;
  const auto file_bytes = static_cast<int64_t>(std::filesystem::file_size(path, error));
  require<FileError>(!error, "'{}' cannot be read: {}", path, error.message());
  std::ifstream file(path, std::ios::binary);
  std::string prefix(static_cast<size_t>(std::min<int64_t>(8, file_bytes)), '\0');
  file.read(prefix.data(), static_cast<std::streamsize>(prefix.size()));
  const int64_t length = parse_safetensors_length(prefix, file_bytes, path);
  std::string text(static_cast<size_t>(length), '\0');
  file.read(text.data(), length);
  const auto header = parse_safetensors_header(text, file_bytes - 8 - length, path);
  std::map<std::string, at::Tensor> tensors;
  for (const SafetensorsEntry& entry : header.entries) {
    at::Tensor tensor = at::empty(entry.shape, dtype_of(entry.dtype));
    file.read(static_cast<char*>(tensor.mutable_data_ptr()), entry.end - entry.begin);
    tensors[entry.name] = std::move(tensor);
  }
  require<FileError>(file.good(), "'{}' cannot be read to its end", path);
  return tensors;
}

}  // namespace lockstep
