#include "lockstep/models/linear_cross_entropy.h"

#include <algorithm>
#include <optional>

#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>

#include "lockstep/core/check.h"
#include "lockstep/core/narrow_dtype.h"
#include "lockstep/kernels/matrix_product.h"
#include "lockstep/models/cross_entropy.h"
#include "lockstep/models/gathering.h"
#include "lockstep/models/input_check.h"
#include "lockstep/models/token_losses.h"
#include "lockstep/models/weight_gradient.h"

namespace lockstep {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

/// The data that backward needs in addition to tensors of the graph.
struct ChunkedLoss : torch::CustomClassHolder {
  ChunkedLoss(TokenLosses l, const ParallelLinearOptions& o, int64_t size)
      : losses(std::move(l)), options(o), chunk_size(size) {}

  /// The input of all ranks, as rows.
  at::Tensor rows_of(const at::Tensor& hidden, const std::string& label) const {
    if (options.input != LinearInput::sequence_chunk) return as_matrix(hidden.detach());
    Gathering gathering(hidden, options, label);
    gathering.work.wait();
    return as_matrix(gathering.whole);
  }

  /// Calls visit(first token, number of tokens, their logits) for each chunk. The logits live only
  /// during that call.
  template <class Visit>
  void each_chunk(const at::Tensor& rows, const at::Tensor& weight, Visit visit) const {
    const int64_t tokens = rows.size(0);
    for (int64_t first = 0; first < tokens; first += chunk_size) {
      const int64_t count = std::min(chunk_size, tokens - first);
      visit(first, count, kernels::product(rows.narrow(0, first, count), weight.t()));
    }
  }

  /// Starts adding up the ranks' terms of the gradient of `hidden`.
  Work reduce(const at::Tensor& term, const at::Tensor& hidden, at::Tensor& result) const {
    std::vector<int64_t> shape = hidden.sizes().vec();
    result = term.view(options.input == LinearInput::sequence_chunk ? whole(shape) : shape);
    const std::string& label = options.label.input_gradient();
    if (options.input == LinearInput::own) return {};
    if (options.input == LinearInput::copied)
      return all_reduce(options.group, result, ReduceOp::sum, label);
    const at::Tensor terms = result;
    result = at::empty(shape, term.options());
    return reduce_scatter(options.group, result, terms, ReduceOp::sum, label);
  }

  TokenLosses losses;
  ParallelLinearOptions options;
  int64_t chunk_size;

 private:
  std::vector<int64_t> whole(std::vector<int64_t> chunk) const {
    chunk[0] *= options.group.size();
    return chunk;
  }
};

kernels::CrossEntropySums of_tokens(const kernels::CrossEntropySums& all, int64_t first,
                                    int64_t count) {
  return {all.highest.narrow(0, first, count), all.sums.narrow(1, first, count)};
}

/// The gradient of a weight, summed over chunks: in the weight's own .grad(), or separately.
class WeightSum {
 public:
  WeightSum(const at::Tensor& weight, bool apart)
      : weight_(weight),
        in_grad_(!apart && is_awaited_in_grad(weight) && !is_narrow(weight.grad().scalar_type())),
        sum_(in_grad_ ? at::Tensor() : zeros()),
        in_products_(sum_.defined()) {}

  void add(const at::Tensor& rows, const at::Tensor& x) {
    if (in_grad_ && add_weight_gradient(weight_, rows, x)) return;
    if (in_products_ && add_to_gradient(sum_, rows, x)) return;
    const at::Tensor term = weight_gradient(weight_, rows, x);
    if (in_grad_)
      weight_.mutable_grad().add_(term);
    else if (sum_.defined())
      sum_.add_(term);
    else
      sum_ = term;
  }

  /// The separate sum; undefined if .grad() has it.
  at::Tensor apart() const { return sum_.defined() ? sum_.to(weight_.scalar_type()) : sum_; }

 private:
  /// What the products are added to; undefined if each is a term of its own.
  at::Tensor zeros() const {
    if (!is_narrow(weight_.scalar_type())) return zeros_in_place_of_grad(weight_);
    return at::zeros(weight_.sizes(), weight_.options().dtype(at::kFloat));
  }

