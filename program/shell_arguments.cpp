#include "lockstep/program/shell_arguments.h"

#include <algorithm>
#include <cctype>
#include <map>
#include <optional>

namespace lockstep {
namespace {

using Words = std::vector<std::string>;

bool is_name(std::string_view text) {
  return !text.empty() && !std::isdigit(static_cast<unsigned char>(text[0])) &&
         std::all_of(text.begin(), text.end(),
                     [](unsigned char c) { return std::isalnum(c) || c == '_'; });
}

bool is_shell(std::string_view word) {
  word.remove_prefix(word.rfind('/') + 1);  // npos + 1 is 0
  return word == "sh" || word == "bash" || word == "dash" || word == "zsh";
}

/// Words as a script has them. Only blanks and quotes are quoted: operators count in `eval`.
std::string joined(Words::const_iterator begin, Words::const_iterator end) {
  std::string text;
  for (; begin != end; ++begin) {
    const bool quoted = begin->empty() || begin->find_first_of(" \t\n'\"") != std::string::npos;
    std::string word = *begin;
    for (size_t at = 0; quoted && (at = word.find('\'', at)) != std::string::npos; at += 4)
      word.replace(at, 1, "'\\''");
    text += quoted ? "'" + word + "' " : word + " ";
  }
  return text;
}

/// What `eval WORDS` or `sh -c TEXT` reads as a script of its own.
std::optional<std::string> inner_script(const Words& words) {
  if (words.size() == 2 && words[0] == "eval") return words[1];
  if (!words.empty() && words[0] == "eval") return joined(words.begin() + 1, words.end());
  auto word = std::find_if(words.begin(), words.end(), is_shell);
  while (word != words.end() && ++word != words.end() && word->starts_with('-'))
    if (!word->starts_with("--") && word->ends_with('c') && word + 1 != words.end())
      return *(word + 1);
  return std::nullopt;
}

class ShellReader {
 public:
  explicit ShellReader(std::string_view script) : text_(script) {}

  ShellArguments read() {
    while (at_ < text_.size()) read_command();
    if (!found_program_ && !arrays_.empty()) result_.words = in_arrays_;
    if (!found_program_ && arrays_.empty()) result_.words = loose_;
    return result_;
  }

 private:
  static constexpr size_t npos = std::string_view::npos;
  static constexpr int kDeepest = 4;  // a script that runs itself ends here

  char peek(size_t ahead = 0) const {
    return at_ + ahead < text_.size() ? text_[at_ + ahead] : '\n';
  }

