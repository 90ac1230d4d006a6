#pragma once

#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "lockstep/core/config.h"
#include "lockstep/datasets/conversation.h"

/// How conversations become text, as a table. Needs no libtorch.
namespace lockstep {

/// A message is before_role, its role, behind_role, its content, end and behind_end. The
/// assistant's content and `end` are trained on.
struct ChatForm {
  ChatTemplate name = ChatTemplate::plain;
  std::string_view begin;        ///< before the first message
  std::string_view before_role;  ///< empty: roles are not written, and contents follow each other
  std::string_view behind_role;
  std::string_view end;  ///< a token; empty: the end of a document, after the assistant's messages
  std::string_view behind_end;
  bool strips_content = false;  ///< of white space at both ends, like Python's str.strip()
  std::span<const std::string_view> tokens;  ///< that the vocabulary must have
};

const ChatForm& chat_form(ChatTemplate name);

/// A part of a conversation's text that begins with its own token, or at the start.
struct ChatText {
  std::string text;
  /// Bytes before what is trained on; unset: nothing is.
  std::optional<size_t> prompt = {};
  /// What is trained on ends with the end of a document, which is not part of `text`.
  bool ends_document = false;
};

/// The parts of a conversation, in order. With roles each message is a part; without roles, each of
/// the assistant's messages together with what comes before it.
std::vector<ChatText> chat_texts(const Conversation& conversation, const ChatForm& form);

/// The text without white space at both ends, like Python's str.strip().
std::string_view stripped(std::string_view text);

}  // namespace lockstep
