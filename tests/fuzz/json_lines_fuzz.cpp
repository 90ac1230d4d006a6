// Lines of JSON, compared with nlohmann's reader. The first byte sets the size of the pieces.

#include <algorithm>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "lockstep/datasets/document_reader.h"
#include "lockstep/datasets/json_line.h"
#include "lockstep/tests/fuzz/fuzz.h"

namespace {

using namespace lockstep;

class Text : public JsonLineParser::Strings {
 public:
  void begin(size_t) override { value.clear(); }
  void append(std::string_view text) override { value += text; }
  void end(size_t) override {}

  std::string value;
};

/// Inputs that only one of the two accepts: NaN and Infinity, numbers beyond fp64, a byte order
/// mark, NUL as the end, any nesting depth.
bool may_differ(const std::string& line) {
  const size_t levels =
      std::count(line.begin(), line.end(), '[') + std::count(line.begin(), line.end(), '{');
  return levels > 1000 || line.find_first_of(std::string("NI\0\xEF", 4)) != std::string::npos;
}

void check_line(const std::string& line, size_t at_once) {
  Text text;
  JsonLineParser parser({"text"}, text);
  for (size_t at = 0; at < line.size(); at += at_once) parser.feed(line.substr(at, at_once));
  const auto found = parser.end_line();
  fuzz::check((found == JsonLineParser::Line::bad) != parser.problem().empty(),
              "a bad line has a problem");
  if (may_differ(line)) return;
  nlohmann::json json;
  try {
    json = nlohmann::json::parse(line);
  } catch (const nlohmann::json::out_of_range&) {
    return;
  } catch (const nlohmann::json::parse_error&) {
  }
  const bool good = json.is_object() && json.contains("text") && json["text"].is_string();
  fuzz::check(good == (found == JsonLineParser::Line::object), "both accept it");
  if (good) fuzz::check(json["text"].get<std::string>() == text.value, "the same text");
}

}  // namespace

int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size == 0) return 0;
  const size_t at_once = data[0] % 40 + 1;
  std::string_view bytes = fuzz::text_of(data + 1, size - 1);
  DocumentReader reader("input.jsonl", [&](char* to, size_t count) {
    const size_t now = std::min({count, at_once, bytes.size()});
    bytes.copy(to, now);
    bytes.remove_prefix(now);
    return now;
  });
  std::string line;
  for (DocumentReader::Piece piece; reader.next(piece);) {
    if (piece.begins) line.clear();
    line += piece.bytes;
    if (piece.ends) check_line(line, at_once);
  }
  return 0;
}
