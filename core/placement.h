#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <variant>
#include <vector>

/// Where a tensor lives on a mesh of ranks, axis by axis.
namespace lockstep {

/// The named axes along which ranks are laid out. Dense parameters live on tp, cp, dp, pp; expert
/// parameters on etp, ep, edp, pp.
enum class MeshAxis { tp, cp, dp, pp, etp, ep, edp };

/// "tp", "cp", ...
const char* to_string(MeshAxis axis);

/// Every rank of the axis holds the whole tensor.
struct Replicate {
  bool operator==(const Replicate&) const = default;
};

/// The ranks of the axis hold consecutive pieces along dimension `dim`, cut as torch.chunk does.
struct Shard {
  int64_t dim = 0;
  bool operator==(const Shard&) const = default;
};

/// How the terms of a Partial tensor are combined; named as in PyTorch.
enum class PartialOp { sum, avg, max, min };

/// "sum", "avg", "max", "min"
const char* to_string(PartialOp op);

/// Each rank of the axis holds one term; the tensor is their sum (or mean, maximum, minimum).
struct Partial {
  PartialOp op = PartialOp::sum;
  bool operator==(const Partial&) const = default;
};

using Placement = std::variant<Replicate, Shard, Partial>;

/// "Replicate", "Shard(0)", "Partial(sum)"
std::string to_string(const Placement& placement);

/// "(Shard(0), Replicate)": one placement for each axis of a mesh.
std::string to_string(const std::vector<Placement>& placements);

/// In which state a gradient leaves the local backward, along one axis. It is declared where the
/// layer registers the parameter; the placement of the weight does not tell it. (A layer norm that
/// is replicated over tp is `complete` there without sequence parallelism and `partial_sum` with
/// it.)
enum class GradientState {
  complete,      ///< the same on all ranks of the axis already; reducing it would multiply it
  partial_sum,   ///< each rank holds a term of the sum
  partial_mean,  ///< each rank holds a term of the mean
};

/// "complete", "partial-sum", "partial-mean"
const char* to_string(GradientState state);

/// All that the framework needs to know of one parameter. Buffers, collectives, norms, optimizer
/// shards and initial weights are worked out from it; nothing else looks at the layer.
struct ParamDescription {
  /// Placement of the weight; axes that are not listed have Replicate.
  std::map<MeshAxis, Placement> placements = {};

  /// State of the local gradient; axes that are not listed have default_gradient_state().
  std::map<MeshAxis, GradientState> gradient_states = {};

  /// An expert parameter lives on the axes etp, ep, edp and pp instead of tp, cp, dp and pp.
  bool is_expert = false;

  /// Decoupled weight decay applies. False for biases and normalization weights.
  bool apply_weight_decay = true;

  Placement placement(MeshAxis axis) const;
  GradientState gradient_state(MeshAxis axis) const;

  /// For a loss that is summed over tokens: `partial_sum` on the axes that split the batch or the
  /// sequence (dp and cp, for experts edp), `complete` on the others.
  GradientState default_gradient_state(MeshAxis axis) const;

  /// One line: "dense, Shard(0) over tp, partial-sum over cp dp", for reports and for comparing
  /// ranks.
  std::string to_string() const;
};

}  // namespace lockstep
