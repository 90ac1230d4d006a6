// Build-time tool: reads the compiled descriptor of config.proto (with its comments) and writes
//   config.h        the plain structs and enumerations of the public API,
//   config_gen.cpp  their conversion from and to the messages, and the table of fields.
// Usage: config_codegen DESCRIPTOR_SET HEADER SOURCE

#include <google/protobuf/descriptor.h>
#include <google/protobuf/descriptor.pb.h>

#include <cstdio>
#include <fstream>
#include <iostream>
#include <set>
#include <sstream>
#include <string>

#include "core/config/field_options.pb.h"

namespace pb = google::protobuf;
namespace options = lockstep::proto;

namespace {

std::string trim(const std::string& text) {
  const auto first = text.find_first_not_of(" \n");
  const auto last = text.find_last_not_of(" \n");
  return first == std::string::npos ? "" : text.substr(first, last - first + 1);
}

/// The comment above a descriptor, line by line, without indentation.
template <class Descriptor>
std::string comment_of(const Descriptor& descriptor) {
  pb::SourceLocation location;
  if (!descriptor.GetSourceLocation(&location)) return "";
  std::istringstream lines(location.leading_comments);
  std::string result;
  for (std::string line; std::getline(lines, line);) result += trim(line) + "\n";
  return trim(result);
}

std::string quote(const std::string& text) {
  std::string result = "\"";
  for (const char c : text) {
    if (c == '\n') {
      result += "\\n";
    } else {
      if (c == '"' || c == '\\') result += '\\';
      result += c;
    }
  }
  return result + "\"";
}

bool is_enum(const pb::FieldDescriptor& field) {
  return field.options().HasExtension(options::enum_name);
}

std::string enum_name(const pb::FieldDescriptor& field) {
  return field.options().GetExtension(options::enum_name);
}

/// "inverse-square-root" -> inverse_square_root, "auto" -> auto_, "a2a+p2p" -> a2a_p2p, "1f1b" ->
/// _1f1b
std::string enumerator(std::string choice) {
  for (char& c : choice)
    if (c == '-' || c == '+') c = '_';
  if (choice.front() >= '0' && choice.front() <= '9') choice = '_' + choice;
  return choice == "auto" ? choice + "_" : choice;
}

std::string element_type(const pb::FieldDescriptor& field) {
  if (is_enum(field)) return enum_name(field);
  switch (field.cpp_type()) {
    case pb::FieldDescriptor::CPPTYPE_INT64:
      return "int64_t";
    case pb::FieldDescriptor::CPPTYPE_DOUBLE:
      return "double";
    case pb::FieldDescriptor::CPPTYPE_BOOL:
      return "bool";
    case pb::FieldDescriptor::CPPTYPE_STRING:
      return "std::string";
    case pb::FieldDescriptor::CPPTYPE_MESSAGE:
      return field.message_type()->name();
    default:
      std::cerr << field.full_name() << ": the configuration uses int64, double, bool and string\n";
      std::exit(1);
  }
}

std::string member_type(const pb::FieldDescriptor& field) {
  if (field.is_repeated()) return "std::vector<" + element_type(field) + ">";
  if (field.cpp_type() == pb::FieldDescriptor::CPPTYPE_MESSAGE || field.has_default_value())
    return element_type(field);
  return "std::optional<" + element_type(field) + ">";
}

bool has_list_default(const pb::FieldDescriptor& field) {
  return field.options().HasExtension(options::list_default);
}

std::string default_text(const pb::FieldDescriptor& field) {
  if (has_list_default(field))
    return std::to_string(field.options().GetExtension(options::list_default));
  if (field.is_repeated()) return "none";
  if (!field.has_default_value()) return "";
  switch (field.cpp_type()) {
    case pb::FieldDescriptor::CPPTYPE_INT64:
      return std::to_string(field.default_value_int64());
    case pb::FieldDescriptor::CPPTYPE_DOUBLE: {
      char text[32];
      std::snprintf(text, sizeof text, "%.15g", field.default_value_double());
      return text;
    }
    case pb::FieldDescriptor::CPPTYPE_BOOL:
      return field.default_value_bool() ? "true" : "false";
    default:
      return field.default_value_string();
  }
}

std::string initializer(const pb::FieldDescriptor& field) {
  if (has_list_default(field)) return " = {" + default_text(field) + "}";
  if (!field.has_default_value()) return "";
  if (is_enum(field)) return " = " + enum_name(field) + "::" + enumerator(default_text(field));
  if (field.cpp_type() == pb::FieldDescriptor::CPPTYPE_STRING)
    return " = " + quote(default_text(field));
  return " = " + default_text(field);
}

/// The allowed values, as the field's options state them: ">= 1", "in [0, 1)", "one of a, b".
std::string allowed(const pb::FieldDescriptor& field) {
  const auto& o = field.options();
  std::string result;
  const auto add = [&](const std::string& text) { result += (result.empty() ? "" : ", ") + text; };
  const auto bound = [&](const char* relation, const auto& extension) {
    char text[32];
    if (!o.HasExtension(extension)) return;
    std::snprintf(text, sizeof text, "%s %.15g", relation, o.GetExtension(extension));
    add(text);
  };
  bound(">=", options::at_least);
  bound(">", options::more_than);
  bound("<=", options::at_most);
  bound("<", options::less_than);
  for (int i = 0; i < o.ExtensionSize(options::choice); ++i)
    add((i == 0 ? "one of " : "") + o.GetExtension(options::choice, i));
  return result;
}

void write_comment(std::ostream& out, const std::string& indent, const std::string& text) {
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);) out << indent << "/// " << line << "\n";
}

