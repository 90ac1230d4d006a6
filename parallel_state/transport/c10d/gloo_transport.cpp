#include "lockstep/parallel_state/gloo_transport.h"

#include <functional>

#include <ATen/ATen.h>

#include "lockstep/core/check.h"
#include "lockstep/parallel_state/c10d_parts.h"

namespace lockstep {
namespace {

using Parts = Transport::Parts;
using Tensors = Transport::Tensors;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;

/// A collective that needs a final step after it.
class FinishedPart : public CollectivePart {
 public:
  FinishedPart(WorkPtr work, std::function<void()> finish)
      : CollectivePart(std::move(work)), finish_(std::move(finish)) {}
  void wait(const Waiting& waiting) override {
    CollectivePart::wait(waiting);
    finish_();
  }

 private:
  std::function<void()> finish_;
};

/// Checks that all ranks make the same call, by its identity.
class AgreementPart : public CollectivePart {
 public:
  AgreementPart(WorkPtr work, at::Tensor identities)
      : CollectivePart(std::move(work)), identities_(std::move(identities)) {}
  void wait(const Waiting& waiting) override {
    CollectivePart::wait(waiting);
    require<CommunicationError>(identities_.eq(identities_[0]).all().item<bool>(),
                                "the ranks have called different operations");
  }

 private:
  at::Tensor identities_;
};

/// The elements without their graph, and their bytes.
at::Tensor flat(const at::Tensor& tensor) { return tensor.detach().view(-1); }
at::Tensor byte_view(const at::Tensor& tensor) { return flat(tensor).view(at::kByte); }

void combine(at::Tensor& result, const at::Tensor& term, ReduceOp op) {
  if (op == ReduceOp::max)
    at::maximum_out(result, result, term);
  else if (op == ReduceOp::min)
    at::minimum_out(result, result, term);
  else
    result.add_(term);
}

c10d::ReduceOp gloo_op(ReduceOp op) {
  return op == ReduceOp::max   ? c10d::ReduceOp::MAX
         : op == ReduceOp::min ? c10d::ReduceOp::MIN
                               : c10d::ReduceOp::SUM;
}

/// The terms of all ranks, one a row, combined in the order of the rows.
at::Tensor combined_rows(const at::Tensor& rows, const Reduction& reduction) {
  const at::ScalarType type = dtype_of_sums(rows.scalar_type());
  at::Tensor result;
  for (int64_t rank = 0; rank < rows.size(0); ++rank) {
    at::Tensor term = rows[rank].to(type);
    scale_terms(term, reduction);
    if (rank == 0)
      result = term;
    else
      combine(result, term, reduction.op);
  }
  if (reduction.op == ReduceOp::average) result.div_(rows.size(0));
  return result;
}

std::shared_ptr<Pending> plain(WorkPtr work) {
  return std::make_shared<CollectivePart>(std::move(work));
}

}  // namespace

at::ScalarType dtype_of_sums(at::ScalarType dtype) {
  switch (dtype) {
    case at::kBFloat16:
    case at::kHalf:
      return at::kFloat;
    case at::kShort:
      return at::kInt;
    default:
      return dtype;
  }
}

Parts GlooTransport::agree(uint64_t identity) const {
  if (identity == kUncounted) return {};
  at::Tensor mine = at::full({1}, static_cast<int64_t>(identity), at::kLong);
  at::Tensor all = at::empty({group().getSize()}, at::kLong);
  WorkPtr work = group()._allgather_base(all, mine);
  return {std::make_shared<AgreementPart>(std::move(work), std::move(all))};
}

template <class StartOne>
Parts GlooTransport::start_each(const Tensors& tensors, uint64_t identity,
                                StartOne start_one) const {
  Parts parts = agree(identity);
  for (size_t i = 0; i < tensors.size(); ++i)
    if (tensors[i].numel() > 0) parts.push_back(start_one(i));
  return parts;
}

void GlooTransport::greet() {
  at::Tensor all = at::empty({group().getSize()}, at::kByte), mine = at::zeros({1}, at::kByte);
  require<CommunicationError>(group()._allgather_base(all, mine)->wait(timeout_), "timed out");
}

Parts GlooTransport::all_reduce(const Tensors& tensors, const Reduction& reduction,
                                uint64_t identity) {
  c10d::AllreduceOptions options;
  options.reduceOp = gloo_op(reduction.op);
  return start_each(tensors, identity, [&](size_t i) -> std::shared_ptr<Pending> {
    const at::Tensor tensor = flat(tensors[i]);
    at::Tensor sums =
        tensor.to(dtype_of_sums(tensor.scalar_type()));  // the tensor itself, if it has that type
    scale_terms(sums, reduction);
    Tensors one = {sums};
    WorkPtr work = group().allreduce(one, options);
    const int64_t divisor = reduction.op == ReduceOp::average ? group().getSize() : 1;
    if (divisor == 1 && sums.is_same(tensor)) return plain(std::move(work));
    return std::make_shared<FinishedPart>(std::move(work), [tensor, sums, divisor]() mutable {
      if (divisor != 1) sums.div_(divisor);
      if (!sums.is_same(tensor)) tensor.copy_(sums);
    });
  });
}

Parts GlooTransport::reduce_scatter(const Tensors& outputs, const Tensors& inputs,
                                    const Reduction& reduction, uint64_t identity) {
  const int64_t size = group().getSize();
  return start_each(inputs, identity, [&](size_t i) {
    at::Tensor terms = at::empty({size, outputs[i].numel()}, inputs[i].options());
    at::Tensor to = byte_view(terms), from = byte_view(inputs[i]);
    std::vector<int64_t> even;
    return std::make_shared<FinishedPart>(group().alltoall_base(to, from, even, even),
                                          [terms, reduction, output = flat(outputs[i])]() mutable {
                                            output.copy_(combined_rows(terms, reduction));
                                          });
  });
}

Parts GlooTransport::all_gather(const Tensors& outputs, const Tensors& inputs, uint64_t identity) {
  return start_each(inputs, identity, [&](size_t i) {
    at::Tensor to = byte_view(outputs[i]), from = byte_view(inputs[i]);
    return plain(group()._allgather_base(to, from));
  });
}

Parts GlooTransport::all_to_all(const at::Tensor& output, const at::Tensor& input,
                                const std::vector<int64_t>& output_rows,
                                const std::vector<int64_t>& input_rows, uint64_t identity) {
  at::Tensor to = byte_view(output), from = byte_view(input);
  std::vector<int64_t> output_bytes = bytes_of_rows(output, output_rows);
  std::vector<int64_t> input_bytes = bytes_of_rows(input, input_rows);
  Parts parts = agree(identity);
  parts.push_back(plain(group().alltoall_base(to, from, output_bytes, input_bytes)));
  return parts;
}

Parts GlooTransport::broadcast(const Tensors& tensors, int source, uint64_t identity) {
  c10d::BroadcastOptions options;
  options.rootRank = source;
  return start_each(tensors, identity, [&](size_t i) {
    Tensors one = {byte_view(tensors[i])};
    return plain(group().broadcast(one, options));
  });
}

}  // namespace lockstep
