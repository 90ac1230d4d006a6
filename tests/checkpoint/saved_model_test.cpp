#include "lockstep/checkpoint/saved_model.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include <ATen/ATen.h>

#include "lockstep/checkpoint/checkpoint_folder.h"
#include "lockstep/checkpoint/checkpoint_reader.h"
#include "lockstep/checkpoint/finite_values.h"
#include "lockstep/checkpoint/safetensors.h"
#include "lockstep/checkpoint/shared_checkpoint.h"
#include "lockstep/checkpoint/training_state.h"
#include "lockstep/core/config_io.h"
#include "lockstep/core/error.h"
#include "lockstep/tests/support/memory_counter.h"
#include "lockstep/tests/support/rank_threads.h"
#include "lockstep/tests/support/temporary_folder.h"
#include "lockstep/tests/support/throws_with.h"
#include "lockstep/training/generate.h"

namespace lockstep {
namespace {

using testing::TemporaryFolder;
using testing::throws_with;

Config small_config() {
  Config config;
  config.model.hidden_size = 16;
  config.model.seq_length = 8;
  return config;
}

TEST(Safetensors, EveryDtypeAndShapeSurvives) {
  const TemporaryFolder folder;
  const std::string path = folder.path() / "t.safetensors";
  std::vector<std::pair<std::string, at::Tensor>> tensors;
  for (const auto dtype : {at::kDouble, at::kFloat, at::kBFloat16, at::kHalf, at::kLong, at::kInt,
                           at::kShort, at::kChar, at::kByte, at::kBool})
    tensors.emplace_back(at::toString(dtype), at::arange(6).to(dtype).view({2, 3}).t());
  tensors.emplace_back("empty", at::empty({0, 3}));
  tensors.emplace_back("scalar", at::full({}, 2.5));
  save_safetensors(path, tensors);
  const auto loaded = load_safetensors(path);
  ASSERT_EQ(loaded.size(), tensors.size());
  for (const auto& [name, tensor] : tensors) {
    EXPECT_EQ(loaded.at(name).scalar_type(), tensor.scalar_type());
    EXPECT_TRUE(at::equal(loaded.at(name), tensor)) << name;
  }
  const std::string whole = folder.read("t.safetensors");
  folder.write("t.safetensors", whole.substr(0, whole.size() - 1));
  EXPECT_TRUE(throws_with<FileError>([&] { load_safetensors(path); }, "the file at"));
}

TEST(SavedModel, ComesBackWithItsConfiguration) {
  const TemporaryFolder folder;
  const GPTModel model(small_config().model, {.seed = 3});
  const std::string step = save_model(folder.path(), 12, small_config(), model);
  EXPECT_TRUE(step.ends_with("step_12"));
  for (const std::string& path : {std::string(folder.path()), step}) {
    const SavedModel saved = load_model(path, c10::kCPU);
    EXPECT_EQ(saved.config.model.hidden_size, 16);
    const auto tokens = at::arange(8).unsqueeze(0);
    EXPECT_TRUE(at::equal(saved.model->forward(tokens), model.forward(tokens)));
  }
}

TEST(SavedModel, SavingAgainReplacesTheStep) {
  const TemporaryFolder folder;
  save_model(folder.path(), 1, small_config(), GPTModel(small_config().model, {.seed = 1}));
  const GPTModel second(small_config().model, {.seed = 2});
  save_model(folder.path(), 1, small_config(), second);
  EXPECT_TRUE(at::equal(load_model(folder.path(), c10::kCPU).model->parameters()[0],
                        second.parameters()[0]));
  EXPECT_EQ(std::distance(std::filesystem::directory_iterator(folder.path()), {}), 2);
}

TEST(SavedModel, OfAnotherModelIsRefusedByName) {
  const TemporaryFolder folder;
  const auto refuses = [&](const std::string& model, const std::string& part) {
    const Config other = parse_config("model { " + model + " seq_length: 8 }", "test");
    save_model(folder.path(), 1, other, GPTModel(small_config().model));
    return throws_with<FileError>([&] { load_model(folder.path(), c10::kCPU); }, part);
  };
  EXPECT_TRUE(throws_with<FileError>([] { load_model("nowhere", c10::kCPU); }, "'nowhere'"));
  EXPECT_TRUE(refuses("hidden_size: 32", "found shape"));
  EXPECT_TRUE(refuses("hidden_size: 16 num_layers: 1", "belongs to no parameter"));
  EXPECT_TRUE(refuses("hidden_size: 16 num_layers: 3", "layers.2.input_layernorm.weight' is miss"));
}

// A run that saves meanwhile makes ranks that look at different moments find different checkpoints.
TEST(SavedModel, OfSeveralRanksIsTheOneThatRank0Finds) {
  const TemporaryFolder folder;
  const std::vector<std::string> of_rank = {folder.path() / "a", folder.path() / "b"};
  for (size_t rank = 0; rank < 2; ++rank)
    for (const int64_t step : {1, 2})
      save_model(of_rank[rank], rank == 0 ? step : 3 - step, small_config(),
                 GPTModel(small_config().model, {.seed = static_cast<uint64_t>(step)}));
  testing::run_ranks(2,
                     [&](const ParallelState& state) {
                       const auto rank = static_cast<size_t>(state.rank());
                       ParallelConfig parallel;
                       parallel.tensor_model_parallel_size = 2;
                       EXPECT_EQ(load_model(of_rank[rank], parallel, state).path,
                                 of_rank[0] + "/step_2");
                       EXPECT_TRUE(throws_with<FileError>(
                           [&] { load_model(rank == 0 ? "nowhere" : of_rank[1], parallel, state); },
                           "'nowhere' is not a folder"));
                     },
                     {.sizes = {.tensor = 2}, .timeout = std::chrono::seconds(5)});
}

TEST(SavedModel, ACheckpointThatOneRankCannotReadIsRefusedOnAll) {
  const TemporaryFolder folder;
  for (const char* const name : {"a", "b"})
    save_model(folder.path() / name, 1, small_config(),
               GPTModel(small_config().model, {.seed = static_cast<uint64_t>(*name)}));
  testing::run_ranks(
      2,
      [&](const ParallelState& state) {
        const auto path = [&](const char* name) { return folder.path() / name / "step_1"; };
        const auto nothing = [](const CheckpointReader&) {};
        SharedCheckpoint others(path(state.rank() == 0 ? "a" : "b"), state);
        EXPECT_TRUE(
            throws_with<FileError>([&] { others.read(nothing); },
                                   "rank 0 found it; rank 1 found another one; allowed: a path"));
        SharedCheckpoint none(path(state.rank() == 0 ? "a" : "c"), state);
        EXPECT_TRUE(throws_with<FileError>([&] { none.read(nothing); }, "rank 1 found none;"));
        SharedCheckpoint same(path("a"), state);
        EXPECT_TRUE(same.read(nothing));
        const auto damaged = [&](const CheckpointReader&) {
          if (state.rank() == 1) throw FileError("damaged");
        };
        EXPECT_TRUE(throws_with<FileError>([&] { same.read(damaged); },
                                           state.rank() == 0 ? "rank 1: damaged" : "damaged"));
      },
      {.timeout = std::chrono::seconds(5)});
}

TEST(SavedModel, WeightsThatAreNotFiniteAreNotSaved) {
  const TemporaryFolder folder;
  const GPTModel model(small_config().model);
  const at::NoGradGuard no_grad;
  const NamedParameter param = collect_parameters(model).back();
  param.tensor.flatten()[0] = std::numeric_limits<float>::quiet_NaN();
  param.tensor.flatten()[2] = -std::numeric_limits<float>::infinity();
  EXPECT_TRUE(throws_with<DivergenceError>(
      [&] { save_model(folder.path(), 1, small_config(), model); },
      "tensor '" + param.name + "': found 2 of " + std::to_string(param.tensor.numel()) +
          " elements that are not finite, allowed: none"));
  EXPECT_FALSE(has_checkpoint(folder.path()));
}

TEST(SavedModel, CountsWhatIsNotFiniteInEveryDtype) {
  for (const auto dtype : {at::kDouble, at::kFloat, at::kBFloat16, at::kHalf}) {
    const at::Tensor values = at::zeros({3, 5}, dtype);
    EXPECT_EQ(count_not_finite(values), 0);
    values[0][1] = HUGE_VAL;
    values[2][4] = -std::numeric_limits<double>::quiet_NaN();
    EXPECT_EQ(count_not_finite(values.t()), 2);
  }
  EXPECT_EQ(count_not_finite(at::arange(4)), 0);
  EXPECT_EQ(count_not_finite(at::empty({0})), 0);
}

TEST(SavedModel, ItsExpertsTakeAllTokensWhateverTheirCapacity) {
  const TemporaryFolder folder;
  const Config config = parse_config(
      "model { hidden_size: 16 seq_length: 8 init_method_std: 0.3 num_experts: 4 "
      "moe_router_topk: 2 moe_expert_capacity_factor: 0.5 moe_pad_expert_input_to_capacity: true }",
      "test");
  save_model(folder.path(), 1, config, GPTModel(config.model, {.seed = 3}));
  const SavedModel saved = load_model(folder.path(), c10::kCPU);
  const at::Tensor tokens = at::arange(16).view({2, 8});
  const at::Tensor together = saved.model->forward(tokens);
  for (const int64_t row : {0, 1})
    EXPECT_TRUE(
        at::allclose(together[row], saved.model->forward(tokens.narrow(0, row, 1))[0], 1e-4, 1e-4))
        << row;
}

TEST(SavedModel, ItsLossesHoldFewLogitsAtATime) {
  const TemporaryFolder folder;
  Config config = small_config();
  config.model.vocab_size = 5000;
  const at::Tensor tokens = at::arange(512).view({64, 8});
  const int64_t all = tokens.numel() * config.model.vocab_size * int64_t{sizeof(float)};
  const at::NoGradGuard no_grad;
  const auto chunk_of = [&](const std::optional<int64_t>& saved, int64_t most_logits) {
    config.model.cross_entropy_chunk_size = saved;
    save_model(folder.path(), 1, config, GPTModel(config.model, {.seed = 3}));
    const LogitsLimit limit = {most_logits, tokens.numel()};
    return load_model(folder.path(), c10::kCPU, limit).config.model.cross_entropy_chunk_size;
  };
  EXPECT_EQ(chunk_of(5, 40000), 5);
  EXPECT_EQ(chunk_of(100, 40000), 8);
  EXPECT_EQ(chunk_of({}, 10), 1);
  EXPECT_EQ(chunk_of({}, tokens.numel() * config.model.vocab_size), std::nullopt);
  EXPECT_EQ(chunk_of({}, 40000), 8);
  const LogitsLimit few_tokens = {20000, 4};  // fewer than in a sequence
  EXPECT_EQ(load_model(folder.path(), c10::kCPU, few_tokens).config.model.cross_entropy_chunk_size,
            4);
  const SavedModel whole = load_model(folder.path(), c10::kCPU);
  const SavedModel saved = load_model(folder.path(), c10::kCPU, LogitsLimit{40000, 512});
  EXPECT_FALSE(whole.config.model.cross_entropy_chunk_size.has_value());
  const at::Tensor expected = whole.model->forward(tokens, tokens);
  const testing::MemoryCounter memory;
  EXPECT_TRUE(at::allclose(saved.model->forward(tokens, tokens), expected, 1e-6, 1e-6));
  EXPECT_LT(memory.peak(), all / 10);
  whole.model->forward(tokens, tokens);
  EXPECT_GT(memory.peak(), all);
}

TEST(SavedModel, OfTensorParallelRanksThatShareSavedActivationsIsLoadedInOneProcess) {
  const TemporaryFolder folder;
  Config config = small_config();
  save_model(folder.path(), 1, config, GPTModel(config.model, {.seed = 3}));
  config.model.recompute_granularity = RecomputeGranularity::full;
  config.model.recompute_method = RecomputeMethod::uniform;
  config.model.recompute_num_layers = 1;
  config.model.distribute_saved_activations = true;
  config.parallel.tensor_model_parallel_size = 2;
  save_model(folder.path(), 2, config, GPTModel(small_config().model, {.seed = 3}));
  const SavedModel saved = load_model(folder.path(), c10::kCPU);
  EXPECT_FALSE(saved.config.model.distribute_saved_activations);
  const auto tokens = at::arange(8).unsqueeze(0);
  EXPECT_TRUE(at::equal(saved.model->forward(tokens),
                        load_model(folder.path() / "step_1", c10::kCPU).model->forward(tokens)));
}

TEST(SavedModel, PaddingOfTheVocabularyIsNotSaved) {
  const TemporaryFolder folder;
  Config config = small_config();
  config.model.make_vocab_size_divisible_by = 100;  // 300 rows for 256 ids
  const GPTModel padded(config.model, {.seed = 3});
  save_model(folder.path(), 1, config, padded);
  CheckpointReader reader(folder.path());
  EXPECT_EQ(reader.find("embedding.word_embeddings.weight")->shape,
            (std::vector<int64_t>{256, 16}));
  const auto tokens = at::arange(8).unsqueeze(0);
  EXPECT_TRUE(at::equal(load_model(folder.path(), c10::kCPU).model->forward(tokens),
                        padded.forward(tokens)));
}

TEST(Generate, DependsOnTheSeedAndStaysInTheWindow) {
  const GPTModel model(small_config().model);
  const std::vector<int64_t> prompt = {1, 2, 3};
  GenerateOptions options;
  options.max_tokens = 30;
  const auto first = generate(model, prompt, options);
  EXPECT_EQ(first.size(), 30u);
  EXPECT_EQ(first, generate(model, prompt, options));
  options.seed = 2;
  EXPECT_NE(first, generate(model, prompt, options));
}

TEST(Generate, DropsNothingInTheMidstOfTraining) {
  TransformerConfig config = small_config().model;
  const GPTModel model(config);
  config.hidden_dropout = 0.5;
  const GPTModel trained(config);
  GenerateOptions options;
  options.max_tokens = 20;
  options.temperature = 0;
  EXPECT_EQ(generate(trained, {1, 2, 3}, options), generate(model, {1, 2, 3}, options));
  for (const auto& module : trained.modules(/*include_self=*/false))
    EXPECT_TRUE(module->is_training());
}

TEST(Generate, GreedyAndTopK) {
  const GPTModel model(small_config().model);
  GenerateOptions options;
  options.max_tokens = 20;
  options.temperature = 0;
  const auto greedy = generate(model, {1, 2, 3}, options);
  const auto logits = model.forward(at::tensor({1, 2, 3}, at::kLong).unsqueeze(0))[0][2];
  EXPECT_EQ(greedy[0], logits.argmax().item<int64_t>());
  options.temperature = 1;
  options.top_k = 1;
  EXPECT_EQ(generate(model, {1, 2, 3}, options), greedy);
  options.top_k = 2;
  const auto best = std::get<1>(logits.topk(2));
  std::set<int64_t> seen;
  options.max_tokens = 1;
  for (options.seed = 0; options.seed < 40; ++options.seed)
    seen.insert(generate(model, {1, 2, 3}, options)[0]);
  EXPECT_EQ(seen, (std::set<int64_t>{best[0].item<int64_t>(), best[1].item<int64_t>()}));
}

TEST(Generate, TakesNoMemoryForTokensThatNeverCome) {
  const GPTModel model(small_config().model);
  GenerateOptions options;
  options.max_tokens = 40;
  const auto expected = generate(model, {1, 2, 3}, options);
  for (const bool use_cache : {true, false}) {
    options.use_cache = use_cache;
    options.max_tokens = std::numeric_limits<int64_t>::max();
    size_t count = 0;
    const auto stop = [&](size_t /*prompt*/, int64_t /*token*/) { return ++count < 40; };
    EXPECT_EQ(generate_batch(model, {{1, 2, 3}}, options, stop).front(), expected);
  }
}

TEST(Generate, RefusesWhatMakesNoSense) {
  const GPTModel model(small_config().model);
  GenerateOptions options;
  EXPECT_TRUE(throws_with<ConfigError>([&] { generate(model, {}, options); }, "--prompt"));
  options.temperature = -1;
  EXPECT_TRUE(throws_with<ConfigError>([&] { generate(model, {1}, options); }, "found -1"));
}

}  // namespace
}  // namespace lockstep
