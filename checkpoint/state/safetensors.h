#pragma once

#include <map>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>

#include "lockstep/checkpoint/safetensors_header.h"
#include "lockstep/core/input_file.h"

namespace lockstep {

/// A safetensors file whose tensors are read one at a time.
class SafetensorsFile {
 public:
  /// Reads the header. FileError names the path and the damage.
  explicit SafetensorsFile(const std::string& path);

  const std::string& path() const { return file_.path(); }
  const SafetensorsHeader& header() const { return header_; }
  /// Reads a tensor onto the CPU. FileError.
  at::Tensor read(const SafetensorsEntry& entry) const;

 private:
  InputFile file_;
  int64_t data_ = 0;  ///< bytes in front of the first tensor
  SafetensorsHeader header_;
};

/// The bytes of a contiguous tensor on the CPU.
std::string_view bytes_of(const at::Tensor& tensor);

/// Writes `tensors` (any device, any layout) as a safetensors file, in their order. The file is
/// complete on disk when the call returns. FileError names the path.
void save_safetensors(const std::string& path,
                      const std::vector<std::pair<std::string, at::Tensor>>& tensors,
                      const std::map<std::string, std::string>& metadata = {});

/// The tensors of a safetensors file, on the CPU. FileError names the path and the damage.
std::map<std::string, at::Tensor> load_safetensors(const std::string& path);

}  // namespace lockstep
