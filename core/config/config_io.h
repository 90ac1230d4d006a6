#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "lockstep/core/config.h"

/// Reading, checking and printing the configuration of lockstep/core/config.h. The language is
/// protobuf's text format. Nothing here needs libtorch.
namespace lockstep {

/// The configuration that `text` spells, with `overrides` ("path=value", no quotes around strings;
/// of two for one path the later wins) applied, checked by validate() and completed by resolve().
/// `origin` is the name of the text in messages, usually its path. Throws ConfigError: a syntax
/// error or unknown field with line and column, an unusable value with its field, what was found
/// and what is allowed. Texts of more than 1 MiB are refused.
Config parse_config(std::string_view text, const std::string& origin,
                    const std::vector<std::string>& overrides = {});

/// parse_config() of a file. Throws ConfigError if it cannot be read.
Config load_config(const std::string& path, const std::vector<std::string>& overrides = {});

/// Throws ConfigError if a field is out of its bounds, is not one of its choices, or contradicts
/// another field. Checks that need the number of ranks are made where it is known.
void validate(const Config& config);

/// Fills in the fields whose default follows from other fields (num_query_groups, kv_channels,
/// ffn_hidden_size, recompute_num_layers, moe_layer_freq, lr_decay_iters, the weight decay's ends,
/// calculate_per_token_loss), and, unless train.device is auto, those of resolve_for_device(). An
/// unset lr_decay_iters stays unset where the batch changes its size: then the decay ends with the
/// samples of the run, which need not be whole batches.
Config resolve(Config config);

/// Fills in the fields whose default depends on where the run takes place, which only the run knows
/// with train.device = auto: make_vocab_size_divisible_by and distributed_timeout_seconds.
Config resolve_for_device(Config config, bool is_cpu);

/// `config` as text that parse_config() reads back to the same value, defaults included. Fields
/// that are unset appear as comments.
std::string print_config(const Config& config);

/// A field and what it holds.
struct ConfigValue {
  std::string path;   ///< "model.num_layers"
  std::string value;  ///< as print_config() writes it, "unset" if there is none

  bool operator==(const ConfigValue&) const = default;
};

/// All fields, in the order of the schema.
std::vector<ConfigValue> config_values(const Config& config);

/// One row of the schema.
struct ConfigField {
  std::string path;           ///< "model.num_layers"
  std::string type;           ///< "int64", "double", "bool", "string"
  std::string default_value;  ///< empty if there is none
  std::string unit;           ///< empty for plain numbers, strings and flags
  std::string allowed;        ///< ">= 1", "one of a, b"
  std::string unset;          ///< what an unset field means
  std::string meaning;
};

/// All fields, in the order of the schema.
const std::vector<ConfigField>& config_fields();

}  // namespace lockstep
