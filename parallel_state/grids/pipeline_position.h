#pragma once

#include <optional>

#include "lockstep/parallel_state/rank_grids.h"

/// The position of a rank in its pipeline. The functions mean the same as the getters of Megatron
/// Core's parallel_state.
namespace lockstep {

/// The stages of one rank's pipeline, as global ranks. Costs the same for any world size.
class PipelinePosition {
 public:
  /// UsageError: a rank outside the world of `grids`.
  PipelinePosition(const RankGrids& grids, int64_t rank);

  /// Index of the rank's stage, 0 ... stages() - 1.
  int64_t stage() const { return stage_; }
  int64_t stages() const { return pipelines_.size(); }
  /// Model chunks of each rank; empty without virtual stages.
  std::optional<int64_t> chunks() const { return chunks_; }

  int64_t first_rank() const { return rank_of(0); }
  int64_t last_rank() const { return rank_of(stages() - 1); }
  /// The rank that holds the next stage; after the last comes the first.
  int64_t next_rank() const { return rank_of((stage_ + 1) % stages()); }
  /// The rank that holds the stage before; before the first comes the last.
  int64_t previous_rank() const { return rank_of((stage_ + stages() - 1) % stages()); }
  /// The rank that holds `stage`. UsageError: no such stage.
  int64_t rank_of(int64_t stage) const { return pipelines_.rank_at(pipeline_, stage); }

  /// Whether the rank holds the first or the last stage, whatever the chunk.
  bool is_first_stage() const { return stage_ == 0; }
  bool is_last_stage() const { return stage_ + 1 == stages(); }
  /// Whether model chunk `chunk` of the rank begins or ends the whole model: chunk 0 on the first
  /// stage begins it, the last chunk on the last stage ends it. Without virtual stages `chunk` may
  /// only be 0. UsageError: no such chunk.
  bool is_first_stage(int64_t chunk) const;
  bool is_last_stage(int64_t chunk) const;

  /// Whether the rank holds a copy of the word embeddings: first or last stage.
  bool in_embedding_group() const { return is_first_stage() || is_last_stage(); }
  /// Whether model chunk `chunk` of the rank holds a copy: the chunk that begins the model on the
  /// first stage, and the one that ends it on the last stage. UsageError: no such chunk.
  bool in_embedding_group(int64_t chunk) const;
  /// Whether the rank holds the position embeddings: first stage.
  bool in_position_embedding_group() const { return is_first_stage(); }

 private:
  void check_chunk(int64_t chunk) const;

  RankGroups pipelines_;
  std::optional<int64_t> chunks_;
  int64_t pipeline_;
  int64_t stage_;
};

}  // namespace lockstep
