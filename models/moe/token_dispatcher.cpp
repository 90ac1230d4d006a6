#include "lockstep/models/token_dispatcher.h"

#include <map>
#include <numeric>
#include <optional>
#include <utility>

#include <ATen/ATen.h>

#include "lockstep/core/integers.h"
#include "lockstep/core/planned_cpu.h"
#include "lockstep/core/upload.h"
#include "lockstep/models/recompute.h"
#include "lockstep/models/row_order.h"
#include "lockstep/parallel_state/collectives.h"
#include "lockstep/parallel_state/parallel_functions.h"
#include "lockstep/parallel_state/row_exchange.h"

namespace lockstep {
namespace {

using Rows = std::vector<int64_t>;

/// The slice of the experts that each rank of tp-ep has.
class ExpertGrid {
 public:
  ExpertGrid(const ParallelState& state, int64_t num_experts)
      : group_(state.group(GroupKind::tp_ep)) {
    const RankGroups ep = state.grids().groups(GroupKind::ep);
    num_local_ = div_exact(num_experts, ep.size(), "model.num_experts",
                           "parallel.expert_model_parallel_size");
    copies_ = state.grids().expert_tensor_size();
    for (const int64_t rank : group_.ranks()) slices_.push_back(*ep.position_of(rank));
  }

  const ProcessGroup& group() const { return group_; }
  int64_t ranks() const { return group_.size(); }
  int64_t num_local() const { return num_local_; }
  int64_t copies() const { return copies_; }  ///< ranks that have parts of the same expert
  bool cuts_experts() const { return copies_ < ranks(); }
  /// First expert of the rank at `position` of the group.
  int64_t first_of(int64_t position) const {
    return slices_[static_cast<size_t>(position)] * num_local_;
  }
  int64_t own_first() const { return first_of(group_.rank()); }

 private:
  ProcessGroup group_;
  int64_t num_local_ = 0, copies_ = 1;
  Rows slices_;
};

at::Tensor weighted_sum(const at::Tensor& outputs, const at::Tensor& probs,
                        const RowOrderPtr& order) {
  const at::Tensor weights = weights_of_rows(probs, order);
  return sums_of_rows(outputs * weights.unsqueeze(-1).to(outputs.scalar_type()), order);
}

Rows to_rows(const at::Tensor& counts) {
  const at::Tensor host = counts.cpu().contiguous();
  return {host.const_data_ptr<int64_t>(), host.const_data_ptr<int64_t>() + host.numel()};
}

/// Whether the host can read it without waiting for a device.
bool is_on_host(const at::Tensor& counts) {
  return counts.is_cpu() || (counts.is_meta() && plans_cpu());
}

int64_t sum_of(const Rows& rows) { return std::accumulate(rows.begin(), rows.end(), int64_t{0}); }

/// The groups of `counts` [experts], on the device and, if known, on the host.
RowGroupsPtr groups_of(const at::Tensor& counts, std::optional<Rows> on_host = {}) {
  return c10::make_intrusive<kernels::RowGroups>(counts.cumsum(0).to(at::kInt), std::move(on_host));
}

/// The number of rows for the routing's pairs, as far as it is known without waiting for a device.
/// `counts`: the pairs of each expert.
int64_t rows_without_waiting(const Routing& routing, const at::Tensor& counts) {
  const RoutingSizes sizes = routing.sizes();
  return is_on_host(counts) && !sizes.all_taken ? sum_of(to_rows(counts)) : sizes.pairs;
}

/// How many rows each rank sends to each other rank.
struct Traffic {
  int64_t rows = 0;                 ///< of this rank's tokens, sorted by expert
  Rows leaving;                     ///< rows to each rank of the group
  Rows leaving_from;                ///< where those begin among this rank's rows
  Rows arriving;                    ///< rows from each rank
  RowGroupsPtr groups;              ///< of this rank's experts
  std::optional<BlockOrder> order;  ///< of arriving rows, by expert; unset: as they arrive
};

class AllToAllDispatcher : public MoETokenDispatcher {
 public:
  explicit AllToAllDispatcher(ExpertGrid grid) : grid_(std::move(grid)) {}

