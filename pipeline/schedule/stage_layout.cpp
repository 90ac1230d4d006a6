#include "lockstep/pipeline/stage_layout.h"

#include <algorithm>
#include <utility>

#include "lockstep/core/check.h"
#include "lockstep/core/counted.h"

namespace lockstep {
namespace {

constexpr std::string_view kLetters = "EtmL";
constexpr int64_t kMaxLayers = int64_t{1} << 17;

void check_size(const char* name, int64_t size, int64_t least = 1) {
  require<ConfigError>(size >= least && size <= kMaxLayers, "{}: found {}, allowed: {} to {}", name,
                       size, least, kMaxLayers);
}

/// Transformer layers of each rank, or places for layers if the embedding or the loss takes one.
std::vector<int64_t> even_ranks(const LayerSplit& split) {
  const bool embedding = split.account_for_embedding_in_pipeline_split;
  const bool loss = split.account_for_loss_in_pipeline_split;
  const int64_t places = split.num_layers + (embedding ? 1 : 0) + (loss ? 1 : 0);
  require<ConfigError>(places % split.pipeline == 0,
                       "num_layers ({}){}{} must be divisible by pipeline_model_parallel_size ({})",
                       split.num_layers, embedding ? " + 1 for the embedding" : "",
                       loss ? " + 1 for the loss" : "", split.pipeline);
  return std::vector<int64_t>(static_cast<size_t>(split.pipeline), places / split.pipeline);
}

std::vector<int64_t> uneven_ranks(const LayerSplit& split) {
  require<ConfigError>(
      !split.account_for_embedding_in_pipeline_split && !split.account_for_loss_in_pipeline_split,
      "num_layers_in_first_pipeline_stage and num_layers_in_last_pipeline_stage: "
      "found beside account_for_embedding_in_pipeline_split or "
      "account_for_loss_in_pipeline_split, allowed: one kind of them");
  const auto first = split.num_layers_in_first_pipeline_stage;
  const auto last = split.num_layers_in_last_pipeline_stage;
  if (first) check_size("num_layers_in_first_pipeline_stage", *first, 0);
  if (last) check_size("num_layers_in_last_pipeline_stage", *last, 0);
  const int64_t others = split.pipeline - (first ? 1 : 0) - (last ? 1 : 0);
  const int64_t left = split.num_layers - first.value_or(0) - last.value_or(0);
  require<ConfigError>(others != 0 || left == 0,
                       "num_layers_in_first_pipeline_stage ({}) and "
                       "num_layers_in_last_pipeline_stage ({}): found {} on the only stages, "
                       "allowed: num_layers ({})",
                       first ? std::to_string(*first) : "unset",
                       last ? std::to_string(*last) : "unset",
                       counted(split.num_layers - left, "layer"), split.num_layers);
  require<ConfigError>(
      others == 0 || (others > 0 && left >= 0 && left % others == 0),
      "num_layers ({}) leaves {} for the {} beside "
      "num_layers_in_first_pipeline_stage ({}) and "
      "num_layers_in_last_pipeline_stage ({}), allowed: a multiple of their number",
      split.num_layers, left, counted(others, "rank"), first ? std::to_string(*first) : "unset",
      last ? std::to_string(*last) : "unset");
  std::vector<int64_t> ranks(static_cast<size_t>(split.pipeline), others == 0 ? 0 : left / others);
  if (first) ranks.front() = *first;
  if (last) ranks.back() = *last;
  return ranks;
}

/// Expands a layout's text into letters and bars.
class LayoutParser {
 public:
  explicit LayoutParser(const std::string& text) : text_(text) {}

  std::string expanded() {
    std::vector<std::string> open = {""};  // the whole, then each group in parentheses
    for (; !at_end(); skip_commas()) {
      const char next = text_[at_];
      if (next == '(') {
        open.emplace_back();
        ++at_;
      } else if (next == ')') {
        if (open.size() == 1 || open.back().empty()) fail_here("a group, as in (tt|)*2");
        ++at_;
        const std::string group = std::move(open.back());
        open.pop_back();
        append(open.back(), group, repetition(true));
      } else if (next == '|' || kLetters.find(next) != std::string_view::npos) {
        ++at_;
        append(open.back(), std::string(1, next), repetition(false));
      } else {
        fail_here("E, t, m, L, |, (, ) and comma, and * after one of them");
      }
    }
    if (open.size() > 1) fail_here("a ')' for each '('");
    return open.back();
  }

