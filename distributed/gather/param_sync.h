#pragma once

// Internal.

#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include "lockstep/distributed/bucketing.h"
#include "lockstep/distributed/read_watch.h"
#include "lockstep/parallel_state/collectives.h"

namespace lockstep {

/// Last stage of the gradient's way: with the distributed optimizer each rank has updated its shard
/// of every bucket, and all-gathers give it the others, straight into the parameter buffer, without
/// a copy.
///
/// From mark_stale() until a bucket's gather has ended its parameters have no readable memory: an
/// operator that takes one waits for the gather, if it is called on the thread that called start();
/// any other access throws c10::Error with a message that says so. So nobody reads stale weights,
/// also after a gather that failed.
class ParamSync final : public ReadObserver {
 public:
  /// `bucketing` outlives this object; it is one for the distributed optimizer.
  ParamSync(const Bucketing& bucketing, const ParallelState& state);
  /// Waits for gathers that are under way.
  ~ParamSync();
  ParamSync(const ParamSync&) = delete;
  ParamSync& operator=(const ParamSync&) = delete;

  /// This rank's shards were changed, or will be before their gathers start.
  void mark_stale();
  /// Starts the gather of the next stale bucket, in the order in which forward needs them.
  void start_next();
  /// Starts the gathers of all buckets that are still stale, in that order. All ranks must call it.
  /// `watch`: operators of this thread wait for what they use.
  void start(bool watch);
  /// Starts what is stale and returns when every bucket is gathered.
  void finish();

  bool is_stale() const { return phase_ == Phase::stale; }
  /// Whether all is stale.
  bool none_started() const { return is_stale() && started_ == 0; }
  /// Whether some parameters cannot be read yet.
  bool pending() const { return phase_ != Phase::current; }

  void on_read(const at::Tensor& tensor) noexcept override;

 private:
  enum class Phase { current, stale, gathering };

  /// One bucket, with the parameters in it.
  struct Gather {
    std::string label;
    ProcessGroup group;
    at::Tensor whole;                 ///< of the parameter buffer
    at::Tensor shard;                 ///< the part of `whole` that this rank owns
    std::vector<at::Tensor> tensors;  ///< the parameters that have elements
    c10::Storage storage;             ///< of the buffer
    c10::Storage closed;              ///< stands for it while it must not be read
    bool open = true;
    Work work = {};
    std::string failure = {};  ///< why the gather failed; then the bucket stays closed
  };

  void add_bucket(const ParamAndGradBuffer& buffer, size_t bucket, const ProcessGroup& group);
  /// Leaves alone what somebody has made a view of other memory.
  static void set_storage(Gather& gather, bool open);
  void wait(Gather& gather);
  void settle();

  std::vector<Gather> gathers_;  ///< in the order of forward
  size_t started_ = 0;           ///< of those since mark_stale()
  Phase phase_ = Phase::current;
  bool busy_ = false;  ///< inside this class, whose own reads need no guard
  ReadWatch watch_;
};

}  // namespace lockstep