  /// Skips blanks, comments and line breaks after a backslash; with `lines`, all line breaks.
  void skip_blanks(bool lines) {
    for (; at_ < text_.size(); ++at_) {
      if (peek() == '\\' && peek(1) == '\n') {
        ++at_;
      } else if (peek() == '#' && !literal_) {
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
      else if (!is_assignment_place(words) || !read_assignment())
        read_word(words);
    }
    ++at_;
    if (const auto script = inner_script(words); script && depth_ < kDeepest)
      take_script(*script);
    else
      take(words);
  }

  void take_script(const std::string& script) {
    ShellReader inner(script);
    inner.depth_ = depth_ + 1;
    inner.variables_ = std::move(variables_);
    inner.arrays_ = std::move(arrays_);
    while (inner.at_ < inner.text_.size()) inner.read_command();
    variables_ = std::move(inner.variables_);
    arrays_ = std::move(inner.arrays_);
    result_.has_conditions = result_.has_conditions || inner.result_.has_conditions;
    if (!inner.found_program_) return;
    result_.words = inner.result_.words;
    found_program_ = true;
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

  /// NAME=value is an assignment if only these words come before it.
  static bool is_assignment_place(const Words& words) {
    return std::all_of(words.begin(), words.end(), [](const std::string& word) {
      return word == "export" || word == "then" || word == "else" || word == "do" ||
             word == "local" || word == "declare" || word == "readonly";
    });
  }

  void take(const Words& words) {
    if (words.empty()) return;
    if (words[0] == "if" || words[0] == "case" || words[0] == "elif") result_.has_conditions = true;
    const auto program = std::find_if(words.rbegin(), words.rend(), [](const std::string& word) {
      return word.ends_with(".py");
    });
    const auto is_flag = [](const std::string& word) { return word.starts_with("--"); };
    if (program != words.rend() && std::any_of(program.base(), words.end(), is_flag)) {
      result_.words.assign(program.base(), words.end());
      found_program_ = true;
    }
    const auto first =
        loose_.empty() ? std::find_if(words.begin(), words.end(), is_flag) : words.begin();
    loose_.insert(loose_.end(), first, words.end());
  }

  bool read_assignment() {
    const size_t equals = text_.find('=', at_);
    if (equals == npos) return false;
    std::string_view name = text_.substr(at_, equals - at_);
    const bool appends = name.ends_with('+');
    if (appends) name.remove_suffix(1);
    if (!is_name(name)) return false;
    at_ = equals + 1;
    if (peek() == '(') {
      ++at_;
      Words elements;
      for (skip_blanks(true); at_ < text_.size() && peek() != ')'; skip_blanks(true))
        read_word(elements);
      ++at_;
      Words& array = arrays_[std::string(name)];
      if (!appends) array.clear();
      array.insert(array.end(), elements.begin(), elements.end());
      in_arrays_.insert(in_arrays_.end(), elements.begin(), elements.end());
    } else {
      Words value;
      if (!ends_command(peek()) && peek() != ' ') read_word(value, /*splits=*/false);
      std::string& variable = variables_[std::string(name)];
      variable = (appends ? variable : "") + (value.empty() ? "" : value[0]);
    }
    return true;
  }

  /// Appends the next word; several words if an expansion outside quotes holds blanks.
  void read_word(Words& words, bool splits = true) {
    const size_t begin = at_;
    std::string word;
    bool expanded = false, quoted = false;
    has_array_ = false;
    const std::string_view ends = literal_ ? " \t\r\n" : " \t\r\n;)&|<>";
    while (at_ < text_.size() && ends.find(peek()) == npos) {
      if (const char c = peek(); c == '\'') {
        const size_t end = std::min(text_.find('\'', at_ + 1), text_.size());
        word += text_.substr(at_ + 1, end - at_ - 1);
        at_ = end + 1;
        quoted = true;
      } else if (c == '"') {
        read_double_quotes(word);
        quoted = true;
      } else if (c == '\\' && at_ + 1 < text_.size()) {
        if (peek(1) != '\n') word += peek(1);
        at_ += 2;
      } else if (c == '$') {
        word += read_expansion();
        expanded = true;
      } else {
        word += c;
        ++at_;
      }
    }
    if (at_ == begin) ++at_;  // a character that begins no word
    const bool holds_flag = word.starts_with("--") && word.find(' ') != std::string::npos;
    if (splits && ((expanded && !quoted) || has_array_ || holds_flag))
      split(word, words);
    else if (!word.empty() || quoted)
      words.push_back(word);
  }

  void read_double_quotes(std::string& word) {
    for (++at_; at_ < text_.size() && peek() != '"';) {
      if (peek() == '\\' && at_ + 1 < text_.size()) {
        const char next = peek(1);
        if (next != '"' && next != '$' && next != '\\' && next != '\n') word += '\\';
        if (next != '\n') word += next;
        at_ += 2;
      } else if (peek() == '$') {
        word += read_expansion();
      } else {
        word += text_[at_++];
      }
    }
    ++at_;
  }

  /// Quotes inside an expansion group what they hold, as a reader of the script expects.
  static void split(const std::string& text, Words& words) {
    ShellReader inner(text);
    inner.literal_ = true;
    for (inner.skip_blanks(true); inner.at_ < inner.text_.size(); inner.skip_blanks(true))
      inner.read_word(words, /*splits=*/false);
  }

  /// The value after a $. Unknown expansions stay as they are.
  std::string read_expansion() {
    const size_t begin = at_++;
    if (peek() == '{') {
      const size_t end = std::min(text_.find('}', at_), text_.size());
      const std::string_view inside = text_.substr(at_ + 1, end - at_ - 1);
      at_ = std::min(end + 1, text_.size());
      return value_of(inside, text_.substr(begin, at_ - begin));
    }
    if (peek() == '(') {
      for (int depth = 0; at_ < text_.size();) {
        depth += peek() == '(' ? 1 : peek() == ')' ? -1 : 0;
        ++at_;
        if (depth == 0) break;
      }
      return std::string(text_.substr(begin, at_ - begin));
    }
    while (at_ < text_.size() &&
           (std::isalnum(static_cast<unsigned char>(peek())) || peek() == '_'))
      ++at_;
    return value_of(text_.substr(begin + 1, at_ - begin - 1), text_.substr(begin, at_ - begin));
  }

  std::string value_of(std::string_view inside, std::string_view written) {
    const size_t minus = inside.find(":-");
    const std::string_view name = inside.substr(0, std::min(inside.find_first_of("[:"), minus));
    has_array_ = has_array_ || inside.ends_with("[@]");
    if (const auto array = arrays_.find(std::string(name)); array != arrays_.end()) {
      std::string text;
      for (const std::string& element : array->second) text += "'" + element + "' ";
      return text;
    }
    if (const auto found = variables_.find(std::string(name)); found != variables_.end())
      return found->second;
    if (inside.ends_with("[@]")) return "";
    if (minus == npos) return std::string(written);
    Words otherwise;
    split(std::string(inside.substr(minus + 2)), otherwise);
    return otherwise.empty() ? "" : otherwise[0];
  }

  std::string_view text_;
  size_t at_ = 0;
  std::map<std::string, std::string> variables_;
  std::map<std::string, Words> arrays_;
  Words in_arrays_, loose_;
  ShellArguments result_;
  bool found_program_ = false;
  int depth_ = 0;           ///< how many scripts it is inside of
  bool literal_ = false;    ///< the text is expanded: its operators and # are ordinary characters
  bool has_array_ = false;  ///< the word that is being read expands an array
};

}  // namespace

ShellArguments read_shell_arguments(std::string_view script) { return ShellReader(script).read(); }

}  // namespace lockstep
