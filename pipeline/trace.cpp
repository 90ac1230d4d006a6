#include "lockstep/pipeline/trace.h"

#include <fmt/format.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <set>

namespace lockstep {
namespace {

/// Rows of a rank: tasks with waits, sends, receives.
int row_of(TraceEvent::Kind kind) {
  if (kind == TraceEvent::Kind::send) return 1;
  return kind == TraceEvent::Kind::receive ? 2 : 0;
}

/// Bytes that are not UTF-8 are replaced.
std::string quoted(const std::string& text) {
  using Json = nlohmann::json;
  return Json(text).dump(-1, ' ', false, Json::error_handler_t::replace);
}

double microseconds(int64_t nanoseconds) { return static_cast<double>(nanoseconds) * 1e-3; }

}  // namespace

const char* to_string(TraceEvent::Kind kind) {
  switch (kind) {
    case TraceEvent::Kind::wait:
      return "wait";
    case TraceEvent::Kind::send:
      return "send";
    case TraceEvent::Kind::receive:
      return "receive";
    default:
      return "task";
  }
}

void PipelineTrace::add(TraceEvent event) {
  const std::lock_guard<std::mutex> lock(mutex_);
  events_.push_back(std::move(event));
}

std::vector<TraceEvent> PipelineTrace::events() const {
  std::vector<TraceEvent> events;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    events = events_;
  }
  std::stable_sort(events.begin(), events.end(),
                   [](const TraceEvent& a, const TraceEvent& b) { return a.begin < b.begin; });
  return events;
}

void PipelineTrace::write_chrome_trace(std::ostream& out) const {
  const std::vector<TraceEvent> events = this->events();
  std::set<int64_t> ranks;
  for (const TraceEvent& event : events) ranks.insert(event.rank);
  out << "{\"displayTimeUnit\": \"ms\", \"traceEvents\": [";
  const char* separator = "\n";
  const auto line = [&](const std::string& text) {
    out << separator << text;
    separator = ",\n";
  };
  for (const int64_t rank : ranks) {
    line(fmt::format(R"({{"ph": "M", "pid": {}, "name": "process_name", "args": {{"name": )"
                     R"("stage {}"}}}})",
                     rank, rank));
    for (const auto& [row, name] : {std::pair(0, "tasks"), {1, "sends"}, {2, "receives"}})
      line(fmt::format(R"({{"ph": "M", "pid": {}, "tid": {}, "name": "thread_name", "args": )"
                       R"({{"name": "{}"}}}})",
                       rank, row, name));
  }
  for (const TraceEvent& event : events)
    line(fmt::format(R"({{"ph": "X", "pid": {}, "tid": {}, "name": {}, "cat": "{}", )"
                     R"("ts": {:.3f}, "dur": {:.3f}}})",
                     event.rank, row_of(event.kind), quoted(event.name), to_string(event.kind),
                     microseconds(event.begin - events.front().begin),
                     microseconds(event.end - event.begin)));
  out << "\n]}\n";
}

}  // namespace lockstep
