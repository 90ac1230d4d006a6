#pragma once

#include <map>
#include <optional>
#include <string>
#include <vector>

#include "lockstep/core/config.h"
#include "lockstep/core/parameters.h"
#include "lockstep/tests/distributed/drawn_params.h"

/// A model for DistributedDataParallel, drawn from a seed: parameters on every axis, in one or two
/// chunks, on some stages or all. Also its gradients as one process computes them.
namespace lockstep::testing {

/// A rank's position in the grids, by plain arithmetic: tp, cp, dp, pp and etp, ep, edp, pp. The
/// first axis varies fastest.
class GridArithmetic {
 public:
  explicit GridArithmetic(const ParallelSizes& sizes);

  /// Position on tp, cp, dp, or for experts on etp, ep, edp.
  GridPlace place(int64_t rank, bool expert) const;
  int64_t stage(int64_t rank) const;
  int64_t stages() const { return dense_[3]; }
  /// Number of ranks that split samples or sequences.
  int64_t dp_cp() const { return dense_[1] * dense_[2]; }
  int64_t world() const { return dense_[0] * dp_cp() * stages(); }
  /// The ranks that differ from `rank` only on axis `axis`; axis 3 is pp.
  RankList along(int64_t rank, size_t axis, bool expert) const;

 private:
  const std::vector<int64_t>& sizes(bool expert) const { return expert ? expert_ : dense_; }
  std::vector<int64_t> dense_, expert_;
};

/// A parameter, and the stages that hold it.
struct ModelParam {
  struct Copy {
    int64_t stage = 0;
    int64_t chunk = 0;
  };
  DrawnParam drawn;  ///< axes: tp, cp, dp, or for experts etp, ep, edp
  bool expert = false;
  std::optional<Tie> tie = {};
  /// Set if all stages hold it and each has a term of its gradient.
  std::optional<GradientState> over_stages = {};
  std::vector<Copy> copies = {};

  ParamDescription description() const;
  std::string text() const;
};

struct DrawnModel {
  DrawnModel(uint32_t seed, const ParallelSizes& sizes);

  /// The divisor of the sum of `param`'s gradient over ranks and tokens, without its own means.
  int64_t loss_divisor() const;
  /// The total divisor of its gradient, for rounding errors.
  int64_t divisor(const ModelParam& param) const;
  /// The final gradient of the part that `rank` holds, summed over all copies.
  at::Tensor gradient(const ModelParam& param, int64_t rank, int64_t step) const;
  /// The 2-norm of the whole model's gradient. Each element counts once.
  double gradient_norm(int64_t step) const;
  /// Tokens in all micro-batches of `rank`.
  int64_t tokens(int64_t rank) const;
  std::string text() const;

  GridArithmetic grid;
  DistributedDataParallelConfig config;
  int64_t microbatches = 1;
  int64_t chunks = 1;
  bool per_token = false;
  bool counted = false;           ///< set_num_microbatches() instead of no_sync()
  bool force_all_reduce = false;  ///< in the second step
  bool even_tokens = false;       ///< so their sum can be a power of two
  std::vector<ModelParam> params;

 private:
  void draw_config(Draw& draw, const ParallelSizes& sizes);
  /// A parameter that every rank uses in every micro-batch of every chunk.
  void add_anchor(int64_t stage, int64_t chunk);
  void add_param(Draw& draw);
  void draw_axes(Draw& draw, ModelParam& param);
  void draw_stages(Draw& draw, ModelParam& param);
  void draw_tie(Draw& draw, ModelParam& param);

  uint32_t seed_;
};

}  // namespace lockstep::testing
