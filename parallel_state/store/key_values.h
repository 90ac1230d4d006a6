#pragma once

// Internal. No libtorch here.

#include <cstdint>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

namespace lockstep {

/// The queries of a store, with the numbers that a c10d::TCPStore gives them.
enum class StoreQuery : uint8_t {
  set = 1,
  compare_set = 2,
  get = 3,
  add = 4,
  check = 5,
  get_num_keys = 7,
  delete_key = 8,
  append = 9,
  multi_get = 10,
  multi_set = 11,
};

/// One request as it arrives, in the TCPStore's format; its texts point into the bytes that were
/// read.
struct StoreRequest {
  /// libtorch's server has the same bounds, except for names, where it is 8 MiB.
  static constexpr uint64_t kLongestName = 1 << 16, kLongestValue = 8 << 20, kMostNames = 1 << 17;
  /// The bound of all parts together.
  static constexpr size_t kLongest = 16 << 20;

  enum class Outcome { whole, incomplete, unreadable };

  StoreQuery query{};
  std::vector<std::string_view> names, values;
  int64_t number = 0;
  size_t size = 0;  ///< in bytes

  /// Reads the request at the beginning of `bytes`. Unreadable: an unknown query, or a bound is
  /// exceeded.
  Outcome read(std::string_view bytes);
};

/// The content of a store and its answers, as a c10d::TCPStore gives them.
class KeyValues {
 public:
  /// Appends the answer. False if there is no usable answer: an add to a value that is not a
  /// number.
  bool answer(const StoreRequest& request, std::string& answer);
  void set(std::string_view name, std::string value) {
    values_[std::string(name)] = std::move(value);
  }

 private:
  std::string get(std::string_view name) const;
  std::string compare_set(const StoreRequest& request);
  bool add(const StoreRequest& request, std::string& answer);
  bool has_all(const std::vector<std::string_view>& names) const;

  std::unordered_map<std::string, std::string> values_;
};

}  // namespace lockstep
