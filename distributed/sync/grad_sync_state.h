#pragma once

// Internal.

#include <cstdint>
#include <string>
#include <vector>

namespace lockstep {

/// How the owner's calls are named, for messages.
struct GradSyncCalls {
  const char* front = "DistributedDataParallel";
  const char* count = "set_num_microbatches";  ///< states the micro-batches of a step
  const char* start = "start_grad_sync";       ///< launches what was not launched
  const char* finish = "finish_grad_sync";     ///< waits for the reductions
  /// The call before which no gradient of a step can be read.
  const char* complete = "finish_grad_sync() or finalize_model_grads()";
  const char* reset = "zero_grad_buffer";  ///< begins a step
  const char* abandon = "abandon_step";    ///< abandons a step
  const char* allow_unused = "ddp.allow_unused_parameters";
  /// What to do about one backward too many.
  const char* surplus = "run all but the last micro-batch inside no_sync()";
  /// What to do about a backward that reached nothing, with unused parameters allowed.
  const char* reached_none =
      "; if a backward of this step reaches none of the parameters, call start_grad_sync() after "
      "the last one";
};

/// Counts the gradients of a training step and says which buckets may be reduced, and when. It has
/// no tensors and sends nothing, so that every interleaving can be tested.
///
///   idle ── first gradient ──► accumulating n/N ── first bucket launched ──► reducing
///                                     ▲                                        │ finished
///                                     └────────── reset ── ready ◄─────────────┘
///
/// abandon() leads from every state to ready.
///
/// A parameter is ready once it has received its gradient of the last micro-batch. Either the
/// caller states that a gradient is of the last micro-batch (`synchronize`), or it is counted, if
/// set_microbatches() says how many micro-batches there are. Buckets are launched strictly in the
/// order of their numbers, whatever the order in which they become ready, so that all ranks
/// communicate in the same order.
///
/// A call that the state does not allow throws UsageError with the state's name and leaves the
/// state as it was. Not thread-safe: the owner locks.
class GradSyncState {
 public:
  enum class Phase { idle, accumulating, reducing, ready };

  struct Param {
    std::string name;
    int64_t bucket = 0;
  };

  /// Buckets [first, last) that the caller must launch now, in this order.
  struct Launch {
    int64_t first = 0;
    int64_t last = 0;
    bool empty() const { return first == last; }
  };

  /// `overlap`: buckets are launched as soon as they are ready; otherwise when start() or finish()
  /// is called. `allow_unused`: parameters without a gradient count as ready when the step is
  /// finished.
  GradSyncState(std::vector<Param> params, int64_t num_buckets, bool overlap, bool allow_unused,
                GradSyncCalls calls = {});

  /// The micro-batches of each following step are counted: the one with number `count` is the last.
  /// Without `allow_unused` every parameter must then get a gradient in each of them. `count` >= 1.
  /// Only between steps (idle or ready).
  void set_microbatches(int64_t count);

  /// Parameter `param` received a gradient. `synchronize`: the caller states that it is of the last
  /// micro-batch; with set_microbatches(n), that it is one of the n that count.
  /// Throws if the parameter was ready already (one backward too many) or the step is over.
  /// `hold_back`: nothing is launched, even with `overlap`.
  Launch on_gradient(int64_t param, bool synchronize, bool hold_back = false);

  /// The gradient of the last on_gradient() arrived in backward `pass`, a number that grows from
  /// pass to pass. With `allow_unused` the passes show how many micro-batches there were, because
  /// no parameter need be used in all of them. A pass that runs inside another counts as part of it
  /// as soon as the outer one yields a gradient. Negative: it arrived outside of a pass.
  void note_pass(int64_t pass);

  /// The same for a pass that runs inside no other. It may be over, and later ones have begun.
  void note_outer_pass(int64_t pass);

  /// The caller states that all gradients have arrived: launches all buckets that were not
  /// launched. Throws with the names of the parameters that received no gradient in any
  /// micro-batch.
  Launch start();

  /// Launches what is left. Throws with the names of the parameters that are not ready; with
  /// `allow_unused`, only as refuse_early_finish() does.
  Launch finish();

  /// Throws, with names and counts, if finish() would come before the last micro-batch has reached
  /// any parameter. With `allow_unused` a step without any backward may be finished, and so may one
  /// in which as many passes were noted as there are micro-batches.
  void refuse_early_finish() const;

  /// All launched buckets are reduced: reducing → ready.
  void finished();

  /// Abandons the step: → ready. Returns the buckets that were not launched, which other ranks may
  /// have launched.
  Launch abandon();

  /// Begins a new step: → idle. Throws while reducing, and for a step whose last micro-batch has
  /// come but that nobody has reduced: each rank would go on with its own gradients.
  void reset();

  Phase phase() const { return phase_; }
  /// Whether the parameter has its gradient of the last micro-batch.
  bool is_ready(int64_t param) const {
    return counts_[static_cast<size_t>(param)].synchronized == microbatches_;
  }
  /// "idle", "accumulating 1/2" (only "accumulating 1" if the caller states the last one),
  /// "reducing", "ready"
  std::string phase_text() const;
  const GradSyncCalls& calls() const { return calls_; }
  int64_t num_buckets() const { return static_cast<int64_t>(pending_.size()); }

 private:
  struct Counts {
    int64_t bucket = 0;
    int32_t received = 0;      ///< gradients since reset()
    int32_t synchronized = 0;  ///< those that counted towards being ready
  };

  bool has_all_passes() const { return static_cast<int64_t>(passes_.size()) >= microbatches_; }
  bool is_left_unreduced() const;
  std::vector<std::string> list_missing(bool needs_ready) const;
  void refuse_missing(bool needs_ready) const;
  Launch launch_ready();
  Launch launch_all();

  std::vector<Param> params_;
  bool overlap_;
  bool allow_unused_;
  GradSyncCalls calls_;
  int64_t microbatches_ = 1;
  Phase phase_ = Phase::idle;
  std::vector<Counts> counts_;
  std::vector<int64_t> bucket_sizes_;  ///< parameters of each bucket
  std::vector<int64_t> pending_;       ///< parameters of each bucket that are not ready
  int64_t next_ = 0;                   ///< first bucket that was not launched
  std::vector<int64_t> passes_;        ///< of this step, increasing; with allow_unused_
};

/// "idle", "accumulating", "reducing", "ready"
const char* to_string(GradSyncState::Phase phase);

}  // namespace lockstep
