#pragma once

// Internal: the passes of finalize_model_grads, and what they share.

#include <optional>
#include <string>
#include <vector>

#include "lockstep/distributed/finalize_model_grads.h"

namespace lockstep {

/// What the passes work on.
struct FinalizeContext {
  const std::vector<DistributedDataParallel*>& models;
  const std::optional<at::Tensor>& num_tokens;
  const std::vector<RouterBias>& router_biases;
  FinalizeReport report = {};

  const ParallelState& state() const { return models.front()->parallel_state(); }
  bool per_token() const {
    return models.front()->scaling_mode() == GradientScalingMode::per_token;
  }
  /// Adds one collective to the report.
  void note(const char* pass, const ProcessGroup& group, std::string operation, int64_t bytes,
            int64_t parameters);
};

/// Reduces gradients that are partial over an axis that the data-parallel reduction does not cover:
/// tp and pp, for experts etp, ep and pp. Large gradients are reduced where they lie; small ones go
/// together through a buffer of at most 1 MiB.
void reduce_partial_gradients(FinalizeContext& context);

/// Compares over the pipeline stages what these reduce together: names, order, shapes, dtypes and
/// descriptions of the parameters whose gradients are partial over pp. Collective over pp, with 8
/// bytes per rank; nothing is sent where it has one rank. Every rank throws the same
/// CommunicationError otherwise.
void check_partial_over_stages(const std::vector<DistributedDataParallel*>& models);

/// Adds up the gradients of tied parameters: first the copies in this rank's models, then those of
/// the other stages, in the order of TiedStages (all, first and last, first) and of the ties'
/// names.
void sum_tied_gradients(FinalizeContext& context);

/// UsageError unless this rank's stage may hold the tied parameters that it has, and the copies of
/// each have one shape and dtype.
void check_ties(const FinalizeContext& context);

/// Compares the tied parameters of all pipeline stages: each stage that a tie names must hold a
/// trained copy in one of its models, and all copies have the same text in `settings`, which says
/// for each parameter of the buffers, in their order, how it is updated. Collective over pp,
/// nothing is sent where it has one rank. Every rank throws the same CommunicationError or
/// ConfigError otherwise.
void check_ties_over_stages(const std::vector<DistributedDataParallel*>& models,
                            const std::vector<std::string>& settings);

/// UsageError: a router bias that does not fit its counters, or a rate that is no number >= 0.
void check_router_biases(const std::vector<RouterBias>& biases);
void update_router_biases(FinalizeContext& context);

}  // namespace lockstep
