#include "lockstep/datasets/conversation_encoder.h"

#include <algorithm>
#include <utility>

#include "lockstep/core/check.h"

namespace lockstep {
namespace {

size_t common_front(const std::vector<int64_t>& a, const std::vector<int64_t>& b) {
  const auto [end, other] = std::mismatch(a.begin(), a.end(), b.begin(), b.end());
  return static_cast<size_t>(end - a.begin());
}

}  // namespace

ConversationEncoder::ConversationEncoder(const ChatForm& form, Tokenizer& tokenizer,
                                         std::string tokenizer_name)
    : form_(form), tokenizer_(tokenizer), tokenizer_name_(std::move(tokenizer_name)) {
  for (const std::string_view token : form.tokens) check_token(token);
  if (!form.end.empty()) {
    ids_behind_end_ =
        tokenizer.encode(std::string(form.end) + std::string(form.behind_end)).size() - 1;
    check_neighbours();
    return;
  }
  end_of_document_ = tokenizer.end_of_document();
  end_text_ = tokenizer.decode({end_of_document_});
  if (tokenizer.encode(end_text_) != std::vector{end_of_document_}) end_text_.clear();
}

void ConversationEncoder::check_token(std::string_view token) const {
  const std::vector<int64_t> ids = tokenizer_.encode(token);
  require<ConfigError>(ids.size() == 1 && tokenizer_.decode(ids) == token,
                       "data.chat_template: found {}, allowed with data.tokenizer = {}, which has "
                       "no token '{}': plain, or a tokenizer that has it",
                       to_string(form_.name), tokenizer_name_, token);
}

void ConversationEncoder::check_neighbours() {
  const Conversation two = {{ChatRole::user, " a "}, {ChatRole::assistant, " b "}};
  std::string text;
  std::vector<int64_t> apart;
  for (const ChatText& part : chat_texts(two, form_)) {
    text += part.text;
    const std::vector<int64_t> ids = tokenizer_.encode(part.text);
    apart.insert(apart.end(), ids.begin(), ids.end());
  }
  require<ConfigError>(tokenizer_.encode(text) == apart,
                       "data.chat_template: found {}, allowed with data.tokenizer = {}, whose "
                       "token '{}' strips adjacent white space: plain, or a tokenizer whose "
                       "template tokens do not",
                       to_string(form_.name), tokenizer_name_, form_.tokens.front());
}

std::vector<int64_t> ConversationEncoder::ids_of(const std::string& text, bool first) {
  if (first || end_text_.empty()) return tokenizer_.encode(text);
  std::vector<int64_t> ids = tokenizer_.encode(end_text_ + text);  // so that text is not first
  ids.erase(ids.begin());
  return ids;
}

size_t ConversationEncoder::prompt_ids(const std::string& prompt, const std::vector<int64_t>& ids,
                                       bool first) {
  size_t count = common_front(ids_of(prompt, first), ids);
  // The text after the prompt may have changed its last tokens, which still belong to the prompt.
  const std::vector<int64_t> front(ids.begin(), ids.begin() + static_cast<ptrdiff_t>(count));
  std::string shown = first ? tokenizer_.decode(front) : tokenizer_.decode_more(front);
  if (!prompt.starts_with(shown)) return count;
  for (; count < ids.size(); ++count) {
    shown += tokenizer_.decode_more({ids[count]});
    if (!prompt.starts_with(shown)) break;
  }
  return count;
}

EncodedConversation ConversationEncoder::encode(const Conversation& conversation) {
  EncodedConversation all;
  for (const ChatText& part : chat_texts(conversation, form_)) {
    const bool first = all.ids.empty();
    std::vector<int64_t> ids = ids_of(part.text, first);
    size_t begin = ids.size(), end = ids.size();
    if (part.prompt) {
      begin = prompt_ids(part.text.substr(0, *part.prompt), ids, first);
      if (part.ends_document) {
        ids.push_back(end_of_document_);
        end = ids.size();
      } else {
        end -= ids_behind_end_;
      }
    }
    for (size_t i = 0; i < ids.size(); ++i) all.learned.push_back(begin <= i && i < end);
    all.ids.insert(all.ids.end(), ids.begin(), ids.end());
  }
  return all;
}

}  // namespace lockstep
