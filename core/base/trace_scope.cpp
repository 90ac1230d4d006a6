#include "lockstep/core/trace_scope.h"

#include <algorithm>
#include <utility>

#include <ATen/record_function.h>

namespace lockstep {
namespace {

thread_local const std::string* innermost_name = nullptr;

char allowed_character(char c) {
  if (c == '"') return '\'';
  return c >= ' ' && c <= '~' ? c : '?';
}

}  // namespace

bool trace_is_recording() {
  return at::getStepCallbacksUnlessEmpty(at::RecordScope::USER_SCOPE).has_value();
}

void TraceScope::begin(std::string_view name) {
  std::string allowed(name);
  std::transform(allowed.begin(), allowed.end(), allowed.begin(), allowed_character);
  function_ = std::make_unique<at::RecordFunction>(at::RecordScope::USER_SCOPE);
  function_->before(std::string_view(allowed), c10::ArrayRef<const c10::IValue>());
}

TraceScope::~TraceScope() = default;

void TraceName::set(std::string name) {
  name_ = std::move(name);
  set_ = true;
  outer_ = std::exchange(innermost_name, &name_);
}

TraceName::~TraceName() {
  if (set_) innermost_name = outer_;
}

TraceSilence::TraceSilence(bool on) {
  if (on) guard_ = std::make_unique<at::RecordFunctionGuard>(/*is_enabled=*/false);
}

TraceSilence::~TraceSilence() = default;

std::string TraceName::current() { return innermost_name ? *innermost_name : std::string(); }

}  // namespace lockstep
