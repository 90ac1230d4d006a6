#include "lockstep/checkpoint/state_copies.h"

#include <algorithm>
#include <cstring>
#include <string_view>

#include "lockstep/core/integers.h"
#include "lockstep/datasets/crc32.h"

namespace lockstep {
namespace {

/// Follows the checksums of the blocks.
struct MetricsNote {
  uint32_t is_there = 0;
  uint32_t checksum = 0;
};

int64_t blocks_of(const Manifest& content) {
  return ceil_div(CopiedPart::file_bytes(content), kChecksumBlock);
}

int64_t bytes_of_checksums(const Manifest& content) {
  return blocks_of(content) * static_cast<int64_t>(sizeof(uint32_t));
}

}  // namespace

int64_t CopiedPart::file_bytes(const Manifest& content) {
  return content.files.empty() ? 0 : content.files.front().size;
}

int64_t CopiedPart::all_bytes(const Manifest& content) {
  return file_bytes(content) + bytes_of_checksums(content) +
         static_cast<int64_t>(sizeof(MetricsNote));
}

void CopiedPart::seal(const std::optional<uint32_t>& metrics_checksum) const {
  const int64_t size = file_bytes(*content);
  const std::string_view file(data(), static_cast<size_t>(size));
  char* to = static_cast<char*>(bytes.data_ptr()) + size;
  for (int64_t begin = 0; begin < size; begin += kChecksumBlock, to += sizeof(uint32_t)) {
    const uint32_t checksum =
        crc32(file.substr(static_cast<size_t>(begin), static_cast<size_t>(kChecksumBlock)));
    std::memcpy(to, &checksum, sizeof checksum);
  }
  const MetricsNote note = {metrics_checksum.has_value(), metrics_checksum.value_or(0)};
  std::memcpy(to, &note, sizeof note);
}

Manifest CopiedPart::manifest() const {
  Manifest manifest = *content;
  const char* const checksums = data() + file_bytes(manifest);
  if (!manifest.files.empty()) {
    std::vector<uint32_t>& of_blocks = manifest.files.front().block_crc32;
    of_blocks.resize(static_cast<size_t>(blocks_of(manifest)));
    std::memcpy(of_blocks.data(), checksums, of_blocks.size() * sizeof(uint32_t));
  }
  MetricsNote note;
  std::memcpy(&note, checksums + bytes_of_checksums(manifest), sizeof note);
  if (note.is_there != 0) manifest.metrics_checksum = note.checksum;
  return manifest;
}

StateCopy& StateCopies::begin(const CopyId& id) {
  auto& copy = *std::min_element(copies_.begin(), copies_.end(), [](const auto& a, const auto& b) {
    return a.has_value() != b.has_value() ? !a : a && a->id < b->id;
  });
  if (!copy) copy.emplace();
  for (auto& [rank, part] : copy->parts) part.is_whole = false;
  copy->id = id;
  return *copy;
}

std::vector<HeldCopy> StateCopies::held() const {
  std::vector<HeldCopy> list;
  for (const auto& copy : copies_) {
    if (!copy) continue;
    HeldCopy held{copy->id, copy->whole.iteration, copy->whole.layout.world_size, {}};
    for (const auto& [rank, part] : copy->parts)
      if (part.is_whole) held.parts.push_back(rank);
    if (!held.parts.empty()) list.push_back(std::move(held));
  }
  std::sort(list.begin(), list.end(), [](const auto& a, const auto& b) { return a.id < b.id; });
  return list;
}

const StateCopy* StateCopies::find(const CopyId& id) const {
  for (const auto& copy : copies_)
    if (copy && copy->id == id) return &*copy;
  return nullptr;
}

void StateCopies::keep_only(const CopyId& id) {
  for (auto& copy : copies_)
    if (copy && copy->id != id) copy.reset();
}

void StateCopies::clear() { copies_ = {}; }

int64_t StateCopies::bytes() const {
  int64_t bytes = 0;
  for (const auto& copy : copies_)
    if (copy)
      for (const auto& [rank, part] : copy->parts)
        bytes += static_cast<int64_t>(part.bytes.nbytes());
  return bytes;
}

}  // namespace lockstep
