#include "lockstep/models/context_parallel_ring.h"

#include <string>
#include <utility>

#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>

#include "lockstep/core/check.h"
#include "lockstep/models/context_parallel_blocks.h"
#include "lockstep/parallel_state/collectives.h"

namespace lockstep {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

struct Ring : torch::CustomClassHolder {
  Ring(ProcessGroup g, std::vector<std::vector<AttentionBlock>> b)
      : group(std::move(g)), blocks(std::move(b)) {}
  ProcessGroup group;
  std::vector<std::vector<AttentionBlock>> blocks;  ///< by step
  int64_t steps() const { return static_cast<int64_t>(blocks.size()); }
};

/// A message to the next rank, and one from the previous rank, under way.
class Passing {
 public:
  Passing(const at::Tensor& tensor, const ProcessGroup& group, const std::string& label)
      : received_(at::empty_like(tensor)) {
    const int64_t ranks = group.size(), next = (group.rank() + 1) % ranks;
    const int64_t previous = (group.rank() + ranks - 1) % ranks;
    work_ = exchange(group, tensor, next, received_, previous, label);
  }

  at::Tensor wait() {
    work_.wait();
    return received_;
  }

 private:
  at::Tensor received_;
  Work work_;
};

/// Calls visit(step, keys and values of the rank `step` places before) while they go round.
template <class Visit>
void go_round(at::Tensor both, const Ring& ring, Visit visit) {
  for (int64_t step = 0; step < ring.steps(); ++step) {
    std::optional<Passing> passing;
    if (step + 1 < ring.steps()) passing.emplace(both, ring.group, "keys and values");
    visit(step, both);
    if (passing) both = passing->wait();
  }
}

struct RingAttention : torch::autograd::Function<RingAttention> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& query,
                            const at::Tensor& key, const at::Tensor& value,
                            const c10::intrusive_ptr<Ring>& ring) {
    const at::Tensor both = at::stack({key, value});
    BlockwiseAttention attention(query, attention_kernel(query));
    go_round(both, *ring, [&](int64_t step, const at::Tensor& kv) {
      for (const AttentionBlock& block : ring->blocks[static_cast<size_t>(step)])
        attention.add(block, kv[0], kv[1]);
    });
    at::Tensor output = attention.output();
    context->save_for_backward({query, both, output, attention.log_sum_exp()});
    context->saved_data["ring"] = c10::IValue::make_capsule(ring);
    return output;
  }

  static variable_list backward(AutogradContext* context, const variable_list& grads) {
    const auto capsule = context->saved_data["ring"].toCapsule();
    const auto& ring = static_cast<const Ring&>(*capsule);
    require<UsageError>(!at::GradMode::is_enabled(),
                        "ring attention over group {}: found backward with create_graph, allowed: "
                        "without; there is no second derivative",
                        ring.group.to_string());
    const variable_list saved = context->get_saved_variables();
    const at::Tensor query = saved[0], both = saved[1];
    BlockwiseAttentionGradient gradient(query, saved[2], saved[3], grads[0].contiguous(),
                                        attention_kernel(query));
    at::Tensor own = key_value_gradient(both, ring, gradient);
    own = own.to(query.scalar_type());
    return {gradient.query_gradient().to(query.scalar_type()), own[0], own[1], {}};
  }

  /// A gradient starts at the rank after the one that owns its keys, follows them, and comes home
  /// after the last step.
  static at::Tensor key_value_gradient(const at::Tensor& both, const Ring& ring,
                                       BlockwiseAttentionGradient& gradient) {
    const auto options = both.options().dtype(BlockwiseAttentionGradient::wide(both));
    at::Tensor own;
    std::optional<Passing> passing;
    go_round(both, ring, [&](int64_t step, const at::Tensor& kv) {
      const at::Tensor sum = at::zeros(kv.sizes(), options);
      for (const AttentionBlock& block : ring.blocks[static_cast<size_t>(step)])
        gradient.add(block, kv[0], kv[1], sum[0], sum[1]);
      if (step == 0) {
        own = sum;
        return;
      }
      if (passing) sum.add_(passing->wait());
      passing.emplace(sum, ring.group, "gradient of keys and values");
    });
    if (passing) own.add_(passing->wait());
    return own;
  }
};

}  // namespace

at::Tensor ring_attention(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                          const ProcessGroup& group,
                          const std::vector<std::vector<AttentionBlock>>& blocks) {
  return RingAttention::apply(query, key, value, c10::make_intrusive<Ring>(group, blocks));
}

}  // namespace lockstep
