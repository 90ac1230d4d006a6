#include "lockstep/training/trace_merge.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <limits>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>

#include "lockstep/core/check.h"
#include "lockstep/core/input_file.h"
#include "lockstep/datasets/unfinished_file.h"
#include "lockstep/training/trace_clocks.h"
#include "lockstep/training/trace_file.h"

namespace lockstep {
namespace {

using Json = nlohmann::json;

constexpr size_t kWriteAtOnce = size_t{1} << 20;
constexpr int64_t kFirstDevice = 1'000'000'000, kProcessesOfRank = 1000;

/// One rank's trace, and what the first reading found.
struct RankTrace {
  std::string path;
  TraceHeader header = {};
  TraceClock clock = {};
  double begin = std::numeric_limits<double>::infinity();  ///< microseconds from its base
  double shift = 0;                                        ///< to be added to its times
};

bool is_trace_name(std::string_view name) {
  constexpr std::string_view kBegin = "rank_", kEnd = ".json";
  if (!name.starts_with(kBegin) || !name.ends_with(kEnd)) return false;
  name = name.substr(kBegin.size(), name.size() - kBegin.size() - kEnd.size());
  return !name.empty() &&
         std::all_of(name.begin(), name.end(), [](char c) { return c >= '0' && c <= '9'; });
}

bool is_number(const Json& event, const char* key) {
  const auto found = event.find(key);
  return found != event.end() && found->is_number();
}

std::string text_of(const Json& event, const char* key) {
  const auto found = event.find(key);
  return found != event.end() && found->is_string() ? found->get<std::string>() : "";
}

/// Ends of collectives: on a device if the trace has them there, otherwise on the host.
class EndsOfCollectives {
 public:
  void add(const Json& event) {
    const std::string name = text_of(event, "name");
    if (text_of(event, "ph") != "X" || !is_number(event, "dur") || !ends_everywhere_at_once(name))
      return;
    const double end = event.at("ts").get<double>() + event.at("dur").get<double>();
    (text_of(event, "cat") == "gpu_user_annotation" ? on_device_ : on_host_)[name].push_back(end);
  }

  std::map<std::string, std::vector<double>> take() {
    auto& ends = on_device_.empty() ? on_host_ : on_device_;
    for (auto& [name, values] : ends) std::sort(values.begin(), values.end());
    return std::move(ends);
  }

 private:
  std::map<std::string, std::vector<double>> on_host_, on_device_;
};

RankTrace look_through(const std::string& path) {
  RankTrace trace{.path = path};
  EndsOfCollectives ends;
  trace.header = read_trace(path, [&](Json& event) {
    if (!is_number(event, "ts") || !is_number(event, "pid") || text_of(event, "ph") == "M") return;
    trace.begin = std::min(trace.begin, event.at("ts").get<double>());
    ends.add(event);
  });
  trace.clock = {trace.header.host, ends.take()};
  return trace;
}

std::vector<RankTrace> look_through_all(const std::string& folder) {
  std::map<int64_t, RankTrace> traces;
  for (const std::string& name : names_in_folder(folder)) {
    if (!is_trace_name(name)) continue;
    RankTrace trace = look_through(folder + "/" + name);
    const auto [at, added] = traces.try_emplace(trace.header.rank, trace);
    require<FileError>(added, "'{}' and '{}' are both of rank {}", at->second.path, trace.path,
                       trace.header.rank);
  }
  require<FileError>(!traces.empty(), "'{}': found no rank_0.json, rank_1.json, ...", folder);
  std::vector<RankTrace> in_order;
  const TraceHeader& first = traces.begin()->second.header;
  for (const auto& [rank, trace] : traces)
    require<FileError>(
        trace.header.world_size == first.world_size,
        "'{}': found a trace of {} ranks, allowed: of {}, as that of rank {}; remove "
        "the traces of earlier runs",
        trace.path, trace.header.world_size, first.world_size, first.rank);
  for (auto& [rank, trace] : traces) in_order.push_back(std::move(trace));
  return in_order;
}

/// Puts all times on the clock of the first rank, from the first event on.
void set_shifts(std::vector<RankTrace>& traces, TraceMerge& merge) {
  const int64_t base = traces.front().header.base_ns;
  std::vector<TraceClock> clocks;
  for (RankTrace& trace : traces) {
    trace.shift = static_cast<double>(trace.header.base_ns - base) / 1000;
    for (auto& [name, ends] : trace.clock.ends)
      for (double& end : ends) end += trace.shift;
    clocks.push_back(std::move(trace.clock));
  }
  const auto offsets = clock_offsets(clocks);
  double first = std::numeric_limits<double>::infinity();
  for (size_t i = 0; i < traces.size(); ++i) {
    if (!offsets[i])
      merge.notes.push_back(fmt::format(
          "rank {}: its clock could not be compared with that of rank {}: found no collective that "
          "both hosts share",
          traces[i].header.rank, traces.front().header.rank));
    traces[i].shift -= offsets[i].value_or(0);
    first = std::min(first, traces[i].begin + traces[i].shift);
  }
  for (RankTrace& trace : traces) trace.shift -= std::isfinite(first) ? first : 0;
}

void note_missing(const std::vector<RankTrace>& traces, TraceMerge& merge) {
  std::set<int64_t> there;
  for (const RankTrace& trace : traces) there.insert(trace.header.rank);
  const int64_t world = traces.front().header.world_size;
  std::vector<int64_t> missing;
  constexpr size_t kMaxNamed = 16;
  for (int64_t rank = 0; rank < world && missing.size() < kMaxNamed; ++rank)
    if (!there.contains(rank)) missing.push_back(rank);
  if (!missing.empty())
    merge.notes.push_back(fmt::format("found traces of {} of {} ranks; missing: {}{}",
                                      traces.size(), world, fmt::join(missing, ", "),
                                      missing.size() == kMaxNamed ? ", ..." : ""));
}

class MergedFile {
 public:
  explicit MergedFile(const std::string& path) : file_(path) {
    text_ = R"({"schemaVersion":1,"displayTimeUnit":"ms","traceEvents":[)";
  }

