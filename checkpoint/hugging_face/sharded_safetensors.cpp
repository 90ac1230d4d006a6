#include "lockstep/checkpoint/sharded_safetensors.h"

#include <algorithm>
#include <cctype>
#include <charconv>
#include <cmath>
#include <regex>

#include "lockstep/checkpoint/safetensors_index.h"
#include "lockstep/core/check.h"

namespace lockstep {
namespace {

/// Bytes of a unit; 0 if there is no such unit.
double bytes_of_unit(std::string unit) {
  std::transform(unit.begin(), unit.end(), unit.begin(),
                 [](unsigned char c) { return static_cast<char>(std::toupper(c)); });
  if (unit.empty() || unit == "B") return 1;
  const size_t power = std::string_view("KMGT").find(unit.front()) + 1;
  if (power == 0) return 0;
  if (unit.substr(1) == "B") return std::pow(1000.0, power);
  return unit.substr(1) == "IB" ? std::pow(1024.0, power) : 0;
}

std::string shard_name_of(size_t shard, size_t count) {
  return count == 1 ? kWeightsFile
                    : fmt::format("model-{:05}-of-{:05}.safetensors", shard + 1, count);
}

}  // namespace

int64_t parse_file_size(const std::string& text, const std::string& option) {
  double number = 0;
  const char* const end = text.data() + text.size();
  const auto [after, error] = std::from_chars(text.data(), end, number, std::chars_format::fixed);
  const double bytes =
      error == std::errc() ? std::floor(number * bytes_of_unit(std::string(after, end))) : 0;
  require<ConfigError>(bytes >= 1 && bytes < 0x1p62,
                       "{}: found '{}', allowed: a size of at least 1 byte, as in 5GB, 500MB, 2GiB",
                       option, text);
  return static_cast<int64_t>(bytes);
}

std::vector<size_t> assign_shards(const std::vector<int64_t>& tensor_bytes, int64_t max_bytes) {
  // Shards are numbered as they are closed: that of a large tensor comes before the open one.
  constexpr size_t kOpen = ~size_t{0};
  std::vector<size_t> shards;
  size_t closed = 0;
  int64_t open_bytes = 0;
  const auto close = [&] {
    if (std::find(shards.begin(), shards.end(), kOpen) == shards.end()) return;
    std::replace(shards.begin(), shards.end(), kOpen, closed++);
    open_bytes = 0;
  };
  for (const int64_t bytes : tensor_bytes) {
    if (bytes > max_bytes) {
      shards.push_back(closed++);
      continue;
    }
    if (open_bytes + bytes > max_bytes) close();
    shards.push_back(kOpen);
    open_bytes += bytes;
  }
  close();
  return shards;
}

bool is_weights_file(const std::string& name) {
  static const std::regex shard("model-[0-9]{5,}-of-[0-9]{5,}\\.safetensors");
  return name == kWeightsFile || name == kWeightsIndexFile || std::regex_match(name, shard);
}

ShardedSafetensors::ShardedSafetensors(std::vector<SafetensorsEntry> tensors, int64_t max_bytes)
    : tensors_(std::move(tensors)) {
  std::vector<int64_t> bytes;
  for (const SafetensorsEntry& tensor : tensors_) {
    bytes.push_back(safetensors_element_size(tensor.dtype));
    for (const int64_t size : tensor.shape) bytes.back() *= size;
  }
  shard_of_ = assign_shards(bytes, max_bytes);
  const size_t count =
      shard_of_.empty() ? 1 : *std::max_element(shard_of_.begin(), shard_of_.end()) + 1;
  shards_.resize(count);
  for (size_t i = 0; i < count; ++i) {
    shards_[i].name = shard_name_of(i, count);
    shards_[i].header.metadata = {{"format", "pt"}};
  }
  for (size_t i = 0; i < tensors_.size(); ++i) {
    auto& entries = shards_[shard_of_[i]].header.entries;
    tensors_[i].begin = entries.empty() ? 0 : entries.back().end;
    tensors_[i].end = tensors_[i].begin + bytes[i];
    entries.push_back(tensors_[i]);
  }
}

std::vector<std::string> ShardedSafetensors::file_names() const {
  std::vector<std::string> names;
  for (const Shard& shard : shards_) names.push_back(shard.name);
  if (shards_.size() > 1) names.emplace_back(kWeightsIndexFile);
  return names;
}

void ShardedSafetensors::write(std::string_view bytes,
                               const std::function<std::string(const std::string&)>& path_of) {
  require<UsageError>(next_ < tensors_.size(), "export: found more tensors than {}",
                      tensors_.size());
  const SafetensorsEntry& tensor = tensors_[next_];
  Shard& shard = shards_[shard_of_[next_]];
  require<UsageError>(static_cast<int64_t>(bytes.size()) == tensor.end - tensor.begin,
                      "export: tensor '{}': found {} bytes, allowed: {}", tensor.name, bytes.size(),
                      tensor.end - tensor.begin);
  if (!shard.file) {
    shard.file = std::make_unique<FileWriter>(path_of(shard.name));
    shard.file->write(format_safetensors_header(shard.header));
  }
  shard.file->write(bytes);
  if (++shard.written == shard.header.entries.size()) shard.file->finish();
  ++next_;
}

void ShardedSafetensors::finish(
    const std::function<std::string(const std::string&)>& path_of) const {
  require<UsageError>(next_ == tensors_.size(), "export: found {} tensors, allowed: {}", next_,
                      tensors_.size());
  if (shards_.size() == 1) return;
  WeightMap files;
  int64_t total_size = 0;
  for (size_t i = 0; i < tensors_.size(); ++i) {
    files[tensors_[i].name] = shards_[shard_of_[i]].name;
    total_size += tensors_[i].end - tensors_[i].begin;
  }
  write_file(path_of(kWeightsIndexFile), {format_safetensors_index(files, total_size)});
}

}  // namespace lockstep
