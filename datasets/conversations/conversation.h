#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace lockstep {

enum class ChatRole { system, user, assistant };

/// "system", "user", "assistant"
std::string_view to_string(ChatRole role);

struct ChatMessage {
  ChatRole role = ChatRole::user;
  std::string content;  ///< UTF-8
  bool operator==(const ChatMessage&) const = default;
};

using Conversation = std::vector<ChatMessage>;

/// A line of JSON: {"messages": [{"role": "user", "content": "..."}, ...]} or {"prompt": "...",
/// "completion": "..."}, which are a user's message and the assistant's. Other keys are ignored;
/// their values may be NaN or Infinity, but not inside `messages`. If a key is repeated, the last
/// value counts. FileError with `place`, and the path in the line: what was found and what is
/// allowed. Needs no libtorch.
Conversation parse_conversation(std::string_view line, const std::string& place);

}  // namespace lockstep
