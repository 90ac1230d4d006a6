#include "lockstep/program/shell_arguments.h"

#include <algorithm>
#include <charconv>
#include <cstdint>
#include <optional>

#include "lockstep/program/shell_expansion.h"
#include "lockstep/program/shell_script.h"

namespace lockstep {
namespace {

using Words = ShellWords;

constexpr const char* kBlanks = " \t\r\n";

/// A flag and its values in one word.
bool holds_flag(const std::string& word) {
  const size_t first = word.find_first_not_of(kBlanks);
  return first != std::string::npos && word.compare(first, 2, "--") == 0 &&
         word.find_first_of(kBlanks, first) != std::string::npos;
}

/// The words that the word which is being read becomes: several by expansions.
class ShellFields {
 public:
  explicit ShellFields(bool splits) : splits_(splits) {}
  bool splits() const { return splits_; }
  /// Continues the last one. Empty text counts if it is quoted.
  void add(std::string_view text, bool quoted = true) {
    word_ += text;
    started_ = started_ || quoted || !text.empty();
  }
  void next() {
    if (started_) done_.push_back(std::move(word_));
    word_.clear();
    started_ = false;
  }
  /// Words of their own, the first of which continues the last one.
  void add(const Words& words) {
    for (size_t i = 0; i < words.size(); ++i) {
      if (i > 0) next();
      add(words[i]);
    }
  }
  Words take() {
    next();
    return std::move(done_);
  }

 private:
  bool splits_;
  Words done_;
  std::string word_;
  bool started_ = false;
};

/// What a text is.
enum class Reading {
  script,
  word,  ///< of ${NAME:-word}: operators and # are ordinary characters
  text   ///< a value: $ is one too
};

class ShellReader {
 public:
  ShellReader(std::string_view text, ShellScript& script, Reading reading, int depth)
      : text_(text), script_(script), reading_(reading), depth_(depth) {}

  void read_script() {
    while (at_ < text_.size()) read_command();
  }

 private:
  static constexpr size_t npos = std::string_view::npos;
  static constexpr int kDeepestScript = 4;  // a script that runs itself ends here
  static constexpr int kDeepest = 16;

  char peek(size_t ahead = 0) const {
    return at_ + ahead < text_.size() ? text_[at_ + ahead] : '\n';
  }

  /// Skips blanks, comments and line breaks after a backslash; with `lines`, all line breaks.
  void skip_blanks(bool lines) {
    for (; at_ < text_.size(); ++at_) {
      if (peek() == '\\' && peek(1) == '\n') {
        ++at_;
      } else if (peek() == '#' && reading_ == Reading::script) {
        at_ = std::min(text_.find('\n', at_), text_.size()) - 1;
      } else if (peek() != ' ' && peek() != '\t' && !(lines && peek() == '\n')) {
        return;
      }
    }
  }

  /// Reads up to the end of a line, or a ; & or |.
  void read_command() {
    Words words;
    for (;;) {
      skip_blanks(/*lines=*/false);
      if (at_ >= text_.size() || ends_command(peek())) break;
      if (read_redirection()) continue;
      if (peek() == '(' || peek() == ')')
        ++at_;
      else if (!is_shell_assignment_place(words) || !read_assignment())
        read_word(words);
    }
    ++at_;
    const auto script = inner_shell_script(words);
    if (!script)
      script_.take(words);
    else if (depth_ < kDeepestScript)
      ShellReader(*script, script_, Reading::script, depth_ + 1).read_script();
  }

  /// Reads a redirection, as in 2>&1 or > file.
  bool read_redirection() {
    const size_t arrow = std::min(text_.find_first_not_of("0123456789", at_), text_.size());
    if (arrow == text_.size() || (text_[arrow] != '<' && text_[arrow] != '>')) return false;
    at_ = std::min(text_.find_first_not_of("<>&", arrow), text_.size());
    skip_blanks(/*lines=*/false);
    Words target;
    if (!ends_command(peek())) read_word(target);
    return true;
  }

  static bool ends_command(char c) { return c == '\n' || c == ';' || c == '&' || c == '|'; }

