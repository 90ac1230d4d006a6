#pragma once

#include <span>
#include <string_view>

/// The flags of Megatron-LM's command line for training a GPT, as data: what each becomes in a
/// configuration here. Follows megatron/training/arguments.py of Megatron-LM at d98e8a6.
namespace lockstep {

/// Values that follow a flag.
enum class FlagValues { none, one, some };

/// What becomes of a flag.
enum class FlagUse {
  copied,    ///< its value is the value of `field`
  sets,      ///< it takes no value and sets `field` to `value`
  derived,   ///< used by a rule that sets `field`; `remark` is the rule
  unneeded,  ///< the run means the same without it; `remark` says why
  missing,   ///< there is nothing like it; `remark` says what there is
};

struct MegatronFlag {
  std::string_view name;  ///< "--num-layers"; with a star at the end: all that begin like it
  FlagUse use;
  FlagValues values;
  std::string_view field = "";   ///< "model.num_layers"
  std::string_view value = "";   ///< of a flag that `sets`
  std::string_view remark = "";  ///< a sentence without a full stop
};

/// Flags that have a counterpart, in the order of the schema.
std::span<const MegatronFlag> megatron_flags_with_field();

/// Flags that have none.
std::span<const MegatronFlag> megatron_flags_without_field();

/// A default of Megatron-LM that differs from the one here.
struct MegatronDefault {
  std::string_view field;
  std::string_view value;
};

/// The defaults that do not depend on other flags.
std::span<const MegatronDefault> megatron_defaults();

/// The row of `name`; null if there is none.
const MegatronFlag* find_megatron_flag(std::string_view name);

}  // namespace lockstep
