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
  summed,          ///< an all-reduce adds the ranks' terms
  sequence_chunk,  ///< a reduce-scatter adds them; a rank keeps its chunk of dimension 0
};

/// The name of a layer and the labels of its collectives. It is made with the layer; copies share
/// the texts, so that a step makes none.
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
  /// Forward, too, overlaps communication with products, in parts: see below.
  bool overlap = false;
  /// Autograd reaches the weight through this call alone, so that its gradient can be deferred, or
  /// added to weight.grad() without those of other uses.
  bool weight_used_once = true;
  /// Takes the weight's gradient while it defers, if weight_used_once is set and the input requires
  /// a gradient. May be null.
  std::shared_ptr<DeferredGradients> deferred = {};
  /// Multiplies in 8-bit floats; null: in the dtype of the operands.
  std::shared_ptr<const Fp8Layer> fp8 = {};
  LinearLabel label = {};
};

/// input W^T (+ bias), where W is `weight` [..., in] with its leading dimensions taken together
/// (out rows) and `bias`, which may be undefined, has `out` elements of the weight's dtype, which
/// is a floating-point one; otherwise UsageError. `input` [..., in], with
/// LinearInput::sequence_chunk [sequence / ranks, ..., in] -> [..., out], or [sequence, ..., out];
/// with LinearOutput::sequence_chunk [sequence, ..., in] -> [sequence / ranks, ..., out]. If
/// outputs are summed, the bias is added once, to the sum.
///
/// The group's collectives; in backward those of the input overlap a matrix product:
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
/// With `overlap` the collectives of forward are cut into two halves of the sequence: of each
/// rank's chunk or, with `summed`, of all of it. A single position is not cut. Both all-gathers
/// start at once; the rank multiplies its own chunk while they run, and then what has arrived from
/// the others. The first half of an output is sent as soon as it is computed, while the second half
/// is being computed. Bytes and backward are the same. So are results, except for rounding: a
/// matrix library may add up a row in another order if there are fewer rows. With `fp8`, forward
/// sends in one piece if scales are those of whole operands; see Fp8Layer::scales_parts().
///
/// If a wrapper such as DistributedDataParallel waits for weight.grad() (a post-accumulate-gradient
/// hook), the product adds the weight's gradient straight into it, provided that weight.grad() has
/// the operands' dtype and weight_used_once is set, or that it is fp32 and the operands are bf16 or
/// fp16. Autograd then calls the hook without a gradient, or with those of other uses alone. A
/// weight that has, or had, a hook of its own (Tensor::register_hook()) is an exception: the hook
/// gets the gradient, with `deferred` when that is computed, and what it returns is accumulated.
/// That holds for parallel_linear_cross_entropy(), too.
///
/// What is not differentiated is neither kept nor computed nor sent: ranks of a group that train
/// different weights send different things, and wait for each other until the timeout. The fronts
/// compare what is trained. torch::autograd::grad() gives this rank's own gradient of the weight,
/// and accumulates nothing; with `deferred` it does not find the weight in the graph. Backward with
/// create_graph is a UsageError. UsageError too, with the label and before anything is sent: an
/// input of another width or dtype; one that is gathered while the output is summed; a weight that
/// one backward reaches twice while `deferred` is set and a wrapper, or a hook of the weight, waits
/// for its gradient; a SplitBackward while `deferred` is set.
at::Tensor parallel_linear(const at::Tensor& input, const at::Tensor& weight,
                           const at::Tensor& bias, const ParallelLinearOptions& options);

}  // namespace lockstep
