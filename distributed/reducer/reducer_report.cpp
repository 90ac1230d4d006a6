// The texts and figures that a Reducer reports about itself.

#include <cstdlib>
#include <set>

#include <ATen/ATen.h>

#include "lockstep/core/check.h"
#include "lockstep/distributed/reducer_impl.h"

namespace lockstep {
namespace {

std::string environment(const char* name) {
  const char* const value = std::getenv(name);
  return value ? value : "N/A";
}

/// "2 1, 0": the parameters of each bucket.
std::string to_text(const std::vector<std::vector<size_t>>& indices) {
  std::vector<std::string> texts;
  for (const auto& bucket : indices) texts.push_back(fmt::format("{}", fmt::join(bucket, " ")));
  return fmt::format("{}", fmt::join(texts, ", "));
}

std::string dtypes_of(const std::vector<NamedParameter>& params) {
  std::set<std::string> names;
  for (const NamedParameter& param : params)
    names.emplace(caffe2::TypeMeta::fromScalarType(param.tensor.scalar_type()).name());
  return fmt::format("{}", fmt::join(names, ", "));
}

}  // namespace

std::vector<BucketInfo> Reducer::buckets() const {
  std::vector<BucketInfo> infos;
  for (const auto& bucket : impl_->buckets) {
    infos.push_back(bucket->info());
    if (!impl_->hook) continue;
    infos.back().operation = {GradOperation::Kind::hook};
    infos.back().hook = impl_->hook->name();
  }
  return infos;
}

std::string Reducer::describe() const {
  return fmt::format("divided by {}, {}\n", impl_->divisor,
                     impl_->rebuilt ? "buckets in the order of the first backward"
                                    : "buckets of the first iteration") +
         to_string(buckets());
}

ReducerLoggingData Reducer::logging_data() const {
  const Impl& r = *impl_;
  std::vector<int64_t> bytes;
  for (const auto& bucket : r.buckets) bytes.push_back(bucket->bytes());
  int64_t total = 0, unused = 0;
  for (size_t p = 0; p < r.params.size(); ++p) {
    const auto size = static_cast<int64_t>(r.params[p].tensor.nbytes());
    total += size;
    if (!r.last_unused.empty() && r.last_unused[p]) unused += size;
  }
  const at::Device device = r.params.front().tensor.device();
  ReducerLoggingData data;
  data.strings = {
      {"backend_name", device.is_cuda() ? "nccl" : "gloo"},
      {"bucket_sizes", fmt::format("{}", fmt::join(r.rebuilt ? r.initial_bytes : bytes, ", "))},
      {"rebuilt_bucket_sizes", r.rebuilt ? fmt::format("{}", fmt::join(bytes, ", ")) : ""},
      {"rebuilt_per_bucket_param_indices", r.rebuilt ? to_text(r.indices) : ""},
      {"prev_iteration_grad_ready_order_indices",
       fmt::format("{}", fmt::join(r.ready_order, ", "))},
      {"device_ids", !device.is_cpu() ? std::to_string(device.index()) : ""},
      {"dtypes", dtypes_of(r.params)},
      {"master_addr", environment("MASTER_ADDR")},
      {"master_port", environment("MASTER_PORT")},
      {"cuda_visible_devices", environment("CUDA_VISIBLE_DEVICES")},
      {"torch_distributed_debug", environment("TORCH_DISTRIBUTED_DEBUG")},
      {"gloo_socket_ifname", environment("GLOO_SOCKET_IFNAME")},
      {"nccl_socket_ifname", environment("NCCL_SOCKET_IFNAME")},
      {"nccl_debug", environment("NCCL_DEBUG")},
      {"comm_hook", r.hook ? r.hook->name() : ""},
      {"error", r.guard.failure()}};
  data.integers = r.statistics.fields();
  data.integers.merge(std::map<std::string, int64_t>{
      {"world_size", r.group.size()},
      {"rank", r.group.rank()},
      {"iteration", r.iteration},
      {"bucket_cap_bytes", r.options.bucket_bytes_caps.back()},
      {"num_parameter_tensors", static_cast<int64_t>(r.params.size())},
      {"total_parameter_size_bytes", total},
      {"unused_parameter_size", unused},
      {"num_buckets_reduced", r.buckets_reduced},
      {"has_rebuilt_buckets", r.rebuilt},
      {"find_unused_parameters", r.options.find_unused_parameters},
      {"gradient_as_bucket_view", r.options.gradient_as_bucket_view},
      {"static_graph", r.options.static_graph},
      {"can_set_static_graph", ddp_graph_static()},
      {"join_uneven_inputs", r.joining.has_value()},
      {"has_error", !r.guard.failure().empty()}});
  for (size_t b = 0; b < r.buckets.size(); ++b)
    data.buckets.push_back({r.buckets[b]->label(), bytes[b], r.statistics.launched_at(b),
                            r.statistics.finished_at(b), r.statistics.overlap_of(b)});
  return data;
}

std::string Reducer::Impl::unfinished() const {
  return armed ? "is not reduced yet (an iteration of Reducer is open); end its backward first"
               : "";
}

}  // namespace lockstep
