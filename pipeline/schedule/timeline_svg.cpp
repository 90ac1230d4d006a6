#include "lockstep/pipeline/timeline_svg.h"

#include <algorithm>
#include <array>
#include <iterator>

#include "lockstep/core/check.h"
#include "lockstep/core/xml_text.h"

namespace lockstep {
namespace {

constexpr double kRow = 26, kGap = 4, kLeft = 64, kTop = 64, kMargin = 16, kDigit = 7;
constexpr double kMinWidth = 480, kMaxUnit = 24, kMaxWidth = 4000;

struct Colour {
  const char* name;
  std::array<int, 3> first;  ///< red, green, blue of the first chunk
  std::array<int, 3> last;   ///< of the last chunk
};

constexpr std::array<Colour, 3> kColours = {{{"forward", {158, 202, 243}, {43, 108, 176}},
                                             {"backward", {164, 219, 168}, {36, 128, 70}},
                                             {"weight part", {250, 214, 145}, {201, 127, 18}}}};

std::string colour_of(const PipelineTask& task, int64_t chunks) {
  const Colour& colour = kColours[static_cast<size_t>(task.kind)];
  std::array<int64_t, 3> mixed;
  for (size_t i = 0; i < mixed.size(); ++i)
    mixed[i] = colour.first[i] +
               (colour.last[i] - colour.first[i]) * task.chunk / std::max<int64_t>(chunks - 1, 1);
  return fmt::format("#{:02x}{:02x}{:02x}", mixed[0], mixed[1], mixed[2]);
}

class Drawing {
 public:
  Drawing(std::ostream& out, const PipelineSchedule& schedule, const Timeline& timeline)
      : out_(out), schedule_(schedule), timeline_(timeline) {
    const auto makespan = static_cast<double>(std::max<int64_t>(timeline.makespan(), 1));
    width_ = std::clamp(makespan * kMaxUnit, kMinWidth, kMaxWidth);
    unit_ = width_ / makespan;
  }

  void draw(const std::string& title) {
    const double height = kTop + static_cast<double>(schedule_.pipeline()) * kRow + kMargin;
    write(R"(<svg xmlns="http://www.w3.org/2000/svg" width="{0:.0f}" height="{1:.0f}" )"
          R"(viewBox="0 0 {0:.0f} {1:.0f}" font-family="sans-serif" font-size="12">)",
          kLeft + width_ + kMargin, height);
    write("\n<rect width=\"100%\" height=\"100%\" fill=\"#ffffff\"/>\n");
    write("<text x=\"{:.0f}\" y=\"24\" font-size=\"14\">{}</text>\n", kMargin, xml_text(title));
    draw_legend();
    for (int64_t rank = 0; rank < schedule_.pipeline(); ++rank) draw_rank(rank);
    write("</svg>\n");
  }

 private:
  template <class... Args>
  void write(fmt::format_string<Args...> text, Args&&... args) {
    fmt::format_to(std::ostreambuf_iterator<char>(out_), text, std::forward<Args>(args)...);
  }

  void draw_legend() {
    const size_t kinds = schedule_.forward_only ? 1 : schedule_.split_backward ? 3 : 2;
    for (size_t k = 0; k < kinds; ++k) {
      const double x = kLeft + 110 * static_cast<double>(k);
      write("<rect x=\"{:.0f}\" y=\"38\" width=\"14\" height=\"14\" fill=\"{}\"/>", x,
            colour_of({static_cast<TaskKind>(k), 0, 0}, schedule_.chunks));
      write("<text x=\"{:.0f}\" y=\"50\">{}</text>\n", x + 20, kColours[k].name);
    }
  }

  void draw_rank(int64_t rank) {
    const auto& tasks = schedule_.ranks[static_cast<size_t>(rank)];
    const auto& times = timeline_.ranks[static_cast<size_t>(rank)];
    require<UsageError>(tasks.size() == times.size(), "timeline of rank {}: {} times for {} tasks",
                        rank, times.size(), tasks.size());
    const double y = kTop + static_cast<double>(rank) * kRow;
    write("<text x=\"{:.0f}\" y=\"{:.0f}\">rank {}</text>\n", kMargin, y + 15, rank);
    write("<rect x=\"{:.0f}\" y=\"{:.0f}\" width=\"{:.1f}\" height=\"{:.0f}\" fill=\"#f1f1f1\"/>\n",
          kLeft, y, width_, kRow - kGap);
    for (size_t i = 0; i < tasks.size(); ++i) draw_task(tasks[i], times[i], y);
  }

  void draw_task(const PipelineTask& task, const TaskTime& time, double y) {
    const double x = kLeft + static_cast<double>(time.start) * unit_;
    const double width = static_cast<double>(time.end - time.start) * unit_;
    write(
        "<rect x=\"{:.1f}\" y=\"{:.0f}\" width=\"{:.1f}\" height=\"{:.0f}\" fill=\"{}\" "
        "stroke=\"#ffffff\" stroke-width=\"{:.1f}\"><title>{}: {} to {}</title></rect>\n",
        x, y, width, kRow - kGap, colour_of(task, schedule_.chunks), std::min(1.0, width / 8),
        to_string(task), time.start, time.end);
    const std::string label = std::to_string(task.microbatch);
    if (static_cast<double>(label.size()) * kDigit + 4 <= width)
      write("<text x=\"{:.1f}\" y=\"{:.0f}\" text-anchor=\"middle\">{}</text>\n", x + width / 2,
            y + 15, label);
  }

  std::ostream& out_;
  const PipelineSchedule& schedule_;
  const Timeline& timeline_;
  double width_;
  double unit_;
};

}  // namespace

void write_timeline_svg(std::ostream& out, const std::string& title,
                        const PipelineSchedule& schedule, const Timeline& timeline) {
  require<UsageError>(timeline.ranks.size() == schedule.ranks.size(),
                      "timeline of {} ranks, schedule of {}", timeline.ranks.size(),
                      schedule.ranks.size());
  Drawing(out, schedule, timeline).draw(title);
}

}  // namespace lockstep
