#pragma once

// Internal.

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "lockstep/checkpoint/block_transfers.h"
#include "lockstep/checkpoint/checkpoint_reader.h"
#include "lockstep/checkpoint/state_copies.h"
#include "lockstep/parallel_state/parallel_state.h"

namespace lockstep {

/// The newest copy of the state that the ranks have in their memory together, as a checkpoint that
/// any layout can read.
class CopyLoader {
 public:
  /// Agrees on the copy. Collective over the world: some all_gather_texts(). Copies of iterations
  /// before `least` do not count; rank 0's word on that counts.
  CopyLoader(const ParallelState& state, const StateCopies& copies, int64_t least);
  ~CopyLoader();
  CopyLoader(const CopyLoader&) = delete;
  CopyLoader& operator=(const CopyLoader&) = delete;

  /// Empty where no copy is whole, or none that counts; then why that is so, unless all that are
  /// whole are too old.
  const std::optional<CopyId>& id() const { return choice_.id; }
  std::string why_none() const;

  /// Calls `use` with the checkpoint: first to note which bytes it reads (see
  /// CheckpointReader::note_reads()), and once the ranks have sent each other what they lack, to
  /// read them. Collective over the world. Returns what any rank has found wrong ("rank 2: ..."),
  /// empty if all have read what they need.
  std::string read(const std::function<void(CheckpointReader&)>& use);
  const CheckpointReader& checkpoint() const { return *checkpoint_; }

  /// Frees what other ranks have sent. Nothing can be read after that.
  void free_memory();

 private:
  class File;
  /// Where the blocks of a file are; nullptr: not here.
  using Blocks = std::vector<const char*>;
  struct Told;

  void open(const StateCopy* copy);
  std::string own_text(const StateCopy* copy) const;
  Told gather_texts(const StateCopy* copy) const;
  void add_file(const ManifestFile& file, const char* data, std::vector<int64_t> holders);
  std::vector<BlockRun> missing_blocks(const std::function<void(CheckpointReader&)>& use);
  void fetch(const std::vector<BlockRun>& missing);
  void exchange(const std::vector<BlockTransfer>& turn);
  int64_t bytes_of(const BlockTransfer& transfer) const;
  std::string first_failure(const std::string& mine, const char* label) const;

  ParallelState state_;
  CopyChoice choice_;
  bool holds_any_ = false;                     ///< any rank, any copy
  std::string config_;                         ///< text
  std::vector<std::vector<int64_t>> holders_;  ///< of each file
  std::shared_ptr<std::vector<Blocks>> blocks_ = std::make_shared<std::vector<Blocks>>();
  std::vector<at::Tensor> memory_;  ///< that other ranks have filled
  at::Tensor given_;                ///< what others get in one exchange
  std::unique_ptr<CheckpointReader> checkpoint_;
};

}  // namespace lockstep
