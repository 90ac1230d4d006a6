#include "lockstep/distributed/bucket_group.h"

#include <ATen/ATen.h>

#include "lockstep/distributed/param_and_grad_buffer.h"

namespace lockstep {

BucketGroup::BucketGroup(std::string label, std::vector<Bucket> buckets, ProcessGroup group,
                         ScalingFactor factor, ReduceOp op)
    : label_(std::move(label)),
      buckets_(std::move(buckets)),
      group_(std::move(group)),
      factor_(factor),
      op_(op) {}

void BucketGroup::scale(Bucket::Piece& piece) const {
  const at::NoGradGuard no_grad;
  if (!piece.scaled) ParamAndGradBuffer::scale_tensor(piece.grads, factor_);
  piece.scaled = true;
}

void BucketGroup::scale_early(size_t bucket, size_t piece) {
  scale(buckets_[bucket].pieces[piece]);
}

void BucketGroup::start() {
  const at::NoGradGuard no_grad;
  for (Bucket& bucket : buckets_) {
    for (Bucket::Piece& piece : bucket.pieces) scale(piece);
    works_.push_back(all_reduce(group_, bucket.grads, op_, label_));
  }
}

void BucketGroup::reset() {
  for (Bucket& bucket : buckets_)
    for (Bucket::Piece& piece : bucket.pieces) piece.scaled = false;
}

void BucketGroup::finish() {
  for (Work& work : works_) work.wait();
  works_.clear();
}

}  // namespace lockstep
