// The message for a refused configuration: the field that the user wrote, and a suggestion.

#include <gtest/gtest.h>

#include "lockstep/core/config_io.h"
#include "lockstep/core/error.h"

namespace lockstep {
namespace {

using Settings = std::vector<std::string>;

std::string refusal_of(const std::string& text, const Settings& settings) {
  try {
    parse_config(text, "x.textproto", settings);
    return "";
  } catch (const ConfigError& error) {
    return error.what();
  }
}

TEST(UnknownField, IsToldWithTheNearestNames) {
  const std::pair<const char*, const char*> cases[] = {
      {"modle.hidden_size", "; did you mean 'model.hidden_size'?"},
      {"model.hidden_sise", "; did you mean 'model.hidden_size'?"},
      {"hidden_size", "; did you mean 'model.hidden_size'?"},
      {"hiden_size", "; did you mean 'model.hidden_size'?"},
      {"model.lr", "; did you mean 'optimizer.lr'?"},
      {"optimizer.adam_beta", "; did you mean 'optimizer.adam_beta1' or 'optimizer.adam_beta2'?"},
      {"parallel.tensor_parallel_size",
       "; did you mean 'parallel.tensor_model_parallel_size' or 'parallel.context_parallel_size'?"},
      {"train.iters", "; did you mean 'train.train_iters' or 'train.eval_iters'?"},
      {"trian", "; did you mean 'train'?"},
      {"optimizer.foo", "; `lockstep train --help` lists all fields"},
      {"frobnicate", "; `lockstep train --help` lists all fields"},
      {"model.", "; `lockstep train --help` lists all fields"},
  };
  for (const auto& [path, advice] : cases) {
    const std::string field = std::string("unknown field '") + path + "'" + advice;
    EXPECT_EQ(refusal_of("", {std::string(path) + "=1"}),
              "--set " + std::string(path) + "=1: " + field);
  }
}

TEST(UnknownField, OfAFileHasLineAndColumn) {
  EXPECT_EQ(refusal_of("model {\n  num_layers: 2\n  hidden_sise: 3\n}\n", {}),
            "x.textproto:3:14: unknown field 'model.hidden_sise'; did you mean "
            "'model.hidden_size'?");
  EXPECT_EQ(refusal_of("modle { hidden_size: 3 }", {}),
            "x.textproto:1:7: unknown field 'modle'; did you mean 'model'?");
  EXPECT_EQ(refusal_of("lr: 3", {}),
            "x.textproto:1:3: unknown field 'lr'; did you mean 'optimizer.lr'?");
}

/// The user did not write the fields that resolve() fills in.
TEST(Refusal, NamesTheFieldThatIsSetAndNotOneThatFollowsFromIt) {
  const std::string tensor_4 = "parallel.tensor_model_parallel_size=4";
  const std::string head = "model.hidden_size / model.num_attention_heads (100 / 4): found 25";
  struct Case {
    Settings settings;
    std::string start;
    std::string derived;  ///< a name that must not appear
  };
  const Case cases[] = {
      {{"model.hidden_size=100"},
       head + ", allowed with model.position_embedding_type = rope: an even number of channels",
       "kv_channels"},
      {{"model.kv_channels=25"}, "model.kv_channels: found 25", "hidden_size"},
      {{"model.kv_channels=24", "model.rotary_percent=0.3"},
       "model.rotary_percent: found 0.3, allowed: a share of the 24 channels",
       "hidden_size"},
      {{"model.kv_channels=100", "model.rotary_percent=0.29"},
       "model.rotary_percent: found 0.29, allowed: a share of the 100 channels",
       "hidden_size"},
      {{"model.hidden_size=126", "model.num_attention_heads=4"},
       "model.hidden_size (126) must be divisible by model.num_attention_heads (4)",
       "kv_channels"},
      {{"model.num_attention_heads=12", "model.hidden_size=24",
        "parallel.tensor_model_parallel_size=12", "model.num_query_groups=2"},
       "model.hidden_size / model.num_attention_heads (24 / 12): found 2, so that a query group",
       "kv_channels"},
      {{"model.hidden_size=54", "model.num_attention_heads=27",
        "parallel.tensor_model_parallel_size=27"},
       "",
       ""},
      {{"model.hidden_size=36", "model.num_attention_heads=9", "model.kv_channels=4",
        "parallel.tensor_model_parallel_size=9"},
       "",
       ""},
      {{"model.hidden_size=30", "model.num_attention_heads=9", "model.kv_channels=4",
        "parallel.tensor_model_parallel_size=9"},
       "4 * model.hidden_size (120) must be divisible by",
       "ffn_hidden_size"},
      {{"model.num_experts=4", "model.hidden_size=30", "model.num_attention_heads=9",
        "model.kv_channels=4", "parallel.expert_tensor_parallel_size=9"},
       "4 * model.hidden_size (120) must be divisible by parallel.expert_tensor_parallel_size (9)",
       "ffn_hidden_size"},
      {{"model.num_experts=4", "model.moe_ffn_hidden_size=30", tensor_4},
       "model.moe_ffn_hidden_size (30) must be divisible by parallel.tensor_model_parallel_size "
       "(4)",
       "expert_tensor"},
      {{"parallel.context_parallel_size=8", "parallel.cp_comm_type=a2a"},
       "model.num_attention_heads: found 4, which leaves 4 on a tensor-parallel rank",
       "num_query_groups"},
      {{"optimizer.lr_decay_style=WSD", "optimizer.lr_wsd_decay_iters=101"},
       "optimizer.lr_wsd_decay_iters: found 101, allowed: <= train.train_iters (100)",
       "lr_decay_iters ("},
      {{"optimizer.start_weight_decay=0"},
       "optimizer.start_weight_decay: found 0, allowed with optimizer.weight_decay_incr_style = "
       "constant: = optimizer.weight_decay (0.01)",
       "end_weight_decay"},
      {{"optimizer.end_weight_decay=0"},
       "optimizer.end_weight_decay: found 0, allowed with optimizer.weight_decay_incr_style = "
       "constant: = optimizer.weight_decay (0.01)",
       "start_weight_decay"},
      {{"optimizer.start_weight_decay=1", "optimizer.weight_decay_incr_style=linear"},
       "optimizer.start_weight_decay: found 1, allowed with optimizer.weight_decay_incr_style = "
       "linear: <= optimizer.weight_decay (0.01)",
       "end_weight_decay"},
      {{"optimizer.start_weight_decay=1", "optimizer.end_weight_decay=0.5",
        "optimizer.weight_decay_incr_style=linear"},
       "optimizer.end_weight_decay: found 0.5, allowed with optimizer.weight_decay_incr_style = "
       "linear: >= optimizer.start_weight_decay (1)",
       "optimizer.weight_decay ("},
      {{"model.hidden_size=4611686018427387904", "model.num_attention_heads=1"},
       "model.hidden_size: found 4611686018427387904, allowed without model.ffn_hidden_size",
       "64 bits"},
  };
  for (const Case& one : cases) {
    const std::string message = refusal_of("", one.settings);
    EXPECT_TRUE(one.start.empty() ? message.empty() : message.starts_with(one.start)) << message;
    if (!one.derived.empty()) {
      EXPECT_EQ(message.find(one.derived), std::string::npos) << message;
    }
  }
}

}  // namespace
}  // namespace lockstep
