#pragma once

#include <map>
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>

namespace lockstep {

/// Writes `tensors` (any device, any layout) as a safetensors file, in their order. The file is
/// complete on disk when the call returns. FileError names the path.
void save_safetensors(const std::string& path,
                      const std::vector<std::pair<std::string, at::Tensor>>& tensors,
                      const std::map<std::string, std::string>& metadata = {});

/// The tensors of a safetensors file, on the CPU. FileError names the path and the damage.
std::map<std::string, at::Tensor> load_safetensors(const std::string& path);

}  // namespace lockstep
