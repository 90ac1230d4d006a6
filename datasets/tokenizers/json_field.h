#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

#include "lockstep/core/check.h"

namespace lockstep {

/// The message of `error`, without the name that the library gives it.
std::string problem_of(const nlohmann::json::exception& error);

/// Whether `json` is an integer that int64_t can represent. The library also converts other
/// numbers: it rounds them, or its behavior is undefined.
bool is_int64(const nlohmann::json& json);
/// Whether `json` is an array of them.
bool is_int64_array(const nlohmann::json& json);

/// A value in a JSON file and its path there, such as 'tokenizer.json': model.merges[3]. Each
/// FileError begins with that path. Needs no libtorch.
class JsonField {
 public:
  using Json = nlohmann::json;

  /// A whole file, which `json` holds.
  JsonField(const Json& json, const std::string& path);
  /// The value at `place`, which is how messages name it.
  static JsonField within(const Json& json, const std::string& place) {
    return {&json, place + ":"};
  }

  /// A member of an object; null if there is none. FileError unless this is an object.
  JsonField operator[](std::string_view name) const;
  /// FileError unless this is an array. Makes no copy.
  size_t size() const;
  JsonField at(size_t index) const;

  const Json& json() const { return *json_; }
  const std::string& place() const { return place_; }
  bool is_null() const { return json_->is_null(); }

  std::string text() const;
  std::string text_or(const std::string& otherwise) const;
  bool flag() const;
  bool flag_or(bool otherwise) const;
  /// A whole number from 0 to `most`.
  uint32_t number(uint32_t most) const;
  const Json::object_t& object() const;

  /// FileError: what was found here, and what is allowed.
  [[noreturn]] void refuse(std::string_view allowed) const;
  /// FileError unless the value is null or equal to `otherwise`.
  void expect_null_or(const Json& otherwise) const;

 private:
  JsonField(const Json* json, std::string place) : json_(json), place_(std::move(place)) {}

  const Json* json_;
  std::string place_;
};

}  // namespace lockstep
