// Token ids of conversations, for chat_templates_test.py. With the arguments TEMPLATE TOKENIZER, it
// prints {"ids": [...], "learned": [...]} for each line of standard input.

#include <cstdio>
#include <iostream>
#include <nlohmann/json.hpp>
#include <string>

#include "lockstep/core/config_io.h"
#include "lockstep/datasets/conversation_encoder.h"

int main(int argc, char** argv) {
  using namespace lockstep;
  if (argc != 3) return 2;
  try {
    const Config config =
        parse_config("", "arguments", {std::string("data.chat_template=") + argv[1]});
    const auto tokenizer = make_tokenizer(argv[2], "TOKENIZER");
    ConversationEncoder encoder(chat_form(config.data.chat_template), *tokenizer, argv[2]);
    for (std::string line; std::getline(std::cin, line);) {
      const EncodedConversation found = encoder.encode(parse_conversation(line, "input"));
      const nlohmann::json json = {{"ids", found.ids}, {"learned", found.learned}};
      std::puts(json.dump().c_str());
    }
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}