  bool read_assignment() {
    const size_t equals = text_.find_first_of("= \t\n", at_);
    if (equals == npos || text_[equals] != '=') return false;
    std::string_view name = text_.substr(at_, equals - at_);
    const bool appends = name.ends_with('+');
    if (appends) name.remove_suffix(1);
    if (!is_shell_name(name)) return false;
    at_ = equals + 1;
    Words value;
    if (peek() == '(') {
      value = read_elements();
      script_.take_array(value);
      Words& array = script_.variables[std::string(name)];
      if (!appends) array.clear();
      array.insert(array.end(), value.begin(), value.end());
      return true;
    }
    if (!ends_command(peek()) && peek() != ' ') read_word(value, /*splits=*/false);
    Words& variable = script_.variables[std::string(name)];
    if (variable.empty()) variable.emplace_back();
    variable[0] = (appends ? variable[0] : "") + (value.empty() ? "" : value[0]);
    return true;
  }

  /// Reads from the ( of an array behind its ).
  Words read_elements() {
    Words elements;
    ++at_;
    for (skip_blanks(true); at_ < text_.size() && peek() != ')'; skip_blanks(true))
      read_word(elements);
    ++at_;
    return elements;
  }

  /// Appends the next word; several words if an expansion outside quotes holds blanks.
  void read_word(Words& words, bool splits = true) {
    const size_t begin = at_;
    ShellFields fields(splits);
    bool split = false;
    const std::string_view ends = reading_ == Reading::script ? " \t\r\n;)&|<>" : kBlanks;
    while (at_ < text_.size() && ends.find(peek()) == npos) {
      if (const char c = peek(); c == '\'') {
        const size_t end = std::min(text_.find('\'', at_ + 1), text_.size());
        fields.add(text_.substr(at_ + 1, end - at_ - 1));
        at_ = end + 1;
      } else if (c == '"') {
        ++at_;
        read_quoted(fields);
        ++at_;
      } else if (c == '\\' && at_ + 1 < text_.size()) {
        if (peek(1) != '\n') fields.add(text_.substr(at_ + 1, 1));
        at_ += 2;
      } else if (c == '$') {
        expand(fields, /*quoted=*/false);
        split = splits;
      } else {
        fields.add(text_.substr(at_++, 1));
      }
    }
    if (at_ == begin) ++at_;  // a character that begins no word
    for (const std::string& word : fields.take())
      if (splits && !split && holds_flag(word))
        split_value(word, words);
      else
        words.push_back(word);
  }

  /// Reads what stands between double quotes, up to the second one.
  void read_quoted(ShellFields& fields) {
    if (peek() == '"') fields.add("");
    while (at_ < text_.size() && peek() != '"') read_quoted_part(fields);
  }

  void read_quoted_part(ShellFields& fields) {
    if (peek() == '\\' && at_ + 1 < text_.size()) {
      const char next = peek(1);
      if (next != '"' && next != '$' && next != '\\' && next != '\n') fields.add("\\");
      if (next != '\n') fields.add(text_.substr(at_ + 1, 1));
      at_ += 2;
    } else if (peek() == '$') {
      expand(fields, /*quoted=*/true);
    } else {
      fields.add(text_.substr(at_++, 1));
    }
  }

  /// Quotes inside a value group what they hold, as a reader of the script expects.
  void split_value(std::string_view value, Words& words) const {
    ShellReader inner(value, script_, Reading::text, depth_);
    for (inner.skip_blanks(true); inner.at_ < value.size(); inner.skip_blanks(true))
      inner.read_word(words, /*splits=*/false);
  }

  /// Reads what begins with a $ and adds what it stands for.
  void expand(ShellFields& fields, bool quoted) {
    const ShellExpansion found = read_shell_expansion(text_, at_);
    if (reading_ == Reading::text || found.name.empty() || depth_ >= kDeepest)
      return fields.add(found.written);
    const std::optional<Words> values = values_of(found);
    const auto is_empty = [](const std::string& value) { return value.empty(); };
    const bool is_set = values && !values->empty() &&
                        !(found.colon && std::all_of(values->begin(), values->end(), is_empty));
    const bool takes_word = found.operation == '+'   ? is_set
                            : found.operation == '-' ? !is_set
                                                     : found.operation == '=' && !is_set;
    if (takes_word) return add_word(found, quoted, fields);
    if (found.operation == '+') {
      if (quoted && !found.is_all()) fields.add("");
      return;
    }
    if (values) return add_values(*values, found.is_all() || found.is_arguments(), quoted, fields);
    if (!found.is_all()) return fields.add(found.written);
    script_.take_unset_array(found.written);
  }

