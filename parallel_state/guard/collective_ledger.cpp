#include "lockstep/parallel_state/collective_ledger.h"

#include <algorithm>
#include <charconv>
#include <iterator>

#include "lockstep/core/check.h"
#include "lockstep/core/text_digest.h"

namespace lockstep {
namespace {

constexpr char kFieldEnd = '\x1f', kEntryEnd = '\n';

/// The end of the text is mixed in too.
uint64_t mix(uint64_t hash, std::string_view text) {
  return digest_with(text_digest(text, hash), 0);
}

uint64_t mix(uint64_t hash, int64_t number) {
  return digest_with(hash, static_cast<uint64_t>(number));
}

using OperationKind = CollectiveOperation::Kind;

const char* name_of(OperationKind kind) {
  switch (kind) {
    case OperationKind::all_reduce:
      return "all_reduce";
    case OperationKind::reduce_scatter:
      return "reduce_scatter";
    case OperationKind::all_gather:
      return "all_gather";
    case OperationKind::all_to_all:
      return "all_to_all";
    case OperationKind::broadcast:
      return "broadcast";
    case OperationKind::send:
      return "send";
    case OperationKind::receive:
      return "receive";
    case OperationKind::exchange:
      return "exchange";
    case OperationKind::comparison:
      return "comparison";
    case OperationKind::scatter_to_group:
      return "scatter_to_group";
    case OperationKind::gather_from_group:
      return "gather_from_group";
    case OperationKind::reduce_scatter_to_group:
      return "reduce_scatter_to_group";
    case OperationKind::all_to_all_rows:
      return "all_to_all_rows";
    case OperationKind::all_to_all_dims:
      return "all_to_all_dims";
  }
  fail<UsageError>("unknown operation {}", static_cast<int>(kind));
}

template <class Take>
void take_number(int64_t number, Take take) {
  char digits[24];
  take(std::string_view(digits, std::to_chars(digits, std::end(digits), number).ptr));
}

/// Calls take() with each part of the text of `operation`, in order. A factor of 1 is left out.
template <class Take>
void for_each_part(const CollectiveOperation& operation, Take take) {
  take(std::string_view(name_of(operation.kind)));
  if (operation.reduction) {
    take(std::string_view(" ("));
    take(std::string_view(to_string(*operation.reduction)));
    if (operation.numerator != operation.denominator) {
      take(std::string_view(", factor "));
      take_number(operation.numerator, take);
      take(std::string_view("/"));
      take_number(operation.denominator, take);
    }
    take(std::string_view(")"));
  }
  const bool exchanges = operation.kind == OperationKind::exchange;
  const bool sends = exchanges || operation.kind == OperationKind::send;
  if (!sends && operation.kind != OperationKind::broadcast &&
      operation.kind != OperationKind::receive)
    return;
  take(std::string_view(sends ? " (to " : " (from "));
  take_number(operation.position, take);
  if (exchanges) {
    take(std::string_view(", from "));
    take_number(operation.source, take);
  }
  take(std::string_view(")"));
}

std::string whole_text(const CollectiveOperation& operation) {
  std::string text;
  for_each_part(operation, [&](std::string_view part) { text += part; });
  return text;
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
  if (!account.answered) return "no answer";
  std::string text = "has not reached it";
  if (!account.entries.empty())
    text += fmt::format("; its last was operation {}: {}", last_sequence(account),
                        account.entries.back().to_string());
  if (!account.elsewhere.empty()) text += "; it " + account.elsewhere;
  return text;
}

/// "rank 3", "ranks 3, 5", "64 ranks (3, 5, ..., 127)"
std::string name_ranks(const std::vector<int64_t>& ranks) {
  constexpr size_t kMostListed = 8;
  if (ranks.size() == 1) return fmt::format("rank {}", ranks.front());
  if (ranks.size() <= kMostListed) return fmt::format("ranks {}", fmt::join(ranks, ", "));
  return fmt::format("{} ranks ({}, {}, ..., {})", ranks.size(), ranks[0], ranks[1], ranks.back());
}

/// Describes all ranks at one operation; in large groups those together that do the same.
std::string describe(const std::vector<RankAccount>& accounts, int64_t sequence) {
  constexpr size_t kMostApart = 64, kMostDescribed = 16;
  std::vector<std::pair<std::string, std::vector<int64_t>>> parts;  // in the order of the ranks
  for (const RankAccount& account : accounts) {
    const CollectiveEntry* const entry = find(account, sequence);
    std::string text = entry ? entry->to_string() : describe_absence(account);
    auto same = parts.end();
    if (accounts.size() > kMostApart)
      same =
          std::find_if(parts.begin(), parts.end(), [&](auto& part) { return part.first == text; });
    if (same == parts.end()) same = parts.insert(parts.end(), {std::move(text), {}});
    same->second.push_back(account.rank);
  }
  std::vector<std::string> texts;
  const size_t most = accounts.size() > kMostApart ? kMostDescribed : kMostApart;
  for (const auto& [text, ranks] : parts)
    if (texts.size() < most) texts.push_back(name_ranks(ranks) + ": " + text);
  if (parts.size() > texts.size())
    texts.push_back(fmt::format("{} further groups of ranks", parts.size() - texts.size()));
  return fmt::format("the ranks diverge at operation {} of the group: {}", sequence,
                     fmt::join(texts, "; "));
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

std::string to_string(const CollectiveOperation& operation) {
  CollectiveOperation unscaled = operation;
  unscaled.numerator = unscaled.denominator = 1;
  return whole_text(unscaled);
}

uint64_t identity_of_call(const CollectiveOperation& operation, std::string_view label,
                          int64_t numel, std::string_view dtype) {
  uint64_t hash = kDigestStart;
  for_each_part(operation, [&](std::string_view part) { hash = text_digest(part, hash); });
  return mix(mix(mix(digest_with(hash, 0), label), numel), dtype);
}

uint64_t identity_of_call(std::string_view operation, std::string_view label, int64_t numel,
                          std::string_view dtype) {
  return mix(mix(mix(mix(kDigestStart, operation), label), numel), dtype);
}

CollectiveLedger::Added CollectiveLedger::add(int64_t step, const CollectiveOperation& operation,
                                              std::string_view label, int64_t numel,
                                              std::string_view dtype) {
  const uint64_t identity = identity_of_call(operation, label, numel, dtype);
  const std::lock_guard<std::mutex> lock(mutex_);
  SharedLabel shared = labels_.share("", label);
  state_ = {state_.sequence + 1, mix(state_.fingerprint, static_cast<int64_t>(identity))};
  if (ring_.size() < kKept) ring_.emplace_back();
  Kept& kept = ring_[static_cast<size_t>(state_.sequence - 1) % kKept];
  kept.sequence = state_.sequence;
  kept.step = step;
  kept.operation = operation;
  kept.label = shared;
  kept.numel = numel;
  kept.dtype.assign(dtype);
  return {identity, std::move(shared)};
}

SharedLabel CollectiveLedger::share_label(std::string_view prefix, std::string_view label) {
  const std::lock_guard<std::mutex> lock(mutex_);
  return labels_.share(prefix, label);
}

CollectiveLedger::State CollectiveLedger::state() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return state_;
}

std::vector<CollectiveEntry> CollectiveLedger::entries() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  std::vector<CollectiveEntry> result;
  for (const Kept& kept : ring_)
    result.push_back({kept.sequence, kept.step, whole_text(kept.operation), *kept.label, kept.numel,
                      kept.dtype});
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
