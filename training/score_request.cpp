#include "lockstep/training/score_request.h"

#include <algorithm>
#include <nlohmann/json.hpp>

#include "lockstep/core/check.h"
#include "lockstep/datasets/json_field.h"

namespace lockstep {
namespace {

using ScoreJson = nlohmann::ordered_json;

std::string text_at(const ScoreJson& json, const char* key, const std::string& place) {
  const auto found = json.find(key);
  require<FileError>(found != json.end(), "{}: '{}' is missing", place, key);
  require<FileError>(found->is_string(), "{}: '{}': found {}, allowed: a text", place, key,
                     found->type_name());
  return found->get<std::string>();
}

bool is_blank(std::string_view line) { return line.find_first_not_of(" \t\r") == line.npos; }

ScoreRequest parse_request(std::string_view line, const std::string& path, int64_t number) {
  const std::string place = fmt::format("'{}': line {}", path, number);
  ScoreJson json;
  try {
    json = ScoreJson::parse(line);
  } catch (const ScoreJson::parse_error& error) {
    fail<FileError>("{}: invalid JSON at byte {} of the line", place, error.byte);
  } catch (const ScoreJson::exception& error) {
    fail<FileError>("{}: invalid JSON: {}", place, problem_of(error));
  }
  require<FileError>(json.is_object(), "{}: found {}, allowed: an object", place, json.type_name());
  return {std::string(line), text_at(json, "context", place), text_at(json, "continuation", place),
          number};
}

/// Characters that Python's str.rstrip() removes.
constexpr std::string_view kSpaces[] = {" ",      "\t",     "\n",     "\v",     "\f",     "\r",
                                        "\x1c",   "\x1d",   "\x1e",   "\x1f",   "\u0085", "\u00a0",
                                        "\u1680", "\u2000", "\u2001", "\u2002", "\u2003", "\u2004",
                                        "\u2005", "\u2006", "\u2007", "\u2008", "\u2009", "\u200a",
                                        "\u2028", "\u2029", "\u202f", "\u205f", "\u3000"};

size_t length_without_spaces(std::string_view text) {
  for (bool more = true; more;) {
    more = false;
    for (const std::string_view space : kSpaces)
      if (text.ends_with(space)) {
        text.remove_suffix(space.size());
        more = true;
      }
  }
  return text.size();
}

}  // namespace

std::vector<ScoreRequest> parse_score_requests(std::string_view text, const std::string& path) {
  std::vector<ScoreRequest> requests;
  for (int64_t number = 1; !text.empty(); ++number) {
    const std::string_view line = text.substr(0, text.find('\n'));
    if (!is_blank(line)) requests.push_back(parse_request(line, path, number));
    text.remove_prefix(std::min(line.size() + 1, text.size()));
  }
  return requests;
}

std::string format_score(const ScoreRequest& request, double logprob, bool is_greedy) {
  ScoreJson json = ScoreJson::parse(request.line);
  json["logprob"] = logprob;
  json["is_greedy"] = is_greedy;
  return json.dump();
}

ScoreTokens encode_score_request(const ScoreRequest& request, Tokenizer& tokenizer,
                                 int64_t seq_length, int64_t vocab_size) {
  const std::string context = request.context.substr(0, length_without_spaces(request.context));
  std::vector<int64_t> ids = tokenizer.encode(request.context + request.continuation);
  const auto before = static_cast<int64_t>(context.empty() ? 0 : tokenizer.encode(context).size());
  const bool empty = context.size() == request.context.size() && request.continuation.empty();
  const int64_t scored = std::min(static_cast<int64_t>(ids.size()) - before, seq_length);
  require<ConfigError>(scored >= 1 || empty,
                       "continuation: found '{}', which adds no token to the context, allowed: a "
                       "text that adds one, or an empty text",
                       request.continuation);
  if (before == 0) ids.insert(ids.begin(), tokenizer.begin_of_text());
  if (static_cast<int64_t>(ids.size()) > seq_length + 1)
    ids.erase(ids.begin(), ids.end() - (seq_length + 1));
  const int64_t largest = *std::max_element(ids.begin(), ids.end());
  require<ConfigError>(
      largest < vocab_size, "token id: found {}{}, allowed: less than {} (model.vocab_size)",
      largest, before == 0 && largest == ids.front() ? ", in the place of an empty context" : "",
      vocab_size);
  return {std::move(ids), scored};
}

}  // namespace lockstep
