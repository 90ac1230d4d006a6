#pragma once

// Internal.

#include <optional>
#include <string>

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

  /// Posts "rank R: message". The first failure of the job stays; later ones are dropped. Never
  /// throws.
  void post(const std::string& message) const noexcept;

  /// The posted failure of another rank. Empty if there is none, or if the store cannot be reached.
  std::optional<std::string> find() const noexcept;

 private:
  c10::intrusive_ptr<c10d::Store> store_;
  int64_t rank_;
};

}  // namespace lockstep
