#include "lockstep/parallel_state/announcement.h"

#include <torch/version.h>

#include "lockstep/core/check.h"
#include "lockstep/parallel_state/build_identity.h"
#include "lockstep/parallel_state/parallel_axes.h"

namespace lockstep {
namespace {

std::string describe(const ParallelSizes& sizes) {
  std::string text;
  for (const ParallelSize* size : parallel_size_table())
    text += fmt::format("{} {}, ", size->name_with(' '), size->of(sizes));
  return text + fmt::format("order {}, optimizer instances {}, hierarchical context {}",
                            sizes.order, sizes.optimizer_instances, sizes.hierarchical_context);
}

std::string describe(const std::map<GroupKind, GroupOptions>& group_options) {
  std::string text;
  for (const auto& [kind, options] : group_options)
    text += fmt::format("{}{}: {}", text.empty() ? "" : "; ", to_string(kind), to_string(options));
  return text.empty() ? "none" : text;
}

}  // namespace

MembershipSpec membership_spec(const ParallelStateOptions& options, int64_t rank) {
  MembershipSpec spec = {.run_id = options.run_id,
                         .rank = rank,
                         .world_size = options.sizes.world_size,
                         .fields = {{"world size", std::to_string(options.sizes.world_size)},
                                    {"build", build_identity()},
                                    {"libtorch", TORCH_VERSION}},
                         .timeout = *options.timeout,
                         .obstacle = options.meeting_obstacle};
  spec.fields.insert(spec.fields.end(), options.announcement.begin(), options.announcement.end());
  spec.fields.push_back({"parallel sizes", describe(options.sizes)});
  spec.fields.push_back({"group options", describe(options.group_options)});
  spec.fields.push_back({"all-gather groups", options.create_all_gather_groups ? "yes" : "no"});
  spec.fields.push_back({"device", c10::DeviceTypeName(options.device.type(), true)});
  return spec;
}

}  // namespace lockstep
