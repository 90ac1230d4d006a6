#include <algorithm>
#include <ostream>

#include "lockstep/core/check.h"
#include "lockstep/core/xml_text.h"
#include "lockstep/pipeline/timeline_svg.h"
#include "lockstep/planner/job_report.h"
#include "lockstep/planner/stacked_bars.h"

namespace lockstep {
namespace {

constexpr size_t kMostTasks = 20000;

constexpr const char* kHead =
    "<meta charset=\"utf-8\">\n"
    "<meta name=\"viewport\" content=\"width=device-width\">\n"
    "<style>\n"
    "body { font-family: sans-serif; margin: 24px auto; padding: 0 16px; max-width: 1040px; "
    "color: #1a1a1a; background: #ffffff }\n"
    "table { border-collapse: collapse } th, td { padding: 3px 12px; text-align: right; "
    "border-bottom: 1px solid #dddddd }\n"
    "th:first-child, td:first-child { text-align: left } section { overflow-x: auto }\n"
    "h1, p { overflow-wrap: anywhere }\n"
    "</style>\n";

/// 1536 -> "1.50 KiB"
std::string bytes_text(int64_t bytes) {
  auto value = static_cast<double>(bytes);
  const char* unit = "B";
  for (const char* next : {"KiB", "MiB", "GiB", "TiB", "PiB"}) {
    if (value < 1024) break;
    value /= 1024;
    unit = next;
  }
  return unit == std::string("B") ? fmt::format("{} B", bytes)
                                  : fmt::format("{:.2f} {}", value, unit);
}

class Page {
 public:
  Page(std::ostream& out, const JobReport& report) : out_(out), report_(report) {}

  void write() {
    const std::string title = xml_text(report_.job);
    out_ << "<!DOCTYPE html>\n<html lang=\"en\">\n<head>\n<title>" << title << "</title>\n"
         << kHead << "</head>\n<body>\n<h1>" << title << "</h1>\n";
    out_ << fmt::format("<p>{} ranks on {} host{} of {}; {} parameters; {:.4g} TFLOP a step</p>\n",
                        report_.world_size, report_.links.hosts,
                        report_.links.hosts == 1 ? "" : "s", report_.links.ranks_per_host,
                        report_.num_parameters, report_.flops_of_step / 1e12);
    section("schedule", "Schedule", [&] { schedule(); });
    section("memory", "Memory of one rank of each stage", [&] { memory(); });
    if (report_.time) section("time", "Time of a step", [&] { time(); });
    section("links", "Bytes that all ranks send in a step", [&] { links(); });
    section("buckets", "Gradient buffers and their buckets, in elements", [&] { buckets(); });
    section("groups", "Groups", [&] { groups(); });
    out_ << "</body>\n</html>\n";
  }

 private:
  template <class Body>
  void section(const char* id, const char* heading, Body&& body) {
    out_ << "<section id=\"" << id << "\">\n<h2>" << heading << "</h2>\n";
    body();
    out_ << "</section>\n";
  }

  void row(const char* cell, const std::vector<std::string>& texts) {
    out_ << "<tr>";
    for (const std::string& text : texts)
      out_ << fmt::format("<{0}>{1}</{0}>", cell, xml_text(text));
    out_ << "</tr>\n";
  }

  void schedule() {
    const ScheduleOptions& options = report_.schedule_options;
    const std::string text =
        fmt::format("{}: pipeline {} x {}, {} micro-batches, bubble {:.2f} %",
                    to_string(options.family), options.pipeline, options.virtual_pipeline,
                    options.microbatches, 100 * report_.timeline.bubble_fraction());
    size_t tasks = 0;
    for (const auto& rank : report_.schedule.ranks) tasks += rank.size();
    if (tasks <= kMostTasks)
      write_timeline_svg(out_, text, report_.schedule, report_.timeline);
    else
      out_ << "<p>" << text << ". " << tasks << " tasks are too many to draw.</p>\n";
  }

