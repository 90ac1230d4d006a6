#pragma once

// Internal.

#include <cstdint>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "lockstep/core/check.h"
#include "lockstep/datasets/json_field.h"

namespace lockstep {

/// Reads the keys of a JSON object. Every refusal is a FileError with `path`, the key, what was
/// found and what is allowed. A key whose value is null counts as missing.
class JsonKeys {
 public:
  using Json = nlohmann::json;

  /// Keeps references to both.
  JsonKeys(const Json& json, const std::string& path) : JsonKeys(json, path, "") {}

  /// Whether the key is there, even if it is null.
  bool mentions(const char* key) const { return json_.contains(key); }
  bool has(const char* key) const { return json_.contains(key) && !json_.at(key).is_null(); }

  /// An array or object without elements, or null.
  bool is_empty(const char* key) const { return json_.at(key).empty(); }

  /// The value, or `otherwise` if the key is missing; without `otherwise` the key must be there.
  template <class Value>
  Value get(const char* key, const std::optional<Value>& otherwise = {}) const {
    if (!has(key) && otherwise) return *otherwise;
    require<FileError>(has(key), "'{}': '{}{}' is missing", path_, outer_, key);
    if constexpr (std::is_integral_v<Value> && !std::is_same_v<Value, bool>)
      check(is_int64(json_.at(key)), key, json_.at(key).dump(), kind_of<Value>());
    if constexpr (std::is_same_v<Value, std::vector<int64_t>>)
      check(is_int64_array(json_.at(key)), key, json_.at(key).dump(), "a list of whole numbers");
    try {
      return json_.at(key).template get<Value>();
    } catch (const Json::exception&) {
      check(false, key, json_.at(key).dump(), kind_of<Value>());
      throw;
    }
  }

  /// A whole number of at least 1.
  int64_t size(const char* key, std::optional<int64_t> otherwise = {}) const {
    const int64_t value = get<int64_t>(key, otherwise);
    check(value >= 1, key, value, ">= 1");
    return value;
  }

  /// Refuses any value but `allowed`; `otherwise` is what a missing key means.
  template <class Value>
  void allow(const char* key, const Value& otherwise, const Value& allowed) const {
    const Value found = get<Value>(key, otherwise);
    check(found == allowed, key, found, allowed);
  }

  /// The object under `key`; messages call its keys "key.inner".
  JsonKeys object(const char* key) const {
    check(json_.at(key).is_object(), key, json_.at(key).dump(), "an object");
    return {json_.at(key), path_, outer_ + key + "."};
  }

  template <class Value, class Allowed>
  void check(bool good, const char* key, const Value& found, const Allowed& allowed) const {
    require<FileError>(good, "'{}': '{}{}': found {}, allowed: {}", path_, outer_, key, found,
                       allowed);
  }

 private:
  JsonKeys(const Json& json, const std::string& path, std::string outer)
      : json_(json), path_(path), outer_(std::move(outer)) {}

  template <class Value>
  static constexpr const char* kind_of() {
    if constexpr (std::is_same_v<Value, bool>) return "true or false";
    if constexpr (std::is_integral_v<Value>) return "a whole number";
    if constexpr (std::is_floating_point_v<Value>) return "a number";
    if constexpr (std::is_same_v<Value, std::string>) return "a string";
    return "a list";
  }

  const Json& json_;
  const std::string& path_;
  std::string outer_;
};

}  // namespace lockstep
