#include "lockstep/distributed/parameter_check.h"

#include <algorithm>
#include <exception>
#include <map>
#include <string_view>

#include <ATen/ATen.h>

#include "lockstep/core/check.h"
#include "lockstep/core/text_digest.h"
#include "lockstep/core/text_fields.h"
#include "lockstep/distributed/gradient_hook.h"
#include "lockstep/distributed/notify_on_error.h"
#include "lockstep/parallel_state/collectives.h"
#include "lockstep/parallel_state/parallel_state.h"

namespace lockstep {
namespace {

/// "2, 3", or "cut, 3" if one of `cut_over` cuts dimension 0.
std::string shape_text(const NamedParameter& param, const std::vector<MeshAxis>& cut_over) {
  std::vector<std::string> lengths;
  for (const int64_t length : param.tensor.sizes()) lengths.push_back(std::to_string(length));
  const auto dims = static_cast<int64_t>(lengths.size());
  for (const MeshAxis axis : cut_over) {
    const Placement placement = param.description.placement(axis);
    const auto* const shard = std::get_if<Shard>(&placement);
    if (shard == nullptr || shard->dim < -dims || shard->dim >= dims) continue;
    lengths[static_cast<size_t>(shard->dim < 0 ? shard->dim + dims : shard->dim)] = "cut";
  }
  return fmt::format("{}", fmt::join(lengths, ", "));
}

/// A rank's facts about a parameter or a setting.
struct Said {
  std::string name, facts;
};

void append_said(std::string& text, std::string_view name, std::string_view facts) {
  append_field(text, name);
  append_field(text, facts);
}

std::vector<Said> decode_said(std::string_view text) {
  constexpr const char* kWhat = "parameter descriptions";
  std::vector<Said> said;
  while (!text.empty()) {
    const std::string_view name = take_field(text, kWhat);
    said.push_back({std::string(name), std::string(take_field(text, kWhat))});
  }
  return said;
}

/// "[2, 3] Float", "[2, 3] Float on cuda"
std::string tensor_text(const NamedParameter& param, const std::vector<MeshAxis>& cut_over) {
  const at::Tensor& tensor = param.tensor;
  return fmt::format(
      "[{}] {}{}", shape_text(param, cut_over), at::toString(tensor.scalar_type()),
      tensor.is_cpu() ? ""
                      : " on " + c10::DeviceTypeName(tensor.device().type(), /*lower_case=*/true));
}

/// Says of each parameter "[2, 3] Float, trained, dense, ...".
std::string description_text(const std::vector<NamedParameter>& parameters,
                             const std::vector<MeshAxis>& cut_over) {
  std::string text;
  for (const NamedParameter& param : parameters)
    append_said(text, param.name,
                fmt::format("{}, {}, {}", tensor_text(param, cut_over),
                            param.tensor.requires_grad() ? "trained" : "frozen",
                            param.description.to_string()));
  return text;
}

/// Precedes the facts about buffers, so that they are told from parameters.
constexpr char kBufferMark = '\t';

std::string buffers_text(const std::vector<NamedParameter>& buffers) {
  std::string text;
  for (const NamedParameter& buffer : buffers)
    append_said(text, buffer.name, kBufferMark + tensor_text(buffer, {}));
  return text;
}

/// What a rank says.
struct Statement {
  std::vector<Said> settings, parameters, buffers;
};

Statement decode_statement(std::string_view text, size_t num_settings) {
  Statement statement;
  for (Said& said : decode_said(text)) {
    const bool is_setting = statement.settings.size() < num_settings;
    const bool is_buffer = !is_setting && said.facts.starts_with(kBufferMark);
    if (is_buffer) said.facts.erase(0, 1);
    auto& list = is_setting  ? statement.settings
                 : is_buffer ? statement.buffers
                             : statement.parameters;
    list.push_back(std::move(said));
  }
  return statement;
}

/// The first difference between two lists of parameters or buffers (`what`); "" if there is none.
std::string first_difference(const std::vector<Said>& a, int64_t rank_a, const std::vector<Said>& b,
                             int64_t rank_b, const char* what) {
  for (size_t i = 0; i < std::max(a.size(), b.size()); ++i) {
    if (i >= a.size() || i >= b.size()) {
      const bool more_in_a = i >= b.size();
      return fmt::format("rank {} has {} {}s and rank {} has {}; '{}' is on rank {} only", rank_a,
                         a.size(), what, rank_b, b.size(), (more_in_a ? a : b)[i].name,
                         more_in_a ? rank_a : rank_b);
    }
    if (a[i].name != b[i].name)
      return fmt::format("{} {} is '{}' on rank {} and '{}' on rank {}", what, i, a[i].name, rank_a,
                         b[i].name, rank_b);
    if (a[i].facts != b[i].facts)
      return fmt::format("{} '{}' is {} on rank {} and {} on rank {}", what, a[i].name, a[i].facts,
                         rank_a, b[i].facts, rank_b);
  }
  return "";
}

std::string values_text(const std::vector<ConfigValue>& settings) {
  std::string text;
  for (const auto& [path, value] : settings) append_said(text, path, value);
  return text;
}

/// The error that the checks of a rank's own arguments threw, if any.
struct OwnFault {
  std::exception_ptr error;
  std::string text;

