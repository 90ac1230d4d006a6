#pragma once

// Internal.

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <torch/csrc/distributed/c10d/Store.hpp>

#include "lockstep/parallel_state/announced_field.h"
#include "lockstep/parallel_state/rank_generator.h"
#include "lockstep/parallel_state/secret.h"

namespace lockstep {

/// A rank's description of itself when it joins a run.
struct MembershipSpec {
  std::string run_id;
  int64_t rank = 0;
  int64_t world_size = 1;
  std::vector<AnnouncedField> fields;  ///< must be the same on all ranks
  std::chrono::milliseconds timeout{};
  bool serves_store = false;  ///< the store ends with this process
  /// What may own the server of the store: lives as long as the membership. Clients of the store
  /// may live longer.
  std::shared_ptr<void> server = {};
  /// Called repeatedly: returns why not all ranks will come. May be empty.
  std::function<std::optional<std::string>()> obstacle = {};
  /// Of rank 0, in the store of torchrun's agent: lets in the ranks that have come meanwhile. It is
  /// called repeatedly.
  std::function<void()> admit = {};
  /// The secret that the ranks prove to each other when they meet; null: none.
  std::shared_ptr<const Secret> secret = {};
  std::optional<int64_t> round = {};  ///< in the store of torchrun's agent (AgentRounds)
};

/// One rank's part in a run, from its claim to its check-out. It uses only the store, so that
/// everything is settled before a group is created. A rank makes a fixed number of requests,
/// whatever the size of the world, and waits; with up to 64 ranks it also looks for processes on
/// its host that died.
///
/// A store can hold several generations of a run, one after the other: a rank whose claim was
/// released claims the next generation, and meets the ranks that do the same. A claim that was
/// never released (the process died, or still runs) keeps the rank out of the run; a restarted job
/// needs its own store or run id.
class Membership {
 public:
  using Clock = std::chrono::steady_clock;

  /// Claims the rank. CommunicationError, on all ranks that have not agreed yet, if it is already
  /// claimed: names host and process of both.
  Membership(c10::intrusive_ptr<c10d::Store> store, MembershipSpec spec,
             Clock::time_point deadline);
  /// Checks out. If this rank serves the store, it waits until the others have checked out or are
  /// known to be lost: for at most 5 s, 2 s after a failure, 10 s after a refusal, for ranks that
  /// are yet to learn of it. While one of them is Connecting, it waits spec.timeout longer. With
  /// spec.admit, after a refused configuration or give_up() of any rank, it admits the others for
  /// up to 3 s, until all have checked out: they learn the reason only from this round.
  ~Membership();
  Membership(const Membership&) = delete;
  Membership& operator=(const Membership&) = delete;

  /// Returns once all ranks have arrived and announce the same. Otherwise every rank throws the
  /// same error: ConfigError with the first field that differs, its values and ranks, or
  /// CommunicationError with the ranks that did not come in time.
  void meet();

  /// Instead of meet(), if this rank cannot take part: then its check-out tells the others so, and
  /// `reason`, and they throw it as a CommunicationError.
  void give_up(const std::string& reason);

  /// 1 for the first, or only, run with this store and run id.
  int64_t generation() const { return generation_; }
  std::optional<int64_t> round() const { return spec_.round; }

  /// A store with only this generation's keys.
  const c10::intrusive_ptr<c10d::Store>& store() const { return keys_; }

 private:
  void claim();
  void refuse_second_claim(int64_t generation, const std::string& holder);
  void compare_fields();
  void wait_for(const char* key);
  std::string missing_ranks(const RankList& gone) const;
  std::string strangers() const;
  std::optional<std::string> obstacle() const;
  RankList all_ranks() const;
  int64_t num_absent_members() const;
  std::string post(char kind, const std::string& message);
  void obey(const std::string& verdict);
  int64_t num_to_leave(int64_t members) const;
  void wait_for_check_outs();
  void admit_late_ranks();

  MembershipSpec spec_;  ///< destroyed last, with the server
  c10::intrusive_ptr<c10d::Store> whole_;
  c10::intrusive_ptr<c10d::Store> root_;
  c10::intrusive_ptr<c10d::Store> keys_;
  Clock::time_point deadline_;
  std::string token_;
  std::string claimed_;  ///< value of the claim; empty until it is held
  int64_t generation_ = 0;
  bool agreed_ = false;
  bool incomplete_ = false;  ///< some ranks did not come in time
  bool refused_ = false;     ///< the ranks' configurations do not fit, or a rank gave up
  std::string failure_;      ///< why this rank gave up; empty: it did not
};

/// While it lives, this rank makes connections, which cannot be interrupted: the rank that serves
/// the store must not leave meanwhile, so that this rank can read from it why it failed.
class Connecting {
 public:
  /// `store`: Membership::store(), or null. c10::Error if it cannot be reached.
  explicit Connecting(c10::intrusive_ptr<c10d::Store> store);
  ~Connecting();
  Connecting(const Connecting&) = delete;
  Connecting& operator=(const Connecting&) = delete;

 private:
  c10::intrusive_ptr<c10d::Store> store_;
};

}  // namespace lockstep
