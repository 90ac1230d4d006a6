#include "lockstep/training/generate.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <set>

#include <ATen/ATen.h>

#include "lockstep/checkpoint/saved_model.h"
#include "lockstep/core/config_io.h"
#include "lockstep/core/error.h"
#include "lockstep/tests/support/rank_threads.h"
#include "lockstep/tests/support/temporary_folder.h"
#include "lockstep/tests/support/throws_with.h"
#include "lockstep/training/sample_text.h"
#include "lockstep/training/score.h"

namespace lockstep {
namespace {

using testing::throws_with;

constexpr const char* kGrouped = "num_query_groups: 2";
constexpr const char* kLearned =
    "position_embedding_type: \"learned_absolute\" normalization: \"LayerNorm\"";
constexpr const char* kLatent =
    "multi_latent_attention: true qk_layernorm: true q_lora_rank: 8 kv_lora_rank: 6 qk_head_dim: 4 "
    "qk_pos_emb_head_dim: 2 v_head_dim: 5 rope_scaling_type: \"yarn\" rope_scaling_factor: 4 "
    "rope_original_max_position_embeddings: 8";

/// A model with weights so large that the next token depends on all tokens before it.
GPTModel model_of(const std::string& more) {
  return GPTModel(parse_config("model { num_layers: 2 hidden_size: 32 num_attention_heads: 4 "
                               "seq_length: 24 vocab_size: 50 init_method_std: 0.3 " +
                                   more + " }",
                               "test")
                      .model);
}

TEST(GenerateWithCache, GivesTheTokensThatReadingAllAgainGives) {
  for (const char* const more : {kGrouped, kLearned, kLatent}) {
    const GPTModel model = model_of(more);
    for (const double temperature : {0.0, 0.8, 2.0})
      for (const size_t length : {1, 7, 23, 24, 25, 60}) {
        std::vector<int64_t> prompt;
        for (size_t i = 0; i < length; ++i) prompt.push_back(static_cast<int64_t>(7 * i % 50));
        // Goes past the 24 tokens of the window.
        GenerateOptions options{.max_tokens = 40, .temperature = temperature};
        const auto cached = generate(model, prompt, options);
        options.use_cache = false;
        EXPECT_EQ(cached, generate(model, prompt, options)) << more << length << " " << temperature;
        if (temperature > 1) {
          EXPECT_GT(std::set<int64_t>(cached.begin(), cached.end()).size(), 3u);
        }
      }
  }
}

TEST(GenerateBatch, GivesEachPromptTheTokensThatItGetsAlone) {
  const GPTModel model = model_of(kGrouped);
  const std::vector<std::vector<int64_t>> prompts = {
      {1, 2, 3}, {4}, {9, 8, 7, 6, 5, 4, 3, 2, 1}, {1, 2, 3}, std::vector<int64_t>(30, 11)};
  for (const double temperature : {0.0, 1.0}) {
    const GenerateOptions options{.max_tokens = 30, .temperature = temperature};
    const auto together = generate_batch(model, prompts, options);
    ASSERT_EQ(together.size(), prompts.size());
    for (size_t i = 0; i < prompts.size(); ++i)
      EXPECT_EQ(together[i], generate(model, prompts[i], options)) << i;
  }
  EXPECT_TRUE(generate_batch(model, {}, {}).empty());
}

TEST(GenerateBatch, EndsAPromptOfWhichTheListenerHasEnough) {
  const GPTModel model = model_of(kGrouped);
  const std::vector<std::vector<int64_t>> prompts = {{1, 2, 3}, {4}};
  const GenerateOptions options{.max_tokens = 12};
  const auto whole = generate_batch(model, prompts, options);
  std::vector<int> heard(2, 0);
  const auto ended = generate_batch(model, prompts, options, [&](size_t prompt, int64_t token) {
    EXPECT_EQ(token, whole[prompt][static_cast<size_t>(heard[prompt]++)]);
    return prompt == 0 || heard[prompt] < 5;
  });
  EXPECT_EQ(heard, (std::vector<int>{12, 5}));
  EXPECT_EQ(ended[0], whole[0]);
  EXPECT_EQ(ended[1], std::vector<int64_t>(whole[1].begin(), whole[1].begin() + 5));
}

TEST(GenerateBatch, EndsATextBeforeAnId) {
  const GPTModel model = model_of(kGrouped);
  const std::vector<std::vector<int64_t>> prompts = {{1, 2, 3}, {4}, {9, 8}};
  GenerateOptions options{.max_tokens = 12};
  auto expected = generate_batch(model, prompts, options);
  options.ends = {expected[0][3], expected[1][7]};
  for (auto& tokens : expected)
    tokens.erase(std::find_if(tokens.begin(), tokens.end(),
                              [&](int64_t token) { return options.ends.contains(token); }),
                 tokens.end());
  std::vector<std::vector<int64_t>> heard(3);
  const auto found = generate_batch(model, prompts, options, [&](size_t prompt, int64_t token) {
    heard[prompt].push_back(token);
    return true;
  });
  EXPECT_EQ(found, expected);
  EXPECT_EQ(heard, expected);
  EXPECT_LE(found[0].size(), 3U);
}

TEST(GenerateBatch, RefusesIdsOutsideTheModelsVocabulary) {
  const GPTModel model = model_of(kGrouped);
  for (const int64_t id : {-1, 50})
    EXPECT_TRUE(throws_with<ConfigError>(
        [&] {
          generate(model, {1, id}, {});
        },
        "--prompt: found the id " + std::to_string(id) + ", allowed: 0 to 49 (model.vocab_size"));
}

TEST(SampleText, IsKnownToBePossibleBeforeTheRun) {
  const testing::TemporaryFolder folder;
  const auto refuses = [](const std::vector<std::string>& fields) {
    return [fields] { SampleText(parse_config("", "test", fields)); };
  };
  EXPECT_TRUE(throws_with<ConfigError>(
      refuses({"model.vocab_size=100", "train.sample_prompt=Oz"}),
      "train.sample_prompt: found the id 122 with data.tokenizer = byte, allowed: 0 to 99"));
  EXPECT_TRUE(throws_with<FileError>(refuses({"data.tokenizer=hf:/nowhere/tokenizer.json"}),
                                     "/nowhere/tokenizer.json"));
  std::string vocabulary;
  for (int byte = 0; byte < 256; ++byte)
    vocabulary += fmt::format("{}\"<0x{:02X}>\": {}", byte > 0 ? ", " : "", byte, byte);
  const std::string without_lines =
      "hf:" + folder.write("tokenizer.json",
                           R"({"model": {"type": "BPE", "byte_fallback": true, "merges": [], )"
                           R"("vocab": {)" +
                               vocabulary +
                               R"(}}, "normalizer": {"type": "Replace", )"
                               R"("pattern": {"String": "\n"}, "content": ""}})");
  EXPECT_TRUE(throws_with<ConfigError>(
      refuses({"data.tokenizer=" + without_lines}),
      "train.sample_prompt: found no token with data.tokenizer = " + without_lines));
  SampleText(
      parse_config("", "test", {"data.tokenizer=" + without_lines, "train.sample_prompt=a"}));
}

TEST(GenerateBatch, DrawsNoIdBeyondTheVocabularyAskedFor) {
  const GPTModel model = model_of(kGrouped);
  const std::vector<int64_t> prompt = {1, 2, 3};
  GenerateOptions options{.max_tokens = 12, .temperature = 0, .vocabulary_size = 7};
  std::vector<int64_t> expected, read = prompt;
  for (int i = 0; i < 12; ++i) {
    const at::Tensor logits = model.forward(at::tensor(read, at::kLong).unsqueeze(0))[0][-1];
    read.push_back(logits.slice(0, 0, 7).argmax().item<int64_t>());
    expected.push_back(read.back());
  }
  EXPECT_EQ(generate(model, prompt, options), expected);
  options = {.max_tokens = 200, .temperature = 5, .top_k = 0, .vocabulary_size = 7};
  const auto drawn = generate(model, prompt, options);
  EXPECT_EQ(std::set<int64_t>(drawn.begin(), drawn.end()),
            (std::set<int64_t>{0, 1, 2, 3, 4, 5, 6}));
  options = {.max_tokens = 30};
  const auto all = generate(model, prompt, options);
  options.vocabulary_size = 1000;
  EXPECT_EQ(generate(model, prompt, options), all);
  options.vocabulary_size = 0;
  EXPECT_TRUE(throws_with<ConfigError>([&] { generate(model, prompt, options); },
                                       "vocabulary_size: found 0, allowed: >= 1"));
}

// The end of a chat model's text may be a token that its tokenizer does not know.
TEST(GenerateBatch, DrawsEndsBeyondTheVocabularyAskedFor) {
  const GPTModel model = model_of(kGrouped);
  const std::vector<int64_t> prompt = {1, 2, 3};
  const at::Tensor known = at::arange(7);
  size_t ended = 0;
  for (int64_t end = 7; end < 50; end += 3) {
    const at::Tensor ids = at::cat({known, at::tensor({end}, at::kLong)});
    std::vector<int64_t> expected, read = prompt;
    while (expected.size() < 12) {
      const at::Tensor logits = model.forward(at::tensor(read, at::kLong).unsqueeze(0))[0][-1];
      const int64_t token =
          ids[logits.index_select(0, ids).argmax().item<int64_t>()].item<int64_t>();
      if (token == end) break;
      read.push_back(token);
      expected.push_back(token);
    }
    if (expected.size() < 12) ++ended;
    const GenerateOptions options{
        .max_tokens = 12, .temperature = 0, .vocabulary_size = 7, .ends = {end, 1000}};
    EXPECT_EQ(generate(model, prompt, options), expected) << end;
  }
  EXPECT_GT(ended, 0U);
  // Sampled as often as its probability says, and the ids between never.
  const at::Tensor logits =
      model.forward(at::tensor(prompt, at::kLong).unsqueeze(0))[0][-1].to(at::kDouble);
  const at::Tensor ids = at::cat({known, at::tensor({49}, at::kLong)});
  const double share = at::softmax(logits.index_select(0, ids) / 9, 0)[-1].item<double>();
  GenerateOptions options{
      .max_tokens = 1, .temperature = 9, .top_k = 0, .vocabulary_size = 7, .ends = {49}};
  int empty = 0;
  for (options.seed = 0; options.seed < 400; ++options.seed) {
    const auto drawn = generate(model, prompt, options);
    if (drawn.empty())
      ++empty;
    else
      EXPECT_LT(drawn.front(), 7);
  }
  EXPECT_NEAR(empty, 400 * share, 5 * std::sqrt(400 * share * (1 - share)));
  EXPECT_GT(empty, 0);
}

TEST(GenerateBatch, ACapacityOfExpertsDoesNotMixPrompts) {
  Config config;
  config.model = model_of(
                     "num_experts: 4 moe_router_topk: 2 moe_expert_capacity_factor: 0.5 "
                     "moe_pad_expert_input_to_capacity: true")
                     .config();
  config.train.precision = Precision::fp64;
  const testing::TemporaryFolder folder;
  save_model(folder.path(), 0, config, GPTModel(config.model, {.dtype = at::kDouble}));
  const SavedModel saved = load_model(folder.path(), c10::kCPU);
  EXPECT_FALSE(saved.config.model.moe_expert_capacity_factor.has_value());
  const std::vector<std::vector<int64_t>> prompts = {
      {1, 2, 3}, {4}, {9, 8, 7, 6, 5, 4, 3, 2, 1}, std::vector<int64_t>(30, 11)};
  GenerateOptions options{.max_tokens = 30, .temperature = 1};
  const auto together = generate_batch(*saved.model, prompts, options);
  for (size_t i = 0; i < prompts.size(); ++i) {
    EXPECT_EQ(together[i], generate(*saved.model, prompts[i], options)) << i;
    options.use_cache = !options.use_cache;
  }
  const std::vector<ScoreTokens> both = {{prompts[2], 3}, {{5, 6, 7, 8, 9}, 2}};
  const std::vector<Score> scores = score(*saved.model, both);
  for (size_t i = 0; i < both.size(); ++i)
    EXPECT_NEAR(scores[i].logprob, score(*saved.model, {both[i]})[0].logprob, 1e-12) << i;
}

TEST(GenerateTemperature, TheSmallestTakesTheMostLikelyToken) {
  const GPTModel model = model_of(kGrouped);
  GenerateOptions options{.max_tokens = 12, .temperature = 0};
  const auto expected = generate(model, {1, 2, 3}, options);
  for (const double temperature : {1e-308, 5e-324})
    for (const double top_p : {0.9, 1.0}) {
      options.temperature = temperature;
      options.top_p = top_p;
      EXPECT_EQ(generate(model, {1, 2, 3}, options), expected) << temperature << " " << top_p;
    }
}

TEST(GenerateOnRanks, GivesTheTokensOfOneRank) {
  const std::vector<std::vector<int64_t>> prompts = {{1, 2, 3}, {4}, {9, 8, 7, 6, 5, 4, 3, 2, 1}};
  const testing::TemporaryFolder folder;
  for (const char* const more :
       {kGrouped, "num_query_groups: 1", kLearned, kLatent, "num_experts: 4 moe_router_topk: 2"}) {
    Config config;
    config.model = model_of(more).config();
    config.train.precision = Precision::fp64;
    const std::string saved = folder.path() / "saved";
    std::filesystem::remove_all(saved);
    save_model(saved, 0, config, GPTModel(config.model, {.dtype = at::kDouble}));
    const auto whole = load_model(saved, c10::kCPU).model;
    const bool experts = config.model.num_experts.has_value();
    for (const ParallelSizes& sizes :
         {ParallelSizes{.tensor = 2}, ParallelSizes{.pipeline = 2},
          ParallelSizes{.tensor = 2, .pipeline = 2}, ParallelSizes{.expert = 2}}) {
      if (sizes.expert > 1 && !experts) continue;
      if (sizes.tensor > 1 && experts) continue;  // needs sequence parallelism
      ParallelConfig parallel;
      parallel.tensor_model_parallel_size = sizes.tensor;
      parallel.pipeline_model_parallel_size = sizes.pipeline;
      parallel.expert_model_parallel_size = sizes.expert;
      for (const double temperature : {0.0, 1.0}) {
        // Goes past the window.
        const GenerateOptions options{.max_tokens = 30, .temperature = temperature};
        const auto expected = generate_batch(*whole, prompts, options);
        testing::run_ranks(
            sizes.tensor * sizes.pipeline * sizes.expert,
            [&](const ParallelState& state) {
              const SavedModel part = load_model(saved, parallel, state);
              EXPECT_EQ(generate_batch(*part.model, prompts, options, {}, state), expected)
                  << more << " on rank " << state.rank();
            },
            {.sizes = sizes});
      }
    }
  }
}

// Of a prompt, too, the output layer gets one token: its logits would be the largest tensor by far.
TEST(GenerateOnRanks, GathersTheLogitsOfTheLastTokenAlone) {
  const TransformerConfig config = model_of(kGrouped).config();
  ParallelConfig parallel;
  parallel.tensor_model_parallel_size = 2;
  const std::vector<std::vector<int64_t>> prompts = {{1, 2, 3, 4, 5}, {6, 7, 8, 9, 10}};
  for (const bool use_cache : {true, false}) {
    testing::CollectiveLog log;
    testing::run_ranks(2,
                       [&](const ParallelState& state) {
                         const GPTModel model(config, parallel, state, GPTStage::whole(config));
                         const GenerateOptions options{.max_tokens = 3, .use_cache = use_cache};
                         generate_batch(model, prompts, options, {}, state);
                       },
                       {.sizes = {.tensor = 2}, .log = &log});
    std::vector<int64_t> gathered;
    for (const CollectiveRecord& call : log.of_rank(0))
      if (call.label == "logits") gathered.push_back(call.numel);
    EXPECT_EQ(gathered, (std::vector<int64_t>{50, 50, 50}));  // 2 prompts, 25 rows of the table
  }
}

// The allowed tokens are the fewest that reach top_p, found here by sorting.
TEST(GenerateTopP, SamplesAmongTheFewestTokensThatReachIt) {
  const GPTModel model = model_of(kGrouped);
  const std::vector<int64_t> prompt = {1, 2, 3};
  const at::Tensor logits =
      model.forward(at::tensor(prompt, at::kLong).unsqueeze(0))[0][-1].to(at::kDouble);
  const auto [probabilities, ids] = at::softmax(logits / 2, 0).sort(0, /*descending=*/true);
  for (const double top_p : {1e-9, 0.3, 0.6}) {
    std::set<int64_t> allowed;
    double sum = 0;
    for (int64_t i = 0; sum < top_p; ++i) {
      allowed.insert(ids[i].item<int64_t>());
      sum += probabilities[i].item<double>();
    }
    std::set<int64_t> seen;
    GenerateOptions options{.max_tokens = 1, .temperature = 2, .top_k = 0, .top_p = top_p};
    for (options.seed = 0; options.seed < 400; ++options.seed)
      seen.insert(generate(model, prompt, options).front());
    for (const int64_t token : seen) EXPECT_TRUE(allowed.contains(token)) << top_p;
    if (allowed.size() <= 3) {
      EXPECT_EQ(seen, allowed) << top_p;
    }
  }
  GenerateOptions options{.max_tokens = 20};
  const auto all = generate(model, prompt, options);
  options.top_p = 1;
  EXPECT_EQ(generate(model, prompt, options), all);
  for (const double bad : {0.0, 1.5}) {
    options.top_p = bad;
    EXPECT_TRUE(throws_with<ConfigError>([&] { generate(model, prompt, options); }, "--top-p"));
  }
}

}  // namespace
}  // namespace lockstep
