#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>

#include "lockstep/parallel_state/backends.h"

namespace lockstep {
namespace {

using Gloo = c10d::ProcessGroupGloo;

c10::intrusive_ptr<Gloo::Options> make_options(const BackendSpec& spec) {
  if (!spec.single_host) return Gloo::Options::create_default(spec.timeout);
  auto options = Gloo::Options::create(spec.timeout);
  options->devices.push_back(Gloo::createDeviceForHostname("127.0.0.1"));
  return options;
}

}  // namespace

c10::intrusive_ptr<c10d::Backend> make_gloo_backend(const BackendSpec& spec) {
  auto options = make_options(spec);
  options->group_name = spec.group_name;
  options->global_ranks_in_group.assign(spec.ranks.begin(), spec.ranks.end());
  return c10::make_intrusive<Gloo>(spec.store, spec.rank, static_cast<int>(spec.ranks.size()),
                                   options);
}

}  // namespace lockstep