 private:
  bool at_end() const { return at_ == text_.size(); }

  void skip_commas() {
    while (!at_end() && text_[at_] == ',') ++at_;
  }

  [[noreturn]] void fail_here(const char* allowed) const {
    fail<ConfigError>("pipeline layout '{}', position {}: found {}, allowed: {}", text_, at_,
                      at_end() ? "its end" : fmt::format("'{}'", text_[at_]), allowed);
  }

  /// The number after a '*'; 1 if there is none and it is not `required`.
  size_t repetition(bool required) {
    skip_commas();
    if (at_end() || text_[at_] != '*') {
      if (required) fail_here("'*' and a number behind ')'");
      return 1;
    }
    ++at_;
    skip_commas();
    const size_t begin = at_;
    size_t number = 0;
    for (; !at_end() && text_[at_] >= '0' && text_[at_] <= '9' && at_ - begin < 6; ++at_)
      number = number * 10 + static_cast<size_t>(text_[at_] - '0');
    if (number > 0 && number <= 99999) return number;
    at_ = begin;
    fail_here("a number from 1 to 99999 behind '*'");
  }

  void append(std::string& to, const std::string& part, size_t times) const {
    require<ConfigError>(to.size() + part.size() * times <= kMaxLayers,
                         "pipeline layout '{}': more than {} layers and bars", text_, kMaxLayers);
    for (size_t i = 0; i < times; ++i) to += part;
  }

