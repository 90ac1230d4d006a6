// A line of a conversation, compared with nlohmann's reader, and the templates' output for it.

#include <nlohmann/json.hpp>
#include <string>

#include "lockstep/core/error.h"
#include "lockstep/datasets/conversation_encoder.h"
#include "lockstep/tests/fuzz/fuzz.h"

namespace {

using namespace lockstep;
using Json = nlohmann::json;

bool is_text(const Json& json, const char* key) {
  return json.contains(key) && json[key].is_string();
}

bool is_message(const Json& json) {
  if (!json.is_object() || !is_text(json, "role") || !is_text(json, "content")) return false;
  const std::string role = json["role"];
  return role == "system" || role == "user" || role == "assistant";
}

/// Whether a line may be accepted, as nlohmann reads it. It refuses NaN and numbers
/// beyond fp64, which other keys may hold.
bool is_conversation(std::string_view line) {
  const Json json = Json::parse(line, nullptr, /*allow_exceptions=*/false);
  const auto has = [&](const char* word) { return line.find(word) != std::string_view::npos; };
  if (!json.is_object())
    return json.is_discarded() && (has("NaN") || has("Infinity") || has("e") || has("E"));
  if (!json.contains("messages")) return is_text(json, "prompt") && is_text(json, "completion");
  if (json.contains("prompt") || json.contains("completion")) return false;
  const Json& messages = json["messages"];
  if (!messages.is_array() || messages.empty()) return false;
  for (const Json& message : messages)
    if (!is_message(message)) return false;
  return true;
}

void check_texts(const Conversation& conversation) {
  for (const auto name : {ChatTemplate::chatml, ChatTemplate::llama3, ChatTemplate::plain}) {
    size_t size = 0, given = 0;
    for (const ChatText& part : chat_texts(conversation, chat_form(name))) {
      fuzz::check(part.prompt.value_or(0) <= part.text.size(), "a prompt inside its text");
      size += part.text.size();
    }
    for (const ChatMessage& message : conversation) given += message.content.size();
    fuzz::check(name != ChatTemplate::plain || size == given, "plain texts are the contents");
  }
  ByteTokenizer bytes;
  ConversationEncoder encoder(chat_form(ChatTemplate::plain), bytes, "byte");
  const EncodedConversation found = encoder.encode(conversation);
  fuzz::check(found.ids.size() == found.learned.size(), "each id has a flag");
}

}  // namespace

int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string_view line = fuzz::text_of(data, size);
  try {
    const Conversation conversation = parse_conversation(line, "line");
    fuzz::check(is_conversation(line), "what was taken is a conversation");
    check_texts(conversation);
  } catch (const FileError&) {
    // Only our parser refuses a leading NUL or byte order mark, numbers beyond fp64 and deep
    // nesting.
  }
  return 0;
}