  /// The elements that are named, without an index the first; unset: the script does not set them.
  std::optional<Words> values_of(const ShellExpansion& found) const {
    if (found.is_arguments()) return Words{};
    const auto variable = script_.variables.find(found.name);
    if (variable == script_.variables.end()) return std::nullopt;
    const Words& elements = variable->second;
    if (found.is_all()) return elements;
    int64_t index = 0;
    const std::string text = found.index.empty() ? "0" : value_in_quotes(found.index);
    const char* const end = text.data() + text.size();
    const auto [after, error] = std::from_chars(text.data(), end, index);
    if (error != std::errc() || after != end) return std::nullopt;
    const auto size = static_cast<int64_t>(elements.size());
    if (index < 0) index += size;
    return index >= 0 && index < size ? Words{elements[static_cast<size_t>(index)]} : Words{};
  }

  /// The text as it is between double quotes.
  std::string value_in_quotes(std::string_view text) const {
    ShellFields fields(/*splits=*/false);
    add_quoted_word(text, fields);
    const Words words = fields.take();
    return words.empty() ? "" : words[0];
  }

  /// Quotes inside the word of an expansion between double quotes vanish.
  void add_quoted_word(std::string_view word, ShellFields& fields) const {
    ShellReader inner(word, script_, Reading::word, depth_ + 1);
    if (word.empty()) fields.add("");
    while (inner.at_ < word.size())
      if (inner.peek() == '"')
        ++inner.at_;
      else
        inner.read_quoted_part(fields);
  }

  void add_word(const ShellExpansion& found, bool quoted, ShellFields& fields) {
    Words words;
    if (found.operation == '=' && found.index.empty() && is_shell_name(found.name))
      script_.variables[std::string(found.name)] = {value_in_quotes(found.word)};
    if (quoted) return add_quoted_word(found.word, fields);
    ShellReader inner(found.word, script_, Reading::word, depth_ + 1);
    for (inner.skip_blanks(true); inner.at_ < found.word.size(); inner.skip_blanks(true))
      inner.read_word(words, fields.splits());
    if (fields.splits())
      fields.add(words);
    else
      fields.add(joined_shell_words(words), /*quoted=*/false);
  }

  /// `all`: they are those of an array, each a word of its own also between double quotes.
  void add_values(const Words& values, bool all, bool quoted, ShellFields& fields) const {
    if (!fields.splits() && values.size() > 1) {
      std::string text;
      for (const std::string& value : values) text += quoted_shell_word(value) + " ";
      return fields.add(text);
    }
    if (quoted && values.empty() && !all) return fields.add("");
    if (quoted || !fields.splits()) return fields.add(values);
    for (size_t i = 0; i < values.size(); ++i) {
      if (i > 0) fields.next();
      add_value(values[i], fields);
    }
  }

  /// A value outside quotes: blanks in it end a word.
  void add_value(const std::string& value, ShellFields& fields) const {
    const auto is_blank = [](char c) { return std::string_view(kBlanks).find(c) != npos; };
    if (value.empty()) return;
    Words words;
    split_value(value, words);
    if (is_blank(value.front())) fields.next();
    fields.add(words);
    if (is_blank(value.back())) fields.next();
  }

  std::string_view text_;
  ShellScript& script_;
  Reading reading_;
  int depth_;  ///< how many scripts and expansions it is inside of
  size_t at_ = 0;
};

}  // namespace

ShellArguments read_shell_arguments(std::string_view script) {
  ShellScript whole;
  ShellReader(script, whole, Reading::script, /*depth=*/0).read_script();
  return whole.result();
}

}  // namespace lockstep
