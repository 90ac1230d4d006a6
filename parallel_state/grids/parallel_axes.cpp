#include "lockstep/parallel_state/parallel_axes.h"

#include <algorithm>
#include <array>
#include <string_view>

#include "lockstep/core/check.h"

namespace lockstep {
namespace {

using P = ParallelSizes;
using C = ParallelConfig;

constexpr ParallelSize kTensor = {"tensor", "Ranks that share each layer's matrices",
                                  "tensor_model_parallel_size", &P::tensor,
                                  &C::tensor_model_parallel_size};
constexpr ParallelSize kPipeline = {"pipeline", "Pipeline stages", "pipeline_model_parallel_size",
                                    &P::pipeline, &C::pipeline_model_parallel_size};
constexpr ParallelSize kVirtualPipeline = {
    "virtual-pipeline", "", "virtual_pipeline_model_parallel_size", &P::virtual_pipeline,
    &C::virtual_pipeline_model_parallel_size};
constexpr ParallelSize kContext = {"context", "Ranks that share each sequence",
                                   "context_parallel_size", &P::context, &C::context_parallel_size};
constexpr ParallelSize kExpert = {"expert", "Ranks over which the experts are split",
                                  "expert_model_parallel_size", &P::expert,
                                  &C::expert_model_parallel_size};
constexpr ParallelSize kExpertTensor = {"expert-tensor",
                                        "Ranks that share each expert's matrices; unset: as "
                                        "--tensor",
                                        "expert_tensor_parallel_size",
                                        &P::expert_tensor,
                                        &C::expert_tensor_parallel_size,
                                        &kTensor};
constexpr std::array kSizes = {&kTensor,  &kPipeline, &kVirtualPipeline,
                               &kContext, &kExpert,   &kExpertTensor};

constexpr OrderAxis kTp = {"tp", &GridSizes::tp}, kCp = {"cp", &GridSizes::cp},
                    kEp = {"ep", &GridSizes::ep}, kDp = {"dp", &GridSizes::dp},
                    kPp = {"pp", &GridSizes::pp};
constexpr std::array kOrderAxes = {kTp, kCp, kEp, kDp, kPp};

constexpr GridAxis kDenseAxes[] = {{MeshAxis::tp, &kTp, &kTensor},
                                   {MeshAxis::pp, &kPp, &kPipeline},
                                   {MeshAxis::cp, &kCp, &kContext},
                                   {MeshAxis::dp, &kDp, nullptr}};
constexpr GridAxis kExpertAxes[] = {{MeshAxis::etp, &kTp, &kExpertTensor},
                                    {MeshAxis::ep, &kEp, &kExpert},
                                    {MeshAxis::pp, &kPp, &kPipeline},
                                    {MeshAxis::edp, &kDp, nullptr}};

constexpr GroupRow kGroups[] = {
    {GroupKind::tp, "tp", Grid::dense, "tp"},
    {GroupKind::cp, "cp", Grid::dense, "cp"},
    {GroupKind::dp, "dp", Grid::dense, "dp"},
    {GroupKind::dp_cp, "dp-cp", Grid::dense, "dp-cp"},
    {GroupKind::pp, "pp", Grid::dense, "pp"},
    {GroupKind::tp_pp, "tp-pp", Grid::dense, "tp-pp"},
    {GroupKind::tp_dp, "tp-dp", Grid::dense, "tp-dp"},
    {GroupKind::tp_cp, "tp-cp", Grid::dense, "tp-cp"},
    {GroupKind::tp_dp_cp, "tp-dp-cp", Grid::dense, "tp-dp-cp"},
    {GroupKind::ep, "ep", Grid::expert, "ep"},
    {GroupKind::expert_tp, "expert-tp", Grid::expert, "tp"},
    {GroupKind::expert_dp, "expert-dp", Grid::expert, "dp"},
    {GroupKind::tp_ep, "tp-ep", Grid::expert, "tp-ep"},
    {GroupKind::tp_ep_pp, "tp-ep-pp", Grid::expert, "tp-ep-pp"},
    {GroupKind::embedding, "embedding", Grid::dense, ""},
    {GroupKind::position_embedding, "position-embedding", Grid::dense, ""},
    {GroupKind::intra_dp_cp, "intra-dp-cp", Grid::dense, ""},
    {GroupKind::intra_expert_dp, "intra-expert-dp", Grid::expert, ""},
    {GroupKind::inter_optimizer, "inter-optimizer", Grid::expert, ""},
    {GroupKind::intra_optimizer, "intra-optimizer", Grid::expert, ""},
};

constexpr bool rows_follow_the_enumeration() {
  for (size_t i = 0; i < std::size(kGroups); ++i)
    if (static_cast<size_t>(kGroups[i].kind) != i) return false;
  return true;
}
static_assert(rows_follow_the_enumeration());

constexpr std::span<const GridAxis> axes_of(Grid grid) {
  return grid == Grid::dense ? std::span<const GridAxis>(kDenseAxes) : kExpertAxes;
}

constexpr std::optional<MeshAxis> axis_of(const GroupRow& row) {
  for (const GridAxis& axis : axes_of(row.grid))
    if (std::string_view(row.axes) == axis.in_order->name) return axis.axis;
  return std::nullopt;
}

/// The kind of group along each axis, by axis number; computed at compile time.
constexpr auto kKindAlong = [] {
  std::array<std::optional<GroupKind>, std::size(kDenseAxes) + std::size(kExpertAxes)> kinds;
  for (const GroupRow& row : kGroups)
    if (const auto axis = axis_of(row)) kinds[static_cast<size_t>(*axis)] = row.kind;
  return kinds;
}();

template <class Struct>
std::optional<int64_t> stated(const Struct& sizes, const SizeMember<Struct>& member) {
  return std::visit([&](auto at) { return std::optional<int64_t>(sizes.*at); }, member);
}

template <class Struct>
int64_t size_in(const Struct& sizes, const ParallelSize& size,
                SizeMember<Struct> ParallelSize::*in) {
  const std::optional<int64_t> found = stated(sizes, size.*in);
  if (found || !size.if_unset) return found.value_or(1);
  return size_in(sizes, *size.if_unset, in);
}

}  // namespace

int64_t ParallelSize::of(const ParallelSizes& sizes) const {
  return size_in(sizes, *this, &ParallelSize::in_sizes);
}

int64_t ParallelSize::of(const ParallelConfig& config) const {
  return size_in(config, *this, &ParallelSize::in_config);
}

const ParallelSize& ParallelSize::source_in(const ParallelConfig& config) const {
  return stated(config, in_config) || !if_unset ? *this : *if_unset;
}

void ParallelSize::copy(const ParallelConfig& config, ParallelSizes& sizes) const {
  if (const std::optional<int64_t> size = stated(config, in_config)) set(sizes, *size);
}

void ParallelSize::set(ParallelSizes& sizes, int64_t size) const {
  std::visit([&](auto at) { sizes.*at = size; }, in_sizes);
}

std::string ParallelSize::name_with(char between) const {
  std::string text = name;
  std::replace(text.begin(), text.end(), '-', between);
  return text;
}

std::span<const ParallelSize* const> parallel_size_table() { return kSizes; }

std::span<const OrderAxis> order_axes() { return kOrderAxes; }

std::span<const GridAxis> grid_axes(Grid grid) { return axes_of(grid); }

const ParallelSize* chosen_size(MeshAxis axis) {
  for (const Grid grid : {Grid::dense, Grid::expert})
    for (const GridAxis& row : grid_axes(grid))
      if (row.axis == axis) return row.size;
  fail<UsageError>("axis {} is in no grid", to_string(axis));
}

std::span<const GroupRow> group_table() { return kGroups; }

std::optional<MeshAxis> only_axis(const GroupRow& row) { return axis_of(row); }

std::optional<GroupKind> kind_along(MeshAxis axis) {
  const auto index = static_cast<size_t>(axis);
  return index < kKindAlong.size() ? kKindAlong[index] : std::nullopt;
}

}  // namespace lockstep
