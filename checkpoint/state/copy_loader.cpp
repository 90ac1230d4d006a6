#include "lockstep/checkpoint/copy_loader.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <sstream>

#include <ATen/ATen.h>

#include "lockstep/checkpoint/checkpoint_source.h"
#include "lockstep/checkpoint/state_share.h"
#include "lockstep/core/check.h"
#include "lockstep/core/integers.h"
#include "lockstep/datasets/crc32.h"
#include "lockstep/parallel_state/collectives.h"

namespace lockstep {
namespace {

constexpr const char* kName = "the ranks' memory";
constexpr int64_t kNone = -1;

ManifestFile describe_text(const std::string& name, const std::string& text) {
  ManifestFile file{name, static_cast<int64_t>(text.size()), {}};
  const auto step = static_cast<size_t>(kChecksumBlock);
  for (size_t begin = 0; begin < text.size(); begin += step)
    file.block_crc32.push_back(crc32(std::string_view(text).substr(begin, step)));
  return file;
}

/// Takes `size` bytes.
std::string take(std::istringstream& from, size_t size) {
  std::string text(size, '\0');
  from.read(text.data(), static_cast<std::streamsize>(size));
  return text;
}

}  // namespace

class CopyLoader::File : public CheckpointFileBytes {
 public:
  File(ManifestFile file, size_t index, std::shared_ptr<const std::vector<Blocks>> blocks)
      : file_(std::move(file)),
        path_(fmt::format("{}/{}", kName, file_.name)),
        index_(index),
        blocks_(std::move(blocks)) {}

  const std::string& path() const override { return path_; }
  int64_t size() const override { return file_.size; }
  void read_at(int64_t offset, char* to, size_t count) const override {
    while (count > 0) {
      const auto block = static_cast<size_t>(offset / kChecksumBlock);
      const int64_t inside = offset % kChecksumBlock;
      const size_t part = std::min(count, static_cast<size_t>(kChecksumBlock - inside));
      const char* const data = (*blocks_)[index_].at(block);
      require<UsageError>(data != nullptr, "'{}': block {} is not here", path_, block);
      std::memcpy(to, data + inside, part);
      to += part;
      offset += static_cast<int64_t>(part);
      count -= part;
    }
  }

