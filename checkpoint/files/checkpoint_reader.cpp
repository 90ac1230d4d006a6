#include "lockstep/checkpoint/checkpoint_reader.h"

#include <algorithm>
#include <optional>

#include "lockstep/checkpoint/checkpoint_folder.h"
#include "lockstep/checkpoint/checkpoint_source.h"
#include "lockstep/checkpoint/safetensors_header.h"
#include "lockstep/checkpoint/shard_file.h"
#include "lockstep/core/check.h"
#include "lockstep/core/config_io.h"
#include "lockstep/core/counted.h"
#include "lockstep/core/input_file.h"
#include "lockstep/core/integers.h"
#include "lockstep/datasets/crc32.h"

namespace lockstep {
namespace {

constexpr int64_t kLongestManifest = int64_t{1} << 30;
constexpr int64_t kLongestConfig = int64_t{64} << 20;
constexpr size_t kMostOpen = 64;  // each keeps a block; a process may often open 1,024 files

/// A piece of a tensor in a file.
struct Placed {
  const ManifestTensor* tensor;
  const ManifestPiece* piece;
  int64_t bytes;
};

std::vector<Placed> pieces_of(const Manifest& manifest, int64_t file) {
  std::vector<Placed> placed;
  for (const ManifestTensor& tensor : manifest.tensors)
    for (const ManifestPiece& piece : tensor.pieces)
      if (piece.file == file)
        placed.push_back(
            {&tensor, &piece, piece.part.range.numel() * safetensors_element_size(tensor.dtype)});
  std::sort(placed.begin(), placed.end(),
            [](const Placed& a, const Placed& b) { return a.piece->offset < b.piece->offset; });
  return placed;
}

/// The tensors that have bytes in begin ... end - 1.
std::vector<std::string> tensors_at(const std::vector<Placed>& placed, int64_t begin, int64_t end) {
  std::vector<std::string> found;
  for (const Placed& p : placed)
    if (p.piece->offset < end && p.piece->offset + p.bytes > begin)
      found.push_back(p.tensor->key());
  return found;
}

/// "'rank_00000.safetensors': tensor 'w': bytes 0 to 99 do not match ..."
std::string describe_damage(const std::string& path, const std::vector<std::string>& tensors,
                            int64_t begin, int64_t end) {
  const std::string others =
      tensors.size() < 2
          ? ""
          : fmt::format(" ({} in these bytes, too)",
                        counted(static_cast<int64_t>(tensors.size()) - 1, "other tensor"));
  return fmt::format("'{}': {}: bytes {} to {} do not match the checksum in the manifest{}", path,
                     tensors.empty() ? "no tensor" : fmt::format("tensor '{}'", tensors.front()),
                     begin, end - 1, others);
}

/// Checks the header of a shard against the manifest.
std::optional<CheckpointDamage> check_header(ShardReader& reader, const std::vector<Placed>& placed,
                                             std::string_view what) {
  const int64_t size = reader.file().size;
  std::string first(static_cast<size_t>(std::min<int64_t>(size, 8)), '\0');
  reader.read(0, static_cast<int64_t>(first.size()), first.data(), what);
  const int64_t length = parse_safetensors_length(first, size, reader.path());
  std::string json(static_cast<size_t>(length), '\0');
  reader.read(8, length, json.data(), what);
  const int64_t data = 8 + length;
  const auto header = parse_safetensors_header(json, size - data, reader.path());
  std::map<std::string, const SafetensorsEntry*> entries;
  for (const SafetensorsEntry& entry : header.entries) entries[entry.name] = &entry;
  for (const Placed& p : placed) {
    const std::string name = shard_entry_name(p.tensor->key(), p.piece->part);
    const auto found = entries.find(name);
    const bool same = found != entries.end() && found->second->dtype == p.tensor->dtype &&
                      found->second->begin + data == p.piece->offset &&
                      found->second->end + data == p.piece->offset + p.bytes;
    if (!same)
      return CheckpointDamage{reader.path(), p.tensor->key(), p.piece->offset,
                              fmt::format("'{}': tensor '{}' is not at byte {}, where the manifest "
                                          "says it is",
                                          reader.path(), name, p.piece->offset)};
  }
  return {};
}

}  // namespace

CheckpointReader::CheckpointReader(const std::string& folder) : path_(find_checkpoint(folder)) {
  for (bool good = false; !good;) {
    try {
      read_manifest();
      good = true;
    } catch (const FileError&) {
      const std::string newest = find_checkpoint(folder);
      if (newest == path_) throw;
      path_ = newest;
    }
  }
  index_manifest();
}

CheckpointReader::CheckpointReader(CheckpointSource source)
    : path_(source.name),
      source_(std::make_unique<CheckpointSource>(std::move(source))),
      manifest_(source_->manifest) {
  index_manifest();
}

void CheckpointReader::index_manifest() {
  for (const ManifestTensor& tensor : manifest_.tensors)
    tensors_[{tensor.name, tensor.state}] = &tensor;
  checked_.resize(manifest_.files.size());
}

CheckpointReader::~CheckpointReader() = default;

void CheckpointReader::read_manifest() {
  const std::string path = path_ + "/" + kManifestName;
  const std::string text = read_file(path, kLongestManifest);
  manifest_ = parse_manifest(text, path);
  manifest_checksum_ = crc32(text);
}

bool CheckpointReader::is_unchanged() const {
  if (source_) return true;
  try {
    return crc32(read_file(path_ + "/" + kManifestName, kLongestManifest)) == manifest_checksum_;
  } catch (const FileError&) {
    return is_checkpoint(path_);
  }
}

const ManifestTensor* CheckpointReader::find(const std::string& name,
                                             const std::string& state) const {
  const auto found = tensors_.find({name, state});
  return found == tensors_.end() ? nullptr : found->second;
}

ShardReader& CheckpointReader::shard(int64_t file, std::string_view what) {
  const auto found = std::find_if(open_.begin(), open_.end(),
                                  [file](const auto& shard) { return shard.first == file; });
  if (found != open_.end()) {
    open_.splice(open_.begin(), open_, found);
  } else {
    open_.emplace_front(file, open_shard(file, what));
    if (open_.size() > kMostOpen) {
      bytes_of_closed_ += open_.back().second->bytes_read();
      open_.pop_back();
    }
  }
  return *open_.front().second;
}

std::unique_ptr<ShardReader> CheckpointReader::open_shard(int64_t file, std::string_view what) {
  const auto index = static_cast<size_t>(file);
  const ManifestFile& expected = manifest_.files[index];
  if (source_) return std::make_unique<ShardReader>(source_->open(expected), expected);
  auto opened = std::make_unique<ShardReader>(path_, expected);
  if (checked_[index]) return opened;
  const auto placed = pieces_of(manifest_, file);
  const auto damage = placed.empty() ? std::nullopt : check_header(*opened, placed, what);
  require<FileError>(!damage, "{}", damage ? damage->message : "");
  checked_[index] = true;
  return opened;
}

void CheckpointReader::read(const ManifestTensor& tensor, const TensorPart& part, char* out) {
  const std::string what = "tensor '" + tensor.key() + "'";
  require<UsageError>(part.box.shape == tensor.shape, "{}: a part of [{}] of [{}]", what,
                      fmt::join(part.box.shape, ", "), fmt::join(tensor.shape, ", "));
  const int64_t element = safetensors_element_size(tensor.dtype);
  int64_t copied = 0;
  for (const ManifestPiece& piece : tensor.pieces)
    for_each_overlap(part, piece.part, [&](int64_t target, int64_t source, int64_t count) {
      const int64_t offset = piece.offset + (source - piece.part.range.first) * element;
      if (note_) note_(piece.file, offset, count * element);
      if (!dry_)
        shard(piece.file, what)
            .read(offset, count * element, out + (target - part.range.first) * element, what);
      copied += count;
    });
  require<FileError>(copied == part.range.numel(), "'{}': {}: {} of {} elements are there", path_,
                     what, copied, part.range.numel());
}

Config CheckpointReader::config() {
  const auto& files = manifest_.files;
  const auto found = std::find_if(files.begin(), files.end(), [](const ManifestFile& file) {
    return file.name == kConfigName;
  });
  require<FileError>(found != files.end(), "'{}': the manifest lists no {}", path_, kConfigName);
  ShardReader& reader = shard(found - files.begin(), kConfigName);
  require<FileError>(found->size <= kLongestConfig, "'{}': found {} bytes, allowed: up to {}",
                     reader.path(), found->size, kLongestConfig);
  std::string text(static_cast<size_t>(found->size), '\0');
  reader.read(0, found->size, text.data(), "the configuration");
  try {
    return parse_config(text, path_ + "/" + kConfigName);
  } catch (const ConfigError& error) {
    fail<FileError>("checkpoint: {}", error.what());
  }
}

int64_t CheckpointReader::bytes_read() const {
  int64_t bytes = bytes_of_closed_;
  for (const auto& [file, shard] : open_) bytes += shard->bytes_read();
  return bytes;
}

void with_newest_checkpoint(const std::string& folder,
                            const std::function<bool(CheckpointReader&)>& use) {
  for (bool done = false; !done;) {
    CheckpointReader checkpoint(folder);
    try {
      done = use(checkpoint) || checkpoint.is_unchanged();
    } catch (const FileError&) {
      if (checkpoint.is_unchanged()) throw;
    }
  }
}

std::vector<CheckpointDamage> verify_checkpoint(const std::string& folder) {
  return verify_checkpoint(CheckpointReader(folder));
}

std::vector<CheckpointDamage> verify_checkpoint(const CheckpointReader& checkpoint) {
  const Manifest& manifest = checkpoint.manifest();
  std::vector<CheckpointDamage> found;
  for (size_t i = 0; i < manifest.files.size(); ++i) {
    const ManifestFile& file = manifest.files[i];
    const std::string path = checkpoint.path() + "/" + file.name;
    const auto placed = pieces_of(manifest, static_cast<int64_t>(i));
    try {
      ShardReader reader(checkpoint.path(), file);
      if (const int64_t block = reader.find_damage(); block >= 0) {
        const int64_t begin = block * kChecksumBlock;
        const int64_t end = std::min(begin + kChecksumBlock, file.size);
        const std::vector<std::string> tensors = tensors_at(placed, begin, end);
        found.push_back({path, tensors.empty() ? "" : tensors.front(), begin,
                         describe_damage(path, tensors, begin, end)});
      } else if (!placed.empty()) {
        if (auto damage = check_header(reader, placed, "header"))
          found.push_back(std::move(*damage));
      }
    } catch (const FileError& error) {
      found.push_back({path, placed.empty() ? "" : placed.front().tensor->key(), 0, error.what()});
    }
  }
  return found;
}

}  // namespace lockstep
