#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "lockstep/checkpoint/checkpoint_folder.h"
#include "lockstep/checkpoint/safetensors_header.h"

/// Weights in files of bounded size, as Hugging Face's save_pretrained() writes them. Needs no
/// libtorch.
namespace lockstep {

inline constexpr const char* kWeightsFile = "model.safetensors";
inline constexpr const char* kWeightsIndexFile = "model.safetensors.index.json";

/// The bytes that a text such as 5GB, 500MB, 1.5GiB or 4096 specifies: units of 1000 or 1024, in
/// upper or lower case. ConfigError, with `option`: it is not a size, or less than 1 byte.
int64_t parse_file_size(const std::string& text, const std::string& option);

/// The shard, from 0 on, of each tensor. A tensor that is larger than `max_bytes` gets its own
/// shard; the others fill one shard after another in their order.
std::vector<size_t> assign_shards(const std::vector<int64_t>& tensor_bytes, int64_t max_bytes);

/// Whether the name is that of a weights file or of an index.
bool is_weights_file(const std::string& name);

/// Writes tensors one after another: `model.safetensors` if they fit into one file, otherwise
/// `model-00001-of-00003.safetensors`, ... and the index.
class ShardedSafetensors {
 public:
  /// `tensors` in the order in which they will be written; `begin` and `end` need not be set.
  ShardedSafetensors(std::vector<SafetensorsEntry> tensors, int64_t max_bytes);

  /// Names of all files, the index last.
  std::vector<std::string> file_names() const;

  /// Writes the next tensor. `path_of` gives the path of a file name. FileError names the path;
  /// UsageError: more tensors than were listed, or the wrong number of bytes.
  void write(std::string_view bytes, const std::function<std::string(const std::string&)>& path_of);

  /// Writes the index, if there is one. UsageError if tensors have not been written.
  void finish(const std::function<std::string(const std::string&)>& path_of) const;

 private:
  struct Shard {
    std::string name;
    SafetensorsHeader header;
    size_t written = 0;  ///< tensors
    std::unique_ptr<FileWriter> file;
  };

  std::vector<SafetensorsEntry> tensors_;
  std::vector<size_t> shard_of_;
  std::vector<Shard> shards_;
  size_t next_ = 0;
};

}  // namespace lockstep