  void memory() {
    StackedBars bars;
    bars.legend = {"weights", "gradients", "optimizer", "activations", "communication"};
    for (const StageMemory& stage : report_.memory.stages)
      bars.rows.push_back({fmt::format("stage {}", stage.stage),
                           {stage.parameter_bytes, stage.gradient_bytes, stage.optimizer_bytes,
                            stage.activation_bytes, stage.communication_bytes},
                           bytes_text(stage.total_bytes())});
    write_stacked_bars_svg(out_, bars, "bytes");
    std::vector<std::string> peaks;
    for (const StageMemory& stage : report_.memory.stages)
      peaks.push_back(bytes_text(*stage.recorded_peak_bytes));
    out_ << fmt::format(
        "<p>The most that tensors take in the recorded program, by stage: {}.</p>\n",
        fmt::join(peaks, ", "));
  }

  void time() {
    const TimePlan& plan = *report_.time;
    out_ << fmt::format(
        "<p>On {}: {:.2f} ms, {:.1f} TFLOP/s of a device, {:.1f} % of the peak. Rows are one rank "
        "of "
        "each class; ranks of a class take the same time.</p>\n",
        xml_text(plan.machine), 1e3 * plan.step.step_s, plan.tflops_per_device,
        100 * plan.utilisation);
    StackedBars bars;
    bars.legend = {"compute", "communication", "bubble", "optimizer"};
    const auto nanoseconds = [](double seconds) { return static_cast<int64_t>(1e9 * seconds); };
    for (const RankTime& rank : plan.step.ranks)
      bars.rows.push_back({fmt::format("rank {} ({} alike)", rank.rank, rank.num_ranks),
                           {nanoseconds(rank.compute_s), nanoseconds(rank.exposed_total_s()),
                            nanoseconds(rank.bubble_s), nanoseconds(rank.optimizer_s)},
                           fmt::format("{:.2f} ms compute", 1e3 * rank.compute_s)});
    write_stacked_bars_svg(out_, bars, "ns");
  }

  void links() {
    StackedBars bars;
    bars.legend = {"inside hosts", "between hosts"};
    for (const LinkUse& use : report_.links.groups)
      bars.rows.push_back({fmt::format("{} ({} ranks)", use.group, use.ranks),
                           {use.inside_bytes, use.between_bytes},
                           bytes_text(use.inside_bytes + use.between_bytes)});
    bars.rows.push_back({"all",
                         {report_.links.inside_bytes(), report_.links.between_bytes()},
                         bytes_text(report_.links.inside_bytes() + report_.links.between_bytes())});
    write_stacked_bars_svg(out_, bars, "bytes");
    out_ << "<table>\n";
    row("th", {"group", "operations", "inside hosts", "between hosts", "most of a rank"});
    for (const LinkUse& use : report_.links.groups)
      row("td", {use.group, std::to_string(use.operations), bytes_text(use.inside_bytes),
                 bytes_text(use.between_bytes), bytes_text(use.most_of_a_rank)});
    out_ << "</table>\n";
  }

  void buckets() {
    StackedBars bars;
    bars.has_legend = false;
    size_t most = 1;
    for (const ChunkBuffers& chunk : report_.buffers)
      for (const PlannedBuffer& buffer : chunk.buffers) {
        std::vector<int64_t> parts;
        for (const ParamLayout::Bucket& bucket : buffer.layout.buckets)
          parts.push_back(bucket.end - bucket.start);
        most = std::max(most, parts.size());
        bars.rows.push_back(
            {fmt::format("{}.{} {}", chunk.stage, chunk.chunk, to_string(buffer.group)),
             std::move(parts),
             fmt::format("{}, over {}", buffer.layout.numel, buffer.options.data_parallel_size)});
      }
    for (size_t i = 0; i < most; ++i) bars.legend.push_back(fmt::format("bucket {}", i));
    write_stacked_bars_svg(out_, bars, "elements");
    out_ << "<p>Rows are stage.chunk and the group over which gradients are reduced.</p>\n";
  }

  void groups() {
    out_ << "<table>\n";
    row("th", {"kind", "groups", "ranks of each"});
    for (const GroupKind kind : all_group_kinds())
      row("td", {to_string(kind), std::to_string(report_.grids.count(kind)),
                 std::to_string(report_.grids.size(kind))});
    out_ << "</table>\n";
  }

  std::ostream& out_;
  const JobReport& report_;
};

}  // namespace

void write_page(std::ostream& out, const JobReport& report) { Page(out, report).write(); }

}  // namespace lockstep
