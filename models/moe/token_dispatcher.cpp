#include "lockstep/models/token_dispatcher.h"

#include <map>
#include <numeric>
#include <utility>

#include <ATen/ATen.h>

#include "lockstep/core/integers.h"
#include "lockstep/parallel_state/collectives.h"
#include "lockstep/parallel_state/parallel_functions.h"
#include "lockstep/parallel_state/row_exchange.h"

namespace lockstep {
namespace {

using Rows = std::vector<int64_t>;

/// The chosen pairs of `map` [tokens, experts], sorted by expert and token.
struct Choices {
  at::Tensor tokens;   ///< [pairs]
  at::Tensor weights;  ///< [pairs], differentiable

  Choices(const at::Tensor& map, const at::Tensor& probs) {
    const at::Tensor pairs = map.t().nonzero();
    tokens = pairs.select(1, 1);
    weights = probs.index({tokens, pairs.select(1, 0)});
  }
};

/// Which slice of the experts each rank of tp-ep has.
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

at::Tensor weighted_sum(const at::Tensor& outputs, const Choices& choices, int64_t tokens) {
  const at::Tensor weighted = outputs * choices.weights.unsqueeze(-1).to(outputs.scalar_type());
  return at::zeros({tokens, outputs.size(1)}, outputs.options())
      .index_add(0, choices.tokens, weighted);
}

Rows to_rows(const at::Tensor& counts) {
  const at::Tensor host = counts.cpu().contiguous();
  return {host.const_data_ptr<int64_t>(), host.const_data_ptr<int64_t>() + host.numel()};
}

/// Who sends how many rows to whom.
struct Traffic {
  Rows leaving;       ///< rows to each rank of the group
  Rows leaving_from;  ///< where they begin among this rank's rows, which are sorted by expert
  Rows arriving;      ///< rows from each rank
  Rows per_expert;    ///< rows for each of this rank's experts
  at::Tensor order;   ///< [rows that arrive]: sorted by expert; they come sorted by rank
};

class AllToAllDispatcher : public MoETokenDispatcher {
 public:
  explicit AllToAllDispatcher(ExpertGrid grid) : grid_(std::move(grid)) {}

  at::Tensor run(const at::Tensor& tokens, const Routing& routing, const ExpertFunction& experts,
                 const std::function<void()>& meanwhile) const override {
    const Choices choices(routing.map, routing.probs);
    const at::Tensor sorted = tokens.index_select(0, choices.tokens);
    const Traffic traffic = exchange_counts(routing.map.sum(0));
    RowExchange exchange(to_ranks(sorted, traffic), grid_.group(), traffic.arriving,
                         traffic.leaving, "tokens of the experts");
    meanwhile();
    const at::Tensor arrived = exchange.wait();
    const at::Tensor order = traffic.order.to(tokens.device());
    const at::Tensor outputs = experts(arrived.index_select(0, order), traffic.per_expert);
    const at::Tensor back =
        all_to_all_rows(outputs.index_select(0, order.argsort()), grid_.group(), traffic.leaving,
                        traffic.arriving, "outputs of the experts");
    return weighted_sum(from_ranks(back, traffic), choices, tokens.size(0));
  }

 private:
  Traffic exchange_counts(const at::Tensor& own) const {
    const int64_t ranks = grid_.ranks(), experts = own.numel(), local = grid_.num_local();
    const at::Tensor gathered = at::empty({ranks, experts}, own.options());
    all_gather(grid_.group(), gathered, own.contiguous(), "numbers of tokens").wait();
    const Rows counts = to_rows(ranks == 1 ? own : gathered);
    const auto rows_of = [&](int64_t rank, int64_t first, int64_t number) {
      const auto begin = counts.begin() + rank * experts + first;
      return std::accumulate(begin, begin + number, int64_t{0});
    };
    Traffic traffic;
    for (int64_t rank = 0; rank < ranks; ++rank) {
      const int64_t first = grid_.first_of(rank);
      traffic.leaving.push_back(rows_of(grid_.group().rank(), first, local));
      traffic.leaving_from.push_back(rows_of(grid_.group().rank(), 0, first));
      traffic.arriving.push_back(rows_of(rank, grid_.own_first(), local));
    }
    traffic.per_expert.assign(static_cast<size_t>(local), 0);
    // Where the rows of each pair (expert, rank) begin, among those that arrive.
    std::vector<std::vector<std::pair<int64_t, int64_t>>> places(static_cast<size_t>(local));
    int64_t start = 0;
    for (int64_t rank = 0; rank < ranks; ++rank)
      for (int64_t e = 0; e < local; ++e) {
        const int64_t rows = rows_of(rank, grid_.own_first() + e, 1);
        places[static_cast<size_t>(e)].emplace_back(start, rows);
        traffic.per_expert[static_cast<size_t>(e)] += rows;
        start += rows;
      }
    std::vector<int64_t> order;
    order.reserve(static_cast<size_t>(start));
    for (const auto& expert : places)
      for (const auto& [from, rows] : expert)
        for (int64_t i = 0; i < rows; ++i) order.push_back(from + i);
    traffic.order = at::tensor(order, at::kLong);
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
    const Choices choices(map, probs);
    const at::Tensor outputs = experts(all.index_select(0, choices.tokens), to_rows(map.sum(0)));
    return reduce_scatter_to_group(weighted_sum(outputs, choices, all.size(0)), group, 0,
                                   "outputs of the experts");
  }

 private:
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
