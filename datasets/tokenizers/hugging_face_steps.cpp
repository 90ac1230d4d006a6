#include <algorithm>
#include <cstdlib>
#include <functional>
#include <string_view>

#include "lockstep/datasets/byte_alphabet.h"
#include "lockstep/datasets/hugging_face_model.h"
#include "lockstep/datasets/utf8.h"

namespace lockstep {
namespace {

constexpr size_t kMostSteps = 8;
constexpr size_t kMostReplacements = 4;
constexpr size_t kLongestReplacement = 8;

/// Calls `visit` with each step of a field: null, one step, or a Sequence whose steps are in the
/// field named `list`.
void for_each_step(const JsonField& field, std::string_view list,
                   const std::function<void(const JsonField&, const std::string& type)>& visit) {
  if (field.is_null()) return;
  const std::string type = field["type"].text();
  if (type != "Sequence") return visit(field, type);
  const JsonField steps = field[list];
  if (steps.size() > kMostSteps) steps.refuse(fmt::format("at most {} steps", kMostSteps));
  for (size_t i = 0; i < steps.size(); ++i) {
    const JsonField step = steps.at(i);
    visit(step, step["type"].text());
  }
}

std::string short_text(const JsonField& field) {
  const std::string text = field.text();
  if (text.size() > kLongestReplacement)
    field.refuse(fmt::format("at most {} bytes", kLongestReplacement));
  return text;
}

ReplaceText replacement(const JsonField& step) {
  const JsonField pattern = step["pattern"];
  if (pattern["String"].is_null()) pattern.refuse("{\"String\": ...}");
  ReplaceText replace{short_text(pattern["String"]), short_text(step["content"])};
  if (replace.what.empty()) pattern["String"].refuse("a character or more");
  return replace;
}

/// Metaspace's character for a space.
std::string meta_character(const JsonField& step) {
  const JsonField field = step["replacement"];
  const std::string text = field.text_or("\xE2\x96\x81");
  const bool single = !text.empty() && utf8_character(text, 0).bytes == text.size();
  if (!single || text == " ") field.refuse("one character that is no space");
  return text;
}

/// "always", "first" or "never".
std::string prepend_scheme(const JsonField& step) {
  const bool otherwise = step["add_prefix_space"].flag_or(true);
  const JsonField field = step["prepend_scheme"];
  const std::string scheme = field.text_or(otherwise ? "always" : "never");
  if (scheme != "always" && scheme != "first" && scheme != "never")
    field.refuse("always, first or never");
  return scheme;
}

void add_stage(const SplitPattern& pattern, const std::string& place, bool keep_gaps,
               HuggingFaceTokenizerFile& file) {
  file.stages.push_back({PieceCutter(pattern, place), keep_gaps});
}

void add_split(const JsonField& step, HuggingFaceTokenizerFile& file) {
  const JsonField pattern = step["pattern"], behavior = step["behavior"];
  const bool invert = step["invert"].flag_or(false);
  const std::string kind = behavior.text();
  if (kind != "Isolated" && !(kind == "Removed" && invert))
    behavior.refuse("Isolated, or Removed with invert = true");
  const JsonField regex = pattern["Regex"];
  const JsonField text = pattern[regex.is_null() ? "String" : "Regex"];
  const SplitPattern parsed = regex.is_null() ? literal_split_pattern(text.text(), text.place())
                                              : parse_split_pattern(text.text(), text.place());
  add_stage(parsed, text.place(), kind == "Isolated", file);
}

void add_byte_level(const JsonField& step, HuggingFaceTokenizerFile& file) {
  const JsonField prefix = step["add_prefix_space"];
  if (prefix.flag_or(true)) {
    if (!file.stages.empty() || !file.part_steps.empty())
      prefix.refuse("false where another step stands before ByteLevel");
    file.part_steps.push_back(PrependText{" ", /*unless_there=*/true});
  }
  if (step["use_regex"].flag_or(true))
    add_stage(parse_split_pattern(kGpt2Pattern, step.place()), step.place(), true, file);
}

void add_metaspace(const JsonField& step, HuggingFaceTokenizerFile& file) {
  if (!file.stages.empty() || !file.part_steps.empty())
    step["type"].refuse("Metaspace as the first step only");
  const std::string meta = meta_character(step), scheme = prepend_scheme(step);
  file.part_steps.push_back(ReplaceText{" ", meta});
  if (scheme != "never") file.part_steps.push_back(PrependText{meta, /*unless_there=*/true});
  file.only_first_part_begins = scheme == "first";
  if (!step["split"].flag_or(true)) return;
  const bool plain = static_cast<unsigned char>(meta[0]) >= 0x80 || meta == "_";
  if (!plain) step["replacement"].refuse("_ or a character beyond ASCII");
  add_stage(parse_split_pattern(fmt::format("{0}[^{0}]*|[^{0}]+", meta), step.place()),
            step.place(), true, file);
}

/// The byte that a token named <0x41> stands for.
std::optional<char> fallback_byte(std::string_view name) {
  constexpr std::string_view kDigits = "0123456789ABCDEFabcdef";
  if (name.size() != 6 || !name.starts_with("<0x") || name[5] != '>') return std::nullopt;
  if (name.substr(3, 2).find_first_not_of(kDigits) != name.npos) return std::nullopt;
  return static_cast<char>(std::strtol(std::string(name.substr(3, 2)).c_str(), nullptr, 16));
}

/// The effect of a decoder's steps on one token.
struct TokenDecoder {
  bool byte_level = false;
  bool byte_fallback = false;
  bool fused = false;
  std::vector<NormalizerStep> replaced;
  std::string meta;         ///< Metaspace's character
  bool meta_first = false;  ///< a text's first token has none

