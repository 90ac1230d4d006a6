#include "lockstep/parallel_state/collective_ledger.h"

#include <algorithm>
#include <charconv>

#include "lockstep/core/check.h"
#include "lockstep/core/text_digest.h"

namespace lockstep {
namespace {

constexpr char kFieldEnd = '\x1f', kEntryEnd = '\n';

/// The end of the text counts too.
uint64_t mix(uint64_t hash, std::string_view text) {
  return digest_with(text_digest(text, hash), 0);
}

uint64_t mix(uint64_t hash, int64_t number) {
  return digest_with(hash, static_cast<uint64_t>(number));
}

/// Cuts the text up to `end` off the front of `text`.
std::string_view cut(std::string_view& text, char end) {
  const size_t length = std::min(text.find(end), text.size());
  const std::string_view part = text.substr(0, length);
  text.remove_prefix(std::min(length + 1, text.size()));
  return part;
}

bool read(std::string_view text, int64_t& number) {
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  return error == std::errc() && end == text.data() + text.size();
}

/// Entries have consecutive numbers.
const CollectiveEntry* find(const RankAccount& account, int64_t sequence) {
  if (account.entries.empty()) return nullptr;
  const int64_t index = sequence - account.entries.front().sequence;
  const bool kept = index >= 0 && index < static_cast<int64_t>(account.entries.size());
  return kept ? &account.entries[static_cast<size_t>(index)] : nullptr;
}

int64_t last_sequence(const RankAccount& account) {
  return account.entries.empty() ? 0 : account.entries.back().sequence;
}

std::string describe_absence(const RankAccount& account) {
  if (!account.answered) return fmt::format("rank {}: no answer", account.rank);
  std::string text = fmt::format("rank {}: has not come to it", account.rank);
  if (!account.entries.empty())
    text += fmt::format("; its last was operation {}: {}", last_sequence(account),
                        account.entries.back().to_string());
  if (!account.elsewhere.empty()) text += "; it " + account.elsewhere;
  return text;
}

/// All ranks at one operation.
std::string describe(const std::vector<RankAccount>& accounts, int64_t sequence) {
  std::vector<std::string> parts;
  for (const RankAccount& account : accounts) {
    const CollectiveEntry* const entry = find(account, sequence);
    parts.push_back(entry ? fmt::format("rank {}: {}", account.rank, entry->to_string())
                          : describe_absence(account));
  }
  return fmt::format("the ranks part at operation {} of the group: {}", sequence,
                     fmt::join(parts, "; "));
}

}  // namespace

bool CollectiveEntry::same_operation(const CollectiveEntry& other) const {
  return operation == other.operation && label == other.label && numel == other.numel &&
         dtype == other.dtype;
}

std::string CollectiveEntry::to_string() const {
  const std::string size = numel < 0 ? "" : fmt::format("{} x ", numel);
  return fmt::format("{} of {}, {}{} (step {})", operation, label, size, dtype, step);
}

uint64_t identity_of_call(std::string_view operation, std::string_view label, int64_t numel,
                          std::string_view dtype) {
  return mix(mix(mix(mix(kDigestStart, operation), label), numel), dtype);
}

uint64_t CollectiveLedger::add(int64_t step, std::string_view operation, std::string_view label,
                               int64_t numel, std::string_view dtype) {
  const uint64_t identity = identity_of_call(operation, label, numel, dtype);
  const std::lock_guard<std::mutex> lock(mutex_);
  state_ = {state_.sequence + 1, mix(state_.fingerprint, static_cast<int64_t>(identity))};
  if (ring_.size() < kKept) ring_.emplace_back();
  CollectiveEntry& entry = ring_[static_cast<size_t>(state_.sequence - 1) % kKept];
  entry.sequence = state_.sequence;
  entry.step = step;
  entry.operation.assign(operation);
  entry.label.assign(label);
  entry.numel = numel;
  entry.dtype.assign(dtype);
  return identity;
}

CollectiveLedger::State CollectiveLedger::state() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return state_;
}

std::vector<CollectiveEntry> CollectiveLedger::entries() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  std::vector<CollectiveEntry> result = ring_;
  std::sort(result.begin(), result.end(), [](auto& a, auto& b) { return a.sequence < b.sequence; });
  return result;
}

std::string CollectiveLedger::serialize() const {
  std::string text;
  for (const CollectiveEntry& entry : entries())
    text +=
        fmt::format("{1}{0}{2}{0}{3}{0}{4}{0}{5}{0}{6}{7}", kFieldEnd, entry.sequence, entry.step,
                    entry.numel, entry.dtype, entry.operation, entry.label, kEntryEnd);
  return text;
}

std::vector<CollectiveEntry> CollectiveLedger::parse(const std::string& text) {
  std::vector<CollectiveEntry> entries;
  std::string_view rest = text;
  while (!rest.empty()) {
    std::string_view line = cut(rest, kEntryEnd);
    CollectiveEntry entry;
    const bool numbers = read(cut(line, kFieldEnd), entry.sequence) &&
                         read(cut(line, kFieldEnd), entry.step) &&
                         read(cut(line, kFieldEnd), entry.numel);
    if (!numbers) continue;
    entry.dtype = cut(line, kFieldEnd);
    entry.operation = cut(line, kFieldEnd);
    entry.label = line;
    entries.push_back(std::move(entry));
  }
  return entries;
}

std::optional<std::string> first_difference(const std::vector<RankAccount>& accounts) {
  int64_t first = 1, last = 0;
  for (const RankAccount& account : accounts) {
    if (!account.entries.empty()) first = std::max(first, account.entries.front().sequence);
    last = std::max(last, last_sequence(account));
  }
  for (int64_t sequence = first; sequence <= last; ++sequence) {
    const CollectiveEntry* reference = nullptr;
    for (const RankAccount& account : accounts) {
      const CollectiveEntry* const entry = find(account, sequence);
      if (!entry || (reference && !reference->same_operation(*entry)))
        return describe(accounts, sequence);
      reference = entry;
    }
  }
  return std::nullopt;
}

}  // namespace lockstep