void write_enums(std::ostream& header, std::ostream& source, const pb::FileDescriptor& file) {
  std::set<std::string> seen;
  for (int m = 0; m < file.message_type_count(); ++m) {
    for (int f = 0; f < file.message_type(m)->field_count(); ++f) {
      const auto& field = *file.message_type(m)->field(f);
      if (!is_enum(field) || !seen.insert(enum_name(field)).second) continue;
      const std::string name = enum_name(field);
      header << "enum class " << name << " {";
      source << "const char* to_string(" << name << " value) {\n  switch (value) {\n";
      std::string parse;
      for (int i = 0; i < field.options().ExtensionSize(options::choice); ++i) {
        const std::string choice = field.options().GetExtension(options::choice, i);
        header << (i ? ", " : " ") << enumerator(choice);
        source << "    case " << name << "::" << enumerator(choice) << ": return " << quote(choice)
               << ";\n";
        parse += "  if (text == " + quote(choice) + ") return " + name + "::" + enumerator(choice) +
                 ";\n";
      }
      header << " };\n/// The spelling of the configuration.\nconst char* to_string(" << name
             << " value);\n\n";
      source << "  }\n  return \"\";\n}\n\nstatic " << name << " parse_" << name
             << "(const std::string& text) {\n"
             << parse << "  throw ConfigError(\"" << name
             << ": '\" + text + \"' is not one of its values\");\n}\n\n";
    }
  }
}

void write_struct(std::ostream& header, const pb::Descriptor& message) {
  write_comment(header, "", comment_of(message));
  header << "struct " << message.name() << " {\n";
  for (int f = 0; f < message.field_count(); ++f) {
    const auto& field = *message.field(f);
    const auto& o = field.options();
    write_comment(header, "  ", comment_of(field));
    std::string facts;
    if (o.HasExtension(options::unit)) facts += "Unit: " + o.GetExtension(options::unit) + ". ";
    if (!is_enum(field) && !allowed(field).empty()) facts += "Allowed: " + allowed(field) + ". ";
    if (o.HasExtension(options::unset)) facts += "Unset: " + o.GetExtension(options::unset) + ". ";
    write_comment(header, "  ", trim(facts));
    header << "  " << member_type(field) << " " << field.name() << initializer(field) << ";\n";
  }
  header << "};\n\n";
}

