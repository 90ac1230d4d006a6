#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include "lockstep/core/parameters.h"
#include "lockstep/parallel_state/process_group.h"

/// Communication hooks: how a Reducer combines a bucket over the ranks. Without a hook it scales by
/// 1 / divisor and sums. A hook does all of this, including the division.
namespace lockstep {

/// A bucket whose gradients are all ready.
struct GradBucket {
  int64_t index = 0;     ///< in the order in which buckets are reduced
  bool is_last = false;  ///< of the iteration
  /// The gradients: [numel] of the bucket's dtype, or one sparse COO gradient.
  at::Tensor buffer;
  /// The parameters, in the order of `buffer`. Later buckets of the same index may have others,
  /// because the Reducer rebuilds its buckets.
  std::shared_ptr<const std::vector<NamedParameter>> parameters = nullptr;
  ProcessGroup group;   ///< over which to combine
  int64_t divisor = 1;  ///< the result is the sum over the ranks divided by this
  /// For a sparse gradient: the sorted rows [rows] that it has on any rank, if they were passed to
  /// Reducer::set_sparse_metadata(); else undefined.
  at::Tensor sparse_rows = {};

  /// "bucket 3 ('a.weight' to 'b.bias')", for labels of collectives.
  std::string label() const;
  /// Parts of `buffer`, one per parameter, in the parameter's shape. For dense buckets only.
  std::vector<at::Tensor> gradients() const;
};

/// Combines buckets. One object serves one Reducer: it may keep state between iterations. Called on
/// the thread that runs backward, on every rank for the same buckets in the same order, also on
/// ranks that have run out of inputs (Reducer::join), which contribute zeros.
class CommHook {
 public:
  /// Waits for the combined gradients and returns them: a tensor of the dtype and size of
  /// GradBucket::buffer, or that tensor itself.
  using Finish = std::function<at::Tensor()>;

  virtual ~CommHook() = default;
  /// For logs: "all-reduce", "fp16-compress(all-reduce)".
  virtual std::string name() const = 0;
  /// What must be the same on all ranks: the name and every setting that changes the result.
  virtual std::string identity() const { return name(); }
  /// Starts to combine the bucket; the started work overlaps backward. The returned function is
  /// called once, after backward, in the order of the buckets; it may communicate as well.
  virtual Finish start(const GradBucket& bucket) = 0;
};

/// The sum divided by the divisor, dense or sparse: what a Reducer without a hook does.
class AllReduceHook : public CommHook {
 public:
  std::string name() const override { return "all-reduce"; }
  Finish start(const GradBucket& bucket) override;
};

/// Converts to a narrower dtype for the transfer, which halves the bytes of fp32. `inner` combines
/// the converted bucket. Sparse gradients go to `inner` as they are.
class CompressHook : public CommHook {
 public:
  /// `dtype`: at::kHalf or at::kBFloat16. ConfigError for another dtype, or if `inner` is null.
  explicit CompressHook(at::ScalarType dtype,
                        std::shared_ptr<CommHook> inner = std::make_shared<AllReduceHook>());
  std::string name() const override;
  std::string identity() const override;
  Finish start(const GradBucket& bucket) override;

 private:
  std::string text_around(const std::string& inner) const;

  at::ScalarType dtype_;
  std::shared_ptr<CommHook> inner_;
};

/// Your own function as a hook.
class FunctionHook : public CommHook {
 public:
  using Function = std::function<Finish(const GradBucket&)>;
  /// ConfigError if `function` is empty.
  FunctionHook(std::string name, Function function);
  std::string name() const override { return name_; }
  Finish start(const GradBucket& bucket) override { return function_(bucket); }

 private:
  std::string name_;
  Function function_;
};

}  // namespace lockstep
