#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include "lockstep/core/config.h"
#include "lockstep/kernels/fp8.h"
#include "lockstep/parallel_state/process_group.h"

namespace lockstep {

/// How linear layers multiply in 8-bit floats; the fields are those of `train`.
struct Fp8Options {
  Fp8Format format = Fp8Format::none;  ///< none: they do not
  Fp8Recipe recipe = Fp8Recipe::delayed;
  int64_t amax_history_len = 1024;  ///< steps
  Fp8AmaxAlgorithm amax_compute_algo = Fp8AmaxAlgorithm::max;
  int64_t margin = 0;
  int64_t num_layers_at_start_in_bf16 = 0, num_layers_at_end_in_bf16 = 0;

  bool enabled() const { return format != Fp8Format::none; }
  /// Whether transformer layer `layer` of `num_layers` multiplies in 8-bit floats.
  bool covers(int64_t layer, int64_t num_layers) const;
};

Fp8Options fp8_options(const TrainConfig& config);

/// An operand of the products of a linear layer.
enum class Fp8Operand { input, weight, output_gradient };
inline constexpr int64_t kFp8Operands = 3;

/// The scales of some layers. With delayed scaling each operand has, in one tensor for all layers,
/// the largest absolute values of the last steps, newest first; the scale that follows from them;
/// and the largest value of this step so far.
class Fp8Scales {
 public:
  /// `sharing`: see Fp8Scaling.
  Fp8Scales(const Fp8Options& options, int64_t layers, c10::Device device, ProcessGroup sharing);

  const at::Tensor& history() const { return history_; }  ///< fp32 [layers, 3, steps]
  const at::Tensor& scales() const { return scales_; }    ///< fp32 [layers, 3]; 0: none yet
  const at::Tensor& largest() const { return largest_; }  ///< fp32 [layers, 3]

  /// Whether layer `layer` has scales. Until then, in the first step, the scales of operands come
  /// from the operands themselves.
  bool is_settled(int64_t layer) const { return settled_[static_cast<size_t>(layer)]; }

  /// The largest of the values `largest` of all ranks that share a micro-batch.
  at::Tensor over_sharing_ranks(const at::Tensor& largest) const;

  /// Ends a step whose largest values over all ranks are `largest`: they join the history, which
  /// gives the next scales. A value that is 0 or not finite leaves a scale as it was. `applied`
  /// (bool [], may be undefined): false leaves the history as it was, except where there is none.
  void advance(const at::Tensor& largest, const at::Tensor& applied);

  /// Call it after history() and scales() were written, for example from a checkpoint of a run that
  /// may have had other options: the scales become those that follow from the history. Waits for
  /// the device.
  void look_again();

 private:
  void follow_history();

  Fp8Options options_;
  ProcessGroup sharing_;
  at::Tensor history_, scales_, largest_;
  std::vector<bool> settled_;
};

/// The products of one linear layer, of `weight` [out, in] and `x` [tokens, in]. Results have the
/// dtype of the operands. Gradients of outputs are e5m2 in the format hybrid; everything else is
/// e4m3.
///
/// With one scale per operand, a matrix and its transpose are the same numbers. With one scale per
/// row, each product has its own, along the rows that it multiplies.
class Fp8Layer {
 public:
  /// `shares_first_scale`: until delayed scales exist, the ranks that have parts of an operand
  /// agree on its scale.
  Fp8Layer(const Fp8Options& options, std::shared_ptr<Fp8Scales> scales, int64_t place,
           bool shares_first_scale)
      : options_(options),
        scales_(std::move(scales)),
        place_(place),
        shares_first_scale_(shares_first_scale) {}

  /// x W^T (+ bias). `notes`: the operands count for the scales of later steps.
  at::Tensor output(const at::Tensor& x, const at::Tensor& weight,
                    const std::optional<at::Tensor>& bias, bool notes) const;

  /// Counts a weight that is not multiplied now for the scales of later steps.
  void note_weight(const at::Tensor& weight) const;

  /// Whether some rows of x have the same scales on their own as within all of x: not with one
  /// scale per tensor, nor with delayed scales in the first step.
  bool scales_parts() const;
  /// The weight, for the products of several parts of x.
  kernels::Fp8Matrix narrowed_weight(const at::Tensor& weight, bool notes) const;
  at::Tensor output(const at::Tensor& x, const kernels::Fp8Matrix& weight,
                    const std::optional<at::Tensor>& bias, bool notes) const;

