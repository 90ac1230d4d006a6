#include "lockstep/datasets/chat_form.h"

#include <algorithm>
#include <array>
#include <utility>

#include "lockstep/core/check.h"

namespace lockstep {
namespace {

constexpr std::array<std::string_view, 2> kChatmlTokens = {"<|im_start|>", "<|im_end|>"};
constexpr std::array<std::string_view, 4> kLlama3Tokens = {
    "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"};

constexpr ChatForm kForms[] = {
    {.name = ChatTemplate::chatml,
     .begin = "",
     .before_role = "<|im_start|>",
     .behind_role = "\n",
     .end = "<|im_end|>",
     .behind_end = "\n",
     .strips_content = false,
     .tokens = kChatmlTokens},
    {.name = ChatTemplate::llama3,
     .begin = "<|begin_of_text|>",
     .before_role = "<|start_header_id|>",
     .behind_role = "<|end_header_id|>\n\n",
     .end = "<|eot_id|>",
     .behind_end = "",
     .strips_content = true,
     .tokens = kLlama3Tokens},
    {.name = ChatTemplate::plain,
     .begin = "",
     .before_role = "",
     .behind_role = "",
     .end = "",
     .behind_end = "",
     .strips_content = false,
     .tokens = {}},
};

constexpr std::string_view kSpaces[] = {" ",      "\t",     "\n",     "\v",     "\f",     "\r",
                                        "\x1c",   "\x1d",   "\x1e",   "\x1f",   "\u0085", "\u00a0",
                                        "\u1680", "\u2000", "\u2001", "\u2002", "\u2003", "\u2004",
                                        "\u2005", "\u2006", "\u2007", "\u2008", "\u2009", "\u200a",
                                        "\u2028", "\u2029", "\u202f", "\u205f", "\u3000"};

template <class Found>
const std::string_view* find_space(Found found) {
  const auto* const space = std::find_if(std::begin(kSpaces), std::end(kSpaces), found);
  return space == std::end(kSpaces) ? nullptr : space;
}

std::vector<ChatText> texts_of_roles(const Conversation& conversation, const ChatForm& form) {
  std::vector<ChatText> texts;
  for (const ChatMessage& message : conversation) {
    ChatText part;
    if (texts.empty()) part.text += form.begin;
    part.text += form.before_role;
    part.text += to_string(message.role);
    part.text += form.behind_role;
    if (message.role == ChatRole::assistant) part.prompt = part.text.size();
    part.text += form.strips_content ? stripped(message.content) : message.content;
    part.text += form.end;
    part.text += form.behind_end;
    texts.push_back(std::move(part));
  }
  return texts;
}

std::vector<ChatText> texts_without_roles(const Conversation& conversation) {
  std::vector<ChatText> texts;
  ChatText part;
  for (const ChatMessage& message : conversation) {
    if (message.role == ChatRole::assistant) part.prompt = part.text.size();
    part.text += message.content;
    if (!part.prompt) continue;
    part.ends_document = true;
    texts.push_back(std::exchange(part, {}));
  }
  if (!part.text.empty()) texts.push_back(std::move(part));
  return texts;
}

}  // namespace

const ChatForm& chat_form(ChatTemplate name) {
  for (const ChatForm& form : kForms)
    if (form.name == name) return form;
  fail<UsageError>("unknown chat template {}", static_cast<int>(name));
}

std::vector<ChatText> chat_texts(const Conversation& conversation, const ChatForm& form) {
  return form.before_role.empty() ? texts_without_roles(conversation)
                                  : texts_of_roles(conversation, form);
}

std::string_view stripped(std::string_view text) {
  while (const auto* space = find_space([&](std::string_view s) { return text.starts_with(s); }))
    text.remove_prefix(space->size());
  while (const auto* space = find_space([&](std::string_view s) { return text.ends_with(s); }))
    text.remove_suffix(space->size());
  return text;
}

}  // namespace lockstep
