#pragma once

// Internal.

#include <cstdint>
#include <string>
#include <vector>

#include "lockstep/core/config.h"

/// Which tensors of a GPTModel correspond to which of Hugging Face's transformers, as data. No
/// libtorch.
namespace lockstep {

/// How one of our tensors becomes one or several of theirs.
enum class WeightForm {
  same,
  transposed,    ///< [out, in] -> [in, out]
  fused_qkv,     ///< group by group -> queries, keys, values, transposed if it is a matrix
  separate_qkv,  ///< group by group -> three tensors
  stacked,       ///< several matrices on top of each other -> as many tensors
  rows,          ///< several vectors, each a row -> as many tensors
  pairs  ///< the last `rotated` rows of each of `blocks`: i and i + rotated / 2 -> 2 i and 2 i + 1
};

struct WeightRule {
  std::string ours;  ///< global name of the parameter or registered buffer
  std::vector<std::string> theirs;
  WeightForm form = WeightForm::same;
  int64_t blocks = 1;
  int64_t rotated = 0;
};

/// In the order of conversion. `model` is resolved. ConfigError as for hugging_face_family().
std::vector<WeightRule> weight_rules(const TransformerConfig& model);

/// The experts' bias of the router of layer `layer`, a registered buffer.
std::string expert_bias_name(int64_t layer);

}  // namespace lockstep
