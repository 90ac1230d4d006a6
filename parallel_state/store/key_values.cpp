#include "lockstep/parallel_state/key_values.h"

#include <algorithm>
#include <charconv>
#include <cstring>

namespace lockstep {
namespace {

/// Takes parts off the front of bytes. After the first one that is incomplete or too long, the
/// others are empty.
class Parts {
 public:
  explicit Parts(std::string_view bytes) : left_(bytes) {}

  template <class T>
  T number() {
    T value{};
    const std::string_view bytes = take(sizeof value);
    if (bytes.size() == sizeof value) std::memcpy(&value, bytes.data(), sizeof value);
    return value;
  }
  std::string_view text(uint64_t longest) {
    const auto length = number<uint64_t>();
    if (length > longest) unreadable_ = true;
    return fine() ? take(length) : std::string_view();
  }
  std::string_view name() { return text(StoreRequest::kLongestName); }
  std::string_view value() { return text(StoreRequest::kLongestValue); }
  uint64_t count() {
    const auto count = number<uint64_t>();
    if (count > StoreRequest::kMostNames) unreadable_ = true;
    return fine() ? count : 0;
  }

  void refuse() { unreadable_ = true; }
  bool fine() const { return !unreadable_ && !incomplete_; }
  bool unreadable() const { return unreadable_; }
  size_t left() const { return left_.size(); }

 private:
  std::string_view take(uint64_t bytes) {
    incomplete_ = incomplete_ || bytes > left_.size();
    if (!fine()) return {};
    const std::string_view taken = left_.substr(0, bytes);
    left_.remove_prefix(bytes);
    return taken;
  }

  std::string_view left_;
  bool incomplete_ = false, unreadable_ = false;
};

void append_number(std::string& to, const auto& number) {
  to.append(reinterpret_cast<const char*>(&number), sizeof number);
}

void append_text(std::string& to, std::string_view text) {
  append_number(to, uint64_t{text.size()});
  to += text;
}

}  // namespace

StoreRequest::Outcome StoreRequest::read(std::string_view bytes) {
  *this = {};
  Parts parts(bytes);
  query = static_cast<StoreQuery>(parts.number<uint8_t>());
  const bool several = query == StoreQuery::check || query == StoreQuery::multi_get ||
                       query == StoreQuery::multi_set;
  const bool has_value = query == StoreQuery::set || query == StoreQuery::append ||
                         query == StoreQuery::compare_set || query == StoreQuery::multi_set;
  const bool known = several || has_value || query == StoreQuery::get || query == StoreQuery::add ||
                     query == StoreQuery::delete_key || query == StoreQuery::get_num_keys;
  if (!known && parts.fine()) parts.refuse();
  uint64_t count = query == StoreQuery::get_num_keys ? 0 : several ? parts.count() : 1;
  for (; count > 0 && parts.fine(); --count) {
    names.push_back(parts.name());
    if (has_value) values.push_back(parts.value());
  }
  if (query == StoreQuery::compare_set) values.push_back(parts.value());
  if (query == StoreQuery::add) number = parts.number<int64_t>();
  size = bytes.size() - parts.left();
  const size_t least_size = parts.fine() ? size : bytes.size();
  if (parts.unreadable() || least_size > kLongest) return Outcome::unreadable;
  return parts.fine() ? Outcome::whole : Outcome::incomplete;
}

bool KeyValues::answer(const StoreRequest& request, std::string& answer) {
  switch (request.query) {
    case StoreQuery::set:
    case StoreQuery::multi_set:
      for (size_t i = 0; i < request.names.size(); ++i)
        values_[std::string(request.names[i])] = request.values[i];
      return true;
    case StoreQuery::append:
      values_[std::string(request.names[0])] += request.values[0];
      return true;
    case StoreQuery::compare_set:
      append_text(answer, compare_set(request));
      return true;
    case StoreQuery::get:
    case StoreQuery::multi_get:
      for (const std::string_view name : request.names) append_text(answer, get(name));
      return true;
    case StoreQuery::add:
      return add(request, answer);
    case StoreQuery::check:
      append_number(answer, uint8_t{has_all(request.names) ? uint8_t{0} : uint8_t{1}});
      return true;
    case StoreQuery::get_num_keys:
      append_number(answer, static_cast<int64_t>(values_.size()));
      return true;
    case StoreQuery::delete_key:
      append_number(answer, static_cast<int64_t>(values_.erase(std::string(request.names[0]))));
      return true;
  }
  return false;
}

std::string KeyValues::get(std::string_view name) const {
  const auto found = values_.find(std::string(name));
  return found == values_.end() ? "" : found->second;
}

bool KeyValues::has_all(const std::vector<std::string_view>& names) const {
  return std::all_of(names.begin(), names.end(),
                     [&](std::string_view name) { return values_.contains(std::string(name)); });
}

/// The value after the operation. If there is none but one was expected, libtorch answers with the
/// expected one, and so does this.
std::string KeyValues::compare_set(const StoreRequest& request) {
  const std::string_view expected = request.values[0];
  const auto found = values_.find(std::string(request.names[0]));
  if (found == values_.end() && !expected.empty()) return std::string(expected);
  if (found != values_.end() && found->second != expected) return found->second;
  return values_[std::string(request.names[0])] = request.values[1];
}

/// The sum is stored as text, so that get() can read it.
bool KeyValues::add(const StoreRequest& request, std::string& answer) {
  const std::string now = get(request.names[0]);
  int64_t sum = 0;
  const auto parsed = std::from_chars(now.data(), now.data() + now.size(), sum);
  if (!now.empty() && parsed.ptr != now.data() + now.size()) return false;
  if (__builtin_add_overflow(sum, request.number, &sum)) return false;
  values_[std::string(request.names[0])] = std::to_string(sum);
  append_number(answer, sum);
  return true;
}

}  // namespace lockstep
