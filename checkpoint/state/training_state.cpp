#include "lockstep/checkpoint/training_state.h"

#include <algorithm>
#include <set>

#include <ATen/ATen.h>

#include "lockstep/checkpoint/finite_values.h"
#include "lockstep/checkpoint/held_blocks.h"
#include "lockstep/core/check.h"
#include "lockstep/core/narrow_dtype.h"
#include "lockstep/parallel_state/collectives.h"

namespace lockstep {
namespace {

constexpr std::pair<at::ScalarType, const char*> kDtypes[] = {
    {at::kDouble, "F64"}, {at::kFloat, "F32"}, {at::kBFloat16, "BF16"}, {at::kHalf, "F16"},
    {at::kLong, "I64"},   {at::kInt, "I32"},   {at::kShort, "I16"},     {at::kChar, "I8"},
    {at::kByte, "U8"},    {at::kBool, "BOOL"}};

/// Adds `tensor` without its padding; adds nothing for an empty piece.
void add(std::vector<StateTensor>& list, StateTensor tensor, const ParamDescription& description) {
  const std::optional<int64_t>& unpadded_rows = description.unpadded_rows;
  tensor.on_one_stage = !description.is_on_several_stages();
  TensorBox& box = tensor.part.box;
  if (box.numel() == 0 && !box.is_whole()) return;
  if (unpadded_rows && !box.shape.empty()) {
    const int64_t rows =
        std::clamp<int64_t>(*unpadded_rows - box.start[0], 0, std::max<int64_t>(box.size[0], 0));
    const int64_t row = box.size[0] == 0 ? 0 : box.numel() / box.size[0];
    box.shape[0] = *unpadded_rows;
    box.size[0] = rows;
    box.start[0] = std::min(box.start[0], *unpadded_rows);
    FlatRange& range = tensor.part.range;
    range.last = std::min(range.last, rows * row);
    if (range.first >= range.last) return;
    tensor.values = tensor.values.narrow(0, 0, range.numel());
  }
  list.push_back(std::move(tensor));
}

at::Tensor flat_view(const std::string& name, const at::Tensor& tensor) {
  require<UsageError>(tensor.is_contiguous(), "checkpoint: '{}' is not contiguous", name);
  return tensor.detach().view({-1});
}

const ManifestTensor* source_of(const CheckpointReader& checkpoint, const StateTensor& target) {
  if (!target.state.empty() && target.state != "master")
    return checkpoint.find(target.name, target.state);
  const ManifestTensor* const master = checkpoint.find(target.name, "master");
  const ManifestTensor* const weight = checkpoint.find(target.name);
  if (target.state == "master") return master != nullptr ? master : weight;
  if (master == nullptr || weight == nullptr) return weight;
  const at::ScalarType saved = dtype_of_safetensors(weight->dtype);
  return is_narrow(saved) && target.values.scalar_type() != saved ? master : weight;
}

void load_tensor(CheckpointReader& checkpoint, const StateTensor& target) {
  const std::string key = tensor_key(target.name, target.state);
  const ManifestTensor* const source = source_of(checkpoint, target);
  require<FileError>(source != nullptr, "'{}': tensor '{}' is missing", checkpoint.path(), key);
  require<FileError>(source->shape == target.part.box.shape,
                     "'{}': tensor '{}': found shape [{}], allowed: [{}]", checkpoint.path(), key,
                     fmt::join(source->shape, ", "), fmt::join(target.part.box.shape, ", "));
  const at::ScalarType dtype = dtype_of_safetensors(source->dtype);
  if (checkpoint.is_dry()) return checkpoint.read(*source, target.part, nullptr);
  const bool direct = target.values.device().is_cpu() && target.values.scalar_type() == dtype &&
                      target.values.is_contiguous();
  const at::Tensor memory =
      direct ? target.values : at::empty({target.part.range.numel()}, at::TensorOptions(dtype));
  checkpoint.read(*source, target.part, static_cast<char*>(memory.mutable_data_ptr()));
  if (!direct) at::Tensor(target.values).copy_(memory);
}

bool has_memory(const at::Tensor& values) {
  try {
    return values.storage().data() != nullptr;
  } catch (const c10::Error&) {
    return false;
  }
}

/// Gathering a unit frees the one before it, whose views then have no memory.
void require_gathered(const std::vector<StateTensor>& list) {
  for (const StateTensor& one : list) {
    const bool real = one.values.is_cpu() || one.values.is_cuda();
    require<UsageError>(
        !real || one.values.numel() == 0 || has_memory(one.values),
        "checkpoint: '{}' is sharded over the data-parallel ranks (optim_grads_params), allowed: "
        "gathered; call unshard() of its DistributedDataParallel first, on every rank",
        one.name);
  }
}

/// These parameters of `model`, and its registered buffers.
std::vector<StateTensor> values_of(const std::vector<NamedParameter>& parameters,
                                   const torch::nn::Module& model, const ParallelState& state) {
  std::vector<StateTensor> list;
  const auto blocks = held_blocks(parameters, state);
  for (const NamedParameter& param : parameters) {
    const TensorBox& box = blocks.at(param.name);
    add(list, {param.name, "", {box, {0, box.numel()}}, flat_view(param.name, param.tensor)},
        param.description);
  }
  require_gathered(list);
  for (const auto& buffer : model.named_buffers()) {
    const TensorBox box = whole_box(buffer.value().sizes().vec());
    list.push_back(
        {buffer.key(), "", {box, {0, box.numel()}}, flat_view(buffer.key(), buffer.value())});
    list.back().is_buffer = true;
  }
  return list;
}

std::string find_not_finite(const std::vector<StateTensor>& tensors) {
  for (const StateTensor& tensor : tensors) {
    if (tensor.is_buffer || !must_be_finite(tensor.state)) continue;
    if (const int64_t count = count_not_finite(tensor.values); count > 0)
      return describe_not_finite(tensor_key(tensor.name, tensor.state), count,
                                 tensor.values.numel());
  }
  return "";
}

}  // namespace

const char* safetensors_dtype(at::ScalarType dtype) {
  for (const auto& [type, name] : kDtypes)
    if (type == dtype) return name;
  std::string allowed;
  for (const auto& [type, name] : kDtypes)
    allowed += fmt::format("{}{}", allowed.empty() ? "" : ", ", at::toString(type));
  fail<UsageError>("safetensors: found a tensor of {}, allowed: {}", at::toString(dtype), allowed);
}

at::ScalarType dtype_of_safetensors(const std::string& name) {
  for (const auto& [type, text] : kDtypes)
    if (name == text) return type;
  fail<UsageError>("safetensors: unknown dtype '{}'", name);
}

std::vector<StateTensor> model_state(const torch::nn::Module& model, const ParallelState& state) {
  return values_of(collect_parameters(model), model, state);
}

std::vector<StateTensor> untrained_state(const torch::nn::Module& model,
                                         const ParallelState& state) {
  std::vector<NamedParameter> frozen = collect_parameters(model);
  std::erase_if(frozen, [](const NamedParameter& param) { return param.tensor.requires_grad(); });
  return values_of(frozen, model, state);
}

std::vector<StateTensor> optimizer_state(const Optimizer& optimizer, const ParallelState& state) {
  std::vector<NamedParameter> parameters;
  for (const DistributedDataParallel* model : optimizer.models())
    for (const auto& buffer : model->buffers())
      parameters.insert(parameters.end(), buffer->params().begin(), buffer->params().end());
  const auto blocks = held_blocks(parameters, state);
  std::vector<StateTensor> list;
  for (const StateSlice& slice : optimizer.state_slices()) {
    const TensorBox& box = blocks.at(slice.parameter);
    for (const auto& [name, tensor] : slice.values)
      add(list, {slice.parameter, name, {box, {slice.range.start, slice.range.end}}, tensor},
          slice.description);
  }
  return list;
}

std::vector<StateTensor> whole_gradients(const std::vector<DistributedDataParallel*>& models,
                                         const ParallelState& state) {
  std::vector<const ParamAndGradBuffer*> buffers;
  std::vector<NamedParameter> parameters;
  for (const DistributedDataParallel* model : models)
    for (const ParamAndGradBuffer* buffer : model->buffers()) {
      if (buffer->is_sharded()) continue;
      buffers.push_back(buffer);
      parameters.insert(parameters.end(), buffer->params().begin(), buffer->params().end());
    }
  const auto blocks = held_blocks(parameters, state);
  std::vector<StateTensor> list;
  for (const ParamAndGradBuffer* buffer : buffers)
    for (size_t i = 0; i < buffer->params().size(); ++i) {
      const NamedParameter& param = buffer->params()[i];
      const TensorBox& box = blocks.at(param.name);
      add(list,
          {param.name,
           "gradient",
           {box, {0, box.numel()}},
           flat_view(param.name, buffer->grad_view(i))},
          param.description);
    }
  return list;
}

std::vector<StateTensor> kept_weights(const std::vector<DistributedDataParallel*>& models,
                                      const ParallelState& state) {
  std::vector<NamedParameter> parameters;
  for (const DistributedDataParallel* model : models)
    for (const ParamAndGradBuffer* buffer : model->buffers())
      parameters.insert(parameters.end(), buffer->params().begin(), buffer->params().end());
  const auto blocks = held_blocks(parameters, state);
  std::vector<StateTensor> list;
  for (const DistributedDataParallel* model : models)
    for (const ParamAndGradBuffer* buffer : model->buffers())
      for (size_t i = 0; i < buffer->params().size(); ++i) {
        const NamedParameter& param = buffer->params()[i];
        const ParamLayout::Slot& slot = buffer->layout().slots[i];
        const std::vector<ElementRange> whole = {{slot.start, slot.end}};
        for (const ElementRange& kept : buffer->lends_params() ? buffer->owned() : whole) {
          const ElementRange part = {std::max(kept.start, slot.start),
                                     std::min(kept.end, slot.end)};
          if (part.start >= part.end) continue;
          add(list,
              {param.name,
               buffer->lends_params() ? "shard" : "",
               {blocks.at(param.name), {part.start - slot.start, part.end - slot.start}},
               buffer->owned_params(part)},
              param.description);
        }
      }
  return list;
}

void load_state(CheckpointReader& checkpoint, const std::vector<StateTensor>& targets) {
  const at::NoGradGuard no_grad;
  for (const StateTensor& target : targets) load_tensor(checkpoint, target);
}

int64_t count_not_finite(const at::Tensor& values) {
  const at::Tensor memory = values.detach().to(at::kCPU).contiguous();
  return count_not_finite(safetensors_dtype(memory.scalar_type()), memory.const_data_ptr(),
                          static_cast<int64_t>(memory.nbytes()));
}

void check_weights_are_finite(const std::string& path, const std::vector<StateTensor>& tensors,
                              const ParallelState& state) {
  const auto found =
      all_gather_texts(state.world(), find_not_finite(tensors), "finite weights of the checkpoint");
  for (size_t rank = 0; rank < found.size(); ++rank)
    require<FileError>(found[rank].empty(), "'{}': {}{}", path,
                       found.size() > 1 ? fmt::format("rank {}: ", rank) : "", found[rank]);
}

bool has_optimizer_state(const Manifest& manifest) {
  return std::any_of(manifest.tensors.begin(), manifest.tensors.end(),
                     [](const ManifestTensor& tensor) { return !tensor.state.empty(); });
}

void check_no_weight_left(const CheckpointReader& checkpoint,
                          const std::vector<StateTensor>& weights, const ParallelState& state) {
  std::set<std::string> names;
  for (const StateTensor& weight : weights) names.insert(weight.name);
  const std::vector<ManifestTensor>& tensors = checkpoint.manifest().tensors;
  const at::Tensor held = at::zeros({static_cast<int64_t>(tensors.size())}, at::kByte);
  auto* const flags = held.mutable_data_ptr<uint8_t>();
  for (size_t i = 0; i < tensors.size(); ++i) flags[i] = names.contains(tensors[i].name) ? 1 : 0;
  all_reduce(state.world(), held, ReduceOp::max, "weights of the checkpoint").wait();
  for (size_t i = 0; i < tensors.size(); ++i)
    require<FileError>(flags[i] != 0, "'{}': tensor '{}' belongs to no parameter of the model",
                       checkpoint.path(), tensors[i].name);
}

}  // namespace lockstep
