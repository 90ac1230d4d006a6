#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

/// Which layers of a model are on which pipeline stage. Pure arithmetic, with Megatron Core's
/// meanings and numbers.
namespace lockstep {

/// A kind of layer on a stage, and its letter in a layout's text.
enum class LayerKind {
  embedding,    ///< E
  transformer,  ///< t
  mtp,          ///< m: a layer for multi-token prediction
  loss,         ///< L: output layer and loss
};

/// Transformer layers [begin, end), counted from 0 over the whole model.
struct LayerRange {
  int64_t begin = 0;
  int64_t end = 0;
  int64_t size() const { return end - begin; }
  bool operator==(const LayerRange&) const = default;
};

/// A model cut into P x V virtual stages; chunk c of rank r is virtual stage c x P + r.
class StageLayout {
 public:
  /// `virtual_stages`: the layers of each, in order. ConfigError: a number of virtual stages that
  /// is 0 or not a multiple of `pipeline`.
  StageLayout(std::vector<std::vector<LayerKind>> virtual_stages, int64_t pipeline);

  int64_t pipeline() const { return pipeline_; }
  int64_t chunks() const { return static_cast<int64_t>(stages_.size()) / pipeline_; }

  /// The following four are about chunk `chunk` of `rank`. UsageError: no such rank or chunk.
  const std::vector<LayerKind>& stage(int64_t rank, int64_t chunk) const;
  LayerRange layers(int64_t rank, int64_t chunk) const;
  bool has_embedding(int64_t rank, int64_t chunk) const;
  bool has_loss(int64_t rank, int64_t chunk) const;

  /// Transformer layers of all stages.
  int64_t num_layers() const;

  /// ConfigError unless the embedding comes first and the loss last, each once, with `num_layers`
  /// transformer layers and then `num_mtp_layers` MTP layers between them, the latter together in
  /// the last chunk of one rank.
  void validate(int64_t num_layers, int64_t num_mtp_layers = 0) const;

  /// The text of the layout, without shortcuts: "Et|tt|tt|tL".
  std::string to_string() const;

 private:
  size_t index(int64_t rank, int64_t chunk) const;
  int64_t count(LayerKind kind) const;

  std::vector<std::vector<LayerKind>> stages_;
  int64_t pipeline_;
};

/// Reads a layout's text: letters of LayerKind; '|' between virtual stages, which may be empty;
/// "t*4" for "tttt", "(tt|)*2" for "tt|tt|"; commas mean nothing. "Et*3|(tt|)*29,m|L" is one of 32
/// virtual stages. ConfigError, with the position: another character, a repetition without a number
/// from 1 to 99999, parentheses that do not match or are not repeated, more than 2^17 layers and
/// bars; otherwise as StageLayout's constructor.
StageLayout parse_stage_layout(const std::string& text, int64_t pipeline);

/// How to cut a model without a layout: evenly, or evenly except for the first or the last rank.
struct LayerSplit {
  int64_t num_layers = 1;
  int64_t pipeline = 1;
  int64_t virtual_pipeline = 1;
  /// Transformer layers of the first and of the last rank, over all of its chunks.
  std::optional<int64_t> num_layers_in_first_pipeline_stage = {};
  std::optional<int64_t> num_layers_in_last_pipeline_stage = {};
  /// The embedding, or the loss, takes the place of one transformer layer on its stage.
  bool account_for_embedding_in_pipeline_split = false;
  bool account_for_loss_in_pipeline_split = false;
};

/// ConfigError, naming the fields: a size below 1 (of one rank's layers below 0), more than 2^17
/// layers or stages, layers that do not divide evenly among the ranks, or a rank's layers among its
/// chunks, a number of layers for the first or last rank together with an account_for field or with
/// too few or too many layers left for the others.
StageLayout split_layers(const LayerSplit& split);

}  // namespace lockstep
