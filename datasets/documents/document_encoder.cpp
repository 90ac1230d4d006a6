#include "lockstep/datasets/document_encoder.h"

#include <algorithm>
#include <utility>

#include "lockstep/core/check.h"

namespace lockstep {
namespace {

constexpr size_t kEncodeAtOnce = 1 << 18;  // each id takes 8 bytes for a moment

}  // namespace

DocumentEncoder::DocumentEncoder(EncoderOptions options, Tokenizer& tokenizer, DocumentSink& sink)
    : options_(std::move(options)),
      tokenizer_(tokenizer),
      sink_(sink),
      json_(options_.keys, *this),
      tokens_(options_.keys.size()) {}

void DocumentEncoder::begin_document(InputForm form) {
  form_ = form;
  std::fill(tokens_.begin(), tokens_.end(), 0);
  if (form == InputForm::json_lines)
    json_.begin_line();
  else
    begin(0);
}

void DocumentEncoder::feed(std::string_view piece) {
  form_ == InputForm::json_lines ? json_.feed(piece) : append(piece);
}

std::optional<std::string> DocumentEncoder::end_document() {
  const bool json = form_ == InputForm::json_lines;
  if (!json) end(0);
  const JsonLineParser::Line line = json ? json_.end_line() : JsonLineParser::Line::object;
  if (line == JsonLineParser::Line::blank) return std::nullopt;
  if (line == JsonLineParser::Line::bad) {
    abandon_document();
    return json_.problem();
  }
  if (std::optional<std::string> problem = problem_so_far()) {
    abandon_document();
    return problem;
  }
  for (size_t output = 0; output < tokens_.size(); ++output) {
    sink_.end(output, !json || tokens_[output] > 0);
    num_tokens_ += tokens_[output];
  }
  ++num_documents_;
  return std::nullopt;
}

std::optional<std::string> DocumentEncoder::problem_so_far() const {
  if (*std::max_element(tokens_.begin(), tokens_.end()) <= options_.most_tokens)
    return std::nullopt;
  return fmt::format(
      "found a document of more than {} tokens, allowed: up to {}, because the .idx counts them in "
      "32 bits; divide its text over several files or over the lines of a .jsonl",
      options_.most_tokens, options_.most_tokens);
}

void DocumentEncoder::abandon_document() {
  for (size_t output = 0; output < tokens_.size(); ++output) sink_.drop(output);
}

void DocumentEncoder::begin(size_t key) {
  output_ = key;
  if (tokens_[key] > 0) sink_.drop(key);
  tokens_[key] = 0;
  text_.clear();
  tokenizer_.restart();
  encode_at_ = kEncodeAtOnce;
}

void DocumentEncoder::append(std::string_view text) {
  while (!text.empty() && tokens_[output_] <= options_.most_tokens) {
    const size_t count = std::min(text.size(), kEncodeAtOnce);
    text_ += text.substr(0, count);
    text.remove_prefix(count);
    if (text_.size() >= encode_at_) encode(/*last=*/false);
  }
}

void DocumentEncoder::encode(bool last) {
  ids_.clear();
  text_.erase(0, tokenizer_.encode_front(text_, last, ids_));
  // Text that has no ids yet is encoded again, so at least as much text must come before that.
  encode_at_ = std::max(kEncodeAtOnce, 2 * text_.size());
  const bool has_text = tokens_[output_] > 0 || !ids_.empty() || form_ == InputForm::text;
  if (last && options_.append_eod && has_text) ids_.push_back(tokenizer_.end_of_document());
  if (ids_.empty()) return;
  tokens_[output_] += static_cast<int64_t>(ids_.size());
  sink_.append(output_, ids_);
}

void DocumentEncoder::end(size_t) { encode(/*last=*/true); }

}  // namespace lockstep
