#include "lockstep/checkpoint/safetensors.h"

#include <algorithm>

#include <ATen/ATen.h>

#include "lockstep/checkpoint/checkpoint_folder.h"
#include "lockstep/checkpoint/training_state.h"

namespace lockstep {

SafetensorsFile::SafetensorsFile(const std::string& path) : file_(path) {
  std::string prefix(static_cast<size_t>(std::min<int64_t>(8, file_.size())), '\0');
  file_.read_at(0, prefix.data(), prefix.size());
  const int64_t length = parse_safetensors_length(prefix, file_.size(), path);
  std::string text(static_cast<size_t>(length), '\0');
  file_.read_at(8, text.data(), text.size());
  data_ = 8 + length;
  header_ = parse_safetensors_header(text, file_.size() - data_, path);
}

at::Tensor SafetensorsFile::read(const SafetensorsEntry& entry) const {
  at::Tensor tensor = at::empty(entry.shape, dtype_of_safetensors(entry.dtype));
  file_.read_at(data_ + entry.begin, static_cast<char*>(tensor.mutable_data_ptr()),
                static_cast<size_t>(entry.end - entry.begin));
  return tensor;
}

std::string_view bytes_of(const at::Tensor& tensor) {
  return {static_cast<const char*>(tensor.const_data_ptr()), tensor.nbytes()};
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
    header.entries.push_back({name, safetensors_dtype(content.scalar_type()), content.sizes().vec(),
                              offset, offset + bytes});
    pieces.push_back(bytes_of(content));
    offset += bytes;
  }
  const std::string text = format_safetensors_header(header);
  pieces.front() = text;
  write_file(path, pieces);
}

std::map<std::string, at::Tensor> load_safetensors(const std::string& path) {
  const SafetensorsFile file(path);
  std::map<std::string, at::Tensor> tensors;
  for (const SafetensorsEntry& entry : file.header().entries)
    tensors[entry.name] = file.read(entry);
  return tensors;
}

}  // namespace lockstep
