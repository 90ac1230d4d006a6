#pragma once

// Internal: the passes of finalize_model_grads, and what they share.

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "lockstep/distributed/finalize_model_grads.h"

namespace lockstep {

/// The data that the passes work on.
struct FinalizeContext {
  const std::vector<DistributedDataParallel*>& models;
  const std::optional<at::Tensor>& num_tokens;
  const std::vector<RouterBias>& router_biases;
  std::string_view pass = {};  ///< name of the pass that is running
  FinalizeReport report = {};

  const ParallelState& state() const { return models.front()->parallel_state(); }
  bool per_token() const {
    return models.front()->scaling_mode() == GradientScalingMode::per_token;
  }
  /// Adds one collective of this pass to the report.
  void note(const ProcessGroup& group, const GradOperation& operation, int64_t bytes,
            int64_t parameters);
};

/// One pass, made of plain functions. kPasses in finalize_model_grads.cpp lists them in their
/// order; only that list, this header and the pass's own source know about a pass.
struct FinalizePass {
  const char* name;  ///< in the report
  void (*run)(FinalizeContext&);
  /// Throws if the arguments do not fit, before any pass has run.
  void (*check)(const FinalizeContext&) = nullptr;
  /// Whether it changes the gradient of such a parameter, which is then not final before this pass;
  /// null: never.
  bool (*changes)(const ParamDescription&, const RankGrids&, GradientScalingMode) = nullptr;
  const char* left_undone = nullptr;  ///< what an error says about a gradient that lacks it
};

/// The FinalizePass::left_undone of passes that reduce.
inline constexpr const char* kNotAddedUp = "partial or tied ones not added up";

/// finish_grad_sync() of every model: the axes dp and cp, for experts edp.
extern const FinalizePass kDataParallel;

/// Reduces gradients that are partial over an axis that the data-parallel reduction does not cover:
/// tp and pp, for experts etp, ep and pp. They are summed over the ranks of that axis, or averaged
/// if they are partial-mean. Those of layer norms under sequence parallelism are an example.
/// Gradients of more than 256 KiB are reduced in place, smaller ones together, through a buffer of
/// at most 1 MiB.
extern const FinalizePass kPartialGradients;

/// Adds up the gradients of tied parameters: first the copies in this rank's models, then those of
/// the other stages that ParamDescription::tie names, in the order of TiedStages (all, first and
/// last, first) and of the ties' names. Only the ranks that hold a copy take part, and all of them
/// must (see Tie). Refuses a parameter whose stage cannot hold it, and copies that differ in shape
/// or dtype.
extern const FinalizePass kTiedGradients;

/// Sums tokens_per_expert of all `router_biases` over tp-dp-cp; a bias rises by its rate where an
/// expert got fewer tokens than the mean and falls where it got more. Refuses a bias that does not
/// fit its counters, and a rate that is not a number >= 0.
extern const FinalizePass kRouterBias;

/// With per-token scaling, sums `num_tokens` over the data- and context-parallel ranks and divides
/// all gradients by it, or by 1 if it is less.
extern const FinalizePass kNumTokens;

/// Compares over the pipeline stages what kPartialGradients reduces together: names, order, shapes,
/// dtypes and descriptions of the parameters whose gradients are partial over pp. Collective over
/// pp, with 8 bytes per rank; nothing is sent if pp has one rank. If they differ, every rank throws
/// the same CommunicationError.
void check_partial_over_stages(const std::vector<DistributedDataParallel*>& models);

/// Compares the tied parameters of all pipeline stages: each stage that a tie names must hold a
/// trained copy in one of its models, and all copies must have the same text in `settings`, which
/// says for each parameter of the buffers, in their order, how it is updated. Collective over pp;
/// nothing is sent if pp has one rank. If the check fails, every rank throws the same
/// CommunicationError or ConfigError.
void check_ties_over_stages(const std::vector<DistributedDataParallel*>& models,
                            const std::vector<std::string>& settings);

}  // namespace lockstep
