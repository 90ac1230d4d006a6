#pragma once

#include <nlohmann/json.hpp>
#include <string>

#include "lockstep/datasets/byte_alphabet.h"

namespace lockstep::fuzz {

/// A tokenizer.json whose first 256 tokens are the bytes, with the steps of Qwen's.
inline nlohmann::json byte_level_sample() {
  using Json = nlohmann::json;
  Json vocab;
  for (unsigned byte = 0; byte < 256; ++byte)
    vocab[name_of_byte(static_cast<unsigned char>(byte))] = byte;
  const Json merges = {"t h", "th e", "\xC4\xA0 t", "\xC4\xA0t he", "i n", "1 2"};
  Json kept = Json::array();
  for (const Json& merge : merges) {
    const auto text = merge.get<std::string>();
    const size_t space = text.find(' ');
    const std::string left = text.substr(0, space), right = text.substr(space + 1);
    if (!vocab.contains(left) || !vocab.contains(right)) continue;
    vocab[left + right] = vocab.size();
    kept.push_back({left, right});
  }
  const auto token = [&](const char* content, unsigned more, bool strips, bool normalized) {
    return Json{{"id", vocab.size() + more}, {"content", content}, {"single_word", false},
                {"lstrip", strips},          {"rstrip", strips},   {"normalized", normalized},
                {"special", !normalized}};
  };
  return {{"added_tokens",
           {token("<|endoftext|>", 0, false, false), token("<mask>", 1, true, false),
            token("caf\xC3\xA9", 2, false, true)}},
          {"normalizer", {{"type", "NFC"}}},
          {"pre_tokenizer",
           {{"type", "Sequence"},
            {"pretokenizers",
             {{{"type", "Split"},
               {"pattern",
                {{"Regex",
                  "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}| "
                  "?[^\\s\\p{L}\\p{N}]+[\\r\\n]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+"}}},
               {"behavior", "Isolated"},
               {"invert", false}},
              {{"type", "ByteLevel"}, {"add_prefix_space", false}, {"use_regex", false}}}}}},
          {"post_processor", {{"type", "ByteLevel"}}},
          {"decoder", {{"type", "ByteLevel"}}},
          {"model", {{"type", "BPE"}, {"vocab", vocab}, {"merges", kept}}}};
}

/// One with characters, like Llama 2's.
inline nlohmann::json sentence_sample() {
  using Json = nlohmann::json;
  const std::string space = "\xE2\x96\x81";
  Json vocab = {{"<unk>", 0}};
  constexpr char kDigits[] = "0123456789ABCDEF";
  for (unsigned byte = 0; byte < 256; ++byte)
    vocab[std::string("<0x") + kDigits[byte / 16] + kDigits[byte % 16] + ">"] = byte + 1;
  for (const std::string& name :
       {space, std::string("t"), std::string("h"), std::string("e"), std::string("a"),
        std::string("\xC3\xA9"), space + "t", std::string("he"), space + "the", space + space})
    vocab[name] = vocab.size();
  const Json merges = {space + " t", "h e", space + "t he", space + " " + space};
  const Json end = {{"id", vocab.size()}, {"content", "</s>"}, {"single_word", false},
                    {"lstrip", false},    {"rstrip", true},    {"normalized", false},
                    {"special", true}};
  return {{"added_tokens", Json::array({end})},
          {"normalizer",
           {{"type", "Sequence"},
            {"normalizers",
             {{{"type", "Prepend"}, {"prepend", space}},
              {{"type", "Replace"}, {"pattern", {{"String", " "}}}, {"content", space}}}}}},
          {"pre_tokenizer", nullptr},
          {"post_processor", nullptr},
          {"decoder",
           {{"type", "Sequence"},
            {"decoders",
             {{{"type", "Replace"}, {"pattern", {{"String", space}}}, {"content", " "}},
              {{"type", "ByteFallback"}},
              {{"type", "Fuse"}},
              {{"type", "Strip"}, {"content", " "}, {"start", 1}, {"stop", 0}}}}}},
          {"model",
           {{"type", "BPE"},
            {"unk_token", "<unk>"},
            {"fuse_unk", true},
            {"byte_fallback", true},
            {"vocab", vocab},
            {"merges", merges}}}};
}

}  // namespace lockstep::fuzz
