#include "lockstep/program/megatron_rules.h"

#include <algorithm>
#include <cinttypes>
#include <cmath>
#include <cstdio>
#include <filesystem>
#include <limits>
#include <sstream>

#include "lockstep/core/check.h"
#include "lockstep/pipeline/stage_layout.h"
#include "lockstep/program/megatron_flag_table.h"

namespace lockstep {
namespace {

using Settings = MegatronSettings;

void apply_activation(Settings& s) {
  s.exclude("--swiglu", "--squared-relu");
  s.exclude("--swiglu", "--quick-geglu");
  const bool fused = !s.has("--no-bias-gelu-fusion") && !s.has("--disable-bias-linear");
  s.set("model.activation", s.has("--swiglu") ? "swiglu" : fused ? "gelu_tanh" : "gelu");
  const auto hidden = s.integer("--hidden-size");
  if (s.has("--ffn-hidden-size"))
    s.copy("--ffn-hidden-size", "model.ffn_hidden_size");
  else if (s.has("--swiglu") && hidden && *hidden <= std::numeric_limits<int64_t>::max() / 8)
    s.set("model.ffn_hidden_size", *hidden * 8 / 3 / 64 * 64);
}

constexpr int64_t kMostTokens = int64_t{1} << 31;

/// "1023,0" or "(1023, 0)": tokens before and after each token that it sees.
void apply_window(Settings& s) {
  if (!s.has("--window-size")) return;
  const std::string given(*s.value("--window-size"));
  int64_t left = -1, right = -1;
  std::string text = given;
  std::erase_if(text, [](char c) { return c == '(' || c == ')' || c == ' '; });
  int used = 0;
  const bool good =
      std::sscanf(text.c_str(), "%" SCNd64 ",%" SCNd64 "%n", &left, &right, &used) == 2 &&
      used == static_cast<int>(text.size()) && left >= 0 && left < kMostTokens && right == 0;
  require<ConfigError>(
      good, "--window-size: found '{}', allowed: LEFT,0 with LEFT >= 0 and below 2^31", given);
  s.set("model.window_size", left + 1);
}

/// YaRN stretches the rotary positions of latent attention unless it is turned off.
void apply_latent_attention(Settings& s) {
  constexpr std::pair<const char*, const char*> kSizes[] = {
      {"--q-lora-rank", "model.q_lora_rank"},
      {"--kv-lora-rank", "model.kv_lora_rank"},
      {"--qk-head-dim", "model.qk_head_dim"},
      {"--qk-pos-emb-head-dim", "model.qk_pos_emb_head_dim"},
      {"--v-head-dim", "model.v_head_dim"}};
  constexpr std::pair<const char*, const char*> kYarn[] = {
      {"--rotary-scaling-factor", "model.rope_scaling_factor"},
      {"--mscale", "model.rope_mscale"},
      {"--mscale-all-dim", "model.rope_mscale_all_dim"}};
  const bool latent = s.has("--multi-latent-attention");
  const bool yarn = latent && s.value("--rope-type").value_or("yarn") == "yarn";
  const auto copy = [&s](const auto& flags, bool counts, const std::string& reason) {
    for (const auto& [flag, field] : flags)
      if (s.has(flag) && counts)
        s.copy(flag, field);
      else if (s.has(flag))
        s.note(flag, "not needed: " + reason + " it has no effect");
  };
  if (latent) {
    s.set("model.multi_latent_attention", true);
    s.set("model.kv_lora_rank", int64_t{32});
    if (s.has("--kv-channels"))
      s.note("--kv-channels", "not needed: with --multi-latent-attention it has no effect");
    s.unset("model.kv_channels");
  }
  if (yarn) {
    s.set("model.rope_scaling_type", "yarn");
    s.set("model.rope_scaling_factor", int64_t{1});
    s.set("model.rope_original_max_position_embeddings", int64_t{4096});
  }
  copy(kSizes, latent, "without --multi-latent-attention");
  copy(kYarn, yarn, "without --multi-latent-attention, or with --rope-type rope,");
  if (!latent && s.has("--rope-type"))
    s.note("--rope-type",
           "not there: without --multi-latent-attention model.rope_scaling_type "
           "stays as --use-rope-scaling says");
}

void apply_attention(Settings& s) {
  apply_latent_attention(s);
  if (s.has("--group-query-attention"))
    s.set("model.num_query_groups", s.integer_or("--num-query-groups", 1));
  else if (s.has("--num-query-groups"))
    s.note("--num-query-groups", "not needed: without --group-query-attention it has no effect");
  if (s.has("--use-rope-scaling") && s.has("--rope-scaling-factor"))
    s.copy("--rope-scaling-factor", "model.rope_scaling_factor");
  else if (s.has("--rope-scaling-factor"))
    s.note("--rope-scaling-factor", "not needed: without --use-rope-scaling it has no effect");
  apply_window(s);
  const auto length = s.integer("--seq-length"), rows = s.integer("--max-position-embeddings");
  const bool learned = s.found("model.position_embedding_type") == "learned_absolute";
  if (learned && length && rows && *rows != *length)
    s.note("--max-position-embeddings",
           fmt::format("not there: the learned position table has model.seq_length ({}) rows, not "
                       "{}",
                       *length, *rows));
}

/// In a dense model Megatron-LM ignores most of these flags; `train` refuses their fields there.
void leave_out_experts(Settings& s) {
  for (const MegatronFlag& row : megatron_flags_with_field()) {
    const std::string flag(row.name);
    if (!row.field.starts_with("model.moe_") || !s.has(flag)) continue;
    s.unset(std::string(row.field));
    s.note(flag, fmt::format("not needed: with{} there are no experts",
                             s.has("--num-experts") ? " --num-experts 0" : "out --num-experts"));
  }
}

void apply_experts(Settings& s) {
  if (s.integer_or("--num-experts", 0) == 0) return leave_out_experts(s);
  s.copy("--num-experts", "model.num_experts");
  if (const auto policy = s.value("--moe-token-drop-policy"))
    s.note("--moe-token-drop-policy",
           std::string(*policy == "probs" ? "not needed" : "not there") +
               ": experts keep the tokens with the largest weights, as with probs");
  if (s.number("--moe-expert-capacity-factor").value_or(1) < 0) {
    s.unset("model.moe_expert_capacity_factor");
    s.note("--moe-expert-capacity-factor",
           "left out: below 0 it means no limit, which is the default here");
  }
  s.set("model.moe_token_dispatcher_type", std::string("allgather"));
  if (s.has("--moe-token-dispatcher-type"))
    s.copy("--moe-token-dispatcher-type", "model.moe_token_dispatcher_type");
  const auto frequency = s.value("--moe-layer-freq");
  if (!frequency) return;
  if (frequency->find('[') == std::string::npos)
    s.copy("--moe-layer-freq", "model.moe_layer_freq");
  else
    s.set("model.moe_layer_freq",
          fmt::format("[{}]", fmt::join(evaluate_layer_list(*frequency), ", ")));
}

void apply_pipeline(Settings& s) {
  constexpr const char* kLayout = "--pipeline-model-parallel-layout";
  constexpr const char* kGroup = "--microbatch-group-size-per-virtual-pipeline-stage";
  s.exclude("--num-layers-per-virtual-pipeline-stage", "--num-virtual-stages-per-pipeline-rank");
  s.exclude(kLayout, "--num-layers-per-virtual-pipeline-stage");
  s.exclude(kLayout, "--num-virtual-stages-per-pipeline-rank");
  const int64_t stages = s.integer_or("--pipeline-model-parallel-size", 1);
  int64_t chunks = s.integer_or("--num-virtual-stages-per-pipeline-rank", 1);
  if (const auto each = s.integer("--num-layers-per-virtual-pipeline-stage")) {
    const int64_t layers = s.integer_or("--num-layers", 0) +
                           s.has("--account-for-embedding-in-pipeline-split") +
                           s.has("--account-for-loss-in-pipeline-split");
    require<ConfigError>(
        *each >= 1 && stages >= 1 && layers % stages == 0 && layers / stages % *each == 0,
        "--num-layers-per-virtual-pipeline-stage: found {}, allowed: a divisor of "
        "the layers of a pipeline rank ({} / {})",
        *each, layers, stages);
    chunks = layers / stages / *each;
  }
  if (s.has(kLayout)) try {
      chunks = parse_stage_layout(*s.value(kLayout), stages).chunks();
    } catch (const ConfigError& error) {
      fail<ConfigError>("{}: {}", kLayout, error.what());
    }
  if (chunks <= 1) {
    if (s.has(kGroup)) s.note(kGroup, "not needed: without virtual stages it has no effect");
    return;
  }
  s.set("parallel.virtual_pipeline_model_parallel_size", chunks);
  if (s.has(kGroup)) s.copy(kGroup, "parallel.microbatch_group_size_per_vp_stage");
  if (s.has("--overlap-param-gather") && !s.has("--no-align-param-gather"))
    s.set("ddp.align_param_gather", true);
}

void apply_parallel(Settings& s) {
  if (s.has("--sequence-parallel")) {
    if (s.integer_or("--tensor-model-parallel-size", 1) > 1)
      s.set("parallel.sequence_parallel", true);
    else
      s.note("--sequence-parallel",
             "not needed: with one tensor-parallel rank Megatron-LM turns it off");
  }
  if (s.has("--tp-comm-overlap")) {
    if (s.found("parallel.sequence_parallel"))
      s.set("parallel.tp_comm_overlap", true);
    else
      s.note("--tp-comm-overlap",
             "not there: Megatron-LM refuses it without --sequence-parallel over several "
             "tensor-parallel ranks");
  }
  if (const auto minutes = s.number("--distributed-timeout-minutes"))
    s.set("parallel.distributed_timeout_seconds", fmt::format("{}", *minutes * 60));
  if (s.has("--cp-comm-type")) {
    const auto& kinds = s.values("--cp-comm-type");
    if (kinds.size() == 1)
      s.copy("--cp-comm-type", "parallel.cp_comm_type");
    else
      s.set("parallel.cp_comm_type_of_layers", fmt::format("{}", fmt::join(kinds, ",")));
  }
  if (s.has("--hierarchical-context-parallel-sizes"))
    s.set("parallel.hierarchical_context_parallel_sizes",
          fmt::format("{}", fmt::join(s.values("--hierarchical-context-parallel-sizes"), ",")));
}

bool is_number(const std::string& text) {
  std::istringstream stream(text);
  double number = 0;
  return stream >> number && stream.eof();
}

struct WeightedPaths {
  std::vector<std::string> weights;  ///< empty, or one for each path
  std::vector<std::string> paths;
};

/// Paths, or weights and paths alternately.
WeightedPaths weighted_paths(const std::vector<std::string>& given) {
  WeightedPaths found;
  for (size_t i = 0; i < given.size(); ++i)
    (i % 2 == 0 ? found.weights : found.paths).push_back(given[i]);
  const bool weighted =
      given.size() % 2 == 0 && std::all_of(found.weights.begin(), found.weights.end(), is_number);
  return weighted ? found : WeightedPaths{{}, given};
}

void apply_training_paths(Settings& s, const char* flag) {
  if (!s.has(flag)) return;
  const auto [weights, paths] = weighted_paths(s.values(flag));
  s.set_list("data.path", paths);
  if (weights.size() > 1) s.set("data.blend", fmt::format("{}", fmt::join(weights, ",")));
  if (weights.empty() && paths.size() > 1)
    s.note(flag,
           "without weights the sets are one set of documents, and samples cross from one to the "
           "next; Megatron-LM draws from each set by its size. data.blend keeps them apart");
}

void apply_evaluation_paths(Settings& s, const char* flag, const char* field) {
  if (!s.has(flag)) return;
  const auto [weights, paths] = weighted_paths(s.values(flag));
  s.set_list(field, paths);
  if (weights.size() > 1) s.note(flag, "the sets follow each other, without the weights");
}

void apply_data_paths(Settings& s) {
  for (const char* flag : {"--data-path", "--train-data-path"}) apply_training_paths(s, flag);
  apply_evaluation_paths(s, "--valid-data-path", "data.valid_path");
  const bool trains = s.has("--train-data-path"), validates = s.has("--valid-data-path");
  if ((trains || validates) && s.has("--split"))
    s.note("--split", fmt::format("left out: Megatron-LM refuses it together with {}",
                                  trains ? "--train-data-path" : "--valid-data-path"));
  if (validates) {
    s.unset("data.split");
    apply_evaluation_paths(s, "--test-data-path", "data.test_path");
  } else if (trains) {
    s.set("data.split", "1,0");
    s.set("train.eval_iters", int64_t{0});
    s.note("--train-data-path",
           "without --valid-data-path all of it is for training and nothing validates, as in "
           "Megatron-LM; train.eval_iters is 0");
  }
  if (!validates && s.has("--test-data-path"))
    s.note("--test-data-path", "not there: data.test_path needs data.valid_path");
}

/// Ids that Megatron-LM's preprocess_data.py has and `lockstep data build` has not.
void note_added_tokens(Settings& s, const std::string& kind) {
  if (kind == "HuggingFaceTokenizer" && !s.has("--tokenizer-hf-no-include-special-tokens"))
    s.note("--tokenizer-type",
           "Megatron-LM, except 0.15 to 0.16.1, adds the tokens of the tokenizer's post_processor "
           "to each document, such as one for its beginning; `lockstep data build` does not");
  if (kind == "Llama2Tokenizer")
    s.note("--tokenizer-type",
           "Megatron-LM up to 0.14, and up to 0.16.1 with --legacy-tokenizer, puts the tokenizer's "
           "beginning-of-text token before each document; `lockstep data build` does not");
}

void apply_tokenizer(Settings& s) {
  if (s.has("--vocab-size")) s.copy("--vocab-size", "model.vocab_size");
  const std::string kind = s.value("--tokenizer-type").value_or("GPT2BPETokenizer");
  note_added_tokens(s, kind);
  const std::string unknown =
      "the tokenizer's number of ids is not among the flags; set model.vocab_size";
  if (kind == "GPT2BPETokenizer") {
    if (!s.found("model.vocab_size")) s.set("model.vocab_size", int64_t{50257});
    const auto vocabulary = s.value("--vocab-file");
    if (!vocabulary) return;
    const std::string folder = std::filesystem::path(*vocabulary).parent_path().string();
    s.set("data.tokenizer", "gpt2:" + (folder.empty() ? "." : folder));
    const std::filesystem::path words = *vocabulary,
                                merges = s.value("--merge-file").value_or(folder + "/merges.txt");
    const std::string pair = words.filename().string() + " " + merges.filename().string();
    const bool has_names = pair == "vocab.json merges.txt" || pair == "encoder.json vocab.bpe";
    if (!has_names || words.parent_path() != merges.parent_path())
      s.note(
          "--vocab-file",
          "data.tokenizer reads vocab.json and merges.txt, or encoder.json and vocab.bpe, of that "
          "folder; rename the two files accordingly");
  } else if (kind.find("SentencePiece") != std::string::npos || kind == "Llama2Tokenizer") {
    s.set("data.tokenizer", "sentencepiece:" + s.value("--tokenizer-model").value_or(""));
    if (!s.found("model.vocab_size")) s.note("--tokenizer-type", unknown);
  } else if (kind == "HuggingFaceTokenizer" && s.has("--tokenizer-model")) {
    const std::filesystem::path model = *s.value("--tokenizer-model");
    const bool is_file = model.extension() == ".json";
    s.set("data.tokenizer", "hf:" + (is_file ? model : model / "tokenizer.json").string());
    if (!is_file)
      s.note("--tokenizer-model",
             "data.tokenizer reads tokenizer.json of that folder; a model's name on Hugging Face "
             "must become a folder");
    if (!s.found("model.vocab_size")) s.note("--tokenizer-type", unknown);
  } else {
    s.note("--tokenizer-type",
           fmt::format("not there: found '{}', allowed for data.tokenizer: byte, gpt2:FOLDER, "
                       "hf:FILE, sentencepiece:FILE; data sets that are built already need none",
                       kind));
    if (!s.found("model.vocab_size")) s.note("--tokenizer-type", unknown);
  }
}

void note_unknown_end_of_document(Settings& s) {
  if (s.found("data.tokenizer")) return;
  for (const char* flag : {"--reset-position-ids", "--reset-attention-mask", "--eod-mask-loss"})
    if (s.has(flag))
      s.note(flag,
             "needs data.tokenizer, which names the id that ends a document, also for data sets "
             "that are built already; its default is byte, with the id 256");
}

void apply_checkpoint(Settings& s) {
  if (!s.has("--load")) return;
  s.copy("--load", "checkpoint.load");
  if (!s.has("--exit-on-missing-checkpoint")) s.set("checkpoint.load_if_present", true);
}

void apply_optimizer(Settings& s) {
  if (s.found("optimizer.optimizer") == "muon")
    s.set("optimizer.muon_momentum", fmt::format("{}", s.number("--muon-momentum").value_or(0.9)));
  for (const auto& [flag, field] : {std::pair{"--exp-avg-dtype", "optimizer.exp_avg_dtype"},
                                    std::pair{"--exp-avg-sq-dtype", "optimizer.exp_avg_sq_dtype"}})
    if (s.has(flag) && s.has("--use-precision-aware-optimizer")) s.copy(flag, field);
}

/// Notes missing flags for which Megatron-LM has no default.
void note_required(Settings& s) {
  const std::pair<const char*, const char*> required[] = {
      {"--num-layers", "model.num_layers"},
      {"--hidden-size", "model.hidden_size"},
      {"--num-attention-heads", "model.num_attention_heads"},
      {"--seq-length", "model.seq_length"},
      {"--micro-batch-size", "train.micro_batch_size"},
      {"--lr", "optimizer.lr"},
      {"--train-iters", "train.train_iters"}};
  for (const auto& [flag, field] : required)
    if (!s.found(field) && !(std::string(flag) == "--train-iters" && s.has("--train-samples")))
      s.note(flag, fmt::format("not given, and Megatron-LM needs it; {} stays {}, the default here",
                               field, config_field(field).default_value));
}

}  // namespace

void apply_megatron_rules(MegatronSettings& settings) {
  apply_precision(settings);
  apply_activation(settings);
  apply_attention(settings);
  apply_experts(settings);
  apply_pipeline(settings);
  apply_parallel(settings);
  apply_batches(settings);
  apply_data_paths(settings);
  apply_tokenizer(settings);
  note_unknown_end_of_document(settings);
  apply_checkpoint(settings);
  apply_optimizer(settings);
  note_required(settings);
}

}  // namespace lockstep