  void add(const Json& event) {
    text_ += events_ == 0 ? "\n" : ",\n";
    text_ += event.dump(-1, ' ', false, Json::error_handler_t::replace);
    ++events_;
    if (text_.size() >= kWriteAtOnce) flush();
  }

  int64_t finish() {
    text_ += "\n]}\n";
    flush();
    file_.sync();
    file_.publish();
    return events_;
  }

 private:
  void flush() {
    file_.write(text_);
    text_.clear();
  }

  UnfinishedFile file_;
  std::string text_;
  int64_t events_ = 0;
};

/// Rewrites the events of one rank.
class RankEvents {
 public:
  RankEvents(const RankTrace& trace, MergedFile& merged) : trace_(trace), merged_(merged) {}

  void add(Json& event) {
    if (!event.contains("pid") || !event.at("pid").is_number_integer()) return;  // Kineto's own
    const std::string phase = text_of(event, "ph");
    if (phase == "M" && text_of(event, "name").substr(0, kProcess.size()) == kProcess) return;
    const int64_t process = event.at("pid").get<int64_t>();
    event["pid"] = number_of(process);
    if (phase == "M") {
      event.erase("ts");
    } else if (is_number(event, "ts")) {
      const double time = event.at("ts").get<double>() + trace_.shift;
      event["ts"] = std::round(time * 1000) / 1000;
    }
    if (const auto id = event.find("id"); id != event.end())
      *id = fmt::format("{}:{}", trace_.header.rank, id->dump());
    merged_.add(event);
  }

 private:
  static constexpr std::string_view kProcess = "process_";

  /// The number of its process in the merged trace; names the process when it is first met.
  int64_t number_of(int64_t process) {
    const int64_t rank = trace_.header.rank;
    const bool is_host = process == trace_.header.process;
    const auto [at, met] = numbers_.try_emplace(process, 0);
    if (!met) return at->second;
    const auto place = static_cast<int64_t>(numbers_.size());
    at->second = is_host ? rank : kFirstDevice + rank * kProcessesOfRank + place;
    const std::string name =
        is_host ? fmt::format("rank {}", rank) : fmt::format("rank {}, device {}", rank, process);
    merged_.add(
        {{"ph", "M"}, {"name", "process_name"}, {"pid", at->second}, {"args", {{"name", name}}}});
    merged_.add({{"ph", "M"},
                 {"name", "process_sort_index"},
                 {"pid", at->second},
                 {"args", {{"sort_index", rank * kProcessesOfRank + (is_host ? 0 : place)}}}});
    return at->second;
  }

  const RankTrace& trace_;
  MergedFile& merged_;
  std::map<int64_t, int64_t> numbers_;
};

}  // namespace

TraceMerge merge_traces(const std::string& folder, const std::string& output) {
  TraceMerge merge;
  std::vector<RankTrace> traces = look_through_all(folder);
  merge.ranks = static_cast<int64_t>(traces.size());
  note_missing(traces, merge);
  set_shifts(traces, merge);
  MergedFile merged(output);
  for (const RankTrace& trace : traces) {
    RankEvents events(trace, merged);
    read_trace(trace.path, [&](Json& event) { events.add(event); });
  }
  merge.events = merged.finish();
  return merge;
}

}  // namespace lockstep
