#pragma once

#include <cstdint>
#include <optional>

#include "lockstep/core/config.h"
#include "lockstep/planner/layout_space.h"
#include "lockstep/planner/machine.h"

/// Roughly how long a step takes, by a formula: accurate enough to tell which layouts are worth
/// simulating. Needs no libtorch.
namespace lockstep {

/// Estimates for one model and machine. Layouts in the order of visit_layouts() cost least.
class LayoutEstimator {
 public:
  /// `config` is resolved. `config` and `machine` are kept by reference.
  LayoutEstimator(const Config& config, int64_t world_size, const Machine& machine);

  /// Seconds of a training step. A layer is four matrix products, attention's core and memory
  /// traffic. Each micro-batch adds its tensor-, context- and expert-parallel communication;
  /// attention hides the context-parallel part. The pipeline idles for (stages - 1) / chunks
  /// micro-batches, during which ranks that share cores leave theirs to others. Reductions and
  /// gathers over data-parallel ranks count only as far as the last backward and the next forward
  /// do not hide them. ConfigError if the machine has no link for the layout.
  double seconds(const JobLayout& layout);

  /// A lower bound of the bytes of weights, gradients and optimizer state that some rank needs: no
  /// more than plan_memory() finds, but computed faster.
  double least_bytes(const JobLayout& layout) const;

 private:
  /// The numbers that follow from the sizes of the groups alone.
  struct Shape {
    JobLayout sizes = {};
    RankList tensor = {}, context = {}, expert = {}, pipeline = {};
    double parameters = 0;  ///< of a rank of the largest stage
    int64_t replicas = 1;   ///< ranks of dp-cp
    int64_t data_parallel = 1;
    double reduce = 0, scatter = 0, gather = 0;  ///< seconds, of all gradients and parameters
  };
  /// Seconds of one micro-batch in one layer on one rank.
  struct Layer {
    double products = 0, attention = 0, rest = 0;  ///< of forward; backward takes twice as long
    double tensor = 0, context = 0, expert = 0;    ///< communication of forward and backward
  };

  Shape make_shape(const JobLayout& layout) const;
  const Shape& shape_of(const JobLayout& layout);
  Layer layer_of(const JobLayout& layout) const;
  double output_seconds(const JobLayout& layout) const;
  double transfer(CollectiveOperation::Kind kind, double bytes, const RankList& ranks) const;
  double kernel(const char* name, double flops, double bytes) const;
  double exposed_over_replicas(const JobLayout& layout, double forward, double backward,
                               double microbatches) const;

  const Config& config_;
  const Machine& machine_;
  int64_t world_size_;
  double element_bytes_;
  double all_parameters_, expert_parameters_;
  double layer_flops_;      ///< of a token's forward, without attention's core
  double attention_flops_;  ///< of a token's forward in attention's core
  std::optional<Shape> shape_;
};

}  // namespace lockstep