  const std::string& text_;
  size_t at_ = 0;
};

}  // namespace

StageLayout::StageLayout(std::vector<std::vector<LayerKind>> virtual_stages, int64_t pipeline)
    : stages_(std::move(virtual_stages)), pipeline_(pipeline) {
  check_size("pipeline_model_parallel_size", pipeline);
  require<ConfigError>(!stages_.empty() && static_cast<int64_t>(stages_.size()) % pipeline == 0,
                       "pipeline layout '{}': found {}, allowed: a multiple of "
                       "pipeline_model_parallel_size ({})",
                       to_string(), counted(static_cast<int64_t>(stages_.size()), "stage"),
                       pipeline);
}

size_t StageLayout::index(int64_t rank, int64_t chunk) const {
  require<UsageError>(rank >= 0 && rank < pipeline_ && chunk >= 0 && chunk < chunks(),
                      "rank {}, chunk {} of a pipeline of {} ranks with {} chunks: no such stage",
                      rank, chunk, pipeline_, chunks());
  return static_cast<size_t>(chunk * pipeline_ + rank);
}

const std::vector<LayerKind>& StageLayout::stage(int64_t rank, int64_t chunk) const {
  return stages_[index(rank, chunk)];
}

LayerRange StageLayout::layers(int64_t rank, int64_t chunk) const {
  const size_t stage = index(rank, chunk);
  int64_t begin = 0, end = 0;
  for (size_t i = 0; i <= stage; ++i) {
    begin = end;
    end += std::count(stages_[i].begin(), stages_[i].end(), LayerKind::transformer);
  }
  return {begin, end};
}

bool StageLayout::has_embedding(int64_t rank, int64_t chunk) const {
  const auto& kinds = stage(rank, chunk);
  return std::count(kinds.begin(), kinds.end(), LayerKind::embedding) > 0;
}

bool StageLayout::has_loss(int64_t rank, int64_t chunk) const {
  const auto& kinds = stage(rank, chunk);
  return std::count(kinds.begin(), kinds.end(), LayerKind::loss) > 0;
}

int64_t StageLayout::num_layers() const { return count(LayerKind::transformer); }

int64_t StageLayout::count(LayerKind kind) const {
  int64_t sum = 0;
  for (const auto& stage : stages_) sum += std::count(stage.begin(), stage.end(), kind);
  return sum;
}

void StageLayout::validate(int64_t num_layers, int64_t num_mtp_layers) const {
  const auto check = [&](LayerKind kind, const char* name, int64_t wanted) {
    require<ConfigError>(count(kind) == wanted,
                         "pipeline layout '{}': found {} {} ({}), allowed: {}", to_string(),
                         count(kind), name, kLetters[static_cast<size_t>(kind)], wanted);
  };
  check(LayerKind::embedding, "embeddings", 1);
  check(LayerKind::loss, "losses", 1);
  check(LayerKind::transformer, "layers", num_layers);
  check(LayerKind::mtp, "MTP layers", num_mtp_layers);
  std::vector<LayerKind> all;
  int64_t with_mtp = 0, last_with_mtp = 0;
  for (size_t i = 0; i < stages_.size(); ++i) {
    all.insert(all.end(), stages_[i].begin(), stages_[i].end());
    if (std::count(stages_[i].begin(), stages_[i].end(), LayerKind::mtp) == 0) continue;
    ++with_mtp;
    last_with_mtp = static_cast<int64_t>(i);
  }
  require<ConfigError>(std::is_sorted(all.begin(), all.end()),
                       "pipeline layout '{}': allowed: first the embedding (E), then layers (t), "
                       "MTP layers (m) and the loss (L)",
                       to_string());
  require<ConfigError>(
      with_mtp == 0 || (with_mtp == 1 && last_with_mtp / pipeline_ + 1 == chunks()),
      "pipeline layout '{}': MTP layers (m) must stand together in the last chunk of one rank",
      to_string());
}

std::string StageLayout::to_string() const {
  std::string text;
  for (size_t i = 0; i < stages_.size(); ++i) {
    if (i > 0) text += '|';
    for (const LayerKind kind : stages_[i]) text += kLetters[static_cast<size_t>(kind)];
  }
  return text;
}

StageLayout parse_stage_layout(const std::string& text, int64_t pipeline) {
  std::vector<std::vector<LayerKind>> stages(1);
  for (const char letter : LayoutParser(text).expanded())
    if (letter == '|')
      stages.emplace_back();
    else
      stages.back().push_back(static_cast<LayerKind>(kLetters.find(letter)));
  return StageLayout(std::move(stages), pipeline);
}

StageLayout split_layers(const LayerSplit& split) {
  check_size("num_layers", split.num_layers);
  check_size("pipeline_model_parallel_size", split.pipeline);
  check_size("virtual_pipeline_model_parallel_size", split.virtual_pipeline);
  const int64_t chunks = split.virtual_pipeline, stages = split.pipeline * chunks;
  check_size("pipeline_model_parallel_size x virtual_pipeline_model_parallel_size", stages);
  const bool uneven =
      split.num_layers_in_first_pipeline_stage || split.num_layers_in_last_pipeline_stage;
  const std::vector<int64_t> ranks = uneven ? uneven_ranks(split) : even_ranks(split);
  std::vector<std::vector<LayerKind>> kinds;
  for (int64_t stage = 0; stage < stages; ++stage) {
    const int64_t places = ranks[static_cast<size_t>(stage % split.pipeline)];
    require<ConfigError>(places % chunks == 0,
                         "pipeline rank {}: {} layers must be divisible by "
                         "virtual_pipeline_model_parallel_size ({})",
                         stage % split.pipeline, places, chunks);
    int64_t layers = places / chunks;
    if (stage == 0 && split.account_for_embedding_in_pipeline_split) --layers;
    if (stage + 1 == stages && split.account_for_loss_in_pipeline_split) --layers;
    kinds.emplace_back(static_cast<size_t>(layers), LayerKind::transformer);
  }
  kinds.front().insert(kinds.front().begin(), LayerKind::embedding);
  kinds.back().push_back(LayerKind::loss);
  return StageLayout(std::move(kinds), split.pipeline);
}

}  // namespace lockstep
