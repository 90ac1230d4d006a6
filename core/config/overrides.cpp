#include "lockstep/core/overrides.h"

#include <google/protobuf/message.h>
#include <google/protobuf/text_format.h>

#include <algorithm>
#include <charconv>
#include <memory>
#include <string_view>
#include <type_traits>

#include "lockstep/core/check.h"
#include "lockstep/core/config_rules.h"
#include "lockstep/core/field_suggestions.h"
#include "lockstep/core/text_format.h"

#include "core/config/config.pb.h"
#include "core/config/config_gen.h"

namespace lockstep {
namespace {

namespace pb = google::protobuf;
using pb::FieldDescriptor;

/// A file reads such an integer as octal.
bool has_leading_zero(std::string_view text) {
  if (text.starts_with('-')) text.remove_prefix(1);
  return text.size() > 1 && text.starts_with('0');
}

template <class Number>
Number parse_number(const std::string& text, const std::string& option, const char* kind) {
  Number value{};
  require<ConfigError>(!std::is_integral_v<Number> || !has_leading_zero(text),
                       "{}: found '{}', allowed: {} without leading zeros", option, text, kind);
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  require<ConfigError>(error == std::errc() && end == text.data() + text.size() && !text.empty(),
                       "{}: found '{}', allowed: {}", option, text, kind);
  return value;
}

bool is_quoted(const std::string& text) {
  return text.size() >= 2 && text.front() == '"' && text.back() == '"';
}

void check_one_value(size_t found, const std::string& option) {
  require<ConfigError>(found <= 1, "{}: found several values, allowed: one, or a list in []",
                       option);
}

/// Sets the field to a value in text format, and nothing else.
void set_from_text(pb::Message* message, const FieldDescriptor& field, const std::string& value,
                   const std::string& option) {
  const std::unique_ptr<pb::Message> parsed(message->New());  // the parser clears its target
  parse_text(field.name() + ": " + value, option, parsed.get());
  std::vector<const FieldDescriptor*> set;
  parsed->GetReflection()->ListFields(*parsed, &set);
  check_one_value(set.size(), option);
  message->GetReflection()->ClearField(message, &field);
  message->MergeFrom(*parsed);
}

std::string_view without_blanks(std::string_view text) {
  while (text.starts_with(' ')) text.remove_prefix(1);
  while (text.ends_with(' ')) text.remove_suffix(1);
  return text;
}

/// Adds the strings of "[a, b]", which need no quotes, to `field`.
void add_bare_strings(pb::Message* message, const FieldDescriptor& field, std::string_view list,
                      const std::string& option) {
  if (without_blanks(list).empty()) return;
  for (size_t begin = 0, end; begin <= list.size(); begin = end + 1) {
    end = std::min(list.find(',', begin), list.size());
    const std::string_view element = without_blanks(list.substr(begin, end - begin));
    require<ConfigError>(!element.empty(), "{}: found an empty element", option);
    message->GetReflection()->AddString(message, &field, std::string(element));
  }
}

/// `value` is a list in brackets, or its only element.
void set_list(pb::Message* message, const FieldDescriptor& field, const std::string& value,
              const std::string& option) {
  const pb::Reflection& reflection = *message->GetReflection();
  const bool bare = field.cpp_type() == FieldDescriptor::CPPTYPE_STRING && value.size() > 2 &&
                    value.front() == '[' && value.back() == ']' &&
                    value.find_first_of("\"'") == std::string::npos;
  if (bare) {
    reflection.ClearField(message, &field);
    return add_bare_strings(message, field, std::string_view(value).substr(1, value.size() - 2),
                            option);
  }
  if (!value.empty() && value.front() == '[') return set_from_text(message, field, value, option);
  if (is_quoted(value)) {
    set_from_text(message, field, value, option);
    const int size = reflection.FieldSize(*message, &field);
    return check_one_value(static_cast<size_t>(size), option);
  }
  reflection.ClearField(message, &field);
  if (field.cpp_type() == FieldDescriptor::CPPTYPE_INT64) {
    const char* const kind = "a whole number of 64 bits, or a list of them, as in [0, 1]";
    reflection.AddInt64(message, &field, parse_number<int64_t>(value, option, kind));
  } else {
    reflection.AddString(message, &field, value);
  }
}

void set_field(pb::Message* message, const FieldDescriptor& field, const std::string& value,
               const std::string& option) {
  const pb::Reflection& reflection = *message->GetReflection();
  if (field.is_repeated()) return set_list(message, field, value, option);
  switch (field.cpp_type()) {
    case FieldDescriptor::CPPTYPE_INT64:
      reflection.SetInt64(message, &field,
                          parse_number<int64_t>(value, option, "a whole number of 64 bits"));
      break;
    case FieldDescriptor::CPPTYPE_DOUBLE:
      reflection.SetDouble(message, &field,
                           parse_number<double>(value, option, "a number of double precision"));
      break;
    case FieldDescriptor::CPPTYPE_BOOL: {
      const bool is_true = value == "true" || value == "1";
      require<ConfigError>(is_true || value == "false" || value == "0",
                           "{}: found '{}', allowed: true, false", option, value);
      reflection.SetBool(message, &field, is_true);
      break;
    }
    default:
      if (is_quoted(value)) return set_from_text(message, field, value, option);
      reflection.SetString(message, &field, value);
  }
}

void apply_override(proto::Config* config, const std::string& assignment) {
  const std::string option = "--set " + assignment;
  const auto equals = assignment.find('=');
  require<ConfigError>(equals != std::string::npos, "{}: must have the form path=value", option);
  std::string path = assignment.substr(0, equals);
  pb::Message* message = config;
  for (;;) {
    const auto dot = path.find('.');
    const std::string name = path.substr(0, dot);
    const FieldDescriptor* field = message->GetDescriptor()->FindFieldByName(name);
    if (field == nullptr)
      fail<ConfigError>("{}: {}", option, unknown_field(assignment.substr(0, equals)));
    const bool is_message = field->cpp_type() == FieldDescriptor::CPPTYPE_MESSAGE;
    if (!is_message) {
      require<ConfigError>(dot == std::string::npos, "{}: '{}' is a value and has no fields",
                           option, name);
      return set_field(message, *field, assignment.substr(equals + 1), option);
    }
    require<ConfigError>(dot != std::string::npos,
                         "{}: '{}' is a group of fields; name one of them, as in {}.{}", option,
                         name, name, field->message_type()->field(0)->name());
    message = message->GetReflection()->MutableMessage(message, field);
    path.erase(0, dot + 1);
  }
}

constexpr char kDecayIters[] = "optimizer.lr_decay_iters";
constexpr char kRampUp[] = "train.rampup_batch_size";
constexpr char kBatchSteps[] = "train.step_batch_size_schedule";

/// A field that resolve() computes from others where it is unset.
struct Follower {
  const char* path;
  std::vector<const char*> sources;
};

const std::vector<Follower>& followers() {
  static const std::vector<Follower> all = {
      {"model.num_query_groups", {"model.num_attention_heads"}},
      {"model.kv_channels",
       {"model.hidden_size", "model.num_attention_heads", "model.multi_latent_attention",
        "model.qk_head_dim", "model.qk_pos_emb_head_dim"}},
      {"model.ffn_hidden_size", {"model.hidden_size"}},
      {"model.moe_ffn_hidden_size", {"model.hidden_size", "model.ffn_hidden_size"}},
      {"model.recompute_num_layers",
       {"model.recompute_granularity", "model.recompute_method", "model.num_layers"}},
      {"model.make_vocab_size_divisible_by", {"train.device"}},
      {"parallel.distributed_timeout_seconds", {"train.device"}},
      {"ddp.calculate_per_token_loss", {"ddp.average_in_collective"}},
      {"data.split", {"data.valid_path"}},
      {kDecayIters, {"train.train_iters", "optimizer.lr_warmup_iters", kRampUp, kBatchSteps}},
      {"optimizer.start_weight_decay", {"optimizer.weight_decay"}},
      {"optimizer.end_weight_decay", {"optimizer.weight_decay"}},
  };
  return all;
}

/// The field at "group.name" of `config` and the message that holds it.
std::pair<pb::Message*, const FieldDescriptor*> field_at(proto::Config* config,
                                                         const std::string& path) {
  const size_t dot = path.find('.');
  const FieldDescriptor& group = *config->GetDescriptor()->FindFieldByName(path.substr(0, dot));
  pb::Message* const message = config->GetReflection()->MutableMessage(config, &group);
  return {message, message->GetDescriptor()->FindFieldByName(path.substr(dot + 1))};
}

std::string text_of(const pb::Message& message, const FieldDescriptor& field) {
  std::string text;
  pb::TextFormat::PrintFieldValueToString(message, &field, -1, &text);
  return text;
}

std::string text_at(proto::Config config, const std::string& path) {
  const auto [message, field] = field_at(&config, path);
  return message->GetReflection()->HasField(*message, field) ? text_of(*message, *field) : "";
}

void clear_at(proto::Config* config, const std::string& path) {
  const auto [message, field] = field_at(config, path);
  message->GetReflection()->ClearField(message, field);
}

/// Whether `config` looks like what print_config() writes, which leaves none of these out.
bool is_effective(const proto::Config& config) {
  const auto& model = config.model();
  const auto& optimizer = config.optimizer();
  const auto& train = config.train();
  const bool has_decay = optimizer.has_lr_decay_iters() || train.has_rampup_batch_size() ||
                         train.has_step_batch_size_schedule();
  return model.has_num_query_groups() && model.has_kv_channels() && model.has_ffn_hidden_size() &&
         model.has_moe_ffn_hidden_size() && has_decay && optimizer.has_start_weight_decay() &&
         optimizer.has_end_weight_decay() && config.ddp().has_calculate_per_token_loss();
}

/// Whether resolve() computes `found` for a field that is unset, on some device if train.device is
/// auto. Earlier versions computed lr_decay_iters also where the batch changes its size.
bool is_computed(proto::Config config, const std::string& path, const std::string& found) {
  clear_at(&config, path);
  if (path == kDecayIters)
    for (const char* const changing : {kRampUp, kBatchSteps}) clear_at(&config, changing);
  try {
    const Config resolved = resolve(config_from_message(config));
    const auto is = [&](const Config& one) {
      return text_at(config_to_message(one), path) == found;
    };
    if (resolved.train.device != DeviceChoice::auto_) return is(resolved);
    return is(resolve_for_device(resolved, true)) || is(resolve_for_device(resolved, false));
  } catch (const ConfigError&) {
    return false;
  }
}

void forget_followers(const std::vector<std::string>& overrides, proto::Config* config) {
  if (overrides.empty() || !is_effective(*config)) return;
  const auto named = [&](const std::string& path) {
    return std::any_of(overrides.begin(), overrides.end(), [&](const std::string& assignment) {
      return assignment.starts_with(path + "=");
    });
  };
  const proto::Config given = *config;
  for (const auto& [path, sources] : followers()) {
    const std::string found = text_at(given, path);
    const bool follows = std::any_of(sources.begin(), sources.end(), named) && !named(path);
    if (follows && !found.empty() && is_computed(given, path, found)) clear_at(config, path);
  }
}

}  // namespace

void apply_overrides(const std::vector<std::string>& overrides, proto::Config* config) {
  forget_followers(overrides, config);
  for (const std::string& assignment : overrides) apply_override(config, assignment);
}

}  // namespace lockstep
