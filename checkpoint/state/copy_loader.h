#pragma once

// Internal.

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "lockstep/checkpoint/block_transfers.h"
#include "lockstep/checkpoint/checkpoint_reader.h"
#include "lockstep/checkpoint/state_copies.h"
#include "lockstep/parallel_state/parallel_state.h"

namespace lockstep {

/// The newest copy of the state that the ranks together have in memory, as a checkpoint that any
/// layout can read.
class CopyLoader {
 public:
  static constexpr int64_t kBytesOfExchange = int64_t{16} << 20;

  /// Agrees on the copy. Collective over the world: several all_gather_texts(). Copies of
  /// iterations before `least` do not count, nor do those made before `first`; rank 0's values
  /// decide. `exchange_bytes`: the most that a rank gives or takes in one exchange; whole blocks.
  CopyLoader(const ParallelState& state, const StateCopies& copies, int64_t least,
             CopyId first = {}, int64_t exchange_bytes = kBytesOfExchange);
  ~CopyLoader();
  CopyLoader(const CopyLoader&) = delete;
  CopyLoader& operator=(const CopyLoader&) = delete;

  /// Empty if no copy that counts is whole. no_copy_reason() then says why, unless all whole copies
  /// are too old.
  const std::optional<CopyId>& id() const { return choice_.id; }
  std::string no_copy_reason() const;

  /// Calls `use` with the checkpoint: once to note which bytes it reads (see
  /// CheckpointReader::note_reads()), then again to read them, in the same order. While it reads,
  /// the ranks send each other what they lack. What a rank has received is kept until its last
  /// read: for one or two exchanges, unless `use` reads it again later. `use` must not communicate.
  /// Collective over the world. Returns what any rank has found wrong ("rank 2: ..."), or empty if
  /// all have read what they need. Nothing can be read afterwards.
  std::string read(const std::function<void(CheckpointReader&)>& use);
  const CheckpointReader& checkpoint() const { return *checkpoint_; }

 private:
  class File;
  /// Where the blocks of a file are; nullptr: not here.
  using Blocks = std::vector<const char*>;
  struct Told;
  /// An exchange between the ranks.
  struct Turn {
    std::vector<BlockTransfer> given, taken;  ///< by this rank, sorted by the other rank
    int64_t last_read = -1;                   ///< number of the last read of what is taken
    at::Tensor memory = {};                   ///< for what is taken, while it is needed
  };

  void open(const StateCopy* copy);
  std::string own_text(const StateCopy* copy) const;
  Told gather_texts(const StateCopy* copy) const;
  void add_file(const ManifestFile& file, const char* data, std::vector<int64_t> holders);
  std::vector<BlockRun> missing_blocks(const std::function<void(CheckpointReader&)>& use);
  void plan_turns(const std::vector<BlockRun>& missing);
  Turn turn_of(const std::vector<BlockTransfer>& transfers) const;
  /// Makes exchanges until the blocks of `count` bytes from `offset` on are here.
  void await(int64_t file, int64_t offset, int64_t count);
  void make_next_turn();
  void give_meanwhile(int64_t bytes);
  void exchange(Turn& turn);
  /// Reuses the memory of what will not be read any more.
  void reuse_memory();
  at::Tensor memory_for(int64_t bytes);
  void free_memory();
  const char*& block(const BlockTransfer& transfer) const;
  int64_t bytes_of(const BlockTransfer& transfer) const;
  int64_t bytes_of(const std::vector<BlockTransfer>& transfers) const;
  std::string first_failure(const std::string& mine, const char* label) const;

  ParallelState state_;
  int64_t exchange_bytes_;
  CopyChoice choice_;
  bool holds_any_ = false;                     ///< any rank, any copy
  std::string config_;                         ///< text
  std::vector<std::vector<int64_t>> holders_;  ///< of each file
  std::shared_ptr<std::vector<Blocks>> blocks_ = std::make_shared<std::vector<Blocks>>();
  std::map<std::pair<int64_t, int64_t>, int64_t> last_read_;  ///< of a missing block of a file
  std::vector<Turn> turns_;
  size_t next_turn_ = 0;
  int64_t reads_ = 0;             ///< so far
  int64_t read_since_ = 0;        ///< bytes, since the last turn
  std::vector<at::Tensor> free_;  ///< memory that no turn needs
  at::Tensor given_;              ///< what this rank gives to others in one exchange
  std::unique_ptr<CheckpointReader> checkpoint_;
};

}  // namespace lockstep
