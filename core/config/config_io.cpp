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
#include "lockstep/core/followers.h"
#include "lockstep/core/input_file.h"

#include "core/config/config.pb.h"
#include "core/config/config_gen.h"
#include "core/config/field_options.pb.h"

namespace lockstep {
namespace {

namespace pb = google::protobuf;
using pb::FieldDescriptor;

constexpr size_t kMaxTextBytes = 1 << 20;

/// "model.num_layers" for a field of one of the messages inside Config.
std::string path_of(const FieldDescriptor& field) {
  const pb::Descriptor& root = *proto::Config::descriptor();
  for (int i = 0; i < root.field_count(); ++i)
    if (root.field(i)->message_type() == field.containing_type())
      return root.field(i)->name() + "." + field.name();
  return field.name();
}

/// "FIELD: " of the field whose value begins in `column` of a line of `text` (a tab advances to the
/// next multiple of 8); empty if no value begins there.
std::string field_of_value(std::string_view text, int line, int column) {
  for (; line > 0; --line) text.remove_prefix(std::min(text.find('\n'), text.size() - 1) + 1);
  size_t size = 0;
  for (int at = 0; at < column && size < text.size(); ++size)
    at += text[size] == '\t' ? 8 - at % 8 : 1;
  std::string_view front = text.substr(0, size);
  const auto drop = [&front](const char* ending) {
    front = front.substr(0, front.find_last_not_of(ending) + 1);
  };
  drop(" \t-");
  if (front.ends_with(',')) front = front.substr(0, std::min(front.rfind('['), front.size()));
  drop(" \t[");
  if (!front.ends_with(':')) return "";
  drop(" \t:");
  const std::string name(front.substr(front.find_last_of(" \t\n{<,;") + 1));
  const pb::Descriptor& root = *proto::Config::descriptor();
  for (int i = 0; i < root.field_count(); ++i)
    if (const auto* field = root.field(i)->message_type()->FindFieldByName(name))
      return path_of(*field) + ": ";
  return "";
}

/// Collects protobuf's first error as "origin:line:column: message", with the field if its value is
/// wrong.
class ErrorCollector : public pb::io::ErrorCollector {
 public:
  ErrorCollector(std::string origin, std::string_view text)
      : origin_(std::move(origin)), text_(text) {}

  void AddError(int line, pb::io::ColumnNumber column, const std::string& message) override {
    if (!first_.empty()) return;
    const bool of_value = message.starts_with("Expected") || message.starts_with("Integer");
    first_ =
        fmt::format("{}:{}:{}: {}{}", origin_, line + 1, column + 1,
                    of_value ? field_of_value(text_, line, column) : "", in_our_words(message));
  }

  const std::string& first() const { return first_; }

 private:
  /// Protobuf says 'Message type "lockstep.proto.TransformerConfig" has no field named "x".'
  static std::string in_our_words(std::string message) {
    constexpr std::string_view kPackage = "lockstep.proto.", kUnknown = "\" has no field named \"";
    if (message.starts_with("Invalid value for boolean")) return message + " Allowed: true, false.";
    const auto at = message.find(kPackage);
    if (at == std::string::npos) return message;
    message.erase(at, kPackage.size());
    const auto end_of_type = message.find(kUnknown, at);
    if (end_of_type == std::string::npos) return message;
    const std::string group = group_of_type(message.substr(at, end_of_type - at));
    const auto name = end_of_type + kUnknown.size();
    return unknown_field(group + message.substr(name, message.find('"', name) - name));
  }

  /// "model." for "TransformerConfig"; empty for Config itself.
  static std::string group_of_type(const std::string& type) {
    const pb::Descriptor& root = *proto::Config::descriptor();
    for (int i = 0; i < root.field_count(); ++i)
      if (root.field(i)->message_type()->name() == type) return root.field(i)->name() + ".";
    return "";
  }

