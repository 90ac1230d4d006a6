#include "lockstep/core/parameters.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <unordered_set>

#include "lockstep/core/check.h"
#include "lockstep/core/flat_tensor.h"
#include "lockstep/core/integers.h"
#include "lockstep/core/parallel_for.h"
#include "lockstep/core/philox.h"

namespace lockstep {
namespace {

bool any_splits_sequence(const torch::nn::Module& module) {
  const auto* const described = dynamic_cast<const DescribedModule*>(&module);
  if (described && described->splits_sequence()) return true;
  const auto children = module.named_children();
  return std::any_of(children.begin(), children.end(),
                     [](const auto& child) { return any_splits_sequence(*child.value()); });
}

/// Collects the parameters of a module and of its submodules.
class Collection {
 public:
  explicit Collection(const torch::nn::Module& root) : splits_sequence_(any_splits_sequence(root)) {
    collect(root, "");
  }
  std::vector<NamedParameter> take() { return std::move(parameters_); }

 private:
  void collect(const torch::nn::Module& module, const std::string& prefix) {
    const auto* const described = dynamic_cast<const DescribedModule*>(&module);
    if (described) describing_.emplace_back(described, prefix.size());
    for (const auto& item : module.named_parameters(/*recurse=*/false)) {
      const at::Tensor& tensor = item.value();
      if (!tensor.defined() || !seen_.insert(tensor.unsafeGetTensorImpl()).second) continue;
      const std::string name = prefix + item.key();
      parameters_.push_back({name, tensor, description_of(name, tensor),
                             described ? described->cut_by(item.key()) : std::nullopt});
    }
    for (const auto& child : module.named_children())
      collect(*child.value(), prefix + child.key() + ".");
    if (described) describing_.pop_back();
  }

  ParamDescription description_of(const std::string& name, const at::Tensor& tensor) const {
    for (auto from = describing_.rbegin(); from != describing_.rend(); ++from)
      if (const ParamDescription* found = from->first->description(name.substr(from->second)))
        return *found;
    ParamDescription description = default_description(tensor);
    if (splits_sequence_ && tensor.requires_grad())
      description.gradient_states[MeshAxis::tp] = GradientState::undeclared;
    return description;
  }

  bool splits_sequence_;
  /// The described modules around the current one and itself, outermost first, and the lengths of
  /// their prefixes.
  std::vector<std::pair<const DescribedModule*, size_t>> describing_;
  std::unordered_set<const c10::TensorImpl*> seen_;
  std::vector<NamedParameter> parameters_;
};

/// UsageError if no layer can be made of `spec`.
void check_spec(const ParamSpec& spec) {
  constexpr auto kMost = std::numeric_limits<int64_t>::max();
  int64_t numel = 1;
  bool good = true;
  for (const int64_t length : spec.shape) {
    good = good && length >= 1 && numel <= kMost / 8 / length;
    if (good) numel *= length;
  }
  require<UsageError>(good,
                      "parameter '{}': found shape [{}], allowed: lengths >= 1, and as many "
                      "elements as memory can be addressed for",
                      spec.name, fmt::join(spec.shape, ", "));
  const auto* const normal = std::get_if<NormalValues>(&spec.values);
  const double deviation = normal ? normal->standard_deviation : 0;
  require<UsageError>(std::isfinite(deviation) && deviation >= 0,
                      "parameter '{}': found a standard deviation of {}, allowed: a finite number "
                      ">= 0",
                      spec.name, deviation);
  const int64_t rows = spec.shape.empty() ? 0 : spec.shape[0];
  const int64_t unpadded = spec.description.unpadded_rows.value_or(rows);
  require<UsageError>(unpadded == rows || (unpadded >= 1 && unpadded <= rows),
                      "parameter '{}': found {} rows before the padding, allowed: 1 to {}",
                      spec.name, unpadded, rows);
}

/// Global index of the first element of row `row` of a piece.
int64_t index_of_row(int64_t row, at::IntArrayRef sizes, at::IntArrayRef global_shape,
                     at::IntArrayRef offset) {
  const auto dims = static_cast<int64_t>(sizes.size());
  int64_t index = 0, stride = 1;
  for (int64_t d = dims - 1; d >= 0; --d) {
    const int64_t coordinate = d == dims - 1 ? 0 : row % sizes[d];
    if (d < dims - 1) row /= sizes[d];
    index += (coordinate + (offset.empty() ? 0 : offset[d])) * stride;
    stride *= global_shape[d];
  }
  return index;
}

/// Fills a row with the normals of the positions from `index` on.
void fill_normal_row(double* out, int64_t length, double standard_deviation,
                     const CounterStream& stream, int64_t index) {
  std::array<double, 2> pair{};
  for (int64_t i = 0; i < length; ++i) {
    const auto position = static_cast<uint64_t>(index + i);
    if (i == 0 || position % 2 == 0) pair = stream.normal_pair(position / 2);
    out[i] = standard_deviation * pair[position % 2];
  }
}

/// Normals of a block of a global tensor, whose elements are numbered row by row.
struct NormalBlock {
  std::vector<int64_t> sizes, global_shape, offset;
  double standard_deviation;
  CounterStream stream;

