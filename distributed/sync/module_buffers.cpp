#include "lockstep/distributed/module_buffers.h"

#include <string>

#include "lockstep/parallel_state/axis_groups.h"

namespace lockstep {
namespace {

/// "a.b." of "a.b.c"; "" of "c".
std::string prefix_of(const std::string& name) {
  const size_t dot = name.rfind('.');
  return dot == std::string::npos ? "" : name.substr(0, dot + 1);
}

std::vector<const NamedParameter*> parameters_below(const std::string& prefix,
                                                    const std::vector<NamedParameter>& parameters) {
  std::vector<const NamedParameter*> below;
  for (const NamedParameter& param : parameters)
    if (param.name.starts_with(prefix)) below.push_back(&param);
  return below;
}

ParamDescription description_for(const std::string& buffer,
                                 const std::vector<NamedParameter>& parameters) {
  std::string prefix = prefix_of(buffer);
  auto beside = parameters_below(prefix, parameters);
  while (beside.empty() && !prefix.empty()) {
    prefix = prefix_of(prefix.substr(0, prefix.size() - 1));
    beside = parameters_below(prefix, parameters);
  }
  for (const NamedParameter* param : beside)
    if (replicas(param->description) == GroupKind::dp_cp) return {};
  return beside.empty() ? ParamDescription{} : beside.front()->description;
}

}  // namespace

std::vector<NamedParameter> collect_buffers(const torch::nn::Module& module,
                                            const std::vector<NamedParameter>& parameters) {
  std::vector<NamedParameter> buffers;
  for (const auto& item : module.named_buffers(/*recurse=*/true))
    buffers.push_back({item.key(), item.value(), description_for(item.key(), parameters)});
  return buffers;
}

}  // namespace lockstep
