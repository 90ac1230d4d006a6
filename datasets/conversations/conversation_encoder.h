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
  std::vector<bool> learned;  ///< for each id: it is the assistant's, or its end
};

/// Turns conversations into token ids according to a form. The ids are those of the whole text, as
/// transformers' apply_chat_template gives them; a special token that is spelled out in a content
/// becomes that token. A token that has characters of both the prompt and the assistant's content
/// is learned. Needs no libtorch. One object serves one thread.
class ConversationEncoder {
 public:
  /// `tokenizer`, called `tokenizer_name` in messages, must outlive this object. ConfigError names
  /// data.chat_template, the tokenizer and a token that it lacks, or that takes white space from
  /// its neighbours. FileError as for end_of_document(), if the form needs it.
  ConversationEncoder(const ChatForm& form, Tokenizer& tokenizer, std::string tokenizer_name);

  EncodedConversation encode(const Conversation& conversation);

 private:
  void check_token(std::string_view token) const;
  void check_neighbours();
  /// The ids of a part; `first`: it is the first of the conversation.
  std::vector<int64_t> ids_of(const std::string& text, bool first);
  /// How many of the `ids` of a part belong only to its prompt.
  size_t prompt_ids(const std::string& prompt, const std::vector<int64_t>& ids, bool first);

  const ChatForm& form_;
  Tokenizer& tokenizer_;
  std::string tokenizer_name_;
  size_t ids_behind_end_ = 0;
  int64_t end_of_document_ = 0;  ///< without form_.end
  /// The text of that token, if it has one that means only this token.
  std::string end_text_;
};

}  // namespace lockstep
