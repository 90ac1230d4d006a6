#include "lockstep/distributed/bucket_group.h"

#include <ATen/ATen.h>

namespace lockstep {

BucketGroup::BucketGroup(std::string label, std::vector<Bucket> buckets, ProcessGroup group,
                         ScalingFactor factor, ReduceOp op)
    : label_(std::move(label)),
      buckets_(std::move(buckets)),
      group_(std::move(group)),
      reduction_(op, factor.numerator, factor.denominator) {}

void BucketGroup::start() {
  const at::NoGradGuard no_grad;
  for (const Bucket& bucket : buckets_)
    works_.push_back(all_reduce(group_, bucket.grads, reduction_, label_));
}

void BucketGroup::finish() {
  for (Work& work : works_) work.wait();
  works_.clear();
}

}  // namespace lockstep
