#include "lockstep/distributed/sparse_all_reduce.h"

#include <algorithm>

#include <ATen/ATen.h>

#include "lockstep/core/check.h"
#include "lockstep/core/text_digest.h"
#include "lockstep/parallel_state/collectives.h"

namespace lockstep {
namespace {

/// Gathers `tensor` [entries, ...] of all ranks, each padded to `most` entries: [ranks, most, ...].
at::Tensor gather_padded(const ProcessGroup& group, const at::Tensor& tensor, int64_t most,
                         const std::string& label) {
  std::vector<int64_t> shape = tensor.sizes().vec();
  shape[0] = most;
  at::Tensor padded = at::zeros(shape, tensor.options());
  padded.narrow(0, 0, tensor.size(0)).copy_(tensor);
  shape.insert(shape.begin(), group.size());
  at::Tensor all = at::empty(shape, tensor.options());
  all_gather(group, all, padded, label).wait();
  return all;
}

/// The entries without padding, of all ranks in order.
at::Tensor without_padding(const at::Tensor& all, const at::Tensor& counts) {
  std::vector<at::Tensor> parts;
  for (int64_t rank = 0; rank < counts.numel(); ++rank)
    parts.push_back(all[rank].narrow(0, 0, counts[rank].item<int64_t>()));
  return at::cat(parts);
}

at::Tensor sum_of_entries(const ProcessGroup& group, const at::Tensor& tensor,
                          const at::Tensor& counts, int64_t divisor, const std::string& label) {
  const int64_t most = counts.max().item<int64_t>();
  if (most == 0) return tensor;
  const at::Tensor indices = without_padding(
      gather_padded(group, tensor.indices().t().contiguous(), most, label + ", indices"), counts);
  const at::Tensor values = without_padding(
      gather_padded(group, tensor.values().contiguous(), most, label + ", values"), counts);
  return at::sparse_coo_tensor(indices.t().contiguous(), values / divisor, tensor.sizes())
      .coalesce();
}

/// Where the rows `found` are among `rows`, both on the host.
at::Tensor places_of(const at::Tensor& found, const at::Tensor& rows, const std::string& label) {
  at::Tensor places = at::searchsorted(rows, found);
  const auto row = found.accessor<int64_t, 1>(), place = places.accessor<int64_t, 1>(),
             known = rows.accessor<int64_t, 1>();
  for (int64_t i = 0; i < found.numel(); ++i)
    require<UsageError>(place[i] < rows.numel() && known[place[i]] == row[i],
                        "{}: the gradient has row {}, which is not in the sparse metadata", label,
                        row[i]);
  return places;
}

std::function<at::Tensor()> start_over_rows(const ProcessGroup& group, const at::Tensor& tensor,
                                            const at::Tensor& rows, int64_t divisor,
                                            const std::string& label) {
  require<UsageError>(tensor.sparse_dim() == 1 && rows.dim() == 1,
                      "{}: found {} sparse dimensions and rows of {} dimensions, allowed: 1 each",
                      label, tensor.sparse_dim(), rows.dim());
  const at::Tensor on_host = rows.cpu().contiguous();
  const at::Tensor places = places_of(tensor.indices()[0].cpu(), on_host, label);
  const at::Device device = tensor.device();
  std::vector<int64_t> shape = tensor.values().sizes().vec();
  shape[0] = rows.numel();
  const at::Tensor values = at::zeros(shape, tensor.values().options());
  values.index_add_(0, places.to(device), tensor.values());
  // The digest keeps ranks with other rows from joining this sum.
  const std::string_view bytes(static_cast<const char*>(on_host.const_data_ptr()),
                               on_host.nbytes());
  Work work = all_reduce(
      group, values, {ReduceOp::sum, 1, divisor},
      fmt::format("{}, {} rows with digest {:x}", label, rows.numel(), text_digest(bytes)));
  return [=]() mutable {
    work.wait();
    return at::sparse_coo_tensor(on_host.to(device).unsqueeze(0), values, tensor.sizes())
        .coalesce();
  };
}

}  // namespace

std::function<at::Tensor()> start_sparse_all_reduce(const ProcessGroup& group,
                                                    const at::Tensor& tensor,
                                                    const at::Tensor& rows, int64_t divisor,
                                                    const std::string& label) {
  const at::Tensor coalesced = tensor.coalesce();
  if (rows.defined()) return start_over_rows(group, coalesced, rows, divisor, label);
  const at::Tensor counts = at::empty({group.size()}, at::kLong);
  Work work = all_gather(group, counts, at::full({1}, coalesced._nnz(), at::kLong),
                         label + ", number of entries");
  return [=]() mutable {
    work.wait();
    return sum_of_entries(group, coalesced, counts, divisor, label);
  };
}

}  // namespace lockstep
