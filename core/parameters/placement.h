#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

/// Where a tensor lives on a mesh of ranks, axis by axis.
namespace lockstep {

/// The named axes along which ranks are laid out. Dense parameters live on tp, cp, dp, pp; expert
/// parameters on etp, ep, edp, pp.
enum class MeshAxis { tp, cp, dp, pp, etp, ep, edp };

/// "tp", "cp", ...
const char* to_string(MeshAxis axis);

/// Whether the ranks of the axis work on different samples or tokens with the same weights: dp, cp
/// and edp.
bool splits_batch(MeshAxis axis);

/// Every rank of the axis holds the whole tensor.
struct Replicate {
  bool operator==(const Replicate&) const = default;
};

/// The ranks of the axis hold consecutive pieces along dimension `dim`, cut as torch.chunk does.
struct Shard {
  int64_t dim = 0;
  bool operator==(const Shard&) const = default;
};

/// How the terms of a Partial tensor or of a collective are combined. `avg` is PyTorch's name for
/// the average.
enum class ReduceOp { sum, average, max, min, avg = average };

/// "sum", "average", "max", "min"
const char* to_string(ReduceOp op);

/// Each rank of the axis holds one term; the tensor is their sum (or mean, maximum, minimum).
struct Partial {
  ReduceOp op = ReduceOp::sum;
  bool operator==(const Partial&) const = default;
};

using Placement = std::variant<Replicate, Shard, Partial>;

/// As PyTorch writes it: "Replicate", "Shard(0)", "Partial(sum)", "Partial(avg)"
std::string to_string(const Placement& placement);

/// "(Shard(0), Replicate)": one placement for each axis of a mesh.
std::string to_string(const std::vector<Placement>& placements);

/// The state of a gradient after the local backward, along one axis. The layer declares it when it
/// registers the parameter; it cannot be derived from the placement of the weight. (A layer norm
/// that is replicated over tp is `complete` there without sequence parallelism and `partial_sum`
/// with it.)
enum class GradientState {
  complete,      ///< already the same on all ranks of the axis; a sum would multiply it
  partial_sum,   ///< each rank holds a term of the sum
  partial_mean,  ///< each rank holds a term of the mean
  undeclared,    ///< not declared, and possibly a term of a sum; every front refuses it
};

/// "complete", "partial-sum", "partial-mean", "undeclared"
const char* to_string(GradientState state);

/// Pipeline stages that hold a copy of one parameter.
enum class TiedStages { all, first_and_last, first };

/// "all stages", "the first and the last stage", "the first stage"
const char* to_string(TiedStages stages);

/// One parameter of the model that has several copies, on different pipeline stages or in different
/// model chunks of a rank. Every copy gets the sum of the gradients of all copies. Each of the
/// named stages must hold at least one copy, no copy may be frozen, and all must start from the
/// same values (call fill_normal() with the same name for each).
struct Tie {
  std::string name = {};  ///< the same for all copies: "word_embeddings"
  TiedStages stages = TiedStages::first_and_last;
  bool operator==(const Tie&) const = default;
};

/// Which pipeline stages hold a parameter that is not tied.
enum class StageCopies {
  one,  ///< this stage alone; the others hold other parameters
  all,  ///< each of them holds a copy; all copies start from the same values. For copies in
        ///< several model chunks of a rank see Tie.
};

/// How the optimizer may treat a parameter. Muon (optimizer.optimizer = muon) updates matrices
/// as a whole; other optimizers update all parameters element by element.
enum class ParamUpdate {
  elementwise,
  matrix,  ///< at least two dimensions; the last one is the columns
};

/// Everything that the framework needs to know about one parameter. Buffers, collectives, norms,
/// optimizer shards and initial weights are derived from it; nothing else looks at the layer.
struct ParamDescription {
  /// Placement of the weight; axes that are not listed have Replicate. Only tp, etp and ep may cut
  /// it. If two axes cut one dimension, the one that MeshAxis lists first cuts first: etp before
  /// ep. Over pp, Replicate has no meaning: see `stages` and `tie`.
  std::map<MeshAxis, Placement> placements = {};

  /// State of the local gradient; axes that are not listed have default_gradient_state().
  std::map<MeshAxis, GradientState> gradient_states = {};

  /// An expert parameter lives on the axes etp, ep, edp and pp instead of tp, cp, dp and pp.
  bool is_expert = false;

  /// Which stages hold the parameter. A gradient that is partial over pp implies `all`; for a tied
  /// parameter, `tie` names the stages.
  StageCopies stages = StageCopies::one;

  /// Set if the parameter is tied to copies elsewhere.
  std::optional<Tie> tie = {};

  /// Decoupled weight decay applies. False for biases and normalization weights.
  bool apply_weight_decay = true;

  /// A word embedding table or output layer weight. These may have their own learning rate
  /// (optimizer.decoupled_lr).
  bool is_embedding_or_output = false;

  /// Set if dimension 0 of the whole parameter ends with padding rows whose number depends on the
  /// layout (the vocabulary): the number of rows before the padding. Padding has no gradient, and a
  /// checkpoint leaves it out.
  std::optional<int64_t> unpadded_rows = {};

  ParamUpdate update = ParamUpdate::elementwise;

  /// Set if dimension 0 of the whole parameter holds several matrices in repeating blocks: the
  /// number of rows of each matrix in a block. Example: the queries, the key and the value of a
  /// query group.
  std::vector<int64_t> rows_of_matrices = {};

  /// The axes that the parameter lives on: tp, cp, dp, pp; for an expert etp, ep, edp, pp.
  std::array<MeshAxis, 4> axes() const;
  bool lives_on(MeshAxis axis) const;

  Placement placement(MeshAxis axis) const;
  GradientState gradient_state(MeshAxis axis) const;

  /// For a loss that is summed over tokens: `partial_sum` on the axes that split the batch or the
  /// sequence (dp and cp, for experts edp), `complete` on the others.
  GradientState default_gradient_state(MeshAxis axis) const;

  /// Whether every pipeline stage holds a copy: `stages` is `all`, or the gradient is partial over
  /// pp.
  bool is_on_all_stages() const;

  /// The same, or the parameter is tied. Such a parameter has a bucket of its own, so that the
  /// shards of its copies line up (see LayoutParam::shared_embedding).
  bool is_on_several_stages() const { return tie || is_on_all_stages(); }

  /// Throws UsageError naming `parameter` if the description contradicts itself: an axis that the
  /// parameter does not live on, a weight that is Partial, a Shard over an axis other than tp, etp
  /// and ep, a gradient that is partial over an axis whose ranks hold different pieces, a tie
  /// without a name, a tie together with copies on all stages or with a gradient that is partial
  /// over pp; or if a gradient is undeclared.
  void validate(std::string_view parameter) const;

  /// One line: "dense, Shard(0) over tp, partial-sum over cp, partial-sum over dp, tied
  /// 'word_embeddings' on the first and the last stage", for reports and for comparing ranks.
  std::string to_string() const;
};

}  // namespace lockstep
