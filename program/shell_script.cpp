#include "lockstep/program/shell_script.h"

#include <algorithm>
#include <iterator>

#include "lockstep/program/megatron_flag_table.h"

namespace lockstep {
namespace {

bool is_shell(std::string_view word) {
  word.remove_prefix(word.rfind('/') + 1);  // npos + 1 is 0
  return word == "sh" || word == "bash" || word == "dash" || word == "zsh";
}

bool is_flag(const std::string& word) { return word.starts_with("--"); }

bool is_known_flag(const std::string& word) {
  return is_flag(word) && find_megatron_flag(std::string_view(word).substr(0, word.find('=')));
}

void add_new(ShellWords& words, std::string_view word) {
  if (std::find(words.begin(), words.end(), word) == words.end()) words.emplace_back(word);
}

/// Words after which a command begins.
bool is_before_command(const std::string& word) {
  return word == "then" || word == "else" || word == "do" || word == "{";
}

bool begins_condition(const ShellWords& words) {
  constexpr std::string_view kWords[] = {"if", "case", "elif", "[", "[[", "test", "!"};
  const auto first = std::find_if_not(words.begin(), words.end(), is_before_command);
  return first != words.end() &&
         std::find(std::begin(kWords), std::end(kWords), *first) != std::end(kWords);
}

}  // namespace

std::string quoted_shell_word(std::string word) {
  for (size_t at = 0; (at = word.find('\'', at)) != std::string::npos; at += 4)
    word.replace(at, 1, "'\\''");
  return "'" + word + "'";
}

std::string joined_shell_words(const ShellWords& words) {
  std::string text;
  for (const std::string& word : words) {
    const bool quoted = word.empty() || word.find_first_of(" \t\n'\"") != std::string::npos;
    text += (text.empty() ? "" : " ") + (quoted ? quoted_shell_word(word) : word);
  }
  return text;
}

std::optional<std::string> inner_shell_script(const ShellWords& words) {
  if (words.size() == 2 && words[0] == "eval") return words[1];
  if (!words.empty() && words[0] == "eval")
    return joined_shell_words({words.begin() + 1, words.end()});
  auto word = std::find_if(words.begin(), words.end(), is_shell);
  while (word != words.end() && ++word != words.end() && word->starts_with('-'))
    if (!word->starts_with("--") && word->ends_with('c') && word + 1 != words.end())
      return *(word + 1);
  return std::nullopt;
}

bool is_shell_assignment_place(const ShellWords& words) {
  const auto first = std::find_if_not(words.begin(), words.end(), is_before_command);
  return first == words.end() || *first == "export" || *first == "local" || *first == "declare" ||
         *first == "readonly" || *first == "typeset";
}

void ShellScript::take(const ShellWords& words) {
  if (begins_condition(words)) result_.has_conditions = true;
  const auto program = std::find_if(words.rbegin(), words.rend(),
                                    [](const std::string& word) { return word.ends_with(".py"); });
  if (program != words.rend() && std::any_of(program.base(), words.end(), is_flag))
    take_program(*program, {program.base(), words.end()});
  const auto first =
      loose_.empty() ? std::find_if(words.begin(), words.end(), is_flag) : words.begin();
  loose_.insert(loose_.end(), first, words.end());
}

void ShellScript::take_unset_array(std::string_view written) {
  add_new(result_.unset_arrays, written);
}

ShellArguments ShellScript::result() const {
  ShellArguments result = result_;
  if (result.program.empty()) result.words = in_arrays_.empty() ? loose_ : in_arrays_;
  return result;
}

void ShellScript::take_program(const std::string& program, ShellWords words) {
  if (program == result_.program && words == result_.words) return;  // as `echo` of the command
  const auto known = std::count_if(words.begin(), words.end(), is_known_flag);
  if (!result_.program.empty() && known <= known_) return add_new(result_.left_out, program);
  if (!result_.program.empty()) add_new(result_.left_out, result_.program);
  result_.program = program;
  result_.words = std::move(words);
  known_ = known;
}

}  // namespace lockstep