 private:
  ManifestFile file_;
  std::string path_;
  size_t index_;
  std::shared_ptr<const std::vector<Blocks>> blocks_;
};

/// The data that the ranks exchange about the copy.
struct CopyLoader::Told {
  std::string config;
  int64_t came_from = kNone;
  std::vector<Manifest> parts;  ///< by rank; the first says where the run stood
};

CopyLoader::CopyLoader(const ParallelState& state, const StateCopies& copies, int64_t least,
                       CopyId first, int64_t exchange_bytes)
    : state_(state), exchange_bytes_(exchange_bytes) {
  std::vector<std::vector<HeldCopy>> of_ranks;
  const std::string mine = fmt::format("{} {} {}\n{}", least, first.round, first.number,
                                       format_held_copies(copies.held()));
  for (const std::string& text : all_gather_texts(state.world(), mine, "copies in memory")) {
    const size_t end = text.find('\n');
    if (of_ranks.empty())
      std::istringstream(text.substr(0, end)) >> least >> first.round >> first.number;
    of_ranks.push_back(parse_held_copies(text.substr(end + 1)));
  }
  choice_ = choose_copy(of_ranks, least, first);
  holds_any_ = std::any_of(of_ranks.begin(), of_ranks.end(),
                           [](const std::vector<HeldCopy>& held) { return !held.empty(); });
  if (choice_.id) open(copies.find(*choice_.id));
}

CopyLoader::~CopyLoader() = default;

std::string CopyLoader::no_copy_reason() const {
  if (!holds_any_ && state_.world_size() > 1)  // a lone rank keeps none
    return "no surviving rank has a copy of the state";
  if (!choice_.lost) return "";
  return fmt::format(
      "the copy of iteration {} is incomplete: no surviving rank has the part of rank {}",
      choice_.lost->iteration, choice_.lost->rank);
}

/// For each part that this rank reports: "rank bytes\n" and the part's manifest. Before the first
/// part of all: where the run came from, and the configuration.
std::string CopyLoader::own_text(const StateCopy* copy) const {
  std::string text;
  for (size_t part = 0; part < choice_.holders.size(); ++part) {
    if (choice_.holders[part].front() != state_.rank()) continue;
    const Manifest content = copy->parts.at(static_cast<int64_t>(part)).manifest();
    Manifest manifest = copy->whole;
    manifest.metrics_checksum = content.metrics_checksum;
    manifest.files = content.files;
    manifest.tensors = content.tensors;
    if (part == 0)
      text += fmt::format("{} {}\n{}", copy->whole.spikes.came_from.value_or(kNone),
                          copy->config.size(), copy->config);
    const std::string of_part = format_manifest(manifest);
    text += fmt::format("{} {}\n{}", part, of_part.size(), of_part);
  }
  return text;
}

CopyLoader::Told CopyLoader::gather_texts(const StateCopy* copy) const {
  Told told;
  told.parts.resize(choice_.holders.size());
  const auto texts = all_gather_texts(state_.world(), own_text(copy), "parts in memory");
  for (size_t rank = 0; rank < texts.size(); ++rank) {
    std::istringstream text(texts[rank]);
    size_t size = 0, part = 0;
    if (static_cast<int64_t>(rank) == choice_.holders.front().front()) {
      text >> told.came_from >> size;
      text.get();
      told.config = take(text, size);
    }
    while (text >> part >> size && text.get() == '\n')
      told.parts.at(part) = parse_manifest_part(take(text, size), kName);
  }
  return told;
}

void CopyLoader::add_file(const ManifestFile& file, const char* data,
                          std::vector<int64_t> holders) {
  Blocks blocks(static_cast<size_t>(ceil_div(file.size, kChecksumBlock)), nullptr);
  for (size_t i = 0; data != nullptr && i < blocks.size(); ++i)
    blocks[i] = data + static_cast<int64_t>(i) * kChecksumBlock;
  blocks_->push_back(std::move(blocks));
  holders_.push_back(std::move(holders));
}

void CopyLoader::open(const StateCopy* copy) {
  Told told = gather_texts(copy);
  config_ = std::move(told.config);
  Manifest whole = told.parts.front();
  whole.tensors.clear();
  whole.files = {describe_text(kConfigName, config_)};
  add_file(whole.files.front(), config_.data(), {});
  for (size_t part = 0; part < told.parts.size(); ++part) {
    if (told.parts[part].files.empty()) continue;
    const auto& here = choice_.holders[part];
    const bool is_here = std::find(here.begin(), here.end(), state_.rank()) != here.end();
    add_file(told.parts[part].files.front(),
             is_here ? copy->parts.at(static_cast<int64_t>(part)).data() : nullptr, here);
  }
  const Manifest joined = join_manifests(whole, told.parts);
  CheckpointSource source{kName, parse_manifest(format_manifest(joined), kName), {}};
  if (told.came_from != kNone) source.manifest.spikes.came_from = told.came_from;
  source.open = [files = source.manifest.files, blocks = blocks_](const ManifestFile& file) {
    const auto found = std::find(files.begin(), files.end(), file);
    return std::make_unique<File>(file, static_cast<size_t>(found - files.begin()), blocks);
  };
  checkpoint_ = std::make_unique<CheckpointReader>(std::move(source));
}

/// The blocks that this rank lacks, in the order in which they are first read.
std::vector<BlockRun> CopyLoader::missing_blocks(
    const std::function<void(CheckpointReader&)>& use) {
  std::vector<BlockRun> runs;
  int64_t reads = 0;
  const auto note = [&](int64_t file, int64_t offset, int64_t count) {
    const Blocks& blocks = (*blocks_)[static_cast<size_t>(file)];
    for (int64_t b = offset / kChecksumBlock; b * kChecksumBlock < offset + count; ++b) {
      if (blocks.at(static_cast<size_t>(b)) != nullptr) continue;
      const bool is_new = last_read_.insert_or_assign({file, b}, reads).second;
      if (!is_new) continue;
      if (!runs.empty() && runs.back().file == file && runs.back().last == b)
        ++runs.back().last;
      else
        runs.push_back({file, b, b + 1});
    }
    ++reads;
  };
  checkpoint_->note_reads(note, /*dry=*/true);
  use(*checkpoint_);
  return runs;
}

const char*& CopyLoader::block(const BlockTransfer& transfer) const {
  return (*blocks_)[static_cast<size_t>(transfer.file)][static_cast<size_t>(transfer.block)];
}

int64_t CopyLoader::bytes_of(const BlockTransfer& transfer) const {
  const ManifestFile& file = checkpoint_->manifest().files[static_cast<size_t>(transfer.file)];
  return std::min(kChecksumBlock, file.size - transfer.block * kChecksumBlock);
}

int64_t CopyLoader::bytes_of(const std::vector<BlockTransfer>& transfers) const {
  int64_t bytes = 0;
  for (const BlockTransfer& transfer : transfers) bytes += bytes_of(transfer);
  return bytes;
}

CopyLoader::Turn CopyLoader::turn_of(const std::vector<BlockTransfer>& transfers) const {
  Turn turn;
  for (const BlockTransfer& transfer : transfers) {
    if (transfer.from == state_.rank()) turn.given.push_back(transfer);
    if (transfer.to != state_.rank()) continue;
    turn.taken.push_back(transfer);
    turn.last_read = std::max(turn.last_read, last_read_.at({transfer.file, transfer.block}));
  }
  std::stable_sort(turn.given.begin(), turn.given.end(),
                   [](auto& a, auto& b) { return a.to < b.to; });
  std::stable_sort(turn.taken.begin(), turn.taken.end(),
                   [](auto& a, auto& b) { return a.from < b.from; });
  return turn;
}

void CopyLoader::plan_turns(const std::vector<BlockRun>& missing) {
  std::vector<std::vector<BlockRun>> needs;
  for (const std::string& text :
       all_gather_texts(state_.world(), format_block_runs(missing), "blocks that ranks lack"))
    needs.push_back(parse_block_runs(text));
  for (const auto& transfers : plan_transfers(needs, holders_, exchange_bytes_ / kChecksumBlock))
    turns_.push_back(turn_of(transfers));
}

at::Tensor CopyLoader::memory_for(int64_t bytes) {
  const auto found = std::find_if(free_.begin(), free_.end(),
                                  [&](const at::Tensor& one) { return one.numel() >= bytes; });
  if (found == free_.end()) return host_memory(bytes, c10::kCPU);
  at::Tensor memory = std::move(*found);
  free_.erase(found);
  return memory;
}

/// Blocks to one rank, and blocks from one rank, lie in the order of the list.
void CopyLoader::exchange(Turn& turn) {
  const auto ranks = static_cast<size_t>(state_.world_size());
  std::vector<int64_t> input_rows(ranks, 0), output_rows(ranks, 0);
  for (const BlockTransfer& transfer : turn.given)
    input_rows[static_cast<size_t>(transfer.to)] += bytes_of(transfer);
  for (const BlockTransfer& transfer : turn.taken)
    output_rows[static_cast<size_t>(transfer.from)] += bytes_of(transfer);
  const int64_t input_bytes = bytes_of(turn.given), output_bytes = bytes_of(turn.taken);
  if (!given_.defined() || given_.numel() < input_bytes)
    given_ = host_memory(input_bytes, c10::kCPU);
  const at::Tensor input = given_.narrow(0, 0, input_bytes);
  auto* to = static_cast<char*>(input.data_ptr());
  for (const BlockTransfer& transfer : turn.given) {
    std::memcpy(to, block(transfer), static_cast<size_t>(bytes_of(transfer)));
    to += bytes_of(transfer);
  }
  turn.memory = memory_for(output_bytes);
  all_to_all(state_.world(), turn.memory.narrow(0, 0, output_bytes), input, output_rows, input_rows,
             "blocks in memory")
      .wait();
  const auto* from = static_cast<const char*>(turn.memory.const_data_ptr());
  for (const BlockTransfer& transfer : turn.taken) {
    block(transfer) = from;
    from += bytes_of(transfer);
  }
}

void CopyLoader::reuse_memory() {
  for (size_t i = 0; i < next_turn_; ++i) {
    Turn& turn = turns_[i];
    if (!turn.memory.defined() || turn.last_read >= reads_) continue;
    for (const BlockTransfer& transfer : turn.taken) block(transfer) = nullptr;
    free_.push_back(std::exchange(turn.memory, {}));
  }
}

void CopyLoader::make_next_turn() {
  reuse_memory();
  read_since_ = 0;
  exchange(turns_[next_turn_++]);
}

/// A rank that gives blocks and reads its own alternates between the two, so that no rank waits for
/// another.
void CopyLoader::give_meanwhile(int64_t bytes) {
  read_since_ += bytes;
  if (next_turn_ == turns_.size() || !turns_[next_turn_].taken.empty()) return;
  if (next_turn_ > 0 && read_since_ < exchange_bytes_) return;
  make_next_turn();
}

void CopyLoader::await(int64_t file, int64_t offset, int64_t count) {
  give_meanwhile(count);
  const Blocks& blocks = (*blocks_)[static_cast<size_t>(file)];
  const int64_t end = ceil_div(offset + count, kChecksumBlock);
  for (int64_t b = offset / kChecksumBlock; b < end; ++b)
    while (blocks.at(static_cast<size_t>(b)) == nullptr && next_turn_ < turns_.size())
      make_next_turn();
  ++reads_;
}

std::string CopyLoader::first_failure(const std::string& mine, const char* label) const {
  const auto all = all_gather_texts(state_.world(), mine, label);
  const auto found =
      std::find_if(all.begin(), all.end(), [](const std::string& text) { return !text.empty(); });
  return found == all.end() ? "" : fmt::format("rank {}: {}", found - all.begin(), *found);
}

void CopyLoader::free_memory() {
  turns_.clear();
  free_.clear();
  given_.reset();
  for (Blocks& blocks : *blocks_) blocks.clear();
}

std::string CopyLoader::read(const std::function<void(CheckpointReader&)>& use) {
  std::string failure;
  std::vector<BlockRun> missing;
  try {
    missing = missing_blocks(use);
  } catch (const FileError& error) {
    failure = error.what();
  }
  checkpoint_->note_reads({}, /*dry=*/false);
  failure = first_failure(failure, "copies that are looked at");
  if (!failure.empty()) return failure;
  plan_turns(missing);
  checkpoint_->note_reads(
      [this](int64_t file, int64_t offset, int64_t count) { await(file, offset, count); },
      /*dry=*/false);
  try {
    use(*checkpoint_);
  } catch (const FileError& error) {
    failure = error.what();
  }
  checkpoint_->note_reads({}, /*dry=*/false);
  reads_ = std::numeric_limits<int64_t>::max();
  while (next_turn_ < turns_.size()) make_next_turn();  // the others wait for them
  free_memory();
  return first_failure(failure, "copies that are read");
}

}  // namespace lockstep
