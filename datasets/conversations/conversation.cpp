#include "lockstep/datasets/conversation.h"

#include <array>
#include <utility>

#include "lockstep/datasets/json_field.h"
#include "lockstep/datasets/json_line.h"

namespace lockstep {
namespace {

using Json = nlohmann::json;

constexpr std::array kRoles = {ChatRole::system, ChatRole::user, ChatRole::assistant};

/// Keeps no strings: the parser only says where a line is bad and limits its nesting.
class NoStrings : public JsonLineParser::Strings {
 public:
  void begin(size_t /*key*/) override {}
  void append(std::string_view /*text*/) override {}
  void end(size_t /*key*/) override {}
};

bool is_known_key(std::string_view quoted) {
  const auto key = Json::parse(quoted).get<std::string>();
  return key == "messages" || key == "prompt" || key == "completion";
}

/// Puts 0 in place of the values of all other keys of a valid object, in as many bytes. Json
/// refuses NaN, Infinity and numbers beyond fp64.
std::string without_other_values(std::string_view line) {
  std::string made(line);
  size_t levels = 0, other = 0;  // other: where the value of another key begins, or 0
  std::string_view text;
  for (size_t at = 0; at < line.size(); ++at) {
    const size_t begin = at;
    const char c = line[at];
    if (c == '"') {
      while (line[++at] != '"')
        if (line[at] == '\\') ++at;
      if (levels == 1) text = line.substr(begin, at + 1 - begin);
      continue;
    }
    if (levels == 1 && c == ':') other = is_known_key(text) ? 0 : at + 1;
    if (levels == 1 && (c == ',' || c == '}') && other > 0) {
      made.replace(other, at - other, at - other, ' ');
      made[std::exchange(other, 0)] = '0';
    }
    if (c == '{' || c == '[') ++levels;
    if (c == '}' || c == ']') --levels;
  }
  return made;
}

Json parse_line(std::string_view line, const std::string& place) {
  NoStrings none;
  JsonLineParser parser({}, none);
  parser.begin_line();
  parser.feed(line);
  const JsonLineParser::Line found = parser.end_line();
  require<FileError>(found != JsonLineParser::Line::blank, "{}: found nothing, allowed: an object",
                     place);
  require<FileError>(found == JsonLineParser::Line::object, "{}: {}", place, parser.problem());
  try {
    return Json::parse(without_other_values(line));
  } catch (const Json::parse_error& error) {
    fail<FileError>("{}: invalid JSON at byte {} of the line", place, error.byte);
  } catch (const Json::exception& error) {
    fail<FileError>("{}: invalid JSON: {}", place, problem_of(error));
  }
}

ChatRole role_of(const JsonField& message) {
  const JsonField role = message["role"];
  if (role.json().is_string())
    for (const ChatRole known : kRoles)
      if (role.json().get_ref<const std::string&>() == to_string(known)) return known;
  role.refuse("system, user or assistant");
}

std::string text_of(const JsonField& field) {
  if (!field.json().is_string()) field.refuse("a text");
  return field.text();
}

Conversation parse_messages(const JsonField& messages) {
  if (!messages.json().is_array() || messages.json().empty())
    messages.refuse("one message or more, each with role and content");
  Conversation conversation;
  for (size_t i = 0; i < messages.size(); ++i) {
    const JsonField message = messages.at(i);
    if (!message.json().is_object()) message.refuse("an object with role and content");
    conversation.push_back({role_of(message), text_of(message["content"])});
  }
  return conversation;
}

}  // namespace

std::string_view to_string(ChatRole role) {
  switch (role) {
    case ChatRole::system:
      return "system";
    case ChatRole::user:
      return "user";
    case ChatRole::assistant:
      return "assistant";
  }
  fail<UsageError>("unknown role {}", static_cast<int>(role));
}

Conversation parse_conversation(std::string_view line, const std::string& place) {
  const Json json = parse_line(line, place);
  const bool has_messages = json.contains("messages"), has_prompt = json.contains("prompt"),
             has_completion = json.contains("completion");
  require<FileError>(has_messages ? !has_prompt && !has_completion : has_prompt && has_completion,
                     "{}: found {}, allowed: messages, or prompt and completion", place,
                     has_messages     ? "messages beside prompt or completion"
                     : has_prompt     ? "prompt without completion"
                     : has_completion ? "completion without prompt"
                                      : "none of the keys");
  const JsonField whole = JsonField::within(json, place);
  if (has_messages) return parse_messages(whole["messages"]);
  return {{ChatRole::user, text_of(whole["prompt"])},
          {ChatRole::assistant, text_of(whole["completion"])}};
}

}  // namespace lockstep
