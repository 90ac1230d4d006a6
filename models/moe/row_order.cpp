#include "lockstep/models/row_order.h"

#include <algorithm>
#include <utility>

#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>

namespace lockstep {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

template <class T>
struct Held : torch::CustomClassHolder {
  explicit Held(T v) : value(std::move(v)) {}
  T value;
};

template <class T>
void hold(AutogradContext* context, const T& value) {
  context->saved_data["order"] = c10::IValue::make_capsule(c10::make_intrusive<Held<T>>(value));
}

template <class T>
T held(AutogradContext* context) {
  const auto capsule = context->saved_data["order"].toCapsule();
  return static_cast<const Held<T>&>(*capsule).value;
}

/// A sum of two terms is rounded only once in any dtype.
at::ScalarType sum_dtype(at::ScalarType dtype, int64_t terms) {
  return terms > 2 && at::isReducedFloatingType(dtype) ? at::kFloat : dtype;
}

at::Tensor add_up(const at::Tensor& rows, const RowOrder& order) {
  const int64_t terms = order.of_token.size(0), tokens = order.of_token.size(1);
  const at::ScalarType dtype = rows.scalar_type();
  at::Tensor sum = at::zeros({tokens, rows.size(1)}, rows.options().dtype(sum_dtype(dtype, terms)));
  for (int64_t i = 0; i < terms && rows.size(0) > 0; ++i) {
    const at::Tensor term = rows.index_select(0, order.of_token[i]);
    if (order.missing.defined()) term.masked_fill_(order.missing[i].unsqueeze(1), 0);
    sum.add_(term);
  }
  return sum.to(dtype);
}

struct SumsOfRows;

struct RowsOfTokens : torch::autograd::Function<RowsOfTokens> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& tokens,
                            const RowOrderPtr& order) {
    hold(context, order);
    return tokens.index_select(0, order->tokens);
  }
  static variable_list backward(AutogradContext* context, const variable_list& grads) {
    return {sums_of_rows(grads[0], held<RowOrderPtr>(context)), {}};
  }
};

struct SumsOfRows : torch::autograd::Function<SumsOfRows> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& rows,
                            const RowOrderPtr& order) {
    hold(context, order);
    return add_up(rows, *order);
  }
  static variable_list backward(AutogradContext* context, const variable_list& grads) {
    return {rows_of_tokens(grads[0], held<RowOrderPtr>(context)), {}};
  }
};

struct WeightsOfRows : torch::autograd::Function<WeightsOfRows> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& weights,
                            const RowOrderPtr& order) {
    hold(context, order);
    return weights.flatten().index_select(0, order->places);
  }
  static variable_list backward(AutogradContext* context, const variable_list& grads) {
    const auto order = held<RowOrderPtr>(context);
    const int64_t rows = grads[0].size(0);
    if (rows == 0) return {at::zeros(order->chosen.sizes(), grads[0].options()), {}};
    const at::Tensor found = grads[0].index_select(0, order->of_pair.flatten().clamp(0, rows - 1));
    return {found.view(order->chosen.sizes()).masked_fill(order->chosen.logical_not(), 0), {}};
  }
};

struct ReorderRows : torch::autograd::Function<ReorderRows> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& x,
                            const BlockOrder& order) {
    hold(context, order);
    return x.index_select(0, order.forth);
  }
  static variable_list backward(AutogradContext* context, const variable_list& grads) {
    const auto order = held<BlockOrder>(context);
    return {reorder_rows(grads[0], {order.back, order.forth}), {}};
  }
};

/// [rows]: for each row of the transposed list, its row in the list.
at::Tensor transposed_order(const at::Tensor& blocks, const at::Tensor& row) {
  const at::Tensor sizes = blocks.t().flatten();
  const at::Tensor ends = sizes.cumsum(0);
  const at::Tensor starts =
      (blocks.flatten().cumsum(0).view(blocks.sizes()) - blocks).t().flatten();
  const at::Tensor block = at::searchsorted(ends, row, /*out_int32=*/false, /*right=*/true);
  return row + (starts - ends + sizes).index_select(0, block);
}

}  // namespace

RowOrderPtr order_rows(const Routing& routing, int64_t rows) {
  const int64_t tokens = routing.map.size(0), experts = routing.map.size(1);
  const auto options = routing.map.options().dtype(at::kLong);
  const RoutingSizes sizes = routing.sizes();
  RowOrder order;
  order.chosen = routing.map;
  const at::Tensor until = routing.map.t().flatten().cumsum(0, at::kLong);  // pairs so far
  const at::Tensor pairs = at::searchsorted(until, at::arange(1, rows + 1, options))
                               .clamp_max(std::max<int64_t>(tokens * experts - 1, 0));
  const at::Tensor expert = pairs.floor_divide(std::max<int64_t>(tokens, 1));
  order.tokens = pairs - expert * tokens;
  order.places = order.tokens * experts + expert;
  const at::Tensor row = (until - 1).view({experts, tokens});
  order.of_pair = row.t().contiguous();
  // An expert's output with weight 0 adds nothing and gets no gradient.
  const at::Tensor counted =
      sizes.all_taken ? routing.map : routing.map.logical_and(routing.probs.detach().ne(0));
  const at::Tensor found = std::get<0>(order.of_pair.masked_fill(counted.logical_not(), rows)
                                           .topk(std::min(sizes.per_token, experts), /*dim=*/1,
                                                 /*largest=*/false, /*sorted=*/true));
  order.of_token = found.t().contiguous();
  if (!sizes.all_taken) {
    order.missing = order.of_token.ge(rows);
    order.of_token.clamp_(0, std::max<int64_t>(rows - 1, 0));
  }
  return std::make_shared<const RowOrder>(std::move(order));
}

at::Tensor rows_of_tokens(const at::Tensor& tokens, const RowOrderPtr& order) {
  return RowsOfTokens::apply(tokens, order);
}

at::Tensor sums_of_rows(const at::Tensor& rows, const RowOrderPtr& order) {
  return SumsOfRows::apply(rows, order);
}

at::Tensor weights_of_rows(const at::Tensor& weights, const RowOrderPtr& order) {
  return WeightsOfRows::apply(weights, order);
}

BlockOrder transpose_blocks(const at::Tensor& blocks, int64_t rows) {
  const at::Tensor row = at::arange(rows, blocks.options());
  return {transposed_order(blocks, row), transposed_order(blocks.t(), row)};
}

at::Tensor reorder_rows(const at::Tensor& x, const BlockOrder& order) {
  return ReorderRows::apply(x, order);
}

}  // namespace lockstep
