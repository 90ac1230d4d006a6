#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "lockstep/core/config_io.h"
#include "lockstep/program/megatron_flags.h"

namespace lockstep {

/// The flags of a command line, and the configuration that is being made from them.
class MegatronSettings {
 public:
  explicit MegatronSettings(const std::vector<GivenFlag>& flags);

  bool has(const std::string& flag) const { return flags_.contains(flag); }
  /// The values of a flag that is given.
  const std::vector<std::string>& values(const std::string& flag) const { return flags_.at(flag); }
  /// The only value of a flag, if it is given.
  std::optional<std::string> value(const std::string& flag) const;
  /// The same as a number. ConfigError if it is not one.
  std::optional<int64_t> integer(const std::string& flag) const;
  std::optional<double> number(const std::string& flag) const;

  int64_t integer_or(const std::string& flag, int64_t otherwise) const {
    return integer(flag).value_or(otherwise);
  }
  /// ConfigError naming both flags if both are given.
  void exclude(const std::string& one, const std::string& other) const;

  /// Sets a field to a value as it would be written after --set; a later value replaces it.
  void set(const std::string& field, const std::string& value) { fields_[field] = {value}; }
  void set(const std::string& field, const char* value) { set(field, std::string(value)); }
  void set(const std::string& field, int64_t value) { set(field, std::to_string(value)); }
  void set(const std::string& field, bool value) { set(field, value ? "true" : "false"); }
  /// A repeated field of strings.
  void set_list(const std::string& field, std::vector<std::string> values);
  void unset(const std::string& field) { fields_.erase(field); }
  /// The value that was set.
  std::optional<std::string> found(const std::string& field) const;
  /// Calls set() with the value of `flag`. ConfigError if the field is a number and the value is
  /// not. A choice that the field does not have is noted instead.
  void copy(const std::string& flag, const std::string& field);

  /// Says what became of `flag`.
  void note(const std::string& flag, const std::string& text);

  MegatronConversion result() const;

 private:
  std::map<std::string, std::vector<std::string>> flags_;
  std::map<std::string, std::vector<std::string>> fields_;
  std::vector<std::string> notes_;
};

/// The row of the schema. The field exists.
const ConfigField& config_field(const std::string& path);

}  // namespace lockstep
