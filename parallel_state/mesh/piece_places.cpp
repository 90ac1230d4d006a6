#include "lockstep/parallel_state/piece_places.h"

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

/// The lengths that each rank of `group` holds along the dimensions in `cut`, as far as its places
/// are known.
std::vector<Lengths> lengths_along(const ProcessGroup& group,
                                   const std::map<std::string, size_t>& cut,
                                   const std::map<std::string, PiecePlace>& places) {
  std::string own;
  for (const auto& [name, dim] : cut)
    own += fmt::format("{} {}\n", places.at(name).whole[dim], name);
  std::vector<Lengths> lengths;
  for (const std::string& text : all_gather_texts(group, own, "pieces of parameters"))
    lengths.push_back(parse_lengths(text));
  return lengths;
}

/// Puts the pieces side by side along one axis.
void join_along(const ProcessGroup& group, const std::map<std::string, size_t>& cut,
                std::map<std::string, PiecePlace>& places, const char* caller) {
  const std::vector<Lengths> lengths = lengths_along(group, cut, places);
  for (const auto& [name, dim] : cut) {
    PiecePlace& place = places.at(name);
    int64_t total = 0;
    for (size_t i = 0; i < lengths.size(); ++i) {
      const auto found = lengths[i].find(name);
      require<CommunicationError>(found != lengths[i].end(),
                                  "{}: parameter '{}' is cut over group {}, but rank {} does not "
                                  "hold a piece of it",
                                  caller, name, group.to_string(), group.ranks()[i]);
      if (static_cast<int64_t>(i) == group.rank()) place.start[dim] += total;
      total += found->second;
    }
    place.whole[dim] = total;
  }
}

}  // namespace

std::map<std::string, PiecePlace> piece_places(const std::vector<NamedParameter>& parameters,
                                               const ParallelState& state, const char* caller) {
  std::map<std::string, PiecePlace> places;
  for (const NamedParameter& param : parameters)
    places[param.name] = {param.tensor.sizes().vec(),
                          std::vector<int64_t>(static_cast<size_t>(param.tensor.dim()), 0)};
  for (const MeshAxis axis : kCuttingAxes | std::views::reverse) {  // the first cut is undone last
    if (state.grids().size(group_kind_of(axis)) == 1) continue;
    std::map<std::string, size_t> cut;
    for (const NamedParameter& param : parameters) {
      const Placement placement = param.description.placement(axis);
      const auto* const shard = std::get_if<Shard>(&placement);
      if (shard == nullptr) continue;
      const int64_t dims = param.tensor.dim();
      require<UsageError>(shard->dim >= -dims && shard->dim < dims,
                          "{}: parameter '{}' of {} dimensions: found {} over {}", caller,
                          param.name, dims, to_string(placement), to_string(axis));
      cut[param.name] = static_cast<size_t>(shard->dim < 0 ? shard->dim + dims : shard->dim);
    }
    if (!cut.empty()) join_along(state.group(group_kind_of(axis)), cut, places, caller);
  }
  return places;
}

}  // namespace lockstep
