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

/// What a rank has posted.
struct Failure {
  int64_t rank = 0;     ///< that posted it
  std::string culprit;  ///< "rank 1 has gone"; empty where no rank is lost
  std::string message;
  bool own = false;  ///< the rank failed by itself, not in an operation with others

  /// "rank 2: no text", after the culprit where there is one.
  std::string text() const;
};

/// The failure that was posted in `store`, if any. Asks it.
std::optional<Failure> posted_failure(c10d::Store& store);

/// Where a rank that fails says so, for the ranks that would otherwise wait for it, and where every
/// rank shows that it is alive. Lies in the store of the rendezvous, over a connection of its own.
/// A thread looks for failures and counts a beat four times a second (more rarely from 500 ranks
/// on), so that a rank that waits need not ask: the store may be stopped or cut off, and a question
/// to it takes up to two seconds then. After a failure is posted the groups of the job cannot be
/// used.
class FailureBoard {
 public:
  /// Ranks from which nothing is to be expected.
  struct Lost {
    RankList gone;    ///< known to have ended
    RankList silent;  ///< stopped, cut off, or ended on another host
    bool none() const { return gone.empty() && silent.empty(); }
    /// "rank 1 has gone", "ranks 1, 3 do not answer", in ascending order.
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
  /// Posts that an operation with other ranks has failed, for which `lost` ranks are the cause.
  void post_operation(const std::string& message, const Lost& lost) const noexcept;

  /// The failure of another rank that the thread has seen. Asks nobody and never blocks.
  std::optional<Failure> find() const;
  /// Whether there is one, or this rank has posted one.
  bool has_failed() const { return posted_ || find(); }
  /// The same, with a question to the store if none was seen. c10::Error if that cannot be reached.
  std::optional<Failure> ask() const;

  /// Writes a note that the other ranks can read, and reads one; empty where there is none.
  /// c10::Error if the store cannot be reached.
  void write_note(const std::string& key, const std::string& text) const;
  std::optional<std::string> read_note(const std::string& key) const;

  /// Those of `ranks`, and then of the other ranks, that have ended without a word, or have
  /// stopped: their processes are gone, or their beats stand still, and they have written no note
  /// under note_of(rank). Looks at 64 at most. Takes 1.25 s at most (more from 500 ranks on), less
  /// where all are found alive, or one gone. c10::Error as above.
  Lost find_lost(const RankList& ranks, const std::function<std::string(int64_t)>& note_of) const;

  /// Those of `ranks` whose processes are known to have ended without a check-out, on this host.
  /// Nobody is looked for among more than 64. c10::Error as above.
  Lost find_gone(const RankList& ranks) const;

  /// Why a rank need not wait for `ranks`: what another rank has posted, or which of them have
  /// gone; nothing where neither is known. c10::Error as above.
  std::optional<std::string> find_obstacle(const RankList& ranks) const;

  /// Ranks of this host whose processes have ended, or are stopped by a signal, as far as that is
  /// known without the store. Only where a launcher serves it, whose silence says nothing of the
  /// ranks.
  Lost find_lost_here() const;

  /// "rank 0, which serves the store at ..., has gone", or has not answered for so and so long;
  /// nothing while it answers. Asks nobody.
  std::optional<std::string> lost_server() const;
  /// Whether a rank serves the store, not the launcher.
  bool rank_serves() const;
  /// Where the launcher serves the store and has ended: "the launcher's store at ... has gone".
  std::optional<std::string> lost_launcher() const;

  /// For a wait that nothing but its end can interrupt: while the returned object lives, the thread
  /// calls `abort`, once, when any rank has posted a failure, this one included.
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
  StoreClient* client_ = nullptr;  ///< behind store_; null for a store of this process
  int64_t rank_;
  int64_t world_size_;
  std::chrono::milliseconds period_;
  mutable std::atomic<bool> posted_ = false;
  std::atomic<Clock::rep> last_answer_;

  mutable std::mutex mutex_;
  std::optional<Failure> found_;
  std::vector<std::string> marks_;  ///< of the processes of all ranks, where a launcher serves
  std::condition_variable wake_;
  std::list<std::function<void()>> watched_;
  bool ended_ = false;
  std::thread lookout_;
};

/// How long a rank waits before it looks whether another one has failed.
inline constexpr std::chrono::milliseconds kPatience{500};

/// How long a rank that has failed waits for an answer of the store, or of other ranks.
inline constexpr std::chrono::milliseconds kAnswerTime{2000};

/// Writes in `store` that this process is rank `rank`, or that it is so no more.
void note_process(c10d::Store& store, int64_t rank);
void take_process_back(c10d::Store& store, int64_t rank);
/// Those of `ranks` whose noted processes are known to have ended. Nobody among more than 64.
RankList ended_processes(c10d::Store& store, const RankList& ranks);
/// Ranks that a posted failure names as lost.
int64_t number_lost(c10d::Store& store);

}  // namespace lockstep
