// Documents packed into samples train as each one does alone: losses and gradients in fp64, on
// every kind of layout. The reference is a model in one process that sees each document as a
// sequence of its own.

#include <fmt/ranges.h>
#include <gtest/gtest.h>

#include <cmath>
#include <map>
#include <mutex>
#include <span>
#include <string>
#include <vector>

#include <ATen/ATen.h>

#include "lockstep/core/config_io.h"
#include "lockstep/core/error.h"
#include "lockstep/datasets/conversation_source.h"
#include "lockstep/datasets/sample_marks.h"
#include "lockstep/models/cross_entropy.h"
#include "lockstep/parallel_state/collectives.h"
#include "lockstep/tests/support/local_part.h"
#include "lockstep/tests/support/rank_threads.h"
#include "lockstep/tests/support/temporary_folder.h"
#include "lockstep/tests/support/throws_with.h"
#include "lockstep/training/batch_input.h"
#include "lockstep/training/run_setup.h"
#include "lockstep/training/training_model.h"

namespace lockstep {
namespace {

using testing::CollectiveLog;
using testing::part_on;
using testing::run_ranks;
using testing::throws_with;
using Fields = std::vector<std::string>;
using Ids = std::vector<int64_t>;

constexpr int64_t kLength = 24, kSequences = 4;

/// The lengths of each sequence's documents.
const std::vector<Ids> kDocuments = {{5, 1, 7, 11}, {24}, {23, 1}, {8, 8, 8}};

/// Ids 1 to 31; 0 ends each document.
Ids ids_of(size_t sequence) {
  Ids ids;
  for (const int64_t length : kDocuments[sequence]) {
    for (int64_t i = 0; i + 1 < length; ++i)
      ids.push_back(1 + (i * i + 3 * i + 7 * length + 5 * static_cast<int64_t>(sequence)) % 31);
    ids.push_back(0);
  }
  ids.push_back(3);
  return ids;
}

SampleMarks marks_of(size_t sequence) {
  return mark_documents(ids_of(sequence), {.end_of_document = 0,
                                           .reset_position_ids = true,
                                           .reset_attention_mask = true,
                                           .eod_mask_loss = true});
}

/// A sequence with the label of each token.
struct Document {
  Ids tokens, labels;
};

/// Packed sequences and the documents in them.
struct Packed {
  std::vector<Ids> ids;
  std::vector<SampleMarks> marks;
  std::vector<Document> documents;
};

Packed documents_with_ends() {
  Packed packed;
  for (size_t sequence = 0; sequence < kDocuments.size(); ++sequence) {
    packed.ids.push_back(ids_of(sequence));
    packed.marks.push_back(marks_of(sequence));
    auto begin = packed.ids.back().begin();
    for (const int64_t length : kDocuments[sequence]) {
      Document document = {Ids(begin, begin + length), Ids(begin + 1, begin + length)};
      document.labels.push_back(kIgnoredLabel);
      begin += length;
      packed.documents.push_back(std::move(document));
    }
  }
  return packed;
}

/// Prompts and answers of bytes. Prompts carry no loss.
Packed conversations() {
  const std::vector<std::pair<size_t, size_t>> lengths = {{10, 13}, {8, 6}, {4, 4}, {3, 10}, {2, 4},
                                                          {1, 1},   {6, 5}, {1, 3}, {2, 3}};
  Packed packed;
  std::string lines;
  for (size_t i = 0; i < lengths.size(); ++i) {
    const auto [prompt, answer] = lengths[i];
    std::string text;
    for (size_t c = 0; c < prompt + answer; ++c)
      text += static_cast<char>('a' + (c * c + 7 * i + 3) % 26);
    lines += fmt::format("{{\"prompt\": \"{}\", \"completion\": \"{}\"}}\n", text.substr(0, prompt),
                         text.substr(prompt));
    Document document = {Ids(text.begin(), text.end()), Ids(text.begin() + 1, text.end())};
    document.tokens.push_back(256);
    document.labels.insert(document.labels.end(), {256, kIgnoredLabel});
    std::fill_n(document.labels.begin(), prompt - 1, kIgnoredLabel);
    packed.documents.push_back(std::move(document));
  }
  const testing::TemporaryFolder folder;
  DataConfig config;
  config.path = {folder.write("a.jsonl", lines)};
  config.chat_template = ChatTemplate::plain;
  config.split = "1,0";
  const SampleSources sources = open_conversations(config, 257, kLength, 1);
  for (int64_t sample = 0; sample < kSequences; ++sample) {
    packed.ids.emplace_back(static_cast<size_t>(kLength + 1));
    sources.training->read(sample, packed.ids.back());
    packed.marks.push_back(sources.training->marks(sample, packed.ids.back()));
  }
  const auto& source = dynamic_cast<const ConversationSource&>(*sources.training);
  EXPECT_EQ(source.samples_per_epoch(), kSequences);
  return packed;
}

Config config_of(const Fields& model, const Fields& layout) {
  Fields all = {"train.precision=fp64", "ddp.overlap_grad_reduce=false"};
  all.insert(all.end(), model.begin(), model.end());
  for (const std::string& field : layout) all.push_back("parallel." + field);
  return parse_config(
      "model { num_layers: 4 hidden_size: 16 num_attention_heads: 4 ffn_hidden_size: 16 "
      "seq_length: 24 vocab_size: 32 init_method_std: 0.3 } "
      "train { global_batch_size: 4 micro_batch_size: 2 }",
      "test", all);
}

struct Gradients {
  double loss = 0, tokens = 0;
  std::map<std::string, at::Tensor> of;
};

/// Gradients from each document as a sequence of its own.
Gradients each_alone(const Config& config, const Packed& packed) {
  GPTModel model(config.model,
                 {.dtype = at::kDouble, .seed = static_cast<uint64_t>(config.train.seed)});
  Gradients result;
  for (const Document& document : packed.documents) {
    const at::Tensor labels = at::tensor(document.labels, at::kLong).unsqueeze(0);
    const at::Tensor loss =
        model.forward(at::tensor(document.tokens, at::kLong).unsqueeze(0), labels).sum();
    loss.backward();
    result.loss += loss.item<double>();
    result.tokens += labels.ne(kIgnoredLabel).sum().item<double>();
  }
  for (const NamedParameter& param : collect_parameters(model))
    result.of[param.name] = param.tensor.grad() / result.tokens;
  return result;
}

/// Loss and tokens of all ranks.
at::Tensor sums_over_ranks(const LossSums& local, const ParallelState& state) {
  at::Tensor sums = at::tensor({local.loss.item<double>(), local.tokens}, at::kDouble);
  if (state.group(GroupKind::tp).rank() != 0) sums.zero_();
  all_reduce(state.world(), sums, ReduceOp::sum, "loss").wait();
  return sums;
}

void expect_as_alone(const Gradients& alone, const Packed& packed, const Config& config,
                     const ParallelState& state) {
  TrainingModel model(config, state);
  const int64_t ranks = state.grids().data_parallel_size();
  const int64_t rank = *state.grids().groups(GroupKind::dp).position_of(state.rank());
  model.zero_grad_buffer();
  const LossSums local = model.forward_backward(kSequences / 2 / ranks, 1, [&](int64_t microbatch) {
    const auto first = static_cast<size_t>(2 * (microbatch * ranks + rank));
    Ids ids = packed.ids[first];
    ids.insert(ids.end(), packed.ids[first + 1].begin(), packed.ids[first + 1].end());
    return make_batch_input(ids, std::span(packed.marks).subspan(first, 2), kLength, 2, state);
  });
  model.finalize_gradients(local.tokens);
  const at::Tensor sums = sums_over_ranks(local, state);
  EXPECT_NEAR(sums[0].item<double>(), alone.loss, 1e-12 * alone.loss);
  EXPECT_EQ(sums[1].item<double>(), alone.tokens);
  for (const auto& chunk : model.chunks())
    for (const NamedParameter& param : collect_parameters(*chunk)) {
      const at::Tensor expected = part_on(alone.of.at(param.name), param, state);
      const double most = (param.tensor.grad() - expected).abs().max().item<double>();
      EXPECT_LT(most, 1e-12) << param.name << " on rank " << state.rank();
    }
}

void expect_packed_as_alone(const Fields& model, int64_t world, const Fields& layout,
                            const Packed& packed = documents_with_ends()) {
  SCOPED_TRACE(
      fmt::format("{} ranks, {}, {}", world, fmt::join(model, " "), fmt::join(layout, " ")));
  const Gradients alone = each_alone(config_of(model, {}), packed);
  const Config config = config_of(model, layout);
  testing::RankThreadOptions options;
  options.sizes = parallel_options(config, c10::kCPU).sizes;
  run_ranks(
      world, [&](const ParallelState& state) { expect_as_alone(alone, packed, config, state); },
      options);
}

const Fields kLearned = {"model.position_embedding_type=learned_absolute",
                         "model.normalization=LayerNorm"};
const Fields kWindow = {"model.window_size=5", "model.num_query_groups=2"};
const Fields kLatent = {"model.multi_latent_attention=true",
                        "model.qk_layernorm=true",
                        "model.q_lora_rank=8",
                        "model.kv_lora_rank=6",
                        "model.qk_head_dim=4",
                        "model.qk_pos_emb_head_dim=2",
                        "model.v_head_dim=5"};
const Fields kExperts = {"model.num_experts=4", "model.moe_router_topk=2",
                         "model.moe_aux_loss_coeff=0"};
const char* const kTensor = "tensor_model_parallel_size=2";
const char* const kPipeline = "pipeline_model_parallel_size=2";
const char* const kContext = "context_parallel_size=2";

TEST(PackedDocuments, TrainAsEachAloneOnEveryLayout) {
  for (const Fields& model : {Fields{}, kLearned, kWindow, kLatent}) {
    expect_packed_as_alone(model, 1, {});
    expect_packed_as_alone(model, 2, {});  // dp
    expect_packed_as_alone(model, 2, {kTensor});
    expect_packed_as_alone(model, 2, {kTensor, "sequence_parallel=true"});
    expect_packed_as_alone(model, 2, {kPipeline});
    expect_packed_as_alone(model, 2, {kPipeline, "virtual_pipeline_model_parallel_size=2"});
    expect_packed_as_alone(model, 2, {kPipeline, "pipeline_schedule=zb-h1"});
    for (const char* const kind : {"p2p", "all_gather", "a2a"})
      expect_packed_as_alone(model, 2, {kContext, fmt::format("cp_comm_type={}", kind)});
  }
}

TEST(PackedDocuments, TrainAsEachAloneOverSeveralAxes) {
  expect_packed_as_alone({}, 3, {"context_parallel_size=3"});
  expect_packed_as_alone({}, 4,
                         {"context_parallel_size=4", "cp_comm_type=a2a+p2p",
                          "hierarchical_context_parallel_sizes=2,2"});
  expect_packed_as_alone({}, 4, {kTensor, kContext, "sequence_parallel=true"});
  expect_packed_as_alone({}, 4, {kPipeline, kContext});
  expect_packed_as_alone(kLearned, 4, {kTensor, kContext, "sequence_parallel=true"});
}

TEST(PackedDocuments, TrainAsEachAloneWithExperts) {
  expect_packed_as_alone(kExperts, 1, {});
  expect_packed_as_alone(kExperts, 2, {"expert_model_parallel_size=2"});
  expect_packed_as_alone(kExperts, 2, {kTensor, "sequence_parallel=true"});
  expect_packed_as_alone(kExperts, 2, {kContext, "expert_model_parallel_size=2"});
}

TEST(PackedDocuments, PromptsWithoutLossTrainAsEachConversationAlone) {
  const Packed packed = conversations();
  const Fields bytes = {"model.vocab_size=258"};  // two ranks share it evenly
  expect_packed_as_alone(bytes, 1, {}, packed);
  expect_packed_as_alone(bytes, 2, {}, packed);  // dp
  expect_packed_as_alone(bytes, 2, {kTensor, "sequence_parallel=true"}, packed);
  expect_packed_as_alone(bytes, 2, {kPipeline}, packed);
  expect_packed_as_alone(bytes, 2, {kPipeline, "virtual_pipeline_model_parallel_size=2"}, packed);
  for (const char* const kind : {"p2p", "all_gather", "a2a"})
    expect_packed_as_alone(bytes, 2, {kContext, fmt::format("cp_comm_type={}", kind)}, packed);
  expect_packed_as_alone(bytes, 4,
                         {"context_parallel_size=4", "cp_comm_type=a2a+p2p",
                          "hierarchical_context_parallel_sizes=2,2"},
                         packed);
  Fields experts = kExperts;
  experts.push_back(bytes[0]);
  expect_packed_as_alone(experts, 2, {"expert_model_parallel_size=2"}, packed);
}

TEST(PackedDocuments, TrainAsEachAloneRecomputed) {
  for (const char* const granularity : {"selective", "full"}) {
    const Fields model = {fmt::format("model.recompute_granularity={}", granularity)};
    expect_packed_as_alone(model, 1, {});
    expect_packed_as_alone(model, 2, {kContext});
    expect_packed_as_alone(model, 2, {kPipeline});
  }
}

TEST(PackedDocuments, SendWhatWholeSequencesSend) {
  const auto sent = [](bool packed) {
    const Config config = config_of({}, {kContext});
    testing::RankThreadOptions options;
    CollectiveLog log;
    options.sizes.context = 2;
    options.log = &log;
    run_ranks(
        2,
        [&](const ParallelState& state) {
          TrainingModel model(config, state);
          model.zero_grad_buffer();
          model.forward_backward(2, 1, [&](int64_t) {
            Ids ids = ids_of(0);
            ids.insert(ids.end(), ids.begin(), ids.end());
            const SampleMarks marks = packed ? marks_of(0) : SampleMarks();
            return make_batch_input(ids, std::vector{marks, marks}, kLength, 2, state);
          });
        },
        options);
    std::vector<std::string> calls;
    for (const auto& call : log.of_rank(0))
      calls.push_back(
          fmt::format("{} {} {} {}", call.group, call.operation, call.label, call.bytes));
    return calls;
  };
  const auto packed = sent(true);
  EXPECT_EQ(packed, sent(false));
  EXPECT_GT(packed.size(), 16U);
}

TEST(PackedDocuments, LabelsAreCountedOfThisRanksPart) {
  run_ranks(2,
            [&](const ParallelState& state) {
              const BatchInput batch =
                  make_batch_input(ids_of(0), std::vector{marks_of(0)}, kLength, 1, state);
              EXPECT_EQ(*batch.labels, batch.input.labels.ne(kIgnoredLabel).sum().item<int64_t>());
              // Rank 0 has tokens 0-5 and 18-23 with the ends 4, 5 and 23; rank 1 has the end at
              // 12.
              EXPECT_EQ(*batch.labels, state.rank() == 0 ? 9 : 11);
              EXPECT_EQ(batch.input.positions.document_positions.sizes(), (Ids{12, 1}));
              const BatchInput none =
                  make_batch_input(ids_of(0), std::vector{marks_of(0)}, kLength, 0, state);
              EXPECT_EQ(*none.labels, 0);
            },
            {.sizes = {.context = 2}});
}

TEST(PackedDocuments, DropoutIsOfThePlaceInTheSequence) {
  const Config config = config_of({"model.hidden_dropout=0.5"}, {});
  const ParallelState state = ParallelState::single_process();
  GPTModel model(config.model, {.dtype = at::kDouble});
  const auto losses = [&](const SampleMarks& marks) {
    return model.forward(
        make_batch_input(Ids(kLength + 1, 2), std::vector{marks}, kLength, 1, state).input);
  };
  // Two equal documents would have equal losses if they dropped the same elements.
  SampleMarks marks = {.documents = {12, 12}};
  marks.positions = positions_in_documents(marks.documents, kLength);
  const at::Tensor found = losses(marks);
  EXPECT_FALSE(at::allclose(found.slice(1, 0, 12), found.slice(1, 12), 1e-3, 1e-3));
  model.eval();
  const at::Tensor without = losses(marks);
  EXPECT_TRUE(at::allclose(without.slice(1, 0, 12), without.slice(1, 12), 1e-12, 1e-12));
}

/// Attention dropout keeps all weights; those of other documents are zero.
TEST(PackedDocuments, AttentionDropoutSeesTheDocumentAlone) {
  const Config config = config_of({"model.attention_dropout=0.5"}, {});
  const ParallelState state = ParallelState::single_process();
  GPTModel model(config.model, {.dtype = at::kDouble});
  const auto losses = [&](Ids ids, bool bounded) {
    const SampleMarks marks = bounded ? SampleMarks{.documents = {10, 14}} : SampleMarks{};
    return model.forward(make_batch_input(ids, std::vector{marks}, kLength, 1, state).input)
        .slice(1, 10, kLength - 1);
  };
  const Ids ids = ids_of(1);
  Ids other = ids;
  for (size_t i = 0; i < 10; ++i) other[i] = 1 + (other[i] + 11) % 31;
  EXPECT_TRUE(at::equal(losses(ids, true), losses(other, true)));
  EXPECT_FALSE(at::allclose(losses(ids, false), losses(other, false)));
}

TEST(PackedDocuments, InputsThatCannotBe) {
  const Config config = config_of({}, {});
  GPTModel model(config.model, {.dtype = at::kDouble});
  const at::Tensor tokens = at::ones({1, 8}, at::kLong);
  const auto run = [&](at::Tensor places, std::vector<Ids> documents) {
    GPTInput input = {.tokens = tokens};
    input.positions.document_positions = std::move(places);
    if (!documents.empty())
      input.positions.documents = std::make_shared<const SequenceDocuments>(std::move(documents));
    return [&model, input] { model.forward(input); };
  };
  EXPECT_TRUE(throws_with<UsageError>(run(at::zeros({8}, at::kLong), {}),
                                      "document_positions: found 8, allowed: 8 x 1"));
  EXPECT_TRUE(throws_with<UsageError>(run(at::full({8, 1}, 24, at::kLong), {}),
                                      "positions: found 24, allowed: 0 to 23"));
  EXPECT_TRUE(throws_with<UsageError>(run({}, {{8}, {8}}),
                                      "documents: found those of 2 sequences, allowed: 1"));
  EXPECT_TRUE(
      throws_with<UsageError>(run({}, {{4, 3}}), "documents: found 7 tokens in all, allowed: 8"));
  EXPECT_TRUE(throws_with<UsageError>(run({}, {{8, 0}}), "in documents of >= 1"));
}

}  // namespace
}  // namespace lockstep
