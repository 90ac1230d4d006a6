#pragma once

#include <map>
#include <string>

#include "lockstep/distributed/comm_hooks.h"

namespace lockstep {

/// Settings of PowerSgdHook; the same on all ranks.
struct PowerSgdOptions {
  int64_t rank = 1;                 ///< columns of the two factors
  int64_t start_iteration = 1000;   ///< iterations before it are plain all-reduces
  double min_compression_rate = 2;  ///< a gradient that shrinks by less is not compressed
  bool use_error_feedback = true;   ///< what compression lost is added to the next gradient
  bool warm_start = true;           ///< factors of an iteration start from those of the one before
  uint64_t seed = 0;                ///< of the first factors
};

/// PowerSGD (Vogels et al. 2019): a gradient seen as a matrix M [rows = size(0), columns] becomes
/// P Qᵀ with P [rows, rank] and Q [columns, rank]. Each rank sends (rows + columns) * rank elements
/// instead of rows * columns: P = M Q is averaged and made orthonormal, then Q = Mᵀ P is averaged.
/// With error feedback M is the gradient plus what the rank lost in the iteration before. Vectors,
/// sparse gradients and matrices that shrink too little are all-reduced as they are. An iteration
/// whose factors are not finite, as after an overflow, has no effect on later iterations.
///
/// The hook keeps its state per parameter, so the state survives rebuilt buckets. With error
/// feedback it needs the memory of one more copy of the compressed gradients.
class PowerSgdHook : public CommHook {
 public:
  /// ConfigError: a rank below 1, a negative iteration, a rate that is not positive.
  explicit PowerSgdHook(const PowerSgdOptions& options = {});
  std::string name() const override;
  std::string identity() const override;
  Finish start(const GradBucket& bucket) override;

 private:
  struct Memory {
    at::Tensor q;      ///< [columns, rank]
    at::Tensor error;  ///< [rows, columns]
  };
  struct Matrix;

  bool is_compressed(const at::Tensor& gradient) const;
  Matrix begin(const std::string& name, const at::Tensor& gradient);
  void end(Matrix& matrix);

  PowerSgdOptions options_;
  AllReduceHook plain_;
  std::map<std::string, Memory> memory_;
  int64_t iteration_ = 0;
  int64_t last_index_ = -1;
};

}  // namespace lockstep
