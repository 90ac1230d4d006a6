#pragma once

// Internal.

#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <unordered_map>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>

#include "lockstep/parallel_state/program_recorder.h"
#include "lockstep/parallel_state/rank_program.h"

namespace lockstep {

/// The small messages that planned ranks have sent, for the ranks that are recorded after them.
class KnownMessages {
 public:
  /// Larger messages, and those on a device, are not kept.
  static constexpr size_t kMostBytes = 1024;

  /// A sender, the group, and the positions of both ends in it. A rank that is represented sends in
  /// a group of its own, of the same shape; with the sender's place the shape gives the ranks.
  struct Way {
    int64_t sender = 0;  ///< its rank
    std::string group;
    uint64_t shape = 0;  ///< a digest of the group's ranks, counted from the first
    int64_t position = 0;
    int64_t receiver = 0;
    std::string label;
    auto operator<=>(const Way&) const = default;
  };

  /// `represented_by`: for each rank of the world, the one that is recorded in its place.
  explicit KnownMessages(std::vector<int64_t> represented_by)
      : represented_by_(std::move(represented_by)) {}

  void send(const Way& way, const at::Tensor& tensor);
  /// Fills `tensor` with message number `index` of those that went this way. Leaves it as it is if
  /// that message is unknown, or has another size or dtype.
  void receive(Way way, size_t index, const at::Tensor& tensor) const;

 private:
  std::vector<int64_t> represented_by_;
  std::map<Way, std::vector<at::Tensor>> sent_;  ///< undefined where not kept
};

/// Records what a rank does on the thread that created this object. Starts on other threads are
/// recorded where they occur; waits on other threads, which block nothing else, are not.
class RankRecorder : public ProgramRecorder {
 public:
  /// By label, the length in bytes of the longest text that a rank gathers.
  using TextLengths = std::map<std::string, int64_t, std::less<>>;

  /// `known`: the lengths of ranks that were recorded before. `messages`: what those have sent, if
  /// this rank is to receive it; takes what this rank sends.
  explicit RankRecorder(int64_t rank, const TextLengths& known = {},
                        std::shared_ptr<KnownMessages> messages = nullptr)
      : text_lengths_(known), messages_(std::move(messages)) {
    program_.rank = rank;
  }

  void on_connect(const Communicator& communicator, const std::string& name, const RankList& ranks,
                  const std::string& apart) override;
  void on_pair(const ProcessGroup::State& group, int64_t first, int64_t second) override;
  uint32_t on_start(const Work::Operation& operation) override;
  void on_wait(const Work::Operation& operation) override;
  void on_message(const ProcessGroup::State& group, const CollectiveOperation& called,
                  std::string_view label, const at::Tensor& tensor) override;
  int64_t longest_text(std::string_view label, int64_t own) override;

  const TextLengths& text_lengths() const { return text_lengths_; }
  /// Whether a text was longer than all under its label before, so that those were padded to less.
  bool texts_grew() const { return texts_grew_; }

  /// The number of waits that the device's stream has been given.
  uint32_t device_waits() const { return device_waits_; }
  /// The host waits until the stream has passed `waits` of them.
  void on_host_wait(uint32_t waits);

  void on_kernel(const ProgramKernel& kernel);

  /// A place in the recording.
  struct Mark {
    size_t events = 0;
    uint32_t started = 0, device_waits = 0;
    bool operator==(const Mark&) const = default;
  };
  Mark mark() const { return {program_.events.size(), started_, device_waits_}; }
  /// What was recorded between two marks, with its waits counted from the first.
  struct Passage {
    std::vector<ProgramEvent> events;
    uint32_t started = 0, device_waits = 0;
    bool operator==(const Passage&) const = default;
  };
  /// What was recorded since `begin`. Unset if it means something else when it is recorded again:
  /// it connects ranks, or waits for what began before `begin`.
  std::optional<Passage> since(const Mark& begin) const;
  /// Records `passage` again, as if the rank did the same once more.
  void repeat(const Passage& passage);

  /// A training step is over.
  void end_step();

  RankProgram take() { return std::move(program_); }

 private:
  uint32_t index_of(const ProgramCall& call);
  uint32_t group_of(const ProcessGroup::State& group) const;
  uint64_t shape_of(const ProcessGroup::State& group);
  void add(ProgramEvent::Kind kind, uint32_t value);

  std::thread::id host_ = std::this_thread::get_id();
  std::mutex mutex_;
  RankProgram program_;
  TextLengths text_lengths_;
  bool texts_grew_ = false;
  std::shared_ptr<KnownMessages> messages_;        ///< may be null
  std::map<KnownMessages::Way, size_t> received_;  ///< messages so far
  std::map<const Communicator*, uint32_t> groups_;
  std::map<const Communicator*, uint64_t> shapes_;               ///< of those with messages
  std::unordered_map<uint64_t, std::vector<uint32_t>> calls_;    ///< by a digest
  std::unordered_map<uint64_t, std::vector<uint32_t>> kernels_;  ///< likewise
  uint32_t started_ = 0, device_waits_ = 0;
};

}  // namespace lockstep