  /// The gradient [tokens, out] of the output, for the functions below. weight_gradient() may be
  /// called if the weight's gradient is `wanted`. The output's gradient counts for the scales of
  /// later steps.
  kernels::Fp8Matrices narrowed(const at::Tensor& gradient, bool wanted) const;
  /// gradient W, [tokens, in] in `dtype`.
  at::Tensor input_gradient(const kernels::Fp8Matrices& gradient, const at::Tensor& weight,
                            at::ScalarType dtype) const;
  /// gradient^T x, [out, in] in `dtype`.
  at::Tensor weight_gradient(const kernels::Fp8Matrices& gradient, const at::Tensor& x,
                             at::ScalarType dtype) const;

 private:
  kernels::Fp8Matrices matrices(Fp8Operand operand, const at::Tensor& x, kernels::Fp8Sides sides,
                                bool notes) const;
  at::ScalarType format(Fp8Operand operand) const;

  Fp8Options options_;
  std::shared_ptr<Fp8Scales> scales_;  ///< null unless scaling is delayed
  int64_t place_;                      ///< in scales_
  bool shares_first_scale_;
};

/// The scaling of the linear layers of a model, or of a stage of it. Layers join when they are
/// made; see ParallelContext::fp8.
///
/// Delayed scales are those of whole operands on every layout. In the first step there are none
/// yet: the scale of an operand comes from the operand itself, taken over the ranks of `sharing`
/// that have parts of the same micro-batch (tp-cp), by an all-reduce (max) of 4 bytes for each
/// operand of each product. The other recipes take scales from the rank's own part of an operand.
///
/// The experts of a layer share the delayed scales, one for each operand. Otherwise, and in the
/// first step, the scales are those of the rows that a single expert has on this rank: ranks have
/// rows of different experts, so they cannot communicate for each of them.
class Fp8Scaling {
 public:
  Fp8Scaling(const Fp8Options& options, c10::Device device, ProcessGroup sharing)
      : options_(options), device_(device), sharing_(std::move(sharing)) {}

  const Fp8Options& options() const { return options_; }

  /// For a layer with the parameter `name`, `weight` [out..., in] on this rank. ConfigError, naming
  /// it, unless out, over all its dimensions, and in are multiples of 16.
  std::shared_ptr<const Fp8Layer> add_layer(const std::string& name, const at::Tensor& weight);

  /// The same for the experts of a layer, `weight` [experts, out..., in] on this rank: the result
  /// multiplies the rows of one expert at a time.
  std::shared_ptr<const Fp8Layer> add_experts(const std::string& name, const at::Tensor& weight);

  /// Ends a step: scales for the next one follow from the largest values noted by the ranks of
  /// `group`, which share the layers' weights and their copies (tp-dp-cp). With delayed scaling,
  /// sends one all-reduce (max) of 12 bytes for each layer and for up to 63 unused places;
  /// otherwise nothing. Call it for all `models` of this rank at once. `applied`: whether the step
  /// changed the parameters (bool [] on the device; undefined: it did). A skipped step does not
  /// change scales, unless there were none.
  static void end_step(const std::vector<std::shared_ptr<Fp8Scaling>>& models,
                       const ProcessGroup& group, const at::Tensor& applied = {});

  /// Forgets what has been noted since the last step.
  void abandon_step();

  /// What a checkpoint keeps of delayed scaling for the layer of a parameter; the same on all ranks
  /// of the group of end_step().
  struct LayerState {
    std::string parameter;
    at::Tensor amax_history;  ///< fp32 [3, steps]: see Fp8Scales
    at::Tensor scales;        ///< fp32 [3]
  };
  std::vector<LayerState> state() const;

  /// Call it after the tensors of state() were written. Waits for the device.
  void look_again();

 private:
  std::shared_ptr<const Fp8Layer> add(const std::string& name, bool shares_first_scale);
  /// `weight` [out..., in] on a rank of `axis`.
  void check_sizes(const std::string& name, const at::Tensor& weight, const char* axis) const;

  Fp8Options options_;
  c10::Device device_;
  ProcessGroup sharing_;
  std::vector<std::shared_ptr<Fp8Scales>> blocks_;  ///< with delayed scaling, of 64 layers each
  std::vector<std::string> parameters_;             ///< of the layers
};

}  // namespace lockstep
