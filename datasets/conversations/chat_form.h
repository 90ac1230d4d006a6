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
/// assistant's content and `end` carry loss.
struct ChatForm {
  ChatTemplate name = ChatTemplate::plain;
  std::string_view begin;        ///< before the first message
  std::string_view before_role;  ///< empty: roles are not written, and contents follow each other
  std::string_view behind_role;
  std::string_view end;  ///< a token; empty: the end of a document, after the assistant's
  std::string_view behind_end;
  bool strips_content = false;  ///< of white space at both ends, as Python's str.strip()
  std::span<const std::string_view> tokens;  ///< that the vocabulary must have
};

const ChatForm& chat_form(ChatTemplate name);

/// A part of a conversation's text that begins with a token of its own, or at the front.
struct ChatText {
  std::string text;
  /// Bytes in front of what carries loss; unset: nothing does.
  std::optional<size_t> prompt = {};
  /// What carries loss ends with the end of a document, which `text` does not show.
  bool ends_document = false;
};

/// The parts of a conversation, in order. With roles each message is one; without, each of the
/// assistant's and what comes before it.
std::vector<ChatText> chat_texts(const Conversation& conversation, const ChatForm& form);

/// Without white space at both ends, as Python's str.strip() has it.
std::string_view stripped(std::string_view text);

}  // namespace lockstep
