// Overrides (--set) of plain and of effective configurations.

#include <gtest/gtest.h>

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "lockstep/core/config_io.h"
#include "lockstep/core/config_rules.h"
#include "lockstep/core/error.h"
#include "lockstep/tests/support/throws_with.h"

namespace lockstep {
namespace {

using testing::throws_with;

TEST(Overrides, OverridesOfAnEffectiveConfigurationReachWhatFollowsThem) {
  const std::string effective = print_config(parse_config("", "x", {"data.path=a"}));
  const Config decay = parse_config(effective, "x", {"optimizer.weight_decay=0.5"});
  EXPECT_EQ(decay.optimizer.start_weight_decay, 0.5);
  EXPECT_EQ(decay.optimizer.end_weight_decay, 0.5);
  EXPECT_EQ(split_of(parse_config(effective, "x", {"data.valid_path=b"}).data), "1,0");
  const Config kept =
      parse_config(effective, "x",
                   {"optimizer.weight_decay_incr_style=linear", "optimizer.end_weight_decay=0.7"});
  EXPECT_EQ(kept.optimizer.start_weight_decay, 0.01);
  const Config own = parse_config(effective, "x",
                                  {"optimizer.weight_decay=0.5", "optimizer.end_weight_decay=0.7",
                                   "optimizer.weight_decay_incr_style=linear"});
  EXPECT_EQ(own.optimizer.start_weight_decay, 0.5);
  EXPECT_EQ(own.optimizer.end_weight_decay, 0.7);
}

// An override of an effective configuration means what it means in the one that it came from.
TEST(Overrides, AnOverrideDoesNotDependOnWhetherTheConfigurationIsEffective) {
  const std::string full = "model { num_layers: 6 recompute_granularity: \"full\" ";
  const std::pair<std::string, std::string> cases[] = {
      {full + "recompute_method: \"block\" }", "model.recompute_method=uniform"},
      {full + "recompute_method: \"uniform\" }", "model.recompute_method=block"},
      {full + "recompute_method: \"block\" recompute_num_layers: 2 }", "model.num_layers=4"},
      {full + "recompute_method: \"block\" }", "model.num_layers=4"},
      {"train { train_iters: 20 } optimizer { lr_warmup_iters: 40 }", "train.train_iters=450"},
      {"train { train_iters: 450 }", "train.train_iters=100"},
      {"train { train_iters: 450 } optimizer { lr_decay_iters: 300 }", "train.train_iters=400"},
      {"train { train_iters: 20 } optimizer { lr_warmup_iters: 40 }",
       "optimizer.lr_warmup_iters=60"},
      {"train { train_iters: 20 }", "train.rampup_batch_size=8 8 100"},
      {"train { train_iters: 20 }", "train.step_batch_size_schedule=0:8 100:4"},
      {"train { rampup_batch_size: \"8 8 100\" }", "optimizer.weight_decay=0.5"},
      {"train { step_batch_size_schedule: \"0:8 100:4\" }", "model.num_attention_heads=8"},
      {"train { step_batch_size_schedule: \"0:8\" } optimizer { lr_decay_iters: 70 }",
       "train.train_iters=50"},
      {"", "ddp.average_in_collective=true"},
      {"train { device: \"cpu\" }", "train.device=cuda"},
      {"train { device: \"cpu\" } parallel { distributed_timeout_seconds: 7 }",
       "train.device=cuda"},
      {"model { num_attention_heads: 4 hidden_size: 64 }", "model.num_attention_heads=8"},
      {"model { num_attention_heads: 4 num_query_groups: 2 hidden_size: 64 }",
       "model.num_attention_heads=8"},
      {"model { hidden_size: 64 }", "model.hidden_size=128"},
      {"model { hidden_size: 64 ffn_hidden_size: 100 kv_channels: 32 }", "model.hidden_size=128"},
      {"model { num_experts: 4 hidden_size: 64 moe_router_topk: 2 }", "model.ffn_hidden_size=96"},
      {"optimizer { weight_decay: 0.1 end_weight_decay: 0.3 weight_decay_incr_style: \"linear\" }",
       "optimizer.weight_decay=0.2"},
  };
  for (const auto& [text, override_] : cases) {
    const std::string effective = print_config(parse_config(text, "x"));
    EXPECT_EQ(print_config(parse_config(effective, "x", {override_})),
              print_config(parse_config(text, "x", {override_})))
        << text << ", " << override_;
  }
}

// Earlier versions computed the decay also where the batch changes its size.
TEST(Overrides, AComputedDecayOfAnOlderEffectiveConfigurationIsForgotten) {
  const auto decay = [](const std::string& batch, int64_t decay_iters, const std::string& set) {
    const std::string given =
        "train { train_iters: 20 " + batch +
        " } optimizer { lr_warmup_iters: 30 lr_decay_iters: " + std::to_string(decay_iters) + " }";
    const std::string effective = print_config(parse_config(given, "x"));
    return parse_config(effective, "x", {set}).optimizer.lr_decay_iters;
  };
  for (const std::string batch :
       {"rampup_batch_size: \"8 8 100\"", "step_batch_size_schedule: \"0:8 100:4\""}) {
    EXPECT_EQ(decay(batch, 31, "train.train_iters=50"), std::nullopt) << batch;
    EXPECT_EQ(decay(batch, 31, "optimizer.lr_warmup_iters=5"), std::nullopt) << batch;
    EXPECT_EQ(decay(batch, 32, "train.train_iters=50"), 32) << batch;
    EXPECT_EQ(decay(batch, 31, "train.seed=5"), 31) << batch;
    EXPECT_EQ(decay(batch, 31, "optimizer.lr_decay_iters=60"), 60) << batch;
  }
}

TEST(Overrides, AListOfStringsNeedsNoQuotes) {
  const auto paths = [](const std::string& list) {
    return parse_config("data { path: \"c\" }", "x", {"data.path=" + list}).data.path;
  };
  using Paths = std::vector<std::string>;
  EXPECT_EQ(paths("[a.txt,b.txt]"), (Paths{"a.txt", "b.txt"}));
  EXPECT_EQ(paths("[ a, b c ]"), (Paths{"a", "b c"}));
  EXPECT_EQ(paths("[a]"), Paths{"a"});
  EXPECT_EQ(paths(R"(["a,b", 'c'])"), (Paths{"a,b", "c"}));
  EXPECT_EQ(paths("[]"), Paths{});
  EXPECT_EQ(paths("[ ]"), Paths{});
  for (const std::string list : {"[a,]", "[,a]", "[,]"})
    EXPECT_TRUE(throws_with<ConfigError>([&] { paths(list); }, "found an empty element"));
  EXPECT_TRUE(throws_with<ConfigError>([&] { paths("[a,,b]"); },
                                       "--set data.path=[a,,b]: found an empty element"));
}

TEST(Overrides, AnIntegerThatAFileWouldReadAsOctalIsRefused) {
  const auto iterations = [](const std::string& value) {
    return parse_config("", "x", {"train.train_iters=" + value}).train.train_iters;
  };
  EXPECT_EQ(iterations("10"), 10);
  EXPECT_TRUE(throws_with<ConfigError>([&] { iterations("010"); }, "without leading zeros"));
  EXPECT_EQ(parse_config("", "x", {"optimizer.lr=00.5"}).optimizer.lr, 0.5);
  EXPECT_EQ(parse_config("", "x", {"train.seed=0"}).train.seed, 0);
}

TEST(Overrides, AQuotedValueIsReadAsInAFile) {
  const auto prompt_of = [](const std::string& value) {
    return parse_config("", "x", {"train.sample_prompt=" + value}).train.sample_prompt;
  };
  EXPECT_EQ(prompt_of(R"("a\nb\"c")"), "a\nb\"c");
  EXPECT_EQ(prompt_of(R"(a\nb)"), R"(a\nb)");
  EXPECT_EQ(prompt_of(R"(")"), R"(")");
  EXPECT_EQ(parse_config("", "x", {R"(data.path="a\tb")"}).data.path,
            std::vector<std::string>{"a\tb"});
}

}  // namespace
}  // namespace lockstep
