#include "lockstep/core/text_format.h"

#include <google/protobuf/io/tokenizer.h>
#include <google/protobuf/text_format.h>

#include <algorithm>
#include <string_view>
#include <utility>

#include "lockstep/core/check.h"
#include "lockstep/core/field_suggestions.h"

#include "core/config/config.pb.h"

namespace lockstep {
namespace {

namespace pb = google::protobuf;
using pb::FieldDescriptor;

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

}  // namespace

std::string path_of(const FieldDescriptor& field) {
  const pb::Descriptor& root = *proto::Config::descriptor();
  for (int i = 0; i < root.field_count(); ++i)
    if (root.field(i)->message_type() == field.containing_type())
      return root.field(i)->name() + "." + field.name();
  return field.name();
}

void parse_text(const std::string& text, const std::string& origin, pb::Message* message) {
  ErrorCollector errors(origin, text);
  pb::TextFormat::Parser parser;
  parser.RecordErrorsTo(&errors);
  if (!parser.ParseFromString(text, message))
    throw ConfigError(errors.first().empty() ? origin + ": not a configuration" : errors.first());
}

}  // namespace lockstep
