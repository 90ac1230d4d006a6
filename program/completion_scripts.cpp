#include "lockstep/program/completion_scripts.h"

#include <algorithm>
#include <map>
#include <string_view>

#include "lockstep/core/check.h"

namespace lockstep {
namespace {

/// The text for an option whose value may be anything.
constexpr const char* kAnyValue = "any";

/// A `case` statement for both shells, which prints a text for each key. Keys with the same text
/// are grouped.
class Table {
 public:
  void add(const std::string& key, const std::string& told) { keys_[told].push_back(key); }

  /// The shell function `name`, which prints the text for `$1`.
  std::string function(const std::string& name, const std::string& comment) const {
    std::string text = fmt::format("# {}\n{}() {{\n  case \"$1\" in\n", comment, name);
    for (const auto& [told, keys] : keys_)
      text += fmt::format("    '{}')\n      echo '{}' ;;\n", fmt::join(keys, "' | '"), told);
    return text + "  esac\n}\n\n";
  }

 private:
  std::map<std::string, std::vector<std::string>> keys_;
};

/// "a b" for "one of a, b", "true false" for a flag; empty if there are many values.
std::string values_of(const ConfigField& field) {
  constexpr std::string_view kChoices = "one of ";
  if (field.type == "bool") return "true false";
  if (!field.allowed.starts_with(kChoices)) return "";
  std::string values = field.allowed.substr(kChoices.size());
  std::erase(values, ',');
  return values;
}

std::string options_of(const CommandText& command) {
  std::string words;
  for (const OptionText& option : command.options)
    if (!option.is_argument) words += (words.empty() ? "" : " ") + option.name;
  return words;
}

bool takes_config(const CommandText& command) {
  return std::any_of(command.options.begin(), command.options.end(), [](const OptionText& option) {
    return option.is_argument && option.name == "CONFIG";
  });
}

/// The values of an option, separated by spaces; empty if there are many.
std::string choices_of(const CommandText& command, const OptionText& option,
                       const std::string& configs) {
  if (command.name == "configs" && option.value == "NAME") return configs;
  if (option.value.find('|') == std::string::npos) return "";
  std::string words = option.value;
  std::replace(words.begin(), words.end(), '|', ' ');
  return words;
}

std::string list_function(const std::string& name, const std::string& comment,
                          const std::string& words) {
  return fmt::format("# {}\n{}() {{\n  echo '{}'\n}}\n\n", comment, name, words);
}

/// The functions for both shells.
std::string tables(const std::vector<CommandText>& commands, const std::vector<ConfigField>& fields,
                   const std::vector<std::string>& config_names) {
  const std::string names = fmt::format("{}", fmt::join(config_names, " "));
  Table inside, options, values, choices, configs;
  for (const CommandText& command : commands) {
    if (!command.commands.empty())
      inside.add(command.name, fmt::format("{}", fmt::join(command.commands, " ")));
    options.add(command.name, options_of(command));
    if (takes_config(command)) configs.add(command.name, "yes");
    for (const OptionText& option : command.options) {
      if (option.is_argument || option.value.empty()) continue;
      const std::string words = choices_of(command, option, names);
      choices.add(command.name + " " + option.name, words.empty() ? kAnyValue : words);
    }
  }
  std::string paths;
  for (const ConfigField& field : fields) {
    paths += (paths.empty() ? "" : " ") + field.path;
    if (const std::string words = values_of(field); !words.empty()) values.add(field.path, words);
  }
  return inside.function("_lockstep_commands", "The commands inside a command.") +
         options.function("_lockstep_options",
                          "The options of a command; every command has some.") +
         choices.function("_lockstep_choices",
                          "The values of 'COMMAND --option'; any where they are not listed.") +
         configs.function("_lockstep_takes_config", "Whether a command takes a configuration.") +
         values.function("_lockstep_values", "The values of a field of the configuration.") +
         list_function("_lockstep_fields", "The paths of all fields.", paths) +
         list_function("_lockstep_configs", "The configurations that come with the program.",
                       names);
}

constexpr const char* kBashDriver = R"sh(_lockstep() {
  local line=${COMP_LINE:0:COMP_POINT} command= previous= word
  local current=${line##*[[:space:]]}
  local -a words
  read -ra words <<< "${line%"$current"}"
  for word in "${words[@]:1}"; do
    if [[ -z $previous && -n $(_lockstep_options "${command:+$command }$word") ]]; then
      command="${command:+$command }$word"
    else
      previous=$word
    fi
  done
  COMPREPLY=()
  if [[ $current == --set=* ]]; then previous=--set current=${current#--set=}; fi
  local choices
  choices=$(_lockstep_choices "$command $previous")
  if [[ $previous == --set && $current == *=* ]]; then
    local values
    values=$(_lockstep_values "${current%%=*}")
    COMPREPLY=($(compgen -W "$values" -- "${current#*=}"))
    if [[ $COMP_WORDBREAKS != *=* ]]; then COMPREPLY=("${COMPREPLY[@]/#/${current%%=*}=}"); fi
  elif [[ $previous == --set ]]; then
    COMPREPLY=($(compgen -W "$(_lockstep_fields)" -S = -- "$current"))
    compopt -o nospace
  elif [[ -n $choices ]]; then
    [[ $choices == any ]] || COMPREPLY=($(compgen -W "$choices" -- "$current"))
  elif [[ $current == -* ]]; then
    COMPREPLY=($(compgen -W "$(_lockstep_options "$command")" -- "$current"))
  elif [[ -z $previous && -n $(_lockstep_commands "$command") ]]; then
    COMPREPLY=($(compgen -W "$(_lockstep_commands "$command")" -- "$current"))
  elif [[ -n $(_lockstep_takes_config "$command") ]]; then
    local IFS=$' \t\n' names
    names=$(compgen -W "$(_lockstep_configs)" -- "$current")
    IFS=$'\n'
    COMPREPLY=($names $(compgen -f -X '!*.textproto' -- "$current") $(compgen -d -- "$current"))
    compopt -o filenames
  fi
}
complete -o default -o bashdefault -F _lockstep lockstep
)sh";

constexpr const char* kZshDriver = R"sh(_lockstep() {
  local command= previous= word current=$words[CURRENT] choices
  for word in ${words[2,CURRENT-1]}; do
    if [[ -z $previous && -n $(_lockstep_options "${command:+$command }$word") ]]; then
      command="${command:+$command }$word"
    else
      previous=$word
    fi
  done
  if [[ $current == --set=* ]]; then
    previous=--set current=${current#--set=}
    compset -P '--set='
  fi
  choices=$(_lockstep_choices "$command $previous")
  if [[ $previous == --set && $current == *=* ]]; then
    compset -P '*='
    choices=$(_lockstep_values "${current%%=*}")
    if [[ -n $choices ]]; then compadd -- ${=choices}; else _files; fi
  elif [[ $previous == --set ]]; then
    compadd -S = -- $(_lockstep_fields)
  elif [[ -n $choices && $choices != any ]]; then
    compadd -- ${=choices}
  elif [[ -z $choices && $current == -* ]]; then
    compadd -- $(_lockstep_options "$command")
  elif [[ -z $previous && -n $(_lockstep_commands "$command") ]]; then
    compadd -- $(_lockstep_commands "$command")
  elif [[ -z $choices && -n $(_lockstep_takes_config "$command") ]]; then
    compadd -- $(_lockstep_configs)
    _files -g '*.textproto'
  else
    _files
  fi
}

if [[ $funcstack[1] == _lockstep ]]; then _lockstep "$@"; else compdef _lockstep lockstep; fi
)sh";

}  // namespace

std::string bash_completion(const std::vector<CommandText>& commands,
                            const std::vector<ConfigField>& fields,
                            const std::vector<std::string>& configs) {
  return "# Completion of lockstep " LOCKSTEP_VERSION " for bash; `lockstep completion bash`.\n\n" +
         tables(commands, fields, configs) + kBashDriver;
}

std::string zsh_completion(const std::vector<CommandText>& commands,
                           const std::vector<ConfigField>& fields,
                           const std::vector<std::string>& configs) {
  return "#compdef lockstep\n# Completion of lockstep " LOCKSTEP_VERSION
         " for zsh; `lockstep completion zsh`.\n\n" +
         tables(commands, fields, configs) + kZshDriver;
}

}  // namespace lockstep
