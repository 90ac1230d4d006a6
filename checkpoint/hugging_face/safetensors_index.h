#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <string_view>

/// `model.safetensors.index.json`: which file holds which tensor. Needs no libtorch.
namespace lockstep {

/// File by tensor.
using WeightMap = std::map<std::string, std::string>;

/// The index of files whose tensors have `total_size` bytes, as Hugging Face writes it.
std::string format_safetensors_index(const WeightMap& files, int64_t total_size);

/// Reads `weight_map`; `metadata` may be anything. FileError, with `path`: not JSON, no such
/// object, a tensor that is listed twice, or a file that is not a plain name and so may be outside
/// the folder.
WeightMap parse_safetensors_index(std::string_view text, const std::string& path);

}  // namespace lockstep
