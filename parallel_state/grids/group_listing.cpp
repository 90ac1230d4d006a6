#include "lockstep/parallel_state/group_listing.h"

#include <charconv>
#include <ostream>

#include "lockstep/core/check.h"
#include "lockstep/parallel_state/parallel_axes.h"

namespace lockstep {
namespace {

/// Collects text and writes it in large pieces.
class Writer {
 public:
  explicit Writer(std::ostream& out) : out_(out) { buffer_.reserve(kCapacity); }
  ~Writer() { out_.write(buffer_.data(), static_cast<std::streamsize>(buffer_.size())); }
  Writer(const Writer&) = delete;
  Writer& operator=(const Writer&) = delete;

  Writer& operator<<(std::string_view text) {
    if (buffer_.size() + text.size() > kCapacity) {
      out_.write(buffer_.data(), static_cast<std::streamsize>(buffer_.size()));
      buffer_.clear();
    }
    buffer_ += text;
    return *this;
  }
  Writer& operator<<(int64_t number) {
    char digits[20];
    const auto end = std::to_chars(digits, digits + sizeof digits, number).ptr;
    return *this << std::string_view(digits, static_cast<size_t>(end - digits));
  }

 private:
  static constexpr size_t kCapacity = 1 << 16;
  std::ostream& out_;
  std::string buffer_;
};

struct Entry {
  std::string name;
  RankGroups groups;
};

std::vector<Entry> entries(const RankGrids& grids) {
  std::vector<Entry> result;
  for (const GroupKind kind : all_group_kinds())
    result.push_back({to_string(kind), grids.groups(kind)});
  for (size_t level = 0; level < grids.sizes().hierarchical_context.size(); ++level)
    result.push_back({"cp-level-" + std::to_string(level), grids.context_level(level)});
  return result;
}

struct Size {
  const char* name;
  int64_t size;
};

std::vector<Size> axis_sizes(const RankGrids& grids) {
  std::vector<Size> sizes;
  for (const GroupRow& row : group_table())
    if (const auto axis = only_axis(row)) sizes.push_back({to_string(*axis), grids.size(row.kind)});
  return sizes;
}

void check(const RankGrids& grids, const GroupListing& listing) {
  require<ConfigError>(!listing.rank || !listing.summary,
                       "rank ({}) and summary: only one of the two can be listed",
                       listing.rank.value_or(0));
  const int64_t world = grids.sizes().world_size;
  require<ConfigError>(!listing.rank || (*listing.rank >= 0 && *listing.rank < world),
                       "rank: found {}, allowed: 0 to {}, because world-size is {}",
                       listing.rank.value_or(0), world - 1, world);
}

void write_ranks(Writer& out, const RankGroups& groups, int64_t index, std::string_view between) {
  std::string_view before;
  groups.visit(index, [&](int64_t rank) {
    out << before << rank;
    before = between;
  });
}

void write_json(Writer& out, const RankGroups& groups, const GroupListing& listing) {
  if (listing.summary) {
    out << "{\"count\":" << groups.count() << ",\"size\":" << groups.size() << "}";
    return;
  }
  out << "[";
  if (listing.rank) {
    if (const auto index = groups.index_of(*listing.rank)) write_ranks(out, groups, *index, ",");
  } else {
    for (int64_t index = 0; index < groups.count(); ++index) {
      out << (index == 0 ? "[" : ",[");
      write_ranks(out, groups, index, ",");
      out << "]";
    }
  }
  out << "]";
}

void write_text(Writer& out, const RankGroups& groups, const GroupListing& listing) {
  if (listing.summary) {
    out << groups.count() << " x " << groups.size();
  } else if (listing.rank) {
    const auto index = groups.index_of(*listing.rank);
    index ? write_ranks(out, groups, *index, " ") : void(out << "-");
  } else {
    if (groups.count() == 0) out << "-";
    for (int64_t index = 0; index < groups.count(); ++index) {
      if (index > 0) out << " | ";
      write_ranks(out, groups, index, " ");
    }
  }
}

}  // namespace

void write_groups_json(std::ostream& stream, const RankGrids& grids, const GroupListing& listing) {
  check(grids, listing);
  Writer out(stream);
  out << "{\"world_size\":" << grids.sizes().world_size << ",\"order\":\"" << grids.sizes().order
      << "\",\n\"sizes\":{";
  std::string_view before = "\"";
  for (const auto& [name, size] : axis_sizes(grids)) {
    out << before << name << "\":" << size;
    before = ",\"";
  }
  out << "},\n\"groups\":{";
  before = "\n\"";
  for (const Entry& entry : entries(grids)) {
    out << before << entry.name << "\":";
    write_json(out, entry.groups, listing);
    before = ",\n\"";
  }
  out << "}}\n";
}

void write_groups_text(std::ostream& stream, const RankGrids& grids, const GroupListing& listing) {
  check(grids, listing);
  Writer out(stream);
  out << "world size " << grids.sizes().world_size << ", order " << grids.sizes().order << ":";
  for (const auto& [name, size] : axis_sizes(grids)) out << " " << name << " " << size;
  out << "\n";
  if (listing.rank) out << "groups of rank " << *listing.rank << "\n";
  if (listing.summary) out << "groups x ranks in each\n";
  for (const Entry& entry : entries(grids)) {
    out << entry.name << std::string(20 - std::min<size_t>(entry.name.size(), 19), ' ');
    write_text(out, entry.groups, listing);
    out << "\n";
  }
}

}  // namespace lockstep
