#include "lockstep/checkpoint/safetensors.h"

#include <algorithm>

#include <ATen/ATen.h>

#include "lockstep/checkpoint/checkpoint_folder.h"
#include "lockstep/checkpoint/safetensors_header.h"
#include "lockstep/checkpoint/training_state.h"
#include "lockstep/core/input_file.h"

namespace lockstep {
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
    pieces.emplace_back(static_cast<const char*>(content.const_data_ptr()), content.nbytes());
    offset += bytes;
  }
  const std::string text = format_safetensors_header(header);
  pieces.front() = text;
  write_file(path, pieces);
}

std::map<std::string, at::Tensor> load_safetensors(const std::string& path) {
  InputFile file(path);
  std::string prefix(static_cast<size_t>(std::min<int64_t>(8, file.size())), '\0');
  file.read(prefix.data(), prefix.size());
  const int64_t length = parse_safetensors_length(prefix, file.size(), path);
  std::string text(static_cast<size_t>(length), '\0');
  file.read(text.data(), text.size());
  const auto header = parse_safetensors_header(text, file.size() - 8 - length, path);
  std::map<std::string, at::Tensor> tensors;
  for (const SafetensorsEntry& entry : header.entries) {
    at::Tensor tensor = at::empty(entry.shape, dtype_of_safetensors(entry.dtype));
    file.read(static_cast<char*>(tensor.mutable_data_ptr()),
              static_cast<size_t>(entry.end - entry.begin));
    tensors[entry.name] = std::move(tensor);
  }
  return tensors;
}

}  // namespace lockstep
