#include "lockstep/checkpoint/held_blocks.h"

#include <ranges>
#include <sstream>

#include "lockstep/core/check.h"
#include "lockstep/parallel_state/axis_groups.h"
#include "lockstep/parallel_state/collectives.h"

namespace lockstep {
namespace {

using Lengths = std::map<std::string, int64_t>;

Lengths parse_lengths(const std::string& text) {
  Lengths lengths;
  std::istringstream lines(text);
  int64_t length = 0;
  for (std::string name; lines >> length && lines.get() == ' ' && std::getline(lines, name);)
    lengths[name] = length;
  return lengths;
}

/// The lengths that each rank of `group` holds along the dimensions in `cut`, as far as its blocks
/// are known.
std::vector<Lengths> lengths_along(const ProcessGroup& group,
                                   const std::map<std::string, size_t>& cut,
                                   const std::map<std::string, TensorBox>& blocks) {
  std::string own;
  for (const auto& [name, dim] : cut)
    own += fmt::format("{} {}\n", blocks.at(name).shape[dim], name);
  std::vector<Lengths> lengths;
  for (const std::string& text : all_gather_texts(group, own, "pieces of parameters"))
    lengths.push_back(parse_lengths(text));
  return lengths;
}

/// Puts the blocks side by side along one axis.
void join_along(const ProcessGroup& group, const std::map<std::string, size_t>& cut,
                std::map<std::string, TensorBox>& blocks) {
  const std::vector<Lengths> lengths = lengths_along(group, cut, blocks);
  for (const auto& [name, dim] : cut) {
    TensorBox& block = blocks.at(name);
    int64_t total = 0;
    for (size_t i = 0; i < lengths.size(); ++i) {
      const auto found = lengths[i].find(name);
      require<CommunicationError>(found != lengths[i].end(),
                                  "checkpoint: parameter '{}' is cut over group {}, but rank {} "
                                  "does not hold a piece of it",
                                  name, group.to_string(), group.ranks()[i]);
      if (static_cast<int64_t>(i) == group.rank()) block.start[dim] += total;
      total += found->second;
    }
    block.shape[dim] = total;
  }
}

}  // namespace

std::map<std::string, TensorBox> held_blocks(const std::vector<NamedParameter>& parameters,
                                             const ParallelState& state) {
  std::map<std::string, TensorBox> blocks;
  for (const NamedParameter& param : parameters)
    blocks[param.name] = whole_box(param.tensor.sizes().vec());
  for (const MeshAxis axis : kCuttingAxes | std::views::reverse) {  // the first cut is undone last
    if (state.grids().size(group_kind_of(axis)) == 1) continue;
    std::map<std::string, size_t> cut;
    for (const NamedParameter& param : parameters) {
      const Placement placement = param.description.placement(axis);
      const auto* const shard = std::get_if<Shard>(&placement);
      if (shard == nullptr) continue;
      const int64_t dims = param.tensor.dim();
      require<UsageError>(shard->dim >= -dims && shard->dim < dims,
                          "checkpoint: parameter '{}' of {} dimensions: found {} over {}",
                          param.name, dims, to_string(placement), to_string(axis));
      cut[param.name] = static_cast<size_t>(shard->dim < 0 ? shard->dim + dims : shard->dim);
    }
    if (!cut.empty()) join_along(state.group(group_kind_of(axis)), cut, blocks);
  }
  return blocks;
}

}  // namespace lockstep
