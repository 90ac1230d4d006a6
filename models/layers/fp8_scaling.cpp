#include "lockstep/models/fp8_scaling.h"

#include <limits>

#include <ATen/ATen.h>

#include "lockstep/core/check.h"
#include "lockstep/parallel_state/collectives.h"

namespace lockstep {
namespace {

using kernels::Fp8Matrices;
using kernels::Fp8Sides;

constexpr int64_t kLayersOfBlock = 64;

at::ScalarType format_of(Fp8Format format, Fp8Operand operand) {
  const bool wide = format == Fp8Format::hybrid && operand == Fp8Operand::output_gradient;
  return wide ? at::kFloat8_e5m2 : at::kFloat8_e4m3fn;
}

/// Each side has scales for its own rows.
Fp8Matrices with_scales_of_rows(const at::Tensor& x, at::ScalarType format, Fp8Sides sides) {
  Fp8Matrices result;
  if (sides != Fp8Sides::transposed) {
    const at::Tensor scale = kernels::fp8_scale(kernels::largest_absolute_of_rows(x), format);
    result.matrix = kernels::to_fp8_matrices(x, format, scale, Fp8Sides::matrix).matrix;
  }
  if (sides != Fp8Sides::matrix) {
    const at::Tensor scale = kernels::fp8_scale(kernels::largest_absolute_of_columns(x), format);
    result.transposed = kernels::to_fp8_matrices(x, format, scale, Fp8Sides::transposed).transposed;
  }
  return result;
}

/// The maxima over the ranks of `group`. NaN becomes infinity, because not every backend treats it
/// as the largest value.
at::Tensor largest_of_ranks(const at::Tensor& values, const ProcessGroup& group,
                            const char* label) {
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  const at::Tensor all = at::nan_to_num(values, kInfinity, kInfinity);
  all_reduce(group, all, ReduceOp::max, label).wait();
  return all;
}

}  // namespace

bool Fp8Options::covers(int64_t layer, int64_t num_layers) const {
  return enabled() && layer >= num_layers_at_start_in_bf16 &&
         layer < num_layers - num_layers_at_end_in_bf16;
}

Fp8Options fp8_options(const TrainConfig& config) {
  return {.format = config.fp8,
          .recipe = config.fp8_recipe,
          .amax_history_len = config.fp8_amax_history_len,
          .amax_compute_algo = config.fp8_amax_compute_algo,
          .margin = config.fp8_margin,
          .num_layers_at_start_in_bf16 = config.num_layers_at_start_in_bf16,
          .num_layers_at_end_in_bf16 = config.num_layers_at_end_in_bf16};
}

Fp8Scales::Fp8Scales(const Fp8Options& options, int64_t layers, c10::Device device,
                     ProcessGroup sharing)
    : options_(options),
      sharing_(std::move(sharing)),
      settled_(static_cast<size_t>(layers), false) {
  const auto fp32 = at::TensorOptions(device).dtype(at::kFloat);
  history_ = at::zeros({layers, kFp8Operands, options.amax_history_len}, fp32);
  scales_ = at::zeros({layers, kFp8Operands}, fp32);
  largest_ = at::zeros({layers, kFp8Operands}, fp32);
}

at::Tensor Fp8Scales::over_sharing_ranks(const at::Tensor& largest) const {
  if (sharing_.size() == 1) return largest;
  return largest_of_ranks(largest, sharing_, "largest value for a first fp8 scale");
}

void Fp8Scales::advance(const at::Tensor& largest, const at::Tensor& applied) {
  const double infinity = std::numeric_limits<double>::infinity();
  const at::Tensor newest = at::where(largest.lt(infinity), largest, 0.0F).unsqueeze(-1);
  const int64_t kept = history_.size(-1) - 1;
  at::Tensor next = at::cat({newest, history_.narrow(-1, 0, kept)}, -1);
  if (applied.defined()) {
    const at::Tensor stays = applied.logical_not().logical_and(scales_.gt(0));
    next = at::where(stays.unsqueeze(-1), history_, next);
  }
  history_.copy_(next);
  scales_.copy_(at::where(scales_.gt(0), scales_, 1.0F));
  follow_history();
  largest_.zero_();
  settled_.assign(settled_.size(), true);
}

void Fp8Scales::follow_history() {
  const at::Tensor found = options_.amax_compute_algo == Fp8AmaxAlgorithm::max
                               ? history_.amax(-1)
                               : history_.select(-1, 0);
  std::vector<at::Tensor> next;
  for (const Fp8Operand operand :
       {Fp8Operand::input, Fp8Operand::weight, Fp8Operand::output_gradient})
    next.push_back(kernels::fp8_scale(found.select(-1, static_cast<int64_t>(operand)),
                                      format_of(options_.format, operand), options_.margin));
  scales_.copy_(at::where(found.gt(0), at::stack(next, -1), scales_));
}

void Fp8Scales::look_again() {
  const at::NoGradGuard no_grad;
  follow_history();
  const at::Tensor least = scales_.amin(-1).cpu();
  for (size_t layer = 0; layer < settled_.size(); ++layer)
    settled_[layer] = least.const_data_ptr<float>()[layer] > 0;
}

at::ScalarType Fp8Layer::format(Fp8Operand operand) const {
  return format_of(options_.format, operand);
}

Fp8Matrices Fp8Layer::matrices(Fp8Operand operand, const at::Tensor& x, Fp8Sides sides,
                               bool notes) const {
  const at::ScalarType to = format(operand);
  if (options_.recipe == Fp8Recipe::rowwise) return with_scales_of_rows(x, to, sides);
  at::Tensor noted;
  if (scales_ && notes)
    noted = scales_->largest()[place_][static_cast<int64_t>(operand)].view({1, 1});
  if (scales_ && scales_->is_settled(place_)) {
    const at::Tensor scale = scales_->scales()[place_][static_cast<int64_t>(operand)];
    return kernels::to_fp8_matrices(x, to, scale.view({1, 1}), sides, noted);
  }
  at::Tensor largest = kernels::largest_absolute(x);
  if (scales_ && shares_first_scale_) largest = scales_->over_sharing_ranks(largest);
  if (noted.defined()) at::maximum_out(noted, noted, largest);
  return kernels::to_fp8_matrices(
      x, to, kernels::fp8_scale(largest, to, scales_ ? options_.margin : 0), sides);
}

at::Tensor Fp8Layer::output(const at::Tensor& x, const at::Tensor& weight,
                            const std::optional<at::Tensor>& bias, bool notes) const {
  const Fp8Matrices inputs = matrices(Fp8Operand::input, x, Fp8Sides::matrix, notes);
  return kernels::scaled_mm(inputs.matrix, narrowed_weight(weight, notes), bias, x.scalar_type(),
                            /*fast_sums=*/true);
}

void Fp8Layer::note_weight(const at::Tensor& weight) const {
  if (!scales_) return;
  at::Tensor noted = scales_->largest()[place_][static_cast<int64_t>(Fp8Operand::weight)];
  noted = noted.view({1, 1});
  at::maximum_out(noted, noted, kernels::largest_absolute(weight));
}

bool Fp8Layer::scales_parts() const {
  return options_.recipe == Fp8Recipe::rowwise || (scales_ && scales_->is_settled(place_));
}

kernels::Fp8Matrix Fp8Layer::narrowed_weight(const at::Tensor& weight, bool notes) const {
  return matrices(Fp8Operand::weight, weight, Fp8Sides::matrix, notes).matrix;
}

at::Tensor Fp8Layer::output(const at::Tensor& x, const kernels::Fp8Matrix& weight,
                            const std::optional<at::Tensor>& bias, bool notes) const {
  const Fp8Matrices inputs = matrices(Fp8Operand::input, x, Fp8Sides::matrix, notes);
  return kernels::scaled_mm(inputs.matrix, weight, bias, x.scalar_type(), /*fast_sums=*/true);
}

Fp8Matrices Fp8Layer::narrowed(const at::Tensor& gradient, bool wanted) const {
  return matrices(Fp8Operand::output_gradient, gradient, wanted ? Fp8Sides::both : Fp8Sides::matrix,
                  /*notes=*/true);
}

at::Tensor Fp8Layer::input_gradient(const Fp8Matrices& gradient, const at::Tensor& weight,
                                    at::ScalarType dtype) const {
  const Fp8Matrices weights =
      matrices(Fp8Operand::weight, weight, Fp8Sides::transposed, /*notes=*/false);
  return kernels::scaled_mm(gradient.matrix, weights.transposed, {}, dtype, /*fast_sums=*/false);
}

at::Tensor Fp8Layer::weight_gradient(const Fp8Matrices& gradient, const at::Tensor& x,
                                     at::ScalarType dtype) const {
  const Fp8Matrices inputs = matrices(Fp8Operand::input, x, Fp8Sides::transposed, /*notes=*/false);
  return kernels::scaled_mm(gradient.transposed, inputs.transposed, {}, dtype,
                            /*fast_sums=*/false);
}

void Fp8Scaling::check_sizes(const std::string& name, const at::Tensor& weight,
                             const char* axis) const {
  const int64_t in = weight.size(-1), out = in == 0 ? 0 : weight.numel() / in;
  require<ConfigError>(in % kernels::kFp8Multiple == 0 && out % kernels::kFp8Multiple == 0,
                       "train.fp8: found {}, but {} is {} x {} on a rank of {}; allowed "
                       "with it: multiples of {}",
                       to_string(options_.format), name, out, in, axis, kernels::kFp8Multiple);
}

std::shared_ptr<const Fp8Layer> Fp8Scaling::add_layer(const std::string& name,
                                                      const at::Tensor& weight) {
  check_sizes(name, weight, "tp");
  return add(name, /*shares_first_scale=*/true);
}

std::shared_ptr<const Fp8Layer> Fp8Scaling::add_experts(const std::string& name,
                                                        const at::Tensor& weight) {
  check_sizes("one expert of " + name, weight[0], "etp");
  return add(name, /*shares_first_scale=*/false);
}

std::shared_ptr<const Fp8Layer> Fp8Scaling::add(const std::string& name, bool shares_first_scale) {
  const auto place = static_cast<int64_t>(parameters_.size()) % kLayersOfBlock;
  parameters_.push_back(name);
  if (options_.recipe != Fp8Recipe::delayed)
    return std::make_shared<Fp8Layer>(options_, nullptr, place, shares_first_scale);
  if (place == 0)
    blocks_.push_back(std::make_shared<Fp8Scales>(options_, kLayersOfBlock, device_, sharing_));
  return std::make_shared<Fp8Layer>(options_, blocks_.back(), place, shares_first_scale);
}

void Fp8Scaling::end_step(const std::vector<std::shared_ptr<Fp8Scaling>>& models,
                          const ProcessGroup& group, const at::Tensor& applied) {
  const at::NoGradGuard no_grad;
  std::vector<at::Tensor> noted;
  for (const auto& model : models)
    for (const auto& block : model->blocks_) noted.push_back(block->largest());
  if (noted.empty()) return;
  const at::Tensor all = largest_of_ranks(at::cat(noted), group, "largest values for fp8 scales");
  int64_t first = 0;
  for (const auto& model : models)
    for (const auto& block : model->blocks_) {
      const int64_t layers = block->largest().size(0);
      block->advance(all.narrow(0, first, layers), applied);
      first += layers;
    }
}

void Fp8Scaling::abandon_step() {
  for (const auto& block : blocks_) at::Tensor(block->largest()).zero_();
}

std::vector<Fp8Scaling::LayerState> Fp8Scaling::state() const {
  std::vector<LayerState> list;
  if (blocks_.empty()) return list;
  for (size_t layer = 0; layer < parameters_.size(); ++layer) {
    const Fp8Scales& block = *blocks_[layer / kLayersOfBlock];
    const auto place = static_cast<int64_t>(layer % kLayersOfBlock);
    list.push_back({parameters_[layer], block.history()[place], block.scales()[place]});
  }
  return list;
}

void Fp8Scaling::look_again() {
  for (const auto& block : blocks_) block->look_again();
}

}  // namespace lockstep
