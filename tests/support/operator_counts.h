#pragma once

#include <map>
#include <memory>
#include <string>

#include <ATen/record_function.h>

namespace lockstep::testing {

/// Counts this thread's calls of each libtorch operator while it lives; at most one per thread.
class OperatorCounts {
 public:
  OperatorCounts() {
    calls().clear();
    handle_ = at::addThreadLocalCallback(at::RecordFunctionCallback(
        [](const at::RecordFunction& function) -> std::unique_ptr<at::ObserverContext> {
          ++calls()[function.name()];
          return nullptr;
        }));
  }
  ~OperatorCounts() { at::removeCallback(handle_); }
  OperatorCounts(const OperatorCounts&) = delete;
  OperatorCounts& operator=(const OperatorCounts&) = delete;

  /// Calls of `name`, such as "aten::add_", since construction.
  int of(const std::string& name) const {
    const auto found = calls().find(name);
    return found == calls().end() ? 0 : found->second;
  }

 private:
  static std::map<std::string, int>& calls() {
    static thread_local std::map<std::string, int> all;
    return all;
  }

  at::CallbackHandle handle_;
};

}  // namespace lockstep::testing
