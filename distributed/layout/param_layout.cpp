#include "lockstep/distributed/param_layout.h"

#include <algorithm>
#include <numeric>

#include "lockstep/core/check.h"
#include "lockstep/core/integers.h"
#include "lockstep/distributed/whole_param_layout.h"

namespace lockstep {
namespace {

constexpr int64_t kParamAlignment = 64;
constexpr int64_t kBucketAlignment = 128;
constexpr int64_t kHighBandwidthAlignment = 1 << 16;
constexpr const char* kBufferSize = "size of the buffer";

int64_t checked_lcm(int64_t a, int64_t b) {
  return checked_mul(a, b / std::gcd(a, b), "alignment of buckets");
}

/// Collects parameters into buckets, starting at offset 0.
class LayoutBuilder {
 public:
  LayoutBuilder(size_t num_params, const LayoutOptions& options) : options_(options) {
    layout_.slots.resize(num_params);
  }

  void add(int64_t index, const LayoutParam& param) {
    const bool alone = options_.distributed_optimizer && param.shared_embedding;
    int64_t start = options_.distributed_optimizer ? pad_param_start(end_) : end_;
    const bool too_large =
        options_.bucket_limit &&
        checked_add(start - open_.start, param.numel, kBufferSize) > *options_.bucket_limit;
    if ((alone || too_large) && !open_.params.empty()) {
      end_ = start;
      close();
      start = end_;
    }
    end_ = checked_add(start, param.numel, kBufferSize);
    layout_.slots[static_cast<size_t>(index)] = {start, end_,
                                                 static_cast<int64_t>(layout_.buckets.size())};
    open_.params.push_back(index);
    if (alone || (options_.bucket_size && end_ - open_.start >= *options_.bucket_size)) close();
  }

  ParamLayout finish() {
    if (!open_.params.empty()) close();
    layout_.numel = end_;
    for (const auto& bucket : layout_.buckets) layout_.numel_unpadded += bucket.numel_unpadded;
    return std::move(layout_);
  }

 private:
  void close() {
    open_.numel_unpadded = end_ - open_.start;
    if (options_.distributed_optimizer)
      end_ = pad_bucket_end(end_, options_.data_parallel_size, options_.pad_for_high_bus_bandwidth);
    open_.end = end_;
    layout_.buckets.push_back(std::move(open_));
    open_ = {};
    open_.start = end_;
  }

  const LayoutOptions& options_;
  ParamLayout layout_;
  ParamLayout::Bucket open_;
  int64_t end_ = 0;
};

}  // namespace

const char* to_string(MatrixLayout layout) {
  return layout == MatrixLayout::whole ? "whole" : "cut";
}

std::optional<int64_t> effective_bucket_size(const DistributedDataParallelConfig& config,
                                             int64_t numel, int64_t dp_cp) {
  if (config.num_buckets) return std::max<int64_t>(numel / *config.num_buckets, 1);
  if (config.bucket_size) return config.bucket_size;
  if (!config.overlap_grad_reduce) return std::nullopt;
  return std::max<int64_t>(40'000'000, 1'000'000 * dp_cp);
}

int64_t pad_param_start(int64_t offset) {
  return checked_round_up(offset, kParamAlignment, kBufferSize);
}

int64_t pad_bucket_end(int64_t offset, int64_t data_parallel_size, bool high_bus_bandwidth) {
  int64_t divisor = checked_lcm(data_parallel_size, kBucketAlignment);
  if (high_bus_bandwidth) divisor = checked_lcm(divisor, kHighBandwidthAlignment);
  return checked_round_up(offset, divisor, kBufferSize);
}

ParamLayout compute_param_layout(const std::vector<LayoutParam>& params,
                                 const LayoutOptions& options) {
  require<UsageError>(!options.bucket_size || *options.bucket_size >= 1,
                      "bucket_size: found {}, allowed: >= 1", options.bucket_size.value_or(0));
  require<UsageError>(!options.bucket_limit || *options.bucket_limit >= 1,
                      "bucket_limit: found {}, allowed: >= 1", options.bucket_limit.value_or(0));
  require<UsageError>(options.data_parallel_size >= 1,
                      "data_parallel_size: found {}, allowed: >= 1", options.data_parallel_size);
  for (size_t i = 0; i < params.size(); ++i)
    require<UsageError>(params[i].numel >= 0, "parameter {}: found {} elements, allowed: >= 0", i,
                        params[i].numel);
  if (options.distributed_optimizer && options.whole_parameters)
    return compute_whole_param_layout(params, options);
  LayoutBuilder builder(params.size(), options);
  for (size_t i = params.size(); i-- > 0;) builder.add(static_cast<int64_t>(i), params[i]);
  return builder.finish();
}

}  // namespace lockstep
