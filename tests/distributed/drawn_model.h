#pragma once

#include <map>
#include <optional>
#include <string>
#include <vector>

#include "lockstep/core/config.h"
#include "lockstep/core/parameters.h"
#include "lockstep/tests/distributed/drawn_params.h"

/// A model for DistributedDataParallel that is drawn from a seed: on every axis, in one or two
/// chunks, on some stages or all; and what one process says its gradients must be.
namespace lockstep::testing {

/// Where a rank is in the grids, by plain arithmetic: tp, cp, dp, pp and etp, ep, edp, pp, of which
/// the first axis varies fastest.
class GridArithmetic {
 public:
  explicit GridArithmetic(const ParallelSizes& sizes);

  /// On tp, cp, dp, or for experts on etp, ep, edp.
  GridPlace place(int64_t rank, bool expert) const;
  int64_t stage(int64_t rank) const;
  int64_t stages() const { return dense_[3]; }
  /// Of the ranks that split samples or sequences.
  int64_t dp_cp() const { return dense_[1] * dense_[2]; }
  int64_t world() const { return dense_[0] * dp_cp() * stages(); }
  /// Those that differ from `rank` on axis `axis` alone, where 3 is pp.
  RankList along(int64_t rank, size_t axis, bool expert) const;

 private:
  const std::vector<int64_t>& sizes(bool expert) const { return expert ? expert_ : dense_; }
  std::vector<int64_t> dense_, expert_;
};

/// A parameter, and on which stages it lives.
struct ModelParam {
  struct Copy {
    int64_t stage = 0;
    int64_t chunk = 0;
  };
  DrawnParam drawn;  ///< axes: tp, cp, dp, or for experts etp, ep, edp
  bool expert = false;
  std::optional<Tie> tie = {};
  /// Set where all stages hold it and have terms of it.
  std::optional<GradientState> over_stages = {};
  std::vector<Copy> copies = {};

  ParamDescription description() const;
  std::string text() const;
};

struct DrawnModel {
  DrawnModel(uint32_t seed, const ParallelSizes& sizes);

  /// By what the sum over ranks and tokens of the gradient of `param` is divided, its own means
  /// left aside.
  int64_t loss_divisor() const;
  /// By what it is divided in all, as far as rounding goes.
  int64_t divisor(const ModelParam& param) const;
  /// The final gradient of the part that `rank` holds, wherever the copies are.
  at::Tensor gradient(const ModelParam& param, int64_t rank, int64_t step) const;
  /// The 2-norm of the gradient of the whole model, each element once.
  double gradient_norm(int64_t step) const;
  /// Tokens of all micro-batches of `rank`.
  int64_t tokens(int64_t rank) const;
  std::string text() const;

  GridArithmetic grid;
  DistributedDataParallelConfig config;
  int64_t microbatches = 1;
  int64_t chunks = 1;
  bool per_token = false;
  bool counted = false;           ///< set_num_microbatches() in place of no_sync()
  bool force_all_reduce = false;  ///< in the second step
  bool even_tokens = false;       ///< so that their sum may be a power of two
  std::vector<ModelParam> params;

 private:
  void draw_config(Draw& draw, const ParallelSizes& sizes);
  /// Something that every rank uses in every micro-batch of every chunk.
  void add_anchor(int64_t stage, int64_t chunk);
  void add_param(Draw& draw);
  void draw_axes(Draw& draw, ModelParam& param);
  void draw_stages(Draw& draw, ModelParam& param);
  void draw_tie(Draw& draw, ModelParam& param);

  uint32_t seed_;
};

}  // namespace lockstep::testing