  void fill(double* out, int64_t first, int64_t last) const {
    const int64_t row_length = sizes.empty() ? 1 : sizes.back();
    while (first < last) {
      const int64_t column = first % row_length;
      const int64_t count = std::min(row_length - column, last - first);
      const int64_t index = index_of_row(first / row_length, sizes, global_shape, offset) + column;
      fill_normal_row(out, count, standard_deviation, stream, index);
      out += count;
      first += count;
    }
  }
};

/// The number of rows of a piece before the padding.
int64_t rows_before_padding(const ParamSpec& spec, const LocalPiece& piece) {
  const int64_t end = spec.description.unpadded_rows.value_or(spec.shape[0]);
  return std::clamp<int64_t>(end - piece.offset[0], 0, piece.shape[0]);
}

AxisSizes sizes_of_cut(const ParamDescription& description, const MeshPlace& place) {
  AxisSizes sizes;
  for (const auto& [axis, placement] : description.placements)
    if (std::holds_alternative<Shard>(placement)) sizes[axis] = place ? place(axis).size : 1;
  return sizes;
}

/// This rank's piece of `spec`, whose name is the global one.
at::Tensor initial_piece(const ParamSpec& spec, const ParamOrigin& origin) {
  check_spec(spec);
  const LocalPiece piece = local_piece(spec, origin.place);
  at::Tensor tensor = flat_zeros(piece.shape, origin.options);
  at::Tensor filled =
      piece.shape.empty() ? tensor : tensor.narrow(0, 0, rows_before_padding(spec, piece));
  if (const auto* constant = std::get_if<ConstantValue>(&spec.values))
    filled.fill_(constant->value);
  else if (origin.perform_initialization)
    fill_normal(filled, std::get<NormalValues>(spec.values).standard_deviation, origin.seed,
                spec.name, spec.shape, piece.offset);
  return tensor;
}

}  // namespace

at::Tensor DescribedModule::add(const ParamSpec& spec, const ParamOrigin& origin) {
  ParamSpec whole = spec;
  whole.name = origin.name + spec.name;
  spec.description.validate(whole.name);
  splits_sequence_ = splits_sequence_ || origin.splits_sequence;
  at::Tensor& registered =
      register_described_parameter(spec.name, initial_piece(whole, origin), spec.description);
  cut_by_[spec.name] = sizes_of_cut(spec.description, origin.place);
  return registered;
}

std::optional<AxisSizes> DescribedModule::cut_by(const std::string& name) const {
  const auto found = cut_by_.find(name);
  return found == cut_by_.end() ? std::nullopt : std::optional(found->second);
}

const ParamDescription* DescribedModule::description(const std::string& name) const {
  const auto found = descriptions_.find(name);
  return found == descriptions_.end() ? nullptr : &found->second;
}

at::Tensor& DescribedModule::register_described_parameter(const std::string& name,
                                                          at::Tensor tensor,
                                                          ParamDescription description) {
  description.validate(name);
  descriptions_[name] = std::move(description);
  return register_parameter(name, std::move(tensor));
}

ParamDescriptions DescribedModule::default_descriptions(const torch::nn::Module& child,
                                                        GradientState over_tp) {
  ParamDescriptions descriptions;
  for (const NamedParameter& param : collect_parameters(child)) {
    ParamDescription description = default_description(param.tensor);
    description.gradient_states[MeshAxis::tp] = over_tp;
    descriptions[param.name] = std::move(description);
  }
  return descriptions;
}

void DescribedModule::check_descriptions(const torch::nn::Module& child, const std::string& name,
                                         const ParamDescriptions& descriptions) {
  const auto parameters = child.named_parameters();
  for (const auto& [parameter, description] : descriptions) {
    require<UsageError>(parameters.contains(parameter),
                        "module '{}': found a description of '{}', allowed: of its parameters, {}",
                        name, parameter, fmt::join(parameters.keys(), ", "));
    description.validate(name + "." + parameter);
  }
}

void DescribedModule::describe_child(const std::string& name,
                                     const ParamDescriptions& descriptions) {
  for (const auto& [parameter, description] : descriptions)
    descriptions_[name + "." + parameter] = description;
}

ParamDescription default_description(const at::Tensor& parameter) {
  ParamDescription description;
  description.apply_weight_decay = parameter.dim() >= 2;
  return description;
}

std::vector<NamedParameter> collect_parameters(const torch::nn::Module& module) {
  return Collection(module).take();
}

void fill_normal(at::Tensor& local, double standard_deviation, uint64_t seed, std::string_view name,
                 at::IntArrayRef global_shape, at::IntArrayRef offset) {
  const int64_t dims = local.dim();
  require<UsageError>(static_cast<int64_t>(global_shape.size()) == dims &&
                          (offset.empty() || static_cast<int64_t>(offset.size()) == dims),
                      "fill_normal of '{}': {} dimensions, but a global shape of {} and an offset "
                      "of {}",
                      name, dims, global_shape.size(), offset.size());
  if (local.is_meta()) return;
  const NormalBlock block = {local.sizes().vec(), global_shape.vec(), offset.vec(),
                             standard_deviation, CounterStream(seed, name)};
  const bool in_place = local.is_cpu() && local.is_contiguous();
  const at::Tensor host =
      in_place ? local.detach() : at::empty(local.sizes(), local.options().device(at::kCPU));
  const at::Tensor flat = host.view({-1});
  constexpr int64_t kPart = 1 << 13;  // elements that are worth a thread
  parallel_for(0, ceil_div(flat.numel(), kPart), 1, [&](int64_t begin, int64_t end) {
    const at::NoGradGuard no_grad;
    std::array<double, kPart> values;
    for (int64_t first = begin * kPart; first < std::min(end * kPart, flat.numel());
         first += kPart) {
      const int64_t count = std::min(kPart, flat.numel() - first);
      block.fill(values.data(), first, first + count);
      flat.narrow(0, first, count).copy_(at::from_blob(values.data(), {count}, at::kDouble));
    }
  });
  const at::NoGradGuard no_grad;
  if (!in_place) local.copy_(host);
}

}  // namespace lockstep
