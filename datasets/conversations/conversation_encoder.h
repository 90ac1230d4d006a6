#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "lockstep/datasets/chat_form.h"
#include "lockstep/datasets/tokenizer.h"

namespace lockstep {

/// The token ids of a conversation, and which of them are to be learned.
struct EncodedConversation {
  std::vector<int64_t> ids;
  std::vector<bool> learned;  ///< of each id: it is the assistant's, or its end
};

/// Conversations to token ids by a form. They are those of the whole text, as transformers'
/// apply_chat_template gives them; a special token that a content spells out becomes that token.
/// Where a token has characters of the prompt and of the assistant's content, it is learned. Needs
/// no libtorch. One object serves one thread.
class ConversationEncoder {
 public:
  /// `tokenizer`, whose name is `tokenizer_name` in messages, outlives this. ConfigError names
  /// data.chat_template, the tokenizer and the token that it lacks, or that takes white space of
  /// its neighbours. FileError as of end_of_document() for a form that needs it.
  ConversationEncoder(const ChatForm& form, Tokenizer& tokenizer, std::string tokenizer_name);

  EncodedConversation encode(const Conversation& conversation);

 private:
  void check_token(std::string_view token) const;
  void check_neighbours();
  /// The ids of a part; `first`: of the conversation.
  std::vector<int64_t> ids_of(const std::string& text, bool first);
  /// How many of the `ids` of a part are of its prompt alone.
  size_t prompt_ids(const std::string& prompt, const std::vector<int64_t>& ids, bool first);

  const ChatForm& form_;
  Tokenizer& tokenizer_;
  std::string tokenizer_name_;
  size_t ids_behind_end_ = 0;
  int64_t end_of_document_ = 0;  ///< without form_.end
  /// The text of that token, if it has one that stands for it alone.
  std::string end_text_;
};

}  // namespace lockstep
