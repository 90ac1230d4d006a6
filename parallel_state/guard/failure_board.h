#pragma once

// Internal.

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <functional>
#include <list>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include <torch/csrc/distributed/c10d/Store.hpp>

#include "lockstep/parallel_state/rank_generator.h"

namespace lockstep {

class StoreClient;

/// A failure that a rank has posted.
struct Failure {
  int64_t rank = 0;     ///< the rank that posted it
  std::string culprit;  ///< "rank 1 has exited"; empty if no rank is lost
  std::string message;
  bool own = false;  ///< the rank failed on its own, not in an operation with others

  /// "rank 2: no text", preceded by the culprit if there is one.
  std::string text() const;
};

/// The failure that was posted in `store`, if any. Queries the store.
std::optional<Failure> posted_failure(c10d::Store& store);

/// Where a rank posts its failure, for the ranks that would otherwise wait for it, and where every
/// rank signals that it is alive. It uses the store of the rendezvous, over its own connection. A
/// thread looks for failures and counts a heartbeat four times a second (less often from 500 ranks
/// on), so that a waiting rank need not query the store: the store may be stopped or cut off, and a
/// query then takes up to two seconds. After a failure is posted, the groups of the job cannot be
/// used.
class FailureBoard {
 public:
  /// Ranks that no answer can be expected from.
  struct Lost {
    RankList gone;    ///< known to have ended
    RankList silent;  ///< stopped, cut off, or ended on another host
    bool none() const { return gone.empty() && silent.empty(); }
    /// "rank 1 has exited", "ranks 1, 3 do not answer", in ascending order.
    std::string text() const;
  };

  /// `store` may be null (a single process): then nothing is posted and nothing is found.
  FailureBoard(const c10::intrusive_ptr<c10d::Store>& store, int64_t rank, int64_t world_size);
  ~FailureBoard();
  FailureBoard(const FailureBoard&) = delete;
  FailureBoard& operator=(const FailureBoard&) = delete;

  /// Posts that this rank has failed. The first failure of the job stays; later ones are dropped.
  /// Never throws.
  void post(const std::string& message) const noexcept;
  /// Posts that an operation with other ranks has failed because of the `lost` ranks.
  void post_operation(const std::string& message, const Lost& lost) const noexcept;

  /// The failure of another rank that the thread has seen. Queries nothing and never blocks.
  std::optional<Failure> find() const;
  /// Whether there is one, or this rank has posted one.
  bool has_failed() const { return posted_ || find(); }
  /// The same, but queries the store if none was seen. c10::Error if the store cannot be reached.
  std::optional<Failure> ask() const;

  /// Writes a note that the other ranks can read, and reads one; empty if there is none. c10::Error
  /// if the store cannot be reached.
  void write_note(const std::string& key, const std::string& text) const;
  std::optional<std::string> read_note(const std::string& key) const;
  /// Whether this rank is the first that claims `key`. c10::Error likewise.
  bool claim(const std::string& key) const;

  /// The ranks among `ranks`, and then among the other ranks, that have ended without notice or
  /// have stopped: their processes are gone or their heartbeats stand still, and they have written
  /// no note under note_of(rank). Looks at 64 ranks at most. Takes at most 1.25 s (more from 500
  /// ranks on), less if all are found alive or one is found gone. c10::Error as above.
  Lost find_lost(const RankList& ranks, const std::function<std::string(int64_t)>& note_of) const;

  /// The ranks among `ranks` whose processes, on this host, are known to have ended without a
  /// check-out. With more than 64 ranks it does not look. c10::Error as above.
  Lost find_gone(const RankList& ranks) const;

  /// Why a rank need not wait for `ranks`: what another rank has posted, or which of them have
  /// gone; nothing if neither is known. c10::Error as above.
  std::optional<std::string> find_obstacle(const RankList& ranks) const;

  /// Ranks of this host whose processes have ended, or are stopped by a signal, as far as that is
  /// known without the store. Only if a launcher serves the store: its silence then says nothing
  /// about the ranks.
  Lost find_lost_here() const;

  /// "rank 0, which serves the store at ..., has exited", or has not answered for some time. Unset
  /// while it answers, or was not asked because this process was suspended. Queries nothing.
  std::optional<std::string> lost_server() const;
  /// Whether a rank serves the store, rather than the launcher.
  bool rank_serves() const;
  /// If the launcher serves the store and has ended: "the launcher's store at ... has exited".
  std::optional<std::string> lost_launcher() const;

  /// For a wait that cannot be interrupted otherwise: while this object lives, the thread calls
  /// `abort`, once, when any rank has posted a failure, including this one.
  class [[nodiscard]] Watch {
   public:
    Watch(FailureBoard& board, std::function<void()> abort);
    ~Watch();
    Watch(const Watch&) = delete;
    Watch& operator=(const Watch&) = delete;

   private:
    FailureBoard& board_;
    std::list<std::function<void()>>::iterator entry_;
  };

 private:
  using Clock = std::chrono::steady_clock;

  void post(const Failure& failure, int64_t lost) const noexcept;
  void look_out();
  void look();
  bool awaits_marks() const;
  void remember_processes();
  int64_t beats_of(int64_t rank) const;

  c10::intrusive_ptr<c10d::Store> store_;
  StoreClient* client_ = nullptr;  ///< underlying store_; null for a store in this process
  int64_t rank_;
  int64_t world_size_;
  std::chrono::milliseconds period_;
  mutable std::atomic<bool> posted_ = false;
  std::atomic<Clock::rep> unanswered_since_ = 0;  ///< when the thread asked; 0: it has its answer

  mutable std::mutex mutex_;
  std::optional<Failure> found_;
  std::vector<std::string> marks_;  ///< of the processes of all ranks, if a launcher serves
  std::condition_variable wake_;
  std::list<std::function<void()>> watched_;
  bool ended_ = false;
  std::thread lookout_;
};

/// How long a rank waits before it checks whether another one has failed.
inline constexpr std::chrono::milliseconds kPatience{500};

/// How long a rank that has failed waits for an answer from the store or from other ranks.
inline constexpr std::chrono::milliseconds kAnswerTime{2000};

/// Writes to `store` that this process is rank `rank`, or that it no longer is.
void note_process(c10d::Store& store, int64_t rank);
void take_process_back(c10d::Store& store, int64_t rank);
/// The ranks among `ranks` whose noted processes are known to have ended. None if there are more
/// than 64.
RankList ended_processes(c10d::Store& store, const RankList& ranks);
/// Number of ranks that a posted failure names as lost.
int64_t number_lost(c10d::Store& store);

}  // namespace lockstep
