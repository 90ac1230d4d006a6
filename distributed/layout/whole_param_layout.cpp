#include "lockstep/distributed/whole_param_layout.h"

#include <algorithm>
#include <limits>
#include <numeric>

#include "lockstep/core/check.h"
#include "lockstep/core/integers.h"

namespace lockstep {
namespace {

constexpr const char* kWholeBufferSize = "size of the buffer";

/// Elements of each shard of a bucket.
class Shards {
 public:
  explicit Shards(int64_t count) : sizes_(static_cast<size_t>(count), 0) {}

  int64_t end_with(size_t shard, int64_t numel) const {
    return checked_add(pad_param_start(sizes_[shard]), numel, kWholeBufferSize);
  }
  /// Returns where the parameter starts in the shard.
  int64_t add(size_t shard, int64_t numel) {
    const int64_t start = pad_param_start(sizes_[shard]);
    sizes_[shard] = start + numel;
    return start;
  }
  size_t emptiest() const { return position(std::min_element(sizes_.begin(), sizes_.end())); }
  int64_t longest() const { return *std::max_element(sizes_.begin(), sizes_.end()); }
  size_t count() const { return sizes_.size(); }

 private:
  size_t position(std::vector<int64_t>::const_iterator at) const {
    return static_cast<size_t>(at - sizes_.begin());
  }

  std::vector<int64_t> sizes_;
};

double work_of(const LayoutParam& param) {
  if (param.rows == 0) return static_cast<double>(param.numel);
  const auto [least, most] = std::minmax(param.rows, param.columns);
  return static_cast<double>(most) * static_cast<double>(least) * static_cast<double>(least);
}

class Builder {
 public:
  Builder(const std::vector<LayoutParam>& params, const LayoutOptions& options)
      : params_(params),
        options_(options),
        divisor_(whole_param_shard_divisor(options.data_parallel_size,
                                           options.pad_for_high_bus_bandwidth)),
        work_(static_cast<size_t>(options.data_parallel_size), 0.0),
        estimate_(options.data_parallel_size) {
    layout_.slots.resize(params.size());
    for (const LayoutParam& param : params)
      if (!param.shared_embedding) largest_ = std::max(largest_, param.numel);
  }

  ParamLayout run() {
    for (size_t i = params_.size(); i-- > 0;) {
      const LayoutParam& param = params_[i];
      if (param.shared_embedding || (is_full() && !fits(param))) close();
      open_.push_back(static_cast<int64_t>(i));
      open_numel_ = checked_add(open_numel_, param.numel, kWholeBufferSize);
      estimate_.add(estimate_.emptiest(), param.numel);
      if (param.shared_embedding) close();
    }
    close();
    layout_.numel = end_;
    for (const auto& bucket : layout_.buckets) layout_.numel_unpadded += bucket.numel_unpadded;
    return std::move(layout_);
  }

 private:
  const LayoutParam& param(int64_t index) const { return params_[static_cast<size_t>(index)]; }

  bool is_full() const {
    if (!options_.bucket_size || open_numel_ < *options_.bucket_size) return false;
    return static_cast<double>(open_numel_) >=
           0.9 * static_cast<double>(options_.data_parallel_size) * static_cast<double>(largest_);
  }

  bool fits(const LayoutParam& param) const {
    return estimate_.end_with(estimate_.emptiest(), param.numel) <=
           checked_round_up(estimate_.longest(), divisor_, kWholeBufferSize);
  }

  void close() {
    if (open_.empty()) return;
    deal_out();
    open_.clear();
    open_numel_ = 0;
    estimate_ = Shards(options_.data_parallel_size);
  }

  /// The rank with the least work among those whose shard stays within the limit.
  size_t choose(const Shards& shards, int64_t numel, double limit) const {
    size_t best = shards.count();
    for (size_t s = 0; s < shards.count(); ++s)
      if (static_cast<double>(shards.end_with(s, numel)) <= limit &&
          (best == shards.count() || work_[s] < work_[best]))
        best = s;
    return best < shards.count() ? best : shards.emptiest();
  }

  void deal_out() {
    std::vector<int64_t> order = open_;
    std::stable_sort(order.begin(), order.end(),
                     [&](int64_t a, int64_t b) { return work_of(param(a)) > work_of(param(b)); });
    const double mean =
        static_cast<double>(open_numel_) / static_cast<double>(options_.data_parallel_size);
    Shards shards(options_.data_parallel_size);
    std::vector<std::vector<int64_t>> members(shards.count());
    std::vector<int64_t> starts(params_.size());
    for (const int64_t index : order) {
      const LayoutParam& next = param(index);
      const size_t shard = next.shared_embedding ? 0 : choose(shards, next.numel, 1.3 * mean);
      starts[static_cast<size_t>(index)] = shards.add(shard, next.numel);
      members[shard].push_back(index);
      work_[shard] += work_of(next);
    }
    add_bucket(members, starts, checked_round_up(shards.longest(), divisor_, kWholeBufferSize));
  }

  void add_bucket(const std::vector<std::vector<int64_t>>& members,
                  const std::vector<int64_t>& starts, int64_t shard_numel) {
    ParamLayout::Bucket bucket;
    bucket.start = end_;
    bucket.numel_unpadded = open_numel_;
    for (size_t shard = 0; shard < members.size(); ++shard)
      for (const int64_t index : members[shard]) {
        const int64_t start =
            end_ + static_cast<int64_t>(shard) * shard_numel + starts[static_cast<size_t>(index)];
        layout_.slots[static_cast<size_t>(index)] = {start, start + param(index).numel,
                                                     static_cast<int64_t>(layout_.buckets.size())};
        bucket.params.push_back(index);
      }
    end_ =
        checked_add(end_, checked_mul(options_.data_parallel_size, shard_numel, kWholeBufferSize),
                    kWholeBufferSize);
    bucket.end = end_;
    layout_.buckets.push_back(std::move(bucket));
  }

  const std::vector<LayoutParam>& params_;
  const LayoutOptions& options_;
  int64_t divisor_;
  int64_t largest_ = 0;
  std::vector<double> work_;  ///< of each rank, over the whole buffer
  std::vector<int64_t> open_;
  int64_t open_numel_ = 0;
  Shards estimate_;  ///< of open_, each parameter in the emptiest shard
  ParamLayout layout_;
  int64_t end_ = 0;
};

}  // namespace

int64_t whole_param_shard_divisor(int64_t data_parallel_size, bool high_bus_bandwidth) {
  const int64_t bucket = pad_bucket_end(1, data_parallel_size, high_bus_bandwidth);
  return std::lcm(pad_param_start(1), bucket / data_parallel_size);
}

ParamLayout compute_whole_param_layout(const std::vector<LayoutParam>& params,
                                       const LayoutOptions& options) {
  return Builder(params, options).run();
}

}  // namespace lockstep
