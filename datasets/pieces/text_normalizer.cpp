#include "lockstep/datasets/text_normalizer.h"

#include <utf8proc.h>

#include <algorithm>
#include <array>
#include <utility>

#include "lockstep/core/check.h"
#include "lockstep/datasets/unicode_marks.h"
#include "lockstep/datasets/utf8.h"

namespace lockstep {
namespace {

constexpr std::string_view kReplacement = "\xEF\xBF\xBD";

constexpr auto kComposed = static_cast<utf8proc_option_t>(UTF8PROC_STABLE | UTF8PROC_COMPOSE);

void check_size(utf8proc_ssize_t size, std::string_view text) {
  require<UsageError>(size >= 0, "a text of {} bytes cannot be normalized: {}", text.size(),
                      utf8proc_errmsg(size));
}

/// Decomposes a whole text, with the marks of each run in the order of their classes.
/// utf8proc_map() gives the same, but in a time that is quadratic in the length of a run.
std::vector<utf8proc_int32_t> decompose(std::string_view text) {
  std::vector<utf8proc_int32_t> points;
  std::array<utf8proc_int32_t, 32> parts;
  for (size_t place = 0; place < text.size();) {
    const Utf8Character next = utf8_character(text, place);
    int boundary = 0;
    const auto count = utf8proc_decompose_char(static_cast<utf8proc_int32_t>(next.point),
                                               parts.data(), parts.size(), kComposed, &boundary);
    check_size(count, text);
    points.insert(points.end(), parts.begin(), parts.begin() + count);
    place += next.bytes;
  }
  const auto class_of = [](auto point) { return utf8proc_get_property(point)->combining_class; };
  const auto is_mark = [&](auto point) { return class_of(point) != 0; };
  const auto end = points.end();
  for (auto mark = std::find_if(points.begin(), end, is_mark); mark != end;) {
    const auto run_end = std::find_if_not(mark, end, is_mark);
    std::stable_sort(mark, run_end, [&](auto a, auto b) { return class_of(a) < class_of(b); });
    mark = std::find_if(run_end, end, is_mark);
  }
  return points;
}

/// Composes a whole text.
std::string compose(std::string_view text) {
  std::vector<utf8proc_int32_t> points = decompose(text);
  const auto length = static_cast<utf8proc_ssize_t>(points.size());
  points.push_back(0);  // the bytes replace the points, and a 0 follows them
  const auto size = utf8proc_reencode(points.data(), length, kComposed);
  check_size(size, text);
  return {reinterpret_cast<const char*>(points.data()), static_cast<size_t>(size)};
}

/// How a character takes part in composition.
enum class Composition : uint8_t {
  none,   ///< stays, whatever comes before it
  alone,  ///< the same, but is itself decomposed and composed again
  mark,   ///< may join or pass what comes before it
  later   ///< a mark that Unicode 9 lacks: nothing passes it
};

std::vector<Composition> make_compositions() {
  std::vector<Composition> kinds(kMalformed + 1, Composition::none);
  for (const CodePointRange& range : kCombiningRanges)
    std::fill(kinds.begin() + range.first, kinds.begin() + range.last + 1, Composition::mark);
  std::string text;
  for (uint32_t point = 0x80; point < kMalformed; ++point) {
    const utf8proc_property_t* const property =
        utf8proc_get_property(static_cast<utf8proc_int32_t>(point));
    if (kinds[point] == Composition::mark) continue;
    if (property->combining_class != 0) kinds[point] = Composition::later;
    if (property->decomp_seqindex == UINT16_MAX || property->decomp_type != 0) continue;
    text.clear();
    append_utf8(point, text);
    const std::string made = compose(text);
    const bool joins = kinds[utf8_character(made, 0).point] == Composition::mark;
    if (made != text) kinds[point] = joins ? Composition::mark : Composition::alone;
  }
  return kinds;
}

RewrittenText compose_characters(const TextPart& part) {
  static const std::vector<Composition> kinds = make_compositions();
  RewrittenText made;
  const std::string_view text = part.text;
  size_t kept = 0;   // the text up to here is in `made`
  size_t begin = 0;  // where the stretch to compose begins
  bool changes = false;
  const auto end_stretch = [&](size_t end) {
    if (std::exchange(changes, false)) {
      const std::string_view before = text.substr(begin, end - begin);
      const std::string after = compose(before);
      if (after != before) {
        made.keep(text.substr(kept, begin - kept));
        made.replace(before.size(), after);
        kept = end;
      }
    }
    begin = end;
  };
  for (size_t place = 0; place < text.size();) {
    const auto byte = static_cast<unsigned char>(text[place]);
    if (byte < 0x80) {
      end_stretch(place);
      ++place;
      continue;
    }
    const Utf8Character next = utf8_character(text, place);
    const Composition kind = kinds[next.point];
    if (kind != Composition::mark) end_stretch(place);
    place += next.bytes;
    if (kind == Composition::later)
      begin = place;
    else if (kind != Composition::none)
      changes = true;
  }
  if (part.closed) end_stretch(text.size());
  made.keep(text.substr(kept, (part.closed ? text.size() : begin) - kept));
  return made;
}

/// How many bytes at the end of `text` may be the front of `what`.
size_t front_at_end(std::string_view text, std::string_view what) {
  size_t size = std::min(what.size() - 1, text.size());
  while (size > 0 && !what.starts_with(text.substr(text.size() - size))) --size;
  return size;
}

RewrittenText replace_text(const ReplaceText& step, const TextPart& part) {
  RewrittenText made;
  std::string_view left = part.text;
  for (size_t found = left.find(step.what); found != left.npos; found = left.find(step.what)) {
    made.keep(left.substr(0, found));
    made.replace(step.what.size(), step.by);
    left.remove_prefix(found + step.what.size());
  }
  if (!part.closed) left.remove_suffix(front_at_end(left, step.what));
  made.keep(left);
  return made;
}

RewrittenText prepend_text(const PrependText& step, const TextPart& part) {
  RewrittenText made;
  const bool there = step.unless_there && part.text.starts_with(step.front);
  const bool open = step.unless_there && !part.closed && part.text.size() < step.front.size();
  if (part.begins && open) return made;
  if (part.begins && !there && !part.text.empty()) made.replace(0, step.front);
  made.keep(part.text);
  return made;
}

}  // namespace

RewrittenText replace_malformed(std::string_view text) {
  RewrittenText made;
  size_t kept = 0;
  for (size_t place = 0; place < text.size();) {
    const Utf8Character next = utf8_character(text, place);
    if (next.point == kMalformed) {
      made.keep(text.substr(kept, place - kept));
      made.replace(next.bytes, kReplacement);
      kept = place + next.bytes;
    }
    place += next.bytes;
  }
  made.keep(text.substr(kept));
  return made;
}

RewrittenText normalize(const NormalizerStep& step, const TextPart& part) {
  if (const auto* replace = std::get_if<ReplaceText>(&step)) return replace_text(*replace, part);
  if (const auto* prepend = std::get_if<PrependText>(&step)) return prepend_text(*prepend, part);
  return compose_characters(part);
}

std::string normalize(const std::vector<NormalizerStep>& steps, std::string_view text) {
  std::string made(text);
  for (const NormalizerStep& step : steps) made = normalize(step, TextPart{made}).text();
  return made;
}

}  // namespace lockstep
