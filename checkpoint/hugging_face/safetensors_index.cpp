#include "lockstep/checkpoint/safetensors_index.h"

#include <nlohmann/json.hpp>
#include <set>

#include "lockstep/core/check.h"
#include "lockstep/datasets/json_field.h"

namespace lockstep {
namespace {

using IndexJson = nlohmann::json;

constexpr const char* kWeightMap = "weight_map";

/// Duplicate names would hide each other, so they are an error.
IndexJson parse_index_json(std::string_view text, const std::string& path) {
  std::set<std::string> keys, inner_keys;
  const auto refuse_twice = [&](int depth, IndexJson::parse_event_t event, IndexJson& parsed) {
    if (event == IndexJson::parse_event_t::object_end && depth == 1) inner_keys.clear();
    if (event != IndexJson::parse_event_t::key || depth > 2) return true;
    const auto name = parsed.get<std::string>();
    require<FileError>((depth == 1 ? keys : inner_keys).insert(name).second,
                       "'{}': '{}' is listed twice", path, name);
    return true;
  };
  try {
    return IndexJson::parse(text, refuse_twice);
  } catch (const IndexJson::exception& error) {
    fail<FileError>("'{}': the index is damaged: {}", path, problem_of(error));
  }
}

bool is_name_alone(const std::string& file) {
  return !file.empty() && file != "." && file != ".." &&
         file.find_first_of(std::string_view("/\0", 2)) == std::string::npos;
}

}  // namespace

std::string format_safetensors_index(const WeightMap& files, int64_t total_size) {
  const nlohmann::ordered_json json = {{"metadata", {{"total_size", total_size}}},
                                       {kWeightMap, files}};
  return json.dump(2) + "\n";
}

WeightMap parse_safetensors_index(std::string_view text, const std::string& path) {
  const IndexJson json = parse_index_json(text, path);
  WeightMap files;
  try {
    files = json.at(kWeightMap).get<WeightMap>();
  } catch (const IndexJson::exception& error) {
    fail<FileError>("'{}': '{}': {}", path, kWeightMap, problem_of(error));
  }
  require<FileError>(!files.empty(), "'{}': '{}' names no tensor", path, kWeightMap);
  for (const auto& [tensor, file] : files)
    require<FileError>(is_name_alone(file), "'{}': tensor '{}': file '{}' is outside the folder",
                       path, tensor, file);
  return files;
}

}  // namespace lockstep