  at::Tensor run(const at::Tensor& tokens, const Routing& routing, const ExpertFunction& experts,
                 const std::function<void()>& meanwhile) const override {
    const Traffic traffic = plan(routing);
    const RowOrderPtr order = order_rows(routing, traffic.rows);
    RowExchange exchange(to_ranks(rows_of_tokens(tokens, order), traffic), grid_.group(),
                         traffic.arriving, traffic.leaving, "tokens of the experts");
    meanwhile();
    at::Tensor rows = exchange.wait();
    if (traffic.order) rows = reorder_rows(rows, *traffic.order);
    rows = experts(rows, traffic.groups);
    if (traffic.order) rows = reorder_rows(rows, {traffic.order->back, traffic.order->forth});
    rows = all_to_all_rows(rows, grid_.group(), traffic.leaving, traffic.arriving,
                           "outputs of the experts");
    return weighted_sum(from_ranks(rows, traffic), routing.probs, order);
  }

 private:
  Traffic plan(const Routing& routing) const {
    const at::Tensor own = routing.map.sum(0);
    if (grid_.ranks() == 1) {
      const int64_t rows = rows_without_waiting(routing, own);
      return {rows, {rows}, {0}, {rows}, groups_of(own), {}};
    }
    const bool waits = grid_.cuts_experts() || is_on_host(own);
    return waits ? plan_by_counts(own) : plan_whole(gather(own), routing.sizes().pairs);
  }

  /// [ranks, experts]: pairs of each rank and expert.
  at::Tensor gather(const at::Tensor& own) const {
    const at::Tensor gathered = at::empty({grid_.ranks(), own.numel()}, own.options());
    all_gather(grid_.group(), gathered, own.contiguous(), "numbers of tokens").wait();
    return gathered;
  }

  /// Every rank has all experts and sends the same number of rows to every rank.
  Traffic plan_whole(const at::Tensor& counts, int64_t rows) const {
    const auto ranks = static_cast<size_t>(grid_.ranks());
    const at::Tensor unused = rows - counts.sum(1, /*keepdim=*/true);
    return {rows,
            Rows(ranks, rows),
            Rows(ranks, 0),
            Rows(ranks, rows),
            groups_of(counts.sum(0)),
            transpose_blocks(at::cat({counts, unused}, 1), grid_.ranks() * rows)};
  }

  Traffic plan_by_counts(const at::Tensor& own) const {
    const int64_t ranks = grid_.ranks(), experts = own.numel(), local = grid_.num_local();
    at::Tensor gathered;
    const Rows counts = read_once([&] {
      gathered = gather(own);
      return to_rows(gathered);
    });
    if (!gathered.defined()) gathered = upload(at::tensor(counts), own.device());
    const auto rows_of = [&](int64_t rank, int64_t first, int64_t number) {
      const auto begin = counts.begin() + rank * experts + first;
      return std::accumulate(begin, begin + number, int64_t{0});
    };
    Traffic traffic;
    traffic.rows = rows_of(grid_.group().rank(), 0, experts);
    Rows per_expert(static_cast<size_t>(local), 0);
    for (int64_t rank = 0; rank < ranks; ++rank) {
      const int64_t first = grid_.first_of(rank);
      traffic.leaving.push_back(rows_of(grid_.group().rank(), first, local));
      traffic.leaving_from.push_back(rows_of(grid_.group().rank(), 0, first));
      traffic.arriving.push_back(rows_of(rank, grid_.own_first(), local));
      for (int64_t e = 0; e < local; ++e)
        per_expert[static_cast<size_t>(e)] += rows_of(rank, grid_.own_first() + e, 1);
    }
    const at::Tensor blocks = gathered.view({ranks, experts}).narrow(1, grid_.own_first(), local);
    if (local > 1) traffic.order = transpose_blocks(blocks, sum_of(per_expert));
    traffic.groups = groups_of(blocks.sum(0), std::move(per_expert));
    return traffic;
  }