  void rethrow() const {
    if (error) std::rethrow_exception(error);
  }
};

OwnFault fault_of(const std::function<void()>& checks) {
  try {
    checks();
    return {};
  } catch (...) {
    return {std::current_exception(), text_of_exception()};
  }
}

constexpr std::string_view kFault = "refused\t";

void refuse_faults(const std::vector<std::string>& texts, const ProcessGroup& group) {
  for (size_t i = 0; i < texts.size(); ++i)
    require<CommunicationError>(!texts[i].starts_with(kFault),
                                "rank {} of group {} rejected its arguments: {}", group.ranks()[i],
                                group.to_string(),
                                texts[i].substr(std::min(kFault.size(), texts[i].size())));
}

void refuse_odd_shards(const NamedParameter& param) {
  const int64_t dims = param.tensor.dim();
  for (const auto& [axis, placement] : param.description.placements) {
    const auto* const shard = std::get_if<Shard>(&placement);
    require<UsageError>(!shard || (shard->dim >= -dims && shard->dim < dims),
                        "parameter '{}': found {} over {}, but it has {} dimension{}, allowed: {}",
                        param.name, to_string(placement), to_string(axis), dims,
                        dims == 1 ? "" : "s",
                        dims == 0 ? "Replicate" : fmt::format("Shard(0) to Shard({})", dims - 1));
  }
}

void refuse_differences(const std::vector<std::string>& texts, size_t num_settings,
                        const ProcessGroup& group) {
  const Statement first = decode_statement(texts[0], num_settings);
  for (size_t i = 1; i < texts.size(); ++i) {
    const Statement other = decode_statement(texts[i], num_settings);
    for (size_t s = 0; s < std::min(first.settings.size(), other.settings.size()); ++s)
      require<CommunicationError>(
          first.settings[s].facts == other.settings[s].facts,
          "the ranks of group {} have different settings: {} is {} on rank {} and {} on rank {}",
          group.to_string(), first.settings[s].name, first.settings[s].facts, group.ranks()[0],
          other.settings[s].facts, group.ranks()[i]);
    for (const auto& [list, what] : {std::pair(&Statement::parameters, "parameter"),
                                     std::pair(&Statement::buffers, "buffer")}) {
      const std::string difference =
          first_difference(first.*list, group.ranks()[0], other.*list, group.ranks()[i], what);
      require<CommunicationError>(difference.empty(),
                                  "the ranks of group {} have different {}s: {}", group.to_string(),
                                  what, difference);
    }
  }
}

/// Returns if all ranks say the same; throws otherwise.
void compare(const std::string& text, const OwnFault& fault, size_t num_settings,
             const ProcessGroup& group) {
  if (is_same_on_all_ranks(text_digest(text), group, "parameter digests")) return;
  const auto texts = all_gather_texts(group, text, "parameter descriptions");
  fault.rethrow();
  refuse_faults(texts, group);
  refuse_differences(texts, num_settings, group);
}

void refuse_undefined(const std::vector<NamedParameter>& parameters, const char* front) {
  for (size_t i = 0; i < parameters.size(); ++i)
    require<UsageError>(parameters[i].tensor.defined(),
                        "{}: parameter {} ('{}') is an undefined tensor, allowed: defined ones",
                        front, i, parameters[i].name);
}

}  // namespace

void check_parameter_list(const std::vector<NamedParameter>& parameters, const char* front) {
  refuse_undefined(parameters, front);
  std::map<const c10::TensorImpl*, const std::string*> tensors;
  std::map<std::string_view, size_t> names;
  for (size_t i = 0; i < parameters.size(); ++i) {
    const NamedParameter& param = parameters[i];
    refuse_hooked(param);
    refuse_untrainable(param.name, param.tensor);
    const auto [first, is_new] = tensors.emplace(param.tensor.unsafeGetTensorImpl(), &param.name);
    require<UsageError>(is_new || *first->second != param.name,
                        "{}: parameter '{}' is listed twice; list each tensor once", front,
                        param.name);
    require<UsageError>(is_new, "{}: parameter '{}' is '{}' too; list each tensor once", front,
                        param.name, *first->second);
    const auto [named, is_first] = names.emplace(param.name, i);
    require<UsageError>(is_first,
                        "{}: parameters {} and {} are both called '{}'; names must be unique",
                        front, named->second, i, param.name);
  }
}

void refuse_other_devices(const std::vector<NamedParameter>& parameters, const ParallelState& state,
                          const char* front) {
  const c10::Device of_job = state.device();
  if (state.world_size() == 1) return;
  for (const NamedParameter& param : parameters) {
    const c10::Device device = param.tensor.device();
    const bool same =
        device.type() == of_job.type() && (!of_job.has_index() || device.index() == of_job.index());
    require<UsageError>(same || device.is_meta() || !param.tensor.requires_grad(),
                        "{}: parameter '{}' is on {}, allowed: {}, the device of the job", front,
                        param.name, device.str(), of_job.str());
  }
}

void refuse_unfrozen(const std::vector<NamedParameter>& frozen) {
  for (const NamedParameter& param : frozen)
    require<UsageError>(!param.tensor.requires_grad(),
                        "parameter '{}' requires a gradient, but was frozen when it was wrapped, "
                        "so its gradient is not reduced; freeze before wrapping, or wrap again",
                        param.name);
}

void refuse_frozen(const ParamAndGradBuffer& buffer) {
  for (const NamedParameter& param : buffer.params())
    require<UsageError>(param.tensor.requires_grad(),
                        "parameter '{}' requires no gradient, but was trained when it was wrapped, "
                        "so a gradient of zeros would update it; freeze before wrapping, or wrap "
                        "again",
                        param.name);
}

bool is_same_on_all_ranks(uint64_t number, const ProcessGroup& group, const std::string& label) {
  at::Tensor numbers = at::empty({group.size()}, at::kLong);
  const at::Tensor own = at::full({1}, static_cast<int64_t>(number), at::kLong);
  all_gather(group, numbers, own, label).wait();
  return numbers.eq(numbers[0]).all().item<bool>();
}

void check_same_parameters(const std::vector<NamedParameter>& parameters, const ProcessGroup& group,
                           const std::vector<ConfigValue>& settings,
                           const std::function<void()>& own_checks,
                           const std::vector<MeshAxis>& cut_over,
                           const std::vector<NamedParameter>& buffers) {
  const OwnFault fault = fault_of([&] {
    if (own_checks) own_checks();
    for (const NamedParameter& param : parameters) {
      param.description.validate(param.name);
      refuse_odd_shards(param);
      require<UsageError>(
          param.description.update != ParamUpdate::matrix || param.tensor.dim() >= 2,
          "parameter '{}': found shape [{}]; ParamUpdate::matrix needs two dimensions or more",
          param.name, fmt::join(param.tensor.sizes(), ", "));
    }
  });
  if (group.size() > 1)
    compare(fault.error ? std::string(kFault) + fault.text
                        : values_text(settings) + description_text(parameters, cut_over) +
                              buffers_text(buffers),
            fault, settings.size(), group);
  fault.rethrow();
}

std::string trained_text(const NamedParameter& param) {
  return param.tensor.requires_grad() ? "trained" : "frozen";
}

std::string settings_text(const NamedParameter& param) {
  return fmt::format("{}{}", trained_text(param),
                     param.description.apply_weight_decay ? "" : ", no weight decay");
}

void check_same_by_name(const std::vector<NamedText>& facts, const ProcessGroup& group) {
  if (group.size() == 1) return;
  std::string text;
  for (const auto& [name, fact] : facts) append_said(text, name, fact);
  if (is_same_on_all_ranks(text_digest(text), group, "digest of shared parameters")) return;
  const auto texts = all_gather_texts(group, text, "shared parameters");
  std::map<std::string, std::pair<std::string, size_t>> first;
  for (size_t i = 0; i < texts.size(); ++i)
    for (const Said& said : decode_said(texts[i])) {
      const auto& [fact, where] = first.try_emplace(said.name, said.facts, i).first->second;
      require<CommunicationError>(said.facts == fact,
                                  "the ranks of group {} have different parameters: parameter '{}' "
                                  "is {} on rank {} and {} on rank {}",
                                  group.to_string(), said.name, fact, group.ranks()[where],
                                  said.facts, group.ranks()[i]);
    }
}

void check_same_text(const std::string& text, const ProcessGroup& group, const char* what) {
  if (group.size() == 1) return;
  if (is_same_on_all_ranks(text_digest(text), group, fmt::format("digest of {}", what))) return;
  const auto texts = all_gather_texts(group, text, what);
  for (size_t i = 1; i < texts.size(); ++i)
    require<CommunicationError>(texts[i] == texts[0],
                                "the ranks of group {} have different {}: {} on rank {} and {} on "
                                "rank {}",
                                group.to_string(), what, texts[0], group.ranks()[0], texts[i],
                                group.ranks()[i]);
}

bool may_overlap(const at::Tensor& tensor) {
  std::vector<std::pair<int64_t, int64_t>> steps;  // stride, elements
  for (int64_t dim = 0; dim < tensor.dim(); ++dim)
    if (tensor.size(dim) > 1) steps.emplace_back(tensor.stride(dim), tensor.size(dim));
  std::sort(steps.begin(), steps.end());
  int64_t reach = 0;
  for (const auto& [stride, elements] : steps) {
    if (stride <= reach) return tensor.numel() > 0;
    reach += stride * (elements - 1);
  }
  return false;
}

at::Tensor without_repetition(at::Tensor tensor) {
  for (int64_t dim = 0; dim < tensor.dim(); ++dim)
    if (tensor.stride(dim) == 0 && tensor.size(dim) > 1) tensor = tensor.narrow(dim, 0, 1);
  return tensor;
}

void check_model_list(const std::vector<DistributedDataParallel*>& models, const char* caller) {
  require<UsageError>(!models.empty(), "{}: no model was given", caller);
  for (size_t i = 0; i < models.size(); ++i) {
    require<UsageError>(models[i] != nullptr, "{}: model {} is a null pointer", caller, i);
    const auto first = std::find(models.begin(), models.end(), models[i]) - models.begin();
    require<UsageError>(static_cast<size_t>(first) == i,
                        "{}: model {} is model {} too; list each chunk once", caller, i, first);
  }
}

void check_params_attached(const ParamAndGradBuffer& buffer) {
  for (size_t i = 0; i < buffer.params().size(); ++i)
    require<UsageError>(buffer.holds_param(i),
                        "parameter '{}' no longer lies in the buffer of its "
                        "DistributedDataParallel, because its data were replaced "
                        "(torch::load(), Module::load(), Module::to(), set_data()). Do that "
                        "before wrapping, or copy values in place and call "
                        "reload_model_params() of the optimizer",
                        buffer.params()[i].name);
}

}  // namespace lockstep
