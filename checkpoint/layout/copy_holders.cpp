#include "lockstep/checkpoint/copy_holders.h"

#include <algorithm>
#include <map>
#include <numeric>
#include <sstream>
#include <utility>

#include "lockstep/core/check.h"

namespace lockstep {
namespace {

/// The ranks of each host, the hosts in the order of their first ranks.
std::vector<std::vector<int64_t>> ranks_by_host(const std::vector<std::string>& hosts) {
  std::map<std::string, size_t> places;
  std::vector<std::vector<int64_t>> ranks;
  for (size_t rank = 0; rank < hosts.size(); ++rank) {
    const auto [place, is_new] = places.emplace(hosts[rank], ranks.size());
    if (is_new) ranks.emplace_back();
    ranks[place->second].push_back(static_cast<int64_t>(rank));
  }
  return ranks;
}

/// All ranks except the one at `index` of host `host`, in the order in which they keep its copies.
std::vector<int64_t> candidates(const std::vector<std::vector<int64_t>>& ranks, size_t host,
                                size_t index) {
  std::vector<int64_t> list;
  const auto add = [&](const std::vector<int64_t>& there, size_t turn) {
    if (turn < there.size()) list.push_back(there[(index + turn) % there.size()]);
  };
  size_t largest = 0;
  for (const auto& there : ranks) largest = std::max(largest, there.size());
  for (size_t turn = 0; turn < largest; ++turn)
    for (size_t next = 1; next < ranks.size(); ++next)
      add(ranks[(host + next) % ranks.size()], turn);
  for (size_t turn = 1; turn < ranks[host].size(); ++turn) add(ranks[host], turn);
  return list;
}

/// A copy, and the ranks that have each part of it.
struct Gathered {
  int64_t iteration = 0;
  std::vector<std::vector<int64_t>> holders;
};

std::map<CopyId, Gathered> gather(const std::vector<std::vector<HeldCopy>>& of_ranks, int64_t least,
                                  const CopyId& first) {
  std::map<CopyId, Gathered> copies;
  for (size_t rank = 0; rank < of_ranks.size(); ++rank)
    for (const HeldCopy& held : of_ranks[rank]) {
      if (held.iteration < least || held.id < first) continue;
      Gathered& copy = copies[held.id];
      copy.iteration = held.iteration;
      copy.holders.resize(static_cast<size_t>(held.world_size));
      for (const int64_t part : held.parts)
        copy.holders.at(static_cast<size_t>(part)).push_back(static_cast<int64_t>(rank));
    }
  return copies;
}

}  // namespace

std::vector<std::vector<int64_t>> copy_holders(const std::vector<std::string>& hosts,
                                               int64_t replicas) {
  const auto ranks = ranks_by_host(hosts);
  std::vector<std::vector<int64_t>> holders(hosts.size());
  for (size_t host = 0; host < ranks.size(); ++host)
    for (size_t index = 0; index < ranks[host].size(); ++index) {
      std::vector<int64_t> list = candidates(ranks, host, index);
      list.resize(std::min(list.size(), static_cast<size_t>(replicas)));
      holders[static_cast<size_t>(ranks[host][index])] = std::move(list);
    }
  return holders;
}

std::string format_held_copies(const std::vector<HeldCopy>& copies) {
  std::string text;
  for (const HeldCopy& copy : copies)
    text += fmt::format("{} {} {} {} {}\n", copy.id.round, copy.id.number, copy.iteration,
                        copy.world_size, fmt::join(copy.parts, " "));
  return text;
}

std::vector<HeldCopy> parse_held_copies(const std::string& text) {
  std::vector<HeldCopy> copies;
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);) {
    std::istringstream words(line);
    HeldCopy copy;
    bool good = static_cast<bool>(words >> copy.id.round >> copy.id.number >> copy.iteration >>
                                  copy.world_size);
    for (int64_t part = 0; good && words >> part;) {
      good = part >= 0 && part < copy.world_size;
      copy.parts.push_back(part);
    }
    require<FileError>(good && words.eof(),
                       "a rank's list of copies in memory: found '{}', allowed: round, number, "
                       "iteration, ranks, and parts below the number of ranks",
                       line);
    copies.push_back(std::move(copy));
  }
  return copies;
}

CopyChoice choose_copy(const std::vector<std::vector<HeldCopy>>& of_ranks, int64_t least,
                       const CopyId& first) {
  const std::map<CopyId, Gathered> copies = gather(of_ranks, least, first);
  CopyChoice choice;
  for (const auto& [id, copy] : copies) {
    const auto missing = std::find_if(copy.holders.begin(), copy.holders.end(),
                                      [](const auto& ranks) { return ranks.empty(); });
    if (missing == copy.holders.end())
      choice = {id, copy.iteration, copy.holders, {}};
    else if (!choice.id && !choice.lost)
      choice.lost = LostPart{copy.iteration, missing - copy.holders.begin()};
  }
  return choice;
}

std::vector<size_t> ranks_that_go_on(const std::vector<std::vector<HeldCopy>>& of_ranks,
                                     size_t count) {
  const std::optional<CopyId> newest = choose_copy(of_ranks, 0).id;
  std::vector<std::vector<HeldCopy>> left = of_ranks;
  std::vector<size_t> ranks(of_ranks.size());
  std::iota(ranks.begin(), ranks.end(), 0);
  for (size_t i = ranks.size(); i-- > 0 && ranks.size() > count;) {
    const std::vector<HeldCopy> held = std::exchange(left[i], {});
    if (choose_copy(left, 0).id == newest)
      ranks.erase(ranks.begin() + static_cast<std::ptrdiff_t>(i));
    else
      left[i] = held;
  }
  if (ranks.size() > count) {
    ranks.resize(count);
    std::iota(ranks.begin(), ranks.end(), 0);
  }
  return ranks;
}

}  // namespace lockstep