  at::Tensor weight_;
  bool in_grad_;
  at::Tensor sum_;
  bool in_products_;
};

struct LinearCrossEntropy : torch::autograd::Function<LinearCrossEntropy> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& hidden,
                            const at::Tensor& weight, const at::Tensor& labels,
                            const c10::intrusive_ptr<ChunkedLoss>& call) {
    const at::Tensor rows = call->rows_of(hidden, call->options.label.input());
    const TokenLosses& losses = call->losses;
    const kernels::CrossEntropySums sums =
        kernels::make_cross_entropy_sums(rows.size(0), rows, losses.share > 0);
    call->each_chunk(rows, weight, [&](int64_t first, int64_t count, const at::Tensor& logits) {
      kernels::cross_entropy_sums(logits, labels.narrow(0, first, count), losses.columns(),
                                  of_tokens(sums, first, count));
    });
    losses.add_over_ranks(sums);
    context->save_for_backward({hidden, weight, labels, sums.highest, sums.sums});
    context->saved_data["call"] = c10::IValue::make_capsule(call);
    return losses.of(sums, labels);
  }

  static variable_list backward(AutogradContext* context, const variable_list& grads) {
    const auto capsule = context->saved_data["call"].toCapsule();
    const auto& call = static_cast<const ChunkedLoss&>(*capsule);
    require<UsageError>(!at::GradMode::is_enabled(),
                        "{}: found backward with create_graph, allowed: without; there is no "
                        "second derivative",
                        call.options.label.layer());
    const variable_list saved = context->get_saved_variables();
    const at::Tensor &hidden = saved[0], &weight = saved[1], &labels = saved[2];
    const kernels::CrossEntropySums sums = {saved[3], saved[4]};
    const bool of_hidden = context->needs_input_grad(0), of_weight = context->needs_input_grad(1);
    const at::Tensor rows = call.rows_of(hidden, call.options.label.input_again());
    at::Tensor term = of_hidden ? at::empty_like(rows) : at::Tensor();
    std::optional<WeightSum> weight_sum;
    if (of_weight) weight_sum.emplace(weight, is_captured(1));
    call.each_chunk(rows, weight, [&](int64_t first, int64_t count, const at::Tensor& logits) {
      call.losses.gradient(grads[0].narrow(0, first, count), logits, labels.narrow(0, first, count),
                           of_tokens(sums, first, count), logits);
      if (of_hidden) kernels::product_into(term.narrow(0, first, count), logits, weight);
      if (weight_sum) weight_sum->add(logits, rows.narrow(0, first, count));
    });
    at::Tensor hidden_gradient;
    if (of_hidden) call.reduce(term, hidden, hidden_gradient).wait();
    return {hidden_gradient, weight_sum ? weight_sum->apart() : at::Tensor(), {}, {}};
  }
};

}  // namespace

at::Tensor parallel_linear_cross_entropy(const at::Tensor& hidden, const at::Tensor& weight,
                                         const at::Tensor& labels, const VocabPartition& vocabulary,
                                         const ParallelLinearOptions& options, int64_t chunk_size,
                                         double label_smoothing) {
  const std::string& layer = options.label.layer();
  const bool cut = options.input == LinearInput::sequence_chunk && options.group.size() > 1;
  check_input(hidden, weight.size(-1), weight, layer, cut ? 2 : 1);
  const int64_t tokens = hidden.numel() / hidden.size(-1) * (cut ? options.group.size() : 1);
  require<UsageError>(labels.dim() == 1 && labels.size(0) == tokens &&
                          labels.scalar_type() == at::kLong && weight.size(0) == vocabulary.rows,
                      "{}: found labels {} and {} rows of the weight, allowed: [{}] of Long and {}",
                      layer, form_of(labels), weight.size(0), tokens, vocabulary.rows);
  require<UsageError>(chunk_size >= 1, "{}: found chunks of {} tokens, allowed: 1 or more", layer,
                      chunk_size);
  const TokenLosses losses(layer.c_str(), vocabulary, options.group, label_smoothing);
  check_token_ids(labels, vocabulary.vocab_size, /*may_be_ignored=*/true,
                  (layer + ": labels").c_str());
  auto call = c10::make_intrusive<ChunkedLoss>(losses, options, chunk_size);
  if (options.group.size() == 1) call->options.input = LinearInput::own;
  return LinearCrossEntropy::apply(hidden, weight, labels, call);
}

}  // namespace lockstep
