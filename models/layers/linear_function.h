#pragma once

#include <memory>
#include <string>

#include <ATen/core/Tensor.h>

#include "lockstep/core/deferred_gradients.h"
#include "lockstep/parallel_state/process_group.h"

namespace lockstep {

class Fp8Layer;

/// What a linear layer does with its input over the ranks of its group.
enum class LinearInput {
  own,             ///< nothing is sent
  copied,          ///< the same on all ranks; backward adds the terms of its gradient
  sequence_chunk,  ///< this rank's chunk of dimension 0: it is gathered, its gradient is
                   ///< reduce-scattered
};

/// What a linear layer does with its output over the ranks of its group.
enum class LinearOutput {
  own,             ///< nothing is sent
  summed,          ///< an all-reduce adds the terms that the ranks have
  sequence_chunk,  ///< a reduce-scatter does, of which a rank keeps its chunk of dimension 0
};

/// The name of a layer, and what its collectives are called. Made with the layer; copies share the
/// texts, so that a step makes none.
class LinearLabel {
 public:
  // NOLINTBEGIN(google-explicit-constructor): options are written with a text
  LinearLabel(const char* layer = "") : LinearLabel(std::string(layer)) {}
  LinearLabel(const std::string& layer)
      : texts_(std::make_shared<const Texts>(Texts{
            layer, layer + " input", layer + " input again", "gradient of " + layer + " input",
            layer + " output", "gradient of " + layer + " output"})) {}
  // NOLINTEND(google-explicit-constructor)

  const std::string& layer() const { return texts_->layer; }
  const std::string& input() const { return texts_->input; }
  const std::string& input_again() const { return texts_->input_again; }
  const std::string& input_gradient() const { return texts_->input_gradient; }
  const std::string& output() const { return texts_->output; }
  const std::string& output_gradient() const { return texts_->output_gradient; }

 private:
  struct Texts {
    std::string layer, input, input_again, input_gradient, output, output_gradient;
  };
  std::shared_ptr<const Texts> texts_;
};

struct ParallelLinearOptions {
  ProcessGroup group;
  LinearInput input = LinearInput::own;
  LinearOutput output = LinearOutput::own;
  /// Forward, too, sends beside products, in parts: see below.
  bool overlap = false;
  /// Autograd reaches the weight through this call alone, so that its gradient can be deferred, or
  /// added to weight.grad() without those of other uses.
  bool weight_used_once = true;
  /// Takes the weight's gradient while it defers, where weight_used_once and the input requires a
  /// gradient. May be null.
  std::shared_ptr<DeferredGradients> deferred = {};
  /// Multiplies in 8-bit floats; null: in the dtype of the operands.
  std::shared_ptr<const Fp8Layer> fp8 = {};
  LinearLabel label = {};
};

/// input W^T (+ bias), where W is `weight` [..., in] with its leading dimensions taken together
/// (out rows) and `bias`, which may be undefined, has as many elements of its dtype, which is a
/// floating-point one; else UsageError. `input` [..., in], with
/// LinearInput::sequence_chunk [sequence / ranks, ..., in] -> [..., out], or [sequence, ..., out];
/// with LinearOutput::sequence_chunk [sequence, ..., in] -> [sequence / ranks, ..., out]. Where
/// outputs are summed, the bias is added once, to the sum.
///
/// The group's collectives; in backward those of the input run beside a matrix product:
///
///     input            forward          backward
///     own              nothing          nothing
///     copied           nothing          all-reduce of the input's gradient, beside the weight's
///     sequence_chunk   all-gather       all-gather of the input again (only the chunk is kept),
///                                       beside the product for the input's gradient; then
///                                       reduce-scatter of that gradient, beside the weight's
///
///     output           forward          backward
///     own              nothing          nothing
///     summed           all-reduce       nothing
///     sequence_chunk   reduce-scatter   all-gather of the output's gradient
///
/// With `overlap` those of forward are cut into two halves of the sequence, of each rank's chunk or
/// with `summed` of all of it; a single position is not cut. Both all-gathers start at once, and
/// the rank multiplies its own chunk while they travel, then what has arrived of the others. The
/// first half of an output is sent as soon as it is computed, while the second one is. Bytes and
/// backward are the same. So are results but for rounding: a matrix library may add up a row of
/// fewer rows in another order. With `fp8` forward sends at once where scales are those of whole
/// operands; see Fp8Layer::scales_parts().
///
/// Where a wrapper such as DistributedDataParallel waits for weight.grad() (a
/// post-accumulate-gradient hook), the product adds the weight's gradient straight into it, if that
/// has the operands' dtype and weight_used_once, or is in fp32 under bf16 and fp16 operands;
/// autograd then calls the hook without a gradient, or with those of other uses alone.
///
/// What is not differentiated is neither kept nor computed nor sent: ranks of a group that train
/// different weights send different things, and wait for each other until the timeout. The fronts
/// compare what is trained. torch::autograd::grad() gives this rank's own gradient of the weight,
/// and accumulates nothing; with `deferred` it does not find the weight in the graph. Backward with
/// create_graph is a UsageError; so is, by the label and before anything is sent, an input of
/// another width or dtype, one that is gathered where the output is summed, and a weight that one
/// backward reaches twice while `deferred` is set and a wrapper waits for its gradient.
at::Tensor parallel_linear(const at::Tensor& input, const at::Tensor& weight,
                           const at::Tensor& bias, const ParallelLinearOptions& options);

}  // namespace lockstep
