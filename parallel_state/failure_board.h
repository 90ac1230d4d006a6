#pragma once

// Internal.

#include <atomic>
#include <condition_variable>
#include <functional>
#include <list>
#include <mutex>
#include <optional>
#include <string>
#include <thread>

#include <torch/csrc/distributed/c10d/Store.hpp>

namespace lockstep {

/// Where a rank that fails says so, for the ranks that would otherwise wait for it. Lies in the
/// store of the rendezvous, so it costs nothing while all goes well: a waiting rank looks at it
/// only when a communication takes unusually long, or has failed. After a failure is posted the
/// groups of the job cannot be used.
class FailureBoard {
 public:
  /// `store` may be null (a single process): then nothing is posted and nothing is found.
  FailureBoard(c10::intrusive_ptr<c10d::Store> store, int64_t rank);
  ~FailureBoard();

  /// Posts "rank R: message". The first failure of the job stays; later ones are dropped. Never
  /// throws.
  void post(const std::string& message) const noexcept;

  /// The posted failure of another rank. Empty if there is none, or if the store cannot be reached.
  std::optional<std::string> find() const noexcept;

  /// Writes a note that the other ranks can read, and reads one; empty where there is none.
  void write_note(const std::string& key, const std::string& text) const noexcept;
  std::optional<std::string> read_note(const std::string& key) const noexcept;

  /// For a wait that nothing but its end can interrupt: while the returned object lives, a thread
  /// looks for failures now and then and calls `abort`, once, when any rank has posted one, this
  /// one included.
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
  void look_out();

  c10::intrusive_ptr<c10d::Store> store_;
  int64_t rank_;
  mutable std::atomic<bool> posted_ = false;

  std::mutex mutex_;
  std::condition_variable wake_;
  std::list<std::function<void()>> watched_;
  std::thread lookout_;  ///< started by the first Watch
  bool ended_ = false;
};

/// How long a rank waits before it looks whether another one has failed.
inline constexpr std::chrono::milliseconds kPatience{500};

}  // namespace lockstep
