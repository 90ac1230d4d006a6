#pragma once

// Internal.

#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include <ATen/core/Tensor.h>

#include "lockstep/distributed/bucketing.h"
#include "lockstep/distributed/read_watch.h"
#include "lockstep/distributed/unit_order.h"
#include "lockstep/parallel_state/collectives.h"

namespace lockstep {

/// Last stage of a gradient's path: with the distributed optimizer each rank has updated its shard
/// of every bucket, and all-gathers give it the others, straight into the parameter buffer, without
/// a copy.
///
/// From mark_stale() until a bucket's gather has ended, its parameters have no readable memory: an
/// operator that takes one waits for the gather, if it is called on the thread that called start();
/// any other access throws c10::Error with a message that says so. So nobody reads stale weights,
/// even after a gather that failed.
///
/// Where buffers lend the memory of their parameters (ParamAndGradBuffer::lends_params) each buffer
/// is a piece of a unit. An operator that takes a parameter of a piece, or a view of it, gathers
/// the piece, if the operator is called on the watched thread or by autograd for that thread. Then
/// the pieces of all other units are freed, except those from which the operator also takes
/// something, and the gather of the next piece begins, in the order of the previous step. All ranks
/// must use pieces in the same order. A parameter that was changed in place since its gather is
/// written to the shard, by each rank to its own. From mark_stale() to start(), only start_next()
/// gathers.
class ParamSync final : public ReadObserver {
 public:
  /// `bucketing` must outlive this object and be one for the distributed optimizer. Units have
  /// their memory until reshard(). `ahead`: see set_ahead().
  ParamSync(const Bucketing& bucketing, const ParallelState& state, bool ahead);
  /// Waits for gathers that are in progress.
  ~ParamSync();
  ParamSync(const ParamSync&) = delete;
  ParamSync& operator=(const ParamSync&) = delete;

  /// Notes that this rank's shards were changed, or will be before their gathers start.
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

  /// Whether there are units. Then mark_stale() frees them, start_next() starts the gather of the
  /// first unit of a step, start() does nothing, and finish() writes what was changed in place to
  /// the shards.
  bool has_units() const { return !units_.empty(); }
  /// Sets whether the gather of the next unit begins while the current one is in use.
  void set_ahead(bool ahead) { ahead_ = ahead; }
  /// Notes that a step begins, on this thread.
  void begin_step();
  /// Gathers all units. They stay until reshard(), begin_step() or mark_stale(). All ranks must
  /// call it.
  void unshard();
  /// Frees all units.
  void reshard();

  bool on_read(const at::Tensor& tensor) noexcept override;
  void on_operator() noexcept override;

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
    c10::Storage closed;              ///< takes its place while it must not be read
    bool open = true;
    Work work = {};
    std::string failure = {};  ///< why the gather failed; then the bucket stays closed

    ParamAndGradBuffer* lender = nullptr;  ///< of a piece of a unit, else null
    int64_t unit = 0;                      ///< BufferPlan::unit
    bool launched = false;                 ///< its gather is under way
    bool held = false;                     ///< by unshard()
    uint64_t used = 0;                     ///< number of the operator that used it last
    uint64_t version = 0;                  ///< of its parameters when it was gathered
    bool has_memory() const { return open || launched; }
  };

  /// Sets a flag for the time of a scope.
  class Busy {
   public:
    explicit Busy(bool& flag) : flag_(flag), before_(flag) { flag_ = true; }
    ~Busy() { flag_ = before_; }
    Busy(const Busy&) = delete;
    Busy& operator=(const Busy&) = delete;

   private:
    bool& flag_;
    bool before_;
  };

  void add_bucket(const ParamAndGradBuffer& buffer, size_t bucket, const ProcessGroup& group);
  /// Leaves alone what somebody has made a view of other memory.
  static void set_storage(Gather& gather, bool open);
  /// Sets the message with which reading its parameters throws while it is closed.
  static void set_message(Gather& gather, const std::string& message);
  void wait(Gather& gather);
  void settle();

  static uint64_t version_of(const std::vector<at::Tensor>& tensors);
  void watch_this_thread();
  bool use_unit(const c10::StorageImpl* storage);
  /// Reads while units were whole may differ between ranks, and must not steer gathers.
  void forget_uses();
  void map_unit(size_t index);
  void launch(Gather& unit);
  void open(Gather& unit);
  void note_failure(Gather& unit);
  void keep_changes(Gather& unit);
  void free(size_t index, bool keep = true);
  void free_unused(std::optional<size_t> next);

  std::vector<Gather> gathers_;  ///< in the order of forward
  size_t started_ = 0;           ///< of those since mark_stale()
  Phase phase_ = Phase::current;
  bool busy_ = false;  ///< inside this class, whose own reads need no guard
  ReadWatch watch_;

  std::unordered_map<const c10::StorageImpl*, size_t> units_;  ///< of gathers_, by their storages
  std::shared_ptr<BlockPool> pool_;
  UnitOrder order_;
  bool ahead_;
  std::optional<size_t> current_;  ///< of gathers_, which was used last
  bool switched_ = false;          ///< it was another one before the operator that is about to run
  uint64_t operators_ = 1;         ///< that used units
};

}  // namespace lockstep
