#include "lockstep/core/config_io.h"

#include <google/protobuf/io/tokenizer.h>
#include <google/protobuf/text_format.h>

#include <charconv>
#include <cmath>
#include <memory>
#include <sstream>

#include "lockstep/core/check.h"
#include "lockstep/core/config_bounds.h"
#include "lockstep/core/config_rules.h"
#include "lockstep/core/field_suggestions.h"
#include "lockstep/core/input_file.h"
#include "lockstep/core/overrides.h"
#include "lockstep/core/text_format.h"

#include "core/config/config.pb.h"
#include "core/config/config_gen.h"
#include "core/config/field_options.pb.h"

namespace lockstep {
namespace {

namespace pb = google::protobuf;
using pb::FieldDescriptor;

constexpr size_t kMaxTextBytes = 1 << 20;
constexpr std::string_view kByteOrderMark = "\xef\xbb\xbf";  // some editors begin UTF-8 with it

std::string value_text(const pb::Message& message, const FieldDescriptor& field, int index) {
  std::string text;
  pb::TextFormat::PrintFieldValueToString(message, &field, index, &text);
  return text;
}

/// The value of a field as text, "unset" where it has none. A list of one number is written without
/// brackets.
std::string value_or_unset(const pb::Message& message, const FieldDescriptor& field) {
  const pb::Reflection& reflection = *message.GetReflection();
  if (field.is_repeated()) {
    std::string text;
    const int size = reflection.FieldSize(message, &field);
    for (int i = 0; i < size; ++i) text += (i ? ", " : "") + value_text(message, field, i);
    const bool number = field.cpp_type() != FieldDescriptor::CPPTYPE_STRING;
    return number && size == 1 ? text : "[" + text + "]";
  }
  return reflection.HasField(message, &field) ? value_text(message, field, -1) : "unset";
}

void check_number(const FieldDescriptor& field, double value, const std::string& found) {
  const auto& o = field.options();
  const auto require_bound = [&](bool holds, const char* relation, double bound) {
    if (!holds)
      fail<ConfigError>("{}: found {}, allowed: {} {}", path_of(field), found, relation, bound);
  };
  require_bound(std::isfinite(value), "a finite number, not", value);
  if (o.HasExtension(proto::at_least)) {
    const double bound = o.GetExtension(proto::at_least);
    require_bound(value >= bound, ">=", bound);
  }
  if (o.HasExtension(proto::more_than)) {
    const double bound = o.GetExtension(proto::more_than);
    require_bound(value > bound, ">", bound);
  }
  if (o.HasExtension(proto::at_most)) {
    const double bound = o.GetExtension(proto::at_most);
    require_bound(value <= bound, "<=", bound);
  }
  if (o.HasExtension(proto::less_than)) {
    const double bound = o.GetExtension(proto::less_than);
    require_bound(value < bound, "<", bound);
  }
}

void check_choice(const FieldDescriptor& field, const std::string& value) {
  const auto& o = field.options();
  const int count = o.ExtensionSize(proto::choice);
  std::string choices;
  for (int i = 0; i < count; ++i) {
    if (o.GetExtension(proto::choice, i) == value) return;
    choices += (i ? ", " : "") + o.GetExtension(proto::choice, i);
  }
  require<ConfigError>(count == 0, "{}: found '{}', allowed: {}", path_of(field), value, choices);
}

void check_fields(const pb::Message& message) {
  const pb::Reflection& reflection = *message.GetReflection();
  for (int i = 0; i < message.GetDescriptor()->field_count(); ++i) {
    const FieldDescriptor& field = *message.GetDescriptor()->field(i);
    if (field.is_repeated()) {
      if (field.cpp_type() != FieldDescriptor::CPPTYPE_INT64) continue;
      for (int e = 0; e < reflection.FieldSize(message, &field); ++e)
        check_number(field, static_cast<double>(reflection.GetRepeatedInt64(message, &field, e)),
                     value_text(message, field, e));
    } else if (field.cpp_type() == FieldDescriptor::CPPTYPE_MESSAGE) {
      check_fields(reflection.GetMessage(message, &field));
    } else if (reflection.HasField(message, &field)) {
      if (field.cpp_type() == FieldDescriptor::CPPTYPE_INT64)
        check_number(field, static_cast<double>(reflection.GetInt64(message, &field)),
                     value_text(message, field, -1));
      else if (field.cpp_type() == FieldDescriptor::CPPTYPE_DOUBLE)
        check_number(field, reflection.GetDouble(message, &field), value_text(message, field, -1));
      else if (field.cpp_type() == FieldDescriptor::CPPTYPE_STRING)
        check_choice(field, reflection.GetString(message, &field));
    }
  }
}

/// Calls visit(group, field, group's message) for every field of every group.
template <class Visit>
void for_each_field(const pb::Message& config, Visit visit) {
  const pb::Descriptor& root = *config.GetDescriptor();
  for (int g = 0; g < root.field_count(); ++g) {
    const FieldDescriptor& group = *root.field(g);
    const pb::Message& values = config.GetReflection()->GetMessage(config, &group);
    for (int f = 0; f < group.message_type()->field_count(); ++f)
      visit(group, *group.message_type()->field(f), values);
  }
}

/// Reads a file, or the first kMaxTextBytes + 1 bytes of a longer one.
std::string read_config(const std::string& path) {
  std::string text(kMaxTextBytes + 1, '\0');
  try {
    InputFile file(path, {.kinds = InputKinds::any});
    text.resize(file.read(text.data(), text.size()));
  } catch (const FileError& error) {
    std::string message = error.what();
    constexpr std::string_view kFailed = " cannot be read";
    message.insert(message.find(kFailed, path.size()) + kFailed.size(), " as a configuration");
    throw ConfigError(message);
  }
  return text;
}

}  // namespace

Config parse_config(std::string_view text, const std::string& origin,
                    const std::vector<std::string>& overrides) {
  require<ConfigError>(text.size() <= kMaxTextBytes,
                       "{}: {} bytes, allowed: at most {}; this is not a configuration", origin,
                       text.size(), kMaxTextBytes);
  if (text.starts_with(kByteOrderMark)) text.remove_prefix(kByteOrderMark.size());
  proto::Config message;
  parse_text(std::string(text), origin, &message);
  apply_overrides(overrides, &message);
  check_fields(message);
  const Config config = config_from_message(message);
  check_rules(config);
  return resolve(config);
}

Config load_config(const std::string& path, const std::vector<std::string>& overrides) {
  return parse_config(read_config(path), path, overrides);
}

void check_bounds(const OptimizerConfig& config) {
  Config whole;
  whole.optimizer = config;
  check_fields(config_to_message(whole).optimizer());
}

void check_bounds(const DistributedDataParallelConfig& config) {
  Config whole;
  whole.ddp = config;
  check_fields(config_to_message(whole).ddp());
}

void check_bounds(const TrainConfig& config) {
  Config whole;
  whole.train = config;
  check_fields(config_to_message(whole).train());
}

void validate(const Config& config) {
  check_fields(config_to_message(config));
  check_rules(config);
}

std::string print_config(const Config& config) {
  const proto::Config message = config_to_message(config);
  std::string text;
  const FieldDescriptor* open = nullptr;
  for_each_field(message, [&](const FieldDescriptor& group, const FieldDescriptor& field,
                              const pb::Message& values) {
    if (open != &group) text += (open ? "}\n" : "") + group.name() + " {\n";
    open = &group;
    const std::string value = value_or_unset(values, field);
    if (value == "unset")
      text += fmt::format("  # {}: unset: {}\n", field.name(),
                          field.options().GetExtension(proto::unset));
    else
      text += fmt::format("  {}: {}\n", field.name(), value);
  });
  return text + "}\n";
}

std::vector<ConfigValue> config_values(const Config& config) {
  std::vector<ConfigValue> values;
  for_each_field(
      config_to_message(config),
      [&](const FieldDescriptor&, const FieldDescriptor& field, const pb::Message& message) {
        values.push_back({path_of(field), value_or_unset(message, field)});
      });
  return values;
}

}  // namespace lockstep
