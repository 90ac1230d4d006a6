#include <gtest/gtest.h>

#include <set>

#include "lockstep/core/config_io.h"
#include "lockstep/core/config_rules.h"
#include "lockstep/core/error.h"
#include "lockstep/tests/support/temporary_folder.h"

namespace lockstep {
namespace {

/// The message with which a configuration is refused, "" if it is accepted.
std::string refusal(const std::string& text, const std::vector<std::string>& overrides = {}) {
  try {
    parse_config(text, "x.textproto", overrides);
    return "";
  } catch (const ConfigError& error) {
    return error.what();
  }
}

TEST(Config, EmptyTextGivesTheDefaults) {
  const Config config = parse_config("", "x.textproto");
  EXPECT_EQ(config.model.num_layers, 2);
  EXPECT_EQ(config.model.normalization, Normalization::RMSNorm);
  EXPECT_EQ(config.optimizer.lr_decay_style, LrDecayStyle::linear);
  EXPECT_DOUBLE_EQ(config.optimizer.adam_eps, 1e-8);
  EXPECT_FALSE(config.ddp.bucket_size.has_value());
  EXPECT_TRUE(config.data.path.empty());
}

TEST(Config, DerivedFieldsAreFilledIn) {
  const Config config = parse_config("model { hidden_size: 96 num_attention_heads: 6 }", "x");
  EXPECT_EQ(config.model.num_query_groups, 6);
  EXPECT_EQ(config.model.kv_channels, 16);
  EXPECT_EQ(config.model.ffn_hidden_size, 384);
  EXPECT_EQ(config.ddp.calculate_per_token_loss, true);
  EXPECT_EQ(config.optimizer.lr_decay_iters, 100);
  EXPECT_EQ(config.optimizer.start_weight_decay, 0.01);
}

TEST(Config, AverageInCollectiveTurnsPerTokenLossOff) {
  const Config config = parse_config("ddp { average_in_collective: true }", "x");
  EXPECT_EQ(config.ddp.calculate_per_token_loss, false);
}

TEST(Config, SomeDefaultsFollowTheDevice) {
  const auto values = [](const Config& config) {
    return std::pair(config.model.make_vocab_size_divisible_by,
                     config.parallel.distributed_timeout_seconds);
  };
  using Values = std::pair<std::optional<int64_t>, std::optional<double>>;
  const Config unknown = parse_config("", "test");
  EXPECT_EQ(values(unknown), Values()) << "auto: known where the run takes place";
  EXPECT_EQ(values(resolve_for_device(unknown, /*is_cpu=*/true)), Values(1, 60.0));
  EXPECT_EQ(values(resolve_for_device(unknown, /*is_cpu=*/false)), Values(128, 600.0));
  EXPECT_EQ(values(parse_config("", "test", {"train.device=cpu"})), Values(1, 60.0));
  EXPECT_EQ(values(parse_config("", "test", {"train.device=cuda"})), Values(128, 600.0));
  const Config set = parse_config(
      "", "test",
      {"model.make_vocab_size_divisible_by=32", "parallel.distributed_timeout_seconds=5"});
  for (const bool is_cpu : {true, false})
    EXPECT_EQ(values(resolve_for_device(set, is_cpu)), Values(32, 5.0));
  const Config printed = resolve_for_device(unknown, /*is_cpu=*/false);
  EXPECT_EQ(values(parse_config(print_config(printed), "printed")), Values(128, 600.0));
}

TEST(Config, ShortRunsStillHaveADecayLongerThanTheWarmUp) {
  const Config config =
      parse_config("optimizer { lr_warmup_iters: 50 } train { train_iters: 5 }", "x");
  EXPECT_EQ(config.optimizer.lr_decay_iters, 51);
}

TEST(Config, ADecayOverChangingBatchesFollowsTheRun) {
  for (const std::string batches :
       {"train.rampup_batch_size=8 8 100", "train.step_batch_size_schedule=0:64 64000:32"}) {
    const Config config = parse_config("", "x", {batches});
    EXPECT_FALSE(config.optimizer.lr_decay_iters.has_value()) << batches;
    EXPECT_EQ(print_config(parse_config(print_config(config), "printed")), print_config(config));
    const Config given = parse_config("", "x", {batches, "optimizer.lr_decay_iters=7"});
    EXPECT_EQ(given.optimizer.lr_decay_iters, 7);
    const Config final_decay = parse_config(
        "", "x", {batches, "optimizer.lr_decay_style=WSD", "optimizer.lr_wsd_decay_iters=101"});
    EXPECT_EQ(final_decay.optimizer.lr_wsd_decay_iters, 101) << "batches, more than train_iters";
  }
}

TEST(Config, SyntaxErrorsNameLineAndColumn) {
  EXPECT_EQ(refusal("model {\n  num_layers: four\n}"),
            "x.textproto:2:15: model.num_layers: Expected integer, got: four");
  EXPECT_EQ(refusal("model {\tlayernorm_epsilon : -\"a\" }"),
            "x.textproto:1:30: model.layernorm_epsilon: Expected double, got: \"a\"");
  EXPECT_EQ(refusal("data { path: [3] }"), "x.textproto:1:15: data.path: Expected string, got: 3");
  EXPECT_EQ(refusal("train { seed: 1"), "x.textproto:1:16: Expected identifier, got: ");
  EXPECT_EQ(refusal("train { deterministic: yes }"),
            "x.textproto:1:28: Invalid value for boolean field \"deterministic\". Value: "
            "\"yes\". Allowed: true, false.");
  EXPECT_EQ(refusal("train {\n  seeds: 1\n}"),
            "x.textproto:2:8: unknown field 'train.seeds'; did you mean 'train.seed'?");
  EXPECT_NE(refusal("model { num_layers: 2 num_layers: 3 }").find("specified multiple times"),
            std::string::npos);
  EXPECT_NE(refusal("nonsense"), "");
}

TEST(Config, LargeTextsAreRefusedUnparsed) {
  EXPECT_NE(refusal(std::string((1 << 20) + 1, ' ')).find("at most 1048576"), std::string::npos);
}

TEST(Config, DeepNestingIsRefused) { EXPECT_NE(refusal("model " + std::string(100000, '{')), ""); }

TEST(Config, MissingFileIsNamed) {
  try {
    load_config("no/such/file.textproto");
    FAIL();
  } catch (const ConfigError& error) {
    EXPECT_STREQ(error.what(),
                 "'no/such/file.textproto' cannot be read as a configuration: No such file or "
                 "directory");
  }
}

TEST(Config, FilesAreRead) {
  const testing::TemporaryFolder folder;
  const std::string path = folder.write("config.textproto", "model { num_layers: 7 }");
  EXPECT_EQ(load_config(path).model.num_layers, 7);
}

TEST(Config, OverridesReplaceAndTheLastWins) {
  const Config config =
      parse_config("model { num_layers: 3 } data { path: 'a' path: 'b' }", "x",
                   {"model.num_layers=4", "model.num_layers=5", "optimizer.lr=1e-3",
                    "optimizer.lr_decay_style=inverse-square-root", "ddp.overlap_grad_reduce=false",
                    "data.path=some/file with spaces.txt", "train.sample_prompt=\"quoted\""});
  EXPECT_EQ(config.model.num_layers, 5);
  EXPECT_DOUBLE_EQ(config.optimizer.lr, 1e-3);
  EXPECT_EQ(config.optimizer.lr_decay_style, LrDecayStyle::inverse_square_root);
  EXPECT_FALSE(config.ddp.overlap_grad_reduce);
  EXPECT_EQ(config.data.path, std::vector<std::string>{"some/file with spaces.txt"});
  EXPECT_EQ(config.train.sample_prompt, "quoted");
}

TEST(Config, OverridesOfListsTakeBrackets) {
  const Config config = parse_config("", "x", {R"(data.path=["a", "b"])"});
  EXPECT_EQ(config.data.path, (std::vector<std::string>{"a", "b"}));
}

TEST(Config, OverridesOfListsLeaveTheFieldsBesideThem) {
  const Config config = parse_config(
      "data { split: '80,20' } model { num_layers: 3 }", "x",
      {"data.tokenizer=gpt2:folder", R"(data.path=["a", "b"])", "model.moe_layer_freq=[0, 1, 0]"});
  EXPECT_EQ(config.data.split, "80,20");
  EXPECT_EQ(config.data.tokenizer, "gpt2:folder");
  EXPECT_EQ(config.model.num_layers, 3);
}

TEST(Config, BadOverridesAreNamed) {
  EXPECT_EQ(refusal("", {"model.num_layers"}),
            "--set model.num_layers: must have the form path=value");
  EXPECT_EQ(refusal("", {"model.num_layers=two"}),
            "--set model.num_layers=two: found 'two', allowed: a whole number of 64 bits");
  EXPECT_EQ(refusal("", {"model.num_layers=3.5"}),
            "--set model.num_layers=3.5: found '3.5', allowed: a whole number of 64 bits");
  EXPECT_EQ(refusal("", {"ddp.overlap_grad_reduce=maybe"}),
            "--set ddp.overlap_grad_reduce=maybe: found 'maybe', allowed: true, false");
  EXPECT_EQ(
      refusal("", {"model=2"}),
      "--set model=2: 'model' is a group of fields; name one of them, as in model.num_layers");
  EXPECT_NE(refusal("", {"train.seed.x=2"}).find("'seed' is a value"), std::string::npos);
}

TEST(Config, ValuesOutOfBoundsAreNamedWithWhatIsAllowed) {
  const std::pair<const char*, const char*> cases[] = {
      {"model.num_layers=0", "model.num_layers: found 0, allowed: >= 1"},
      {"model.num_layers=-9223372036854775808",
       "model.num_layers: found -9223372036854775808, allowed: >= 1"},
      {"optimizer.lr=nan", "optimizer.lr: found nan, allowed: a finite number, not nan"},
      {"optimizer.lr=inf", "optimizer.lr: found inf, allowed: a finite number, not inf"},
      {"optimizer.adam_beta1=1", "optimizer.adam_beta1: found 1, allowed: < 1"},
      {"optimizer.adam_eps=0", "optimizer.adam_eps: found 0, allowed: > 0"},
      {"model.rotary_percent=1.5", "model.rotary_percent: found 1.5, allowed: <= 1"},
      {"model.normalization=BatchNorm",
       "model.normalization: found 'BatchNorm', allowed: RMSNorm, LayerNorm"},
      {"model.label_smoothing=1", "model.label_smoothing: found 1, allowed: < 1"},
      {"model.label_smoothing=-0.1", "model.label_smoothing: found -0.1, allowed: >= 0"},
      {"model.recompute_method=blocks",
       "model.recompute_method: found 'blocks', allowed: block, uniform"},
      {"train.precision=fp8", "train.precision: found 'fp8', allowed: fp32, fp64, bf16, fp16"},
  };
  for (const auto& [assignment, message] : cases) EXPECT_EQ(refusal("", {assignment}), message);
}

TEST(Config, AnEpsilonThatIsZeroInTheArithmeticOfTheRunIsRefused) {
  for (const std::string field : {"optimizer.adam_eps", "model.layernorm_epsilon"}) {
    EXPECT_EQ(refusal("", {field + "=1e-46"}),
              field +
                  ": found 1e-46, which is 0 in fp32; allowed with train.precision = fp32: at "
                  "least 1e-45");
    EXPECT_NO_THROW(parse_config("", "c", {field + "=1e-46", "train.precision=fp64"}));
    EXPECT_NO_THROW(parse_config("", "c", {field + "=1e-45"}));
  }
}

TEST(Config, ContradictionsAreNamed) {
  const std::pair<std::vector<std::string>, const char*> cases[] = {
      {{"model.hidden_size=100", "model.num_attention_heads=3"},
       "model.hidden_size (100) must be divisible by model.num_attention_heads (3)"},
      {{"model.num_query_groups=3"},
       "model.num_attention_heads (4) must be divisible by model.num_query_groups (3)"},
      {{"ddp.bucket_size=10", "ddp.num_buckets=2"}, "ddp.bucket_size (10) and ddp.num_buckets (2)"},
      {{"ddp.average_in_collective=true", "ddp.calculate_per_token_loss=true"},
       "ddp.average_in_collective: found true"},
      {{"ddp.overlap_param_gather=true"},
       "ddp.overlap_param_gather: found true, which needs ddp.use_distributed_optimizer = true"},
      {{"ddp.pad_buckets_for_high_nccl_busbw=true"}, "ddp.pad_buckets_for_high_nccl_busbw: found"},
      {{"parallel.num_distributed_optimizer_instances=2"},
       "parallel.num_distributed_optimizer_instances: found 2, allowed: 1, or"},
      {{"optimizer.min_lr=1"}, "optimizer.min_lr: found 1, allowed: <= optimizer.lr (0.0003)"},
      {{"optimizer.lr_warmup_iters=10", "optimizer.lr_decay_iters=10"},
       "optimizer.lr_warmup_iters: found 10, allowed: < optimizer.lr_decay_iters (10)"},
      {{"optimizer.lr_decay_style=WSD"}, "optimizer.lr_wsd_decay_iters: not set"},
      {{"optimizer.start_weight_decay=0"}, "optimizer.start_weight_decay: found 0"},
      {{"model.recompute_num_layers=1"}, "model.recompute_num_layers: found 1, but"},
      {{"model.recompute_granularity=full", "model.recompute_num_layers=3"},
       "model.recompute_num_layers: found 3, allowed: <= model.num_layers (2)"},
      {{"model.label_smoothing=0.1", "model.vocab_size=1"},
       "model.label_smoothing: found 0.1, allowed with model.vocab_size = 1: 0"},
      {{"model.kv_channels=5"}, "model.kv_channels: found 5"},
      {{"parallel.virtual_pipeline_model_parallel_size=2"},
       "parallel.virtual_pipeline_model_parallel_size: found 2"},
      {{"data.split=90;10"}, "data.split: found '90;10'"},
      {{"data.split=0,10"}, "data.split: found '0,10'"},
      {{"data.split=90,,10"}, "data.split: found '90,,10'"},
      {{"data.split=1e308,1e308"}, "data.split: found '1e308,1e308'"},
      {{"model.moe_layer_freq=[1] num_layers: 7"},
       "--set model.moe_layer_freq=[1] num_layers: 7: found several values, allowed: one"},
      {{R"(data.tokenizer="a" cache_path: "b")"},
       R"(--set data.tokenizer="a" cache_path: "b": found several values, allowed: one)"},
      {{R"(data.path="a" path: "b")"},
       R"(--set data.path="a" path: "b": found several values, allowed: one)"},
      {{"data.split=1,0", "data.valid_path=a"},
       "data.split: found '1,0', allowed with data.valid_path: unset"},
      {{"data.test_path=a"},
       "data.test_path: found 'a', allowed beside data.valid_path, which is not set"},
      {{"data.mock=true", "data.valid_path=a"},
       "data.mock: found true, allowed: false beside data.valid_path"},
      {{"data.mock=true", "data.path=a", "data.blend=1"},
       "data.mock: found true, allowed: false beside data.blend"},
      {{"parallel.distributed_timeout_seconds=0.0004"},
       "parallel.distributed_timeout_seconds: found 0.0004, allowed: >= 0.001"},
      {{"parallel.distributed_timeout_seconds=1e300"},
       "parallel.distributed_timeout_seconds: found 1e+300, allowed: <= 3153600000"},
      {{"train.sample_tokens=3", "train.sample_prompt="}, "train.sample_prompt: is empty"},
  };
  for (const auto& [overrides, message] : cases)
    EXPECT_TRUE(refusal("", overrides).starts_with(message)) << refusal("", overrides);
}

TEST(Config, AllOfThePathIsForTrainingBesideAValidPath) {
  EXPECT_EQ(parse_config("", "x").data.split, "90,10");
  const Config config =
      parse_config("", "x", {"data.valid_path=a", "data.test_path=[\"b\", \"c\"]"});
  EXPECT_EQ(config.data.split, std::nullopt);
  EXPECT_EQ(split_of(config.data), "1,0");
  EXPECT_EQ(print_config(parse_config(print_config(config), "again")), print_config(config));
}

TEST(Config, LayersWithExpertsAreANumberOrAList) {
  const auto parsed = [](const std::string& text, const std::vector<std::string>& more = {}) {
    return parse_config("model { num_layers: 3 " + text + " }", "x", more).model.moe_layer_freq;
  };
  using List = std::vector<int64_t>;
  EXPECT_EQ(parsed(""), List{1});
  EXPECT_EQ(parsed("moe_layer_freq: 2"), List{2});
  EXPECT_EQ(parsed("moe_layer_freq: [0, 1, 1]"), (List{0, 1, 1}));
  EXPECT_EQ(parsed("moe_layer_freq: 2", {"model.moe_layer_freq=3"}), List{3});
  EXPECT_EQ(parsed("moe_layer_freq: 2", {"model.moe_layer_freq=[1,0,1]"}), (List{1, 0, 1}));
  EXPECT_EQ(parsed("moe_layer_freq: [1, 0, 1]", {"model.moe_layer_freq=[]"}), List{1});
}

TEST(Config, LayersWithExpertsThatDoNotFitAreNamed) {
  const std::string text = "model { num_layers: 3 num_experts: 4 }";
  const std::pair<const char*, const char*> cases[] = {
      {"[0, 1]",
       "model.moe_layer_freq: found 2 values for 3 layers, allowed: a number >= 1, or 0 or 1 for "
       "each of the model.num_layers layers"},
      {"[0, 1, 2]", "model.moe_layer_freq: found 2 for layer 2, allowed: a number >= 1, or"},
      {"0", "model.moe_layer_freq: found 1 values for 3 layers"},
      {"[0, -1, 0]", "model.moe_layer_freq: found -1, allowed: >= 0"},
      {"two", "--set model.moe_layer_freq=two: found 'two', allowed: a whole number of 64 bits"},
      {"[0, two, 0]",
       "--set model.moe_layer_freq=[0, two, 0]:1:21: model.moe_layer_freq: Expected"},
  };
  for (const auto& [value, message] : cases) {
    const std::string found = refusal(text, {std::string("model.moe_layer_freq=") + value});
    EXPECT_TRUE(found.starts_with(message)) << found;
  }
  EXPECT_EQ(refusal("model { moe_layer_freq: [0, x] }"),
            "x.textproto:1:29: model.moe_layer_freq: Expected integer, got: x");
}

TEST(Config, LayersWithExpertsArePrintedAsTheyAreRead) {
  for (const char* value : {"1", "2", "[0, 1]"}) {
    const Config config = parse_config("", "x", {std::string("model.moe_layer_freq=") + value});
    const std::string printed = print_config(config);
    EXPECT_NE(printed.find(std::string("  moe_layer_freq: ") + value + "\n"), std::string::npos);
    EXPECT_EQ(parse_config(printed, "printed").model.moe_layer_freq, config.model.moe_layer_freq);
  }
}

TEST(Config, SplitSharesAddUpToOne) {
  EXPECT_EQ(parse_split("90,10"), (std::vector<double>{0.9, 0.1, 0}));
  EXPECT_EQ(parse_split(" 2 , 1 , 1 "), (std::vector<double>{0.5, 0.25, 0.25}));
  EXPECT_EQ(parse_split("1,1,"), (std::vector<double>{0.5, 0.5, 0})) << "old checkpoints have it";
}

TEST(Config, PrintedConfigurationReadsBackEqual) {
  const Config config =
      parse_config("data { path: 'a \"b\"\\n' }", "x",
                   {"ddp.bucket_size=7", "optimizer.lr=0.1", "train.sample_prompt=two words"});
  const std::string printed = print_config(config);
  EXPECT_EQ(config_values(config), config_values(parse_config(printed, "printed"))) << printed;
  EXPECT_NE(printed.find("  num_layers: 2\n"), std::string::npos) << printed;
  EXPECT_NE(printed.find("  # num_buckets: unset: "), std::string::npos) << printed;
}

TEST(Config, ValuesNameEveryFieldInTheOrderOfTheSchema) {
  const auto values = config_values(parse_config("", "x"));
  ASSERT_EQ(values.size(), config_fields().size());
  for (size_t i = 0; i < values.size(); ++i) EXPECT_EQ(values[i].path, config_fields()[i].path);
  const auto changed = config_values(parse_config("", "x", {"ddp.bucket_size=7"}));
  for (size_t i = 0; i < values.size(); ++i) {
    const bool is_changed = values[i].path == "ddp.bucket_size";
    EXPECT_EQ(values[i] == changed[i], !is_changed);
    if (is_changed) {
      EXPECT_EQ(values[i].value, "unset");
      EXPECT_EQ(changed[i].value, "7");
    }
  }
}

TEST(Config, ValidateChecksValuesThatWereSetInCode) {
  Config config;
  EXPECT_NO_THROW(validate(config));
  config.model.num_layers = 0;
  EXPECT_THROW(validate(config), ConfigError);
}

TEST(Config, EveryFieldHasAMeaningAndADefaultOrAWordOnBeingUnset) {
  std::set<std::string> paths;
  for (const ConfigField& field : config_fields()) {
    EXPECT_TRUE(paths.insert(field.path).second) << field.path;
    EXPECT_FALSE(field.meaning.empty()) << field.path;
    if (field.path != "data.path" && field.path != "train.sample_prompt") {
      EXPECT_TRUE(!field.default_value.empty() || !field.unset.empty()) << field.path;
    }
  }
  EXPECT_TRUE(paths.contains("parallel.tensor_model_parallel_size"));
}

}  // namespace
}  // namespace lockstep
