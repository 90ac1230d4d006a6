#pragma once

#include <cstdint>
#include <vector>

#include "lockstep/core/config.h"

/// How many sequences an iteration takes. Needs no libtorch.
namespace lockstep {

/// Global batch size and number of micro-batches of one rank.
struct BatchSizes {
  int64_t micro = 0;   ///< sequences
  int64_t global = 0;  ///< sequences
  int64_t num_microbatches = 0;
  bool operator==(const BatchSizes&) const = default;
};

/// The sizes once the batch no longer grows. ConfigError naming train.global_batch_size, or
/// train.step_batch_size_schedule, if they do not divide.
BatchSizes batch_sizes(const TrainConfig& config, int64_t data_parallel_size);

/// The sizes of every iteration of a run. With train.rampup_batch_size = "START INCREMENT SAMPLES"
/// an iteration that begins when n <= SAMPLES samples have been consumed has
///   START + INCREMENT * floor(n / (SAMPLES / steps)),  steps = (global_batch_size - START) /
///   INCREMENT
/// sequences, computed in double precision as Megatron Core does; later iterations have
/// global_batch_size. With train.step_batch_size_schedule an iteration has the size of the last
/// step whose samples have been consumed.
class BatchSchedule {
 public:
  /// ConfigError naming train.rampup_batch_size if INCREMENT does not lead from START to the global
  /// batch; naming it or train.step_batch_size_schedule if one of the batches is not a multiple of
  /// micro_batch_size * data-parallel ranks.
  BatchSchedule(const TrainConfig& config, int64_t data_parallel_size);

  /// The sizes of an iteration that begins when `consumed_samples` (>= 0) have been consumed.
  BatchSizes at(int64_t consumed_samples) const;

  /// Number of iterations that consume at least `samples` (>= 0), even if what they consume does
  /// not fit into 64 bits. Takes no longer for more iterations.
  int64_t iterations_until(int64_t samples) const;

  /// The same for as many samples as `full_batches` (>= 0) batches of the size full() have. The
  /// largest int64_t if so many do not fit into 64 bits.
  int64_t iterations_for(int64_t full_batches) const;

  /// Number of samples that the first `iterations` (>= 0) of a run consume. Takes no longer for
  /// more iterations. The largest int64_t if so many do not fit into 64 bits.
  int64_t samples_of(int64_t iterations) const;

  /// The sizes that the run ends with.
  const BatchSizes& full() const { return full_; }

  /// All sizes that occur, in order.
  std::vector<BatchSizes> all() const;

 private:
  /// Batches of `global` sequences for iterations that begin when `samples` have been consumed.
  struct Step {
    int64_t samples;
    int64_t global;
  };

  BatchSizes sized(int64_t global) const;
  /// The least number of consumed samples above `consumed_samples` at which batches may have
  /// another size. The largest int64_t if there is none.
  int64_t next_change(int64_t consumed_samples) const;

  BatchSizes full_;
  int64_t increment_ = 0;
  int64_t steps_ = 0;
  int64_t samples_ = 0;
  std::vector<Step> schedule_;
};

/// The half-open range of samples that one rank processes in one micro-batch.
struct SampleRange {
  int64_t first = 0;
  int64_t last = 0;
};

/// Micro-batch `microbatch` of data-parallel rank `rank` of `ranks`, in an iteration that starts
/// when `consumed` samples have been consumed: micro-batches follow each other, and within each
/// micro-batch the ranks do.
SampleRange microbatch_samples(int64_t consumed, int64_t micro_batch_size, int64_t microbatch,
                               int64_t rank, int64_t ranks);

}  // namespace lockstep