  std::string origin_;
  std::string_view text_;
  std::string first_;
};

void parse_text(const std::string& text, const std::string& origin, pb::Message* message) {
  ErrorCollector errors(origin, text);
  pb::TextFormat::Parser parser;
  parser.RecordErrorsTo(&errors);
  if (!parser.ParseFromString(text, message))
    throw ConfigError(errors.first().empty() ? origin + ": not a configuration" : errors.first());
}

template <class Number>
Number parse_number(const std::string& text, const std::string& option, const char* kind) {
  Number value{};
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  require<ConfigError>(error == std::errc() && end == text.data() + text.size() && !text.empty(),
                       "{}: found '{}', allowed: {}", option, text, kind);
  return value;
}

bool is_quoted(const std::string& text) {
  return text.size() >= 2 && text.front() == '"' && text.back() == '"';
}

void check_one_value(size_t found, const std::string& option) {
  require<ConfigError>(found <= 1, "{}: found several values, allowed: one, or a list in []",
                       option);
}

/// Sets the field to a value in text format, and nothing else.
void set_from_text(pb::Message* message, const FieldDescriptor& field, const std::string& value,
                   const std::string& option) {
  const std::unique_ptr<pb::Message> parsed(message->New());  // the parser clears its target
  parse_text(field.name() + ": " + value, option, parsed.get());
  std::vector<const FieldDescriptor*> set;
  parsed->GetReflection()->ListFields(*parsed, &set);
  check_one_value(set.size(), option);
  message->GetReflection()->ClearField(message, &field);
  message->MergeFrom(*parsed);
}

/// `value` is a list in brackets, or its only element.
void set_list(pb::Message* message, const FieldDescriptor& field, const std::string& value,
              const std::string& option) {
  const pb::Reflection& reflection = *message->GetReflection();
  if (!value.empty() && value.front() == '[') return set_from_text(message, field, value, option);
  if (is_quoted(value)) {
    set_from_text(message, field, value, option);
    const int size = reflection.FieldSize(*message, &field);
    return check_one_value(static_cast<size_t>(size), option);
  }
  reflection.ClearField(message, &field);
  if (field.cpp_type() == FieldDescriptor::CPPTYPE_INT64) {
    const char* const kind = "a whole number of 64 bits, or a list of them, as in [0, 1]";
    reflection.AddInt64(message, &field, parse_number<int64_t>(value, option, kind));
  } else {
    reflection.AddString(message, &field, value);
  }
}

void set_field(pb::Message* message, const FieldDescriptor& field, const std::string& value,
               const std::string& option) {
  const pb::Reflection& reflection = *message->GetReflection();
  if (field.is_repeated()) return set_list(message, field, value, option);
  switch (field.cpp_type()) {
    case FieldDescriptor::CPPTYPE_INT64:
      reflection.SetInt64(message, &field,
                          parse_number<int64_t>(value, option, "a whole number of 64 bits"));
      break;
    case FieldDescriptor::CPPTYPE_DOUBLE:
      reflection.SetDouble(message, &field,
                           parse_number<double>(value, option, "a number of double precision"));
      break;
    case FieldDescriptor::CPPTYPE_BOOL: {
      const bool is_true = value == "true" || value == "1";
      require<ConfigError>(is_true || value == "false" || value == "0",
                           "{}: found '{}', allowed: true, false", option, value);
      reflection.SetBool(message, &field, is_true);
      break;
    }
    default:
      if (is_quoted(value)) return set_from_text(message, field, value, option);
      reflection.SetString(message, &field, value);
  }
}

void apply_override(proto::Config* config, const std::string& assignment) {
  const std::string option = "--set " + assignment;
  const auto equals = assignment.find('=');
  require<ConfigError>(equals != std::string::npos, "{}: must have the form path=value", option);
  std::string path = assignment.substr(0, equals);
  pb::Message* message = config;
  for (;;) {
    const auto dot = path.find('.');
    const std::string name = path.substr(0, dot);
    const FieldDescriptor* field = message->GetDescriptor()->FindFieldByName(name);
    if (field == nullptr)
      fail<ConfigError>("{}: {}", option, unknown_field(assignment.substr(0, equals)));
    const bool is_message = field->cpp_type() == FieldDescriptor::CPPTYPE_MESSAGE;
    if (!is_message) {
      require<ConfigError>(dot == std::string::npos, "{}: '{}' is a value and has no fields",
                           option, name);
      return set_field(message, *field, assignment.substr(equals + 1), option);
    }
    require<ConfigError>(dot != std::string::npos,
                         "{}: '{}' is a group of fields; name one of them, as in {}.{}", option,
                         name, name, field->message_type()->field(0)->name());
    message = message->GetReflection()->MutableMessage(message, field);
    path.erase(0, dot + 1);
  }
}

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
  proto::Config message;
  parse_text(std::string(text), origin, &message);
  forget_followers(overrides, &message);
  for (const std::string& assignment : overrides) apply_override(&message, assignment);
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
