#include "lockstep/core/nearest_name.h"

#include <algorithm>

namespace lockstep {
namespace {

constexpr size_t kMostNames = 3;

}  // namespace

size_t edit_distance(std::string_view a, std::string_view b) {
  std::vector<size_t> before(b.size() + 1), last(b.size() + 1), row(b.size() + 1);
  for (size_t j = 0; j <= b.size(); ++j) row[j] = j;
  for (size_t i = 1; i <= a.size(); ++i) {
    before.swap(last);
    last.swap(row);
    row[0] = i;
    for (size_t j = 1; j <= b.size(); ++j) {
      const size_t replaced = last[j - 1] + (a[i - 1] == b[j - 1] ? 0 : 1);
      row[j] = std::min({last[j] + 1, row[j - 1] + 1, replaced});
      const bool swapped = i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1];
      if (swapped) row[j] = std::min(row[j], before[j - 2] + 1);
    }
  }
  return row[b.size()];
}

bool is_near(std::string_view found, std::string_view known) {
  const size_t limit = std::max<size_t>(1, found.size() / 3);
  const auto [shorter, longer] = std::minmax({found.size(), known.size()});
  return longer - shorter <= limit && edit_distance(found, known) <= limit;
}

std::vector<std::string> nearest_names(std::string_view found,
                                       const std::vector<std::string>& known) {
  std::vector<std::string> nearest;
  size_t least = 0;
  for (const std::string& name : known) {
    if (!is_near(found, name)) continue;
    const size_t distance = edit_distance(found, name);
    if (nearest.empty() || distance < least) nearest.clear();
    if (nearest.empty()) least = distance;
    if (distance == least && nearest.size() < kMostNames) nearest.push_back(name);
  }
  return nearest;
}

std::string did_you_mean(const std::vector<std::string>& names, const std::string& otherwise) {
  if (names.empty()) return otherwise;
  std::string text = "; did you mean ";
  for (size_t i = 0; i < names.size(); ++i) {
    if (i > 0) text += i + 1 == names.size() ? " or " : ", ";
    text += "'" + names[i] + "'";
  }
  return text + "?";
}

}  // namespace lockstep