  std::string bytes_of(const std::string& name) const {
    if (byte_level) return bytes_of_name(name).value_or(name);
    const std::string text = normalize(replaced, name);
    const std::optional<char> byte = byte_fallback ? fallback_byte(text) : std::nullopt;
    return byte ? std::string(1, *byte) : text;
  }
};

void add_strip(const JsonField& step, const TokenDecoder& decoder, TokenBytes& bytes) {
  if (!decoder.fused || bytes.strips > 0) step["type"].refuse("Strip once, after Fuse");
  step["stop"].number(0);
  bytes.strips = step["start"].number(16);
  bytes.stripped = short_text(step["content"]);
  if (bytes.stripped.empty()) step["content"].refuse("a character");
}

void add_decoder(const JsonField& step, const std::string& type, TokenDecoder& decoder,
                 TokenBytes& bytes) {
  constexpr std::string_view kAllowed =
      "ByteLevel or Metaspace alone, or a Sequence of Replace, ByteFallback, Fuse and Strip";
  const bool first =
      !decoder.byte_level && !decoder.byte_fallback && !decoder.fused && decoder.replaced.empty();
  if (type == "Fuse" && !decoder.fused) {
    decoder.fused = true;
  } else if (type == "Strip" && decoder.meta.empty()) {
    add_strip(step, decoder, bytes);
  } else if (type == "ByteFallback" && !decoder.fused && !decoder.byte_level &&
             decoder.meta.empty()) {
    decoder.byte_fallback = true;
  } else if (type == "Replace" && decoder.replaced.size() < kMostReplacements &&
             !decoder.byte_fallback && !decoder.fused && !decoder.byte_level &&
             decoder.meta.empty()) {
    decoder.replaced.push_back(replacement(step));
  } else if (type == "ByteLevel" && first) {
    decoder.byte_level = true;
  } else if (type == "Metaspace" && first) {
    decoder.meta = meta_character(step);
    decoder.meta_first = prepend_scheme(step) != "never";
    decoder.replaced.push_back(ReplaceText{decoder.meta, " "});
  } else {
    step["type"].refuse(kAllowed);
  }
}

}  // namespace

void read_normalizer(const JsonField& normalizer, HuggingFaceTokenizerFile& file) {
  for_each_step(normalizer, "normalizers", [&](const JsonField& step, const std::string& type) {
    if (file.normalizer.size() == kMostReplacements)
      normalizer.refuse(fmt::format("at most {} steps", kMostReplacements));
    if (type == "NFC") return file.normalizer.push_back(ComposeCharacters{});
    if (type == "Replace") return file.normalizer.push_back(replacement(step));
    if (type == "Prepend")
      return file.normalizer.push_back(PrependText{short_text(step["prepend"])});
    step["type"].refuse("NFC, Replace, Prepend, and a Sequence of these");
  });
}

bool read_pre_tokenizer(const JsonField& pre_tokenizer, HuggingFaceTokenizerFile& file) {
  bool by_bytes = false;
  for_each_step(
      pre_tokenizer, "pretokenizers", [&](const JsonField& step, const std::string& type) {
        if (by_bytes) step["type"].refuse("nothing after ByteLevel");
        if (type == "Split") return add_split(step, file);
        if (type == "Metaspace") return add_metaspace(step, file);
        if (type == "ByteLevel") {
          by_bytes = true;
          return add_byte_level(step, file);
        }
        if (type != "Digits")
          step["type"].refuse("ByteLevel, Split, Digits, Metaspace, and a Sequence of these");
        const bool each = step["individual_digits"].flag_or(false);
        add_stage(parse_split_pattern(each ? "\\p{N}" : "\\p{N}+", step.place()), step.place(),
                  true, file);
      });
  return by_bytes;
}

void check_post_processor(const JsonField& post_processor) {
  for_each_step(post_processor, "processors", [](const JsonField& step, const std::string& type) {
    constexpr std::string_view kKnown[] = {"ByteLevel", "TemplateProcessing", "RobertaProcessing",
                                           "BertProcessing"};
    if (std::find(std::begin(kKnown), std::end(kKnown), type) == std::end(kKnown))
      step["type"].refuse(fmt::format("{}, and a Sequence of these", fmt::join(kKnown, ", ")));
  });
}

TokenBytes read_decoder(const JsonField& decoder, const TokenNames& tokens) {
  TokenDecoder steps;
  TokenBytes bytes;
  for_each_step(decoder, "decoders", [&](const JsonField& step, const std::string& type) {
    add_decoder(step, type, steps, bytes);
  });
  for (const std::string& name : tokens.names) bytes.of_token.push_back(steps.bytes_of(name));
  if (steps.meta_first)
    for (const std::string& name : tokens.names)
      bytes.of_first_token.push_back(normalize({ReplaceText{steps.meta, ""}}, name));
  return bytes;
}

}  // namespace lockstep
