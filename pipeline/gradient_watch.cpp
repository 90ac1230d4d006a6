#include "lockstep/pipeline/gradient_watch.h"

#include <algorithm>
#include <utility>

#include <ATen/ATen.h>

namespace lockstep {
namespace {

thread_local GradientWatch* innermost_watch = nullptr;

bool requires_gradient(const c10::IValue& value) {
  if (value.isList()) {
    const auto items = value.toListRef();
    return std::any_of(items.begin(), items.end(), requires_gradient);
  }
  return value.isTensor() && value.toTensor().defined() && value.toTensor().requires_grad();
}

}  // namespace

GradientWatch::GradientWatch()
    : outer_(std::exchange(innermost_watch, this)),
      handle_(at::addThreadLocalCallback(at::RecordFunctionCallback(on_operator)
                                             .needsInputs(true)
                                             .scopes({at::RecordScope::FUNCTION}))) {}

GradientWatch::~GradientWatch() {
  at::removeCallback(handle_);
  innermost_watch = outer_;
}

std::unique_ptr<at::ObserverContext> GradientWatch::on_operator(const at::RecordFunction& call) {
  if (!innermost_watch || innermost_watch->seen_) return nullptr;
  const auto inputs = call.inputs();
  innermost_watch->seen_ = std::any_of(inputs.begin(), inputs.end(), requires_gradient);
  return nullptr;
}

}  // namespace lockstep