  at::Tensor to_ranks(const at::Tensor& sorted, const Traffic& traffic) const {
    if (grid_.copies() == 1) return sorted;
    std::vector<at::Tensor> parts;
    for (size_t rank = 0; rank < traffic.leaving.size(); ++rank)
      parts.push_back(sorted.narrow(0, traffic.leaving_from[rank], traffic.leaving[rank]));
    return at::cat(parts);
  }

  /// The sum of the terms of the ranks that have parts of the same experts.
  at::Tensor from_ranks(const at::Tensor& back, const Traffic& traffic) const {
    if (grid_.copies() == 1) return back;
    std::map<int64_t, at::Tensor> slices;  // by the first expert
    int64_t start = 0;
    for (int64_t rank = 0; rank < grid_.ranks(); ++rank) {
      const int64_t rows = traffic.leaving[static_cast<size_t>(rank)];
      const at::Tensor term = back.narrow(0, start, rows);
      at::Tensor& sum = slices[grid_.first_of(rank)];
      sum = sum.defined() ? sum + term : term;
      start += rows;
    }
    std::vector<at::Tensor> parts;
    for (const auto& slice : slices) parts.push_back(slice.second);
    return at::cat(parts);
  }

  ExpertGrid grid_;
};

class AllGatherDispatcher : public MoETokenDispatcher {
 public:
  explicit AllGatherDispatcher(ExpertGrid grid) : grid_(std::move(grid)) {}

  at::Tensor run(const at::Tensor& tokens, const Routing& routing, const ExpertFunction& experts,
                 const std::function<void()>& meanwhile) const override {
    const ProcessGroup& group = grid_.group();
    const auto gathered = [&](const at::Tensor& x, const char* label) {
      return gather_from_group(x, group, 0, GradientState::partial_sum, label);
    };
    const auto own_experts = [&](const at::Tensor& x) {
      return x.narrow(1, grid_.own_first(), grid_.num_local());
    };
    meanwhile();
    const at::Tensor all = gathered(tokens, "tokens of the experts");
    const at::Tensor probs = own_experts(gathered(routing.probs, "routing weights"));
    const at::Tensor map =
        own_experts(gathered(routing.map.to(at::kByte), "routing map").to(at::kBool));
    const Routing here{probs, map, sizes_here(routing.sizes())};
    const at::Tensor counts = map.sum(0);
    std::optional<Rows> on_host;
    if (grid_.cuts_experts() || is_on_host(counts))
      on_host = read_once([&] { return to_rows(counts); });
    const RowOrderPtr order = order_rows(here, on_host ? sum_of(*on_host) : here.sizes().pairs);
    const at::Tensor outputs =
        experts(rows_of_tokens(all, order), groups_of(counts, std::move(on_host)));
    return reduce_scatter_to_group(weighted_sum(outputs, probs, order), group, 0,
                                   "outputs of the experts");
  }

 private:
  /// The sizes for this rank's experts, if each rank's choices have the sizes `each`.
  RoutingSizes sizes_here(const RoutingSizes& each) const {
    return {each.pairs * grid_.ranks(), each.per_token, each.all_taken && !grid_.cuts_experts()};
  }

  ExpertGrid grid_;
};

}  // namespace

std::shared_ptr<const MoETokenDispatcher> make_token_dispatcher(TokenDispatcher type,
                                                                const ParallelState& state,
                                                                int64_t num_experts) {
  const ExpertGrid grid(state, num_experts);
  if (type == TokenDispatcher::allgather) return std::make_shared<AllGatherDispatcher>(grid);
  return std::make_shared<AllToAllDispatcher>(grid);
}

}  // namespace lockstep
