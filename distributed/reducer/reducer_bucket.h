#pragma once

// Internal.

#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include <ATen/core/Tensor.h>

#include "lockstep/distributed/bucket_group.h"
#include "lockstep/distributed/comm_hooks.h"
#include "lockstep/distributed/param_and_grad_buffer.h"

namespace lockstep {

/// One bucket of a Reducer: a gradient buffer of its own with the engine's reduction, or one
/// parameter with sparse gradients. Its parameters are named by their place in it.
class ReducerBucket {
 public:
  struct Settings {
    ProcessGroup group;
    bool gradient_as_bucket_view = true;
    bool check_for_nan = false;
    std::optional<at::ScalarType> reduce_dtype = {};
  };

  /// `params` in bucket order; `sparse`: there is one parameter, which gets sparse gradients.
  ReducerBucket(std::vector<NamedParameter> params, bool sparse, const Settings& settings,
                size_t index, bool is_last);

  const std::vector<NamedParameter>& params() const { return *params_; }
  bool is_sparse() const { return buffer_ == nullptr; }
  /// "bucket 2 ('layers.0.weight' to 'layers.1.bias')"
  std::string label() const { return grad_bucket(1, {}).label(); }
  /// The dtype of the gradients.
  at::ScalarType dtype() const {
    return (buffer_ ? buffer_->grad_data() : params().front().tensor).scalar_type();
  }
  /// The bytes of the gradients; for a sparse bucket, of the gradient as if it were dense.
  int64_t bytes() const;
  /// The bucket as the engine reduces it.
  BucketInfo info() const;
  /// The expected param.grad() of `place`; undefined if no tensor is expected.
  const at::Tensor& expected_grad(size_t place) const;

  /// The gradient of `place` has arrived: makes it part of the bucket. `in_place`: it already is.
  void take(size_t place, bool in_place);
  /// `place` got no gradient in this iteration. It contributes what param.grad() held, or zero.
  void take_unused(size_t place);
  /// This rank adds nothing.
  void take_zeros();

  /// Starts to combine over the ranks, with `hook` or, if null, by the engine.
  void start(CommHook* hook, int64_t divisor, const at::Tensor& sparse_rows);
  /// Returns when that is done.
  void finish();

  /// After finish(): puts the gradient of `place` where the user sees it. `used`: some rank used
  /// it; otherwise param.grad() stays as it was.
  void give(size_t place, bool used);
  void give_all();

  /// Sets the gradients that are defined to zero.
  void zero_grad();
  /// param.grad() was a view of another bucket: its value moves here.
  void move_in(size_t place);

 private:
  size_t buffer_index(size_t place) const { return params().size() - 1 - place; }
  bool as_view() const { return settings_.gradient_as_bucket_view; }
  GradBucket grad_bucket(int64_t divisor, const at::Tensor& sparse_rows) const;
  void refuse_sparse_not_finite() const;
  void refuse_other_than_sparse(const at::Tensor& result) const;

  std::shared_ptr<const std::vector<NamedParameter>> params_;
  Settings settings_;
  size_t index_;
  bool is_last_;
  std::unique_ptr<ParamAndGradBuffer> buffer_;  ///< null: sparse
  std::optional<BucketGroup> group_;            ///< of `buffer_`
  std::vector<at::Tensor> kept_;                ///< values of unused gradients, by place
  at::Tensor sparse_;                           ///< the sparse gradient on its way
  CommHook::Finish finish_;                     ///< of a hook under way
};

}  // namespace lockstep
