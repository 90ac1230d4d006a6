#include "lockstep/checkpoint/safetensors_header.h"

#include <algorithm>
#include <cstring>
#include <nlohmann/json.hpp>
#include <set>

#include "lockstep/core/check.h"
#include "lockstep/core/integers.h"
#include "lockstep/datasets/json_field.h"

namespace lockstep {
namespace {

using Json = nlohmann::json;

constexpr int64_t kLongestHeader = 100'000'000;  // the limit of the reference implementation
constexpr std::string_view kMetadata = "__metadata__";

const std::map<std::string_view, int64_t>& element_sizes() {
  static const std::map<std::string_view, int64_t> sizes = {
      {"F64", 8}, {"F32", 4}, {"BF16", 2}, {"F16", 2}, {"I64", 8},
      {"I32", 4}, {"I16", 2}, {"I8", 1},   {"U8", 1},  {"BOOL", 1}};
  return sizes;
}

/// The JSON document. Duplicate names would hide each other, so they are an error.
Json parse_json(std::string_view text, const std::string& path) {
  std::set<std::string> names;
  const Json::parser_callback_t refuse_twice = [&](int depth, Json::parse_event_t event,
                                                   Json& parsed) {
    if (event == Json::parse_event_t::key && depth == 1)
      require<FileError>(names.insert(parsed.get<std::string>()).second,
                         "'{}': tensor '{}' is listed twice", path, parsed.get<std::string>());
    return true;
  };
  try {
    return Json::parse(text, refuse_twice);
  } catch (const Json::exception& error) {
    fail<FileError>("'{}': the safetensors header is damaged: {}", path, problem_of(error));
  }
}

SafetensorsEntry parse_entry(const std::string& name, const Json& json, const std::string& path) {
  SafetensorsEntry entry{.name = name, .dtype = {}, .shape = {}};
  std::vector<int64_t> offsets;
  try {
    const auto integers = [&](const char* key) {
      const Json& list = json.at(key);
      require<FileError>(is_int64_array(list),
                         "'{}': tensor '{}': {}: found {}, allowed: a list of whole numbers", path,
                         name, key, list.dump());
      return list.get<std::vector<int64_t>>();
    };
    entry.dtype = json.at("dtype").get<std::string>();
    entry.shape = integers("shape");
    offsets = integers("data_offsets");
  } catch (const Json::exception& error) {
    fail<FileError>("'{}': tensor '{}': {}", path, name, problem_of(error));
  }
  require<FileError>(element_sizes().contains(entry.dtype), "'{}': tensor '{}': unknown dtype '{}'",
                     path, name, entry.dtype);
  require<FileError>(offsets.size() == 2 && offsets[0] >= 0 && offsets[1] >= offsets[0],
                     "'{}': tensor '{}': data_offsets: found [{}], allowed: begin <= end", path,
                     name, fmt::join(offsets, ", "));
  entry.begin = offsets[0];
  entry.end = offsets[1];
  int64_t bytes = safetensors_element_size(entry.dtype);
  for (const int64_t size : entry.shape) {
    require<FileError>(size >= 0, "'{}': tensor '{}': shape: found {}, allowed: >= 0", path, name,
                       size);
    require<FileError>(!__builtin_mul_overflow(bytes, size, &bytes),
                       "'{}': tensor '{}': its size does not fit into 64 bits", path, name);
  }
  require<FileError>(bytes == entry.end - entry.begin,
                     "'{}': tensor '{}': {} bytes for a shape of {} bytes", path, name,
                     entry.end - entry.begin, bytes);
  return entry;
}

}  // namespace

int64_t safetensors_element_size(std::string_view dtype) {
  const auto found = element_sizes().find(dtype);
  require<ConfigError>(found != element_sizes().end(), "safetensors: unknown dtype '{}'", dtype);
  return found->second;
}

std::string format_safetensors_header(const SafetensorsHeader& header) {
  nlohmann::ordered_json json = nlohmann::ordered_json::object();
  if (!header.metadata.empty()) json[kMetadata] = header.metadata;
  for (const SafetensorsEntry& entry : header.entries)
    json[entry.name] = {
        {"dtype", entry.dtype}, {"shape", entry.shape}, {"data_offsets", {entry.begin, entry.end}}};
  std::string text = json.dump();
  text.resize(static_cast<size_t>(round_up(static_cast<int64_t>(text.size()), 8)), ' ');
  const uint64_t length = text.size();
  std::string prefix(sizeof length, '\0');
  std::memcpy(prefix.data(), &length, sizeof length);
  return prefix + text;
}

int64_t parse_safetensors_length(std::string_view first_bytes, int64_t file_bytes,
                                 const std::string& path) {
  uint64_t length = 0;
  require<FileError>(first_bytes.size() >= sizeof length,
                     "'{}': {} bytes, too short for a safetensors file", path, file_bytes);
  std::memcpy(&length, first_bytes.data(), sizeof length);
  const int64_t limit = std::min(file_bytes - static_cast<int64_t>(sizeof length), kLongestHeader);
  require<FileError>(length <= static_cast<uint64_t>(limit),
                     "'{}': a header of {} bytes, allowed: up to {} in this file", path, length,
                     limit);
  return static_cast<int64_t>(length);
}

SafetensorsHeader parse_safetensors_header(std::string_view text, int64_t data_bytes,
                                           const std::string& path) {
  const Json json = parse_json(text, path);
  require<FileError>(json.is_object(), "'{}': the safetensors header is not a JSON object", path);
  SafetensorsHeader header;
  for (const auto& [name, value] : json.items()) {
    if (name != kMetadata) {
      header.entries.push_back(parse_entry(name, value, path));
      continue;
    }
    try {
      header.metadata = value.get<std::map<std::string, std::string>>();
    } catch (const Json::exception& error) {
      fail<FileError>("'{}': {}: {}", path, kMetadata, problem_of(error));
    }
  }
  std::sort(header.entries.begin(), header.entries.end(), [](const auto& a, const auto& b) {
    return std::pair(a.begin, a.end) < std::pair(b.begin, b.end);
  });
  int64_t end = 0;
  for (const SafetensorsEntry& entry : header.entries) {
    require<FileError>(entry.begin == end, "'{}': tensor '{}' begins at byte {}, allowed: {}", path,
                       entry.name, entry.begin, end);
    end = entry.end;
  }
  require<FileError>(end == data_bytes, "'{}': the tensors end at byte {}, the file at {}", path,
                     end, data_bytes);
  return header;
}

}  // namespace lockstep
