#include "lockstep/parallel_state/row_exchange.h"

#include <algorithm>
#include <numeric>
#include <string>
#include <utility>

#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>

#include "lockstep/parallel_state/collective_call.h"
#include "lockstep/parallel_state/collectives.h"

namespace lockstep {

/// The state that both halves share. `rows` are those under way, in either direction.
struct RowExchange::State : torch::CustomClassHolder {
  State(ProcessGroup g, std::vector<int64_t> output, std::vector<int64_t> input, std::string_view l)
      : group(std::move(g)),
        output_rows(std::move(output)),
        input_rows(std::move(input)),
        label(share_label(group, "", l)),
        gradient_label(share_label(group, "gradient of ", l)) {}

  void start(const at::Tensor& x) { start(x, output_rows, input_rows, *label); }
  void start_back(const at::Tensor& grad) { start(grad, input_rows, output_rows, *gradient_label); }
  at::Tensor wait() {
    std::exchange(work, Work()).wait();
    return std::exchange(rows, at::Tensor());
  }

  ProcessGroup group;
  std::vector<int64_t> output_rows, input_rows;
  SharedLabel label, gradient_label;
  Work work;
  at::Tensor rows;

 private:
  void start(const at::Tensor& x, const std::vector<int64_t>& coming,
             const std::vector<int64_t>& going, const std::string& name) {
    std::vector<int64_t> shape = x.sizes().vec();
    shape[0] = std::accumulate(coming.begin(), coming.end(), int64_t{0});
    rows = at::empty(shape, x.options());
    // A collective that holds on to its tensors must not hold the graph, which holds the group.
    work = all_to_all(group, rows, x.detach().contiguous(), coming, going, name);
  }
};

namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;
using StatePtr = c10::intrusive_ptr<RowExchange::State>;

struct Start : torch::autograd::Function<Start> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& x, const StatePtr& state) {
    context->saved_data["state"] = c10::IValue::make_capsule(state);
    state->start(x);
    return state->rows.detach();
  }
  static variable_list backward(AutogradContext* context, const variable_list& grads) {
    const auto holder = context->saved_data["state"].toCapsule();
    (void)grads;
    return {static_cast<RowExchange::State&>(*holder).wait(), {}};
  }
};

struct Finish : torch::autograd::Function<Finish> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& rows,
                            const StatePtr& state) {
    context->saved_data["state"] = c10::IValue::make_capsule(state);
    (void)rows;
    return state->wait().detach();
  }
  static variable_list backward(AutogradContext* context, const variable_list& grads) {
    const auto holder = context->saved_data["state"].toCapsule();
    auto& state = static_cast<RowExchange::State&>(*holder);
    require<UsageError>(!at::GradMode::is_enabled(),
                        "{} over group {}: found backward with create_graph, allowed: without; "
                        "there is no second derivative",
                        *state.gradient_label, state.group.to_string());
    state.start_back(grads[0]);
    // A placeholder in autograd for the gradient under way, which has other rows.
    return {grads[0], {}};
  }
};

bool one_a_rank(const std::vector<int64_t>& rows, int64_t ranks) {
  return static_cast<int64_t>(rows.size()) == ranks &&
         std::all_of(rows.begin(), rows.end(), [](int64_t n) { return n >= 0; });
}

}  // namespace

RowExchange::RowExchange(const at::Tensor& x, const ProcessGroup& group,
                         const std::vector<int64_t>& output_rows,
                         const std::vector<int64_t>& input_rows, std::string_view label) {
  const int64_t ranks = group.size();
  const bool valid = x.dim() > 0 && one_a_rank(output_rows, ranks) &&
                     one_a_rank(input_rows, ranks) &&
                     std::accumulate(input_rows.begin(), input_rows.end(), int64_t{0}) == x.size(0);
  CollectiveCall(group, {CollectiveOperation::Kind::all_to_all_rows}, label)
      .check(valid && (ranks > 1 || output_rows == input_rows),
             "found output rows {} and input rows {} of {}, allowed: one number a rank, the input "
             "rows adding up to dimension 0",
             output_rows, input_rows, x.sizes());
  if (ranks == 1) {
    rows_ = x;
    return;
  }
  state_ = c10::make_intrusive<State>(group, output_rows, input_rows, label);
  const bool recorded = at::GradMode::is_enabled() && x.requires_grad();
  if (recorded)
    rows_ = Start::apply(x, state_);
  else
    state_->start(x);
}

RowExchange::~RowExchange() = default;

at::Tensor RowExchange::wait() {
  if (!state_) return rows_;
  return rows_.defined() ? Finish::apply(rows_, state_) : state_->wait();
}

}  // namespace lockstep
