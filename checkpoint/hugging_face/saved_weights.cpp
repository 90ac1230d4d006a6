#include "lockstep/checkpoint/saved_weights.h"

#include <ATen/ATen.h>

#include "lockstep/checkpoint/finite_values.h"
#include "lockstep/checkpoint/training_state.h"
#include "lockstep/checkpoint/whole_model.h"
#include "lockstep/core/check.h"
#include "lockstep/models/low_rank_adapter.h"

namespace lockstep {

SavedWeights::SavedWeights(CheckpointReader& checkpoint, const Config& config, at::ScalarType dtype,
                           bool meta)
    : checkpoint_(checkpoint), lora_(config.lora), dtype_(dtype), meta_(meta) {
  for (const AdaptedLinear& linear : whole_adapters(config)) adapted_[linear.weight] = linear;
  for (const WholeParameter& param : whole_parameters(config))
    if (param.is_buffer) buffers_.insert(param.name);
}

at::ScalarType SavedWeights::dtype_of(const std::string& name) const {
  return buffers_.contains(name) ? at::kFloat : dtype_;
}

std::vector<std::string> SavedWeights::names() const {
  std::vector<std::string> names;
  for (const ManifestTensor& tensor : checkpoint_.manifest().tensors)
    if (tensor.state.empty()) names.push_back(tensor.name);
  return names;
}

at::Tensor SavedWeights::read(const std::string& name) const {
  if (meta_) {
    const ManifestTensor* const tensor = checkpoint_.find(name);
    require<FileError>(tensor != nullptr, "'{}': tensor '{}' is missing", checkpoint_.path(), name);
    return at::empty(tensor->shape, at::TensorOptions(dtype_of(name)).device(at::kMeta));
  }
  const at::Tensor weight = read_alone(name);
  const auto adapted = adapted_.find(name);
  if (adapted == adapted_.end()) return weight.to(dtype_of(name));
  const auto& [of_weight, a, b] = adapted->second;
  return merged_weight(weight, read_alone(a), read_alone(b), lora_).to(dtype_);
}

at::Tensor SavedWeights::read_alone(const std::string& name) const {
  const ManifestTensor* const tensor = checkpoint_.find(name);
  require<FileError>(tensor != nullptr, "'{}': tensor '{}' is missing", checkpoint_.path(), name);
  const at::Tensor values = at::empty({tensor->numel()}, at::kFloat);
  const TensorBox box = whole_box(tensor->shape);
  load_state(checkpoint_, {{name, "", {box, {0, box.numel()}}, values}});
  const int64_t count = count_not_finite(values);
  require<FileError>(count == 0, "'{}': {}", checkpoint_.path(),
                     describe_not_finite(name, count, values.numel()));
  return values.view(tensor->shape);
}

}  // namespace lockstep
