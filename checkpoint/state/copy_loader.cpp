#include "lockstep/checkpoint/copy_loader.h"

#include <algorithm>
#include <cstring>
#include <set>
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
constexpr int64_t kMostBlocks = 64;  // that a rank gives or takes in one exchange
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

/// What the ranks say of the copy.
struct CopyLoader::Told {
  std::string config;
  int64_t came_from = kNone;
  std::vector<Manifest> parts;  ///< by rank; the first has where the run stood
};

CopyLoader::CopyLoader(const ParallelState& state, const StateCopies& copies, int64_t least)
    : state_(state) {
  std::vector<std::vector<HeldCopy>> of_ranks;
  const std::string mine = fmt::format("{}\n{}", least, format_held_copies(copies.held()));
  for (const std::string& text : all_gather_texts(state.world(), mine, "copies in memory")) {
    const size_t end = text.find('\n');
    if (of_ranks.empty()) least = std::stoll(text.substr(0, end));
    of_ranks.push_back(parse_held_copies(text.substr(end + 1)));
  }
  choice_ = choose_copy(of_ranks, least);
  holds_any_ = std::any_of(of_ranks.begin(), of_ranks.end(),
                           [](const std::vector<HeldCopy>& held) { return !held.empty(); });
  if (choice_.id) open(copies.find(*choice_.id));
}

CopyLoader::~CopyLoader() = default;

std::string CopyLoader::why_none() const {
  if (!holds_any_ && state_.world_size() > 1)  // a lone rank keeps none
    return "no rank that is left has a copy of the state";
  if (!choice_.lost) return "";
  return fmt::format(
      "the copy of iteration {} is not whole: no rank that is left has the part of rank {}",
      choice_.lost->iteration, choice_.lost->rank);
}

/// Of the parts that this rank tells of, each "rank bytes\n" and its manifest; before that of the
/// first, where the run came from and the configuration.
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

std::vector<BlockRun> CopyLoader::missing_blocks(
    const std::function<void(CheckpointReader&)>& use) {
  std::set<std::pair<int64_t, int64_t>> missing;
  checkpoint_->note_reads([&](int64_t file, int64_t offset, int64_t count) {
    const Blocks& blocks = (*blocks_)[static_cast<size_t>(file)];
    for (int64_t block = offset / kChecksumBlock; block * kChecksumBlock < offset + count; ++block)
      if (blocks.at(static_cast<size_t>(block)) == nullptr) missing.emplace(file, block);
  });
  use(*checkpoint_);
  checkpoint_->note_reads({});
  std::vector<BlockRun> runs;
  for (const auto& [file, block] : missing)
    if (!runs.empty() && runs.back().file == file && runs.back().last == block)
      ++runs.back().last;
    else
      runs.push_back({file, block, block + 1});
  return runs;
}

int64_t CopyLoader::bytes_of(const BlockTransfer& transfer) const {
  const ManifestFile& file = checkpoint_->manifest().files[static_cast<size_t>(transfer.file)];
  return std::min(kChecksumBlock, file.size - transfer.block * kChecksumBlock);
}

/// What goes to one rank, or comes from one, lies in the order of the list.
void CopyLoader::exchange(const std::vector<BlockTransfer>& turn) {
  std::vector<BlockTransfer> given, taken;
  for (const BlockTransfer& transfer : turn) {
    if (transfer.from == state_.rank()) given.push_back(transfer);
    if (transfer.to == state_.rank()) taken.push_back(transfer);
  }
  std::stable_sort(given.begin(), given.end(), [](auto& a, auto& b) { return a.to < b.to; });
  std::stable_sort(taken.begin(), taken.end(), [](auto& a, auto& b) { return a.from < b.from; });
  const auto ranks = static_cast<size_t>(state_.world_size());
  std::vector<int64_t> input_rows(ranks, 0), output_rows(ranks, 0);
  int64_t input_bytes = 0, output_bytes = 0;
  for (const BlockTransfer& transfer : given) {
    input_rows[static_cast<size_t>(transfer.to)] += bytes_of(transfer);
    input_bytes += bytes_of(transfer);
  }
  for (const BlockTransfer& transfer : taken) {
    output_rows[static_cast<size_t>(transfer.from)] += bytes_of(transfer);
    output_bytes += bytes_of(transfer);
  }
  if (!given_.defined() || given_.numel() < input_bytes)
    given_ = host_memory(input_bytes, c10::kCPU);
  const at::Tensor input = given_.narrow(0, 0, input_bytes);
  memory_.push_back(host_memory(output_bytes, c10::kCPU));
  auto* to = static_cast<char*>(input.data_ptr());
  for (const BlockTransfer& transfer : given) {
    const Blocks& blocks = (*blocks_)[static_cast<size_t>(transfer.file)];
    std::memcpy(to, blocks[static_cast<size_t>(transfer.block)],
                static_cast<size_t>(bytes_of(transfer)));
    to += bytes_of(transfer);
  }
  all_to_all(state_.world(), memory_.back(), input, output_rows, input_rows, "blocks in memory")
      .wait();
  const auto* from = static_cast<const char*>(memory_.back().const_data_ptr());
  for (const BlockTransfer& transfer : taken) {
    (*blocks_)[static_cast<size_t>(transfer.file)][static_cast<size_t>(transfer.block)] = from;
    from += bytes_of(transfer);
  }
}

void CopyLoader::fetch(const std::vector<BlockRun>& missing) {
  std::vector<std::vector<BlockRun>> needs;
  for (const std::string& text :
       all_gather_texts(state_.world(), format_block_runs(missing), "blocks that ranks lack"))
    needs.push_back(parse_block_runs(text));
  for (const auto& turn : plan_transfers(needs, holders_, kMostBlocks)) exchange(turn);
}

std::string CopyLoader::first_failure(const std::string& mine, const char* label) const {
  const auto all = all_gather_texts(state_.world(), mine, label);
  const auto found =
      std::find_if(all.begin(), all.end(), [](const std::string& text) { return !text.empty(); });
  return found == all.end() ? "" : fmt::format("rank {}: {}", found - all.begin(), *found);
}

void CopyLoader::free_memory() {
  for (Blocks& blocks : *blocks_) blocks.clear();
  memory_.clear();
  given_.reset();
}

std::string CopyLoader::read(const std::function<void(CheckpointReader&)>& use) {
  std::string failure;
  std::vector<BlockRun> missing;
  try {
    missing = missing_blocks(use);
  } catch (const FileError& error) {
    failure = error.what();
  }
  failure = first_failure(failure, "copies that are looked at");
  if (!failure.empty()) return failure;
  fetch(missing);
  try {
    use(*checkpoint_);
  } catch (const FileError& error) {
    failure = error.what();
  }
  return first_failure(failure, "copies that are read");
}

}  // namespace lockstep