void write_conversions(std::ostream& source, const pb::Descriptor& message) {
  const std::string& name = message.name();
  std::string from, to;
  for (int f = 0; f < message.field_count(); ++f) {
    const auto& field = *message.field(f);
    const std::string member = "value." + field.name();
    const std::string get = "message." + field.name() + "()";
    const std::string set = "message->set_" + field.name();
    if (field.cpp_type() == pb::FieldDescriptor::CPPTYPE_MESSAGE) {
      from += "  from_message(" + get + ", " + member + ");\n";
      to += "  to_message(" + member + ", message->mutable_" + field.name() + "());\n";
    } else if (field.is_repeated()) {
      const std::string given = "message." + field.name() + "_size() > 0";
      from += (has_list_default(field) ? "  if (" + given + ")\n  " : "") + "  " + member +
              ".assign(" + get + ".begin(), " + get + ".end());\n";
      to += "  for (const auto& element : " + member + ") message->add_" + field.name() +
            "(element);\n";
    } else if (is_enum(field)) {
      from += "  " + member + " = parse_" + enum_name(field) + "(" + get + ");\n";
      to += "  " + set + "(to_string(" + member + "));\n";
    } else if (field.has_default_value()) {
      from += "  " + member + " = " + get + ";\n";
      to += "  " + set + "(" + member + ");\n";
    } else {
      from += "  if (message.has_" + field.name() + "()) " + member + " = " + get + ";\n";
      to += "  if (" + member + ") " + set + "(*" + member + ");\n";
    }
  }
  source << "static void from_message(const proto::" << name << "& message, " << name
         << "& value) {\n"
         << from << "}\n\n"
         << "static void to_message(const " << name << "& value, proto::" << name
         << "* message) {\n"
         << to << "}\n\n";
}

void write_fields(std::ostream& source, const pb::Descriptor& message, const std::string& path) {
  for (int f = 0; f < message.field_count(); ++f) {
    const auto& field = *message.field(f);
    const std::string field_path = path.empty() ? field.name() : path + "." + field.name();
    if (field.cpp_type() == pb::FieldDescriptor::CPPTYPE_MESSAGE) {
      write_fields(source, *field.message_type(), field_path);
      continue;
    }
    const auto& o = field.options();
    source << "      {" << quote(field_path) << ", " << quote(field.cpp_type_name()) << ", "
           << quote(default_text(field)) << ",\n       " << quote(o.GetExtension(options::unit))
           << ", " << quote(allowed(field)) << ", " << quote(o.GetExtension(options::unset))
           << ",\n       " << quote(comment_of(field)) << "},\n";
  }
}

const char kHeaderStart[] =
    R"(// Generated from config.proto by config_codegen.cpp, both in core/config. Do not edit.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace lockstep {

)";

const char kSourceStart[] =
    R"(// Generated from config.proto by config_codegen.cpp, both in core/config. Do not edit.
#include "core/config/config_gen.h"

#include "lockstep/core/error.h"

namespace lockstep {

)";

}  // namespace

int main(int argc, char** argv) {
  if (argc != 4) return 1;
  pb::FileDescriptorSet set;
  std::ifstream input(argv[1], std::ios::binary);
  if (!set.ParseFromIstream(&input)) {
    std::cerr << argv[1] << ": no descriptor set\n";
    return 1;
  }
  pb::DescriptorPool pool;
  const pb::FileDescriptor* file = nullptr;
  for (const auto& proto : set.file()) file = pool.BuildFile(proto);
  std::ofstream header(argv[2]);
  std::ofstream source(argv[3]);
  header << kHeaderStart;
  source << kSourceStart;
  write_enums(header, source, *file);
  for (int m = 0; m < file->message_type_count(); ++m) {
    write_struct(header, *file->message_type(m));
    write_conversions(source, *file->message_type(m));
  }
  header << "}  // namespace lockstep\n";
  const pb::Descriptor& root = *file->FindMessageTypeByName("Config");
  source << "Config config_from_message(const proto::Config& message) {\n"
         << "  Config value;\n  from_message(message, value);\n  return value;\n}\n\n"
         << "proto::Config config_to_message(const Config& value) {\n"
         << "  proto::Config message;\n  to_message(value, &message);\n  return message;\n}\n\n"
         << "const std::vector<ConfigField>& config_fields() {\n"
         << "  static const std::vector<ConfigField> fields = {\n";
  write_fields(source, root, "");
  source << "  };\n  return fields;\n}\n\n}  // namespace lockstep\n";
  header.flush();
  source.flush();
  return header.good() && source.good() ? 0 : 1;
}
