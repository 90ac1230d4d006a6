#include "lockstep/testing/activation_trace.h"

#include <algorithm>
#include <string_view>

#include <ATen/ATen.h>
#include <ATen/record_function.h>

namespace lockstep::testing {
namespace {

/// Per thread, because libtorch's callbacks are plain functions.
thread_local ActivationTrace::Recorder* current = nullptr;

bool draws_random_numbers(std::string_view operation) {
  for (const std::string_view word :
       {"dropout", "bernoulli", "rand", "uniform", "normal_", "multinomial", "exponential_"})
    if (operation.find(word) != std::string_view::npos) return true;
  return false;
}

bool is_activation(const at::Tensor& tensor) {
  return tensor.defined() && tensor.layout() == at::kStrided &&
         at::isFloatingType(tensor.scalar_type());
}

template <class Visit>
void visit_tensors(const c10::IValue& value, Visit visit) {
  if (value.isTensor())
    visit(value.toTensor());
  else if (value.isList())
    for (const c10::IValue& item : value.toListRef()) visit_tensors(item, visit);
}

}  // namespace

class ActivationTrace::Recorder {
 public:
  Recorder(const std::vector<NamedParameter>& params, int64_t microbatch,
           std::vector<ParamUse>& uses)
      : microbatch_(microbatch), uses_(uses), outer_(std::exchange(current, this)) {
    for (const NamedParameter& param : params) follow(param.tensor, {param.name});
    handle_ = at::addThreadLocalCallback(at::RecordFunctionCallback(on_start, on_end)
                                             .needsInputs(true)
                                             .needsOutputs(true)
                                             .scopes({at::RecordScope::FUNCTION}));
  }
  ~Recorder() {
    at::removeCallback(handle_);
    current = outer_;
  }
  Recorder(const Recorder&) = delete;
  Recorder& operator=(const Recorder&) = delete;

 private:
  struct OpenCall : at::ObserverContext {
    ParamUse use;
    bool indexed = false;  ///< an argument holds integers
  };

  /// Memory that holds parameters.
  struct Followed {
    at::Tensor tensor;
    const char* begin;
    const char* end;
    std::vector<std::string> params;
  };

  static std::unique_ptr<at::ObserverContext> on_start(const at::RecordFunction& call) {
    if (!current || current->depth_++ > 0) return nullptr;
    return current->started(call);
  }

  static void on_end(const at::RecordFunction& call, at::ObserverContext* context) {
    if (!current) return;
    --current->depth_;
    if (context) current->ended(call, *static_cast<OpenCall*>(context));
  }

  std::unique_ptr<at::ObserverContext> started(const at::RecordFunction& call) {
    const at::DisableRecordFunctionGuard unwatched;
    const at::NoGradGuard no_grad;
    if (draws_random_numbers(call.name())) random_ = call.name();
    auto open = std::make_unique<OpenCall>();
    for (const c10::IValue& value : call.inputs())
      visit_tensors(value, [&](const at::Tensor& tensor) {
        if (!tensor.defined()) return;
        open->indexed = open->indexed || !at::isFloatingType(tensor.scalar_type());
        if (!is_activation(tensor)) return;
        if (const Followed* followed = find(tensor))
          open->use.params.insert(open->use.params.end(), followed->params.begin(),
                                  followed->params.end());
        else
          open->use.inputs.push_back(tensor.detach().clone());
      });
    if (open->use.params.empty()) return nullptr;
    open->use.operation = call.name();
    open->use.microbatch = microbatch_;
    return open;
  }

  void ended(const at::RecordFunction& call, OpenCall& open) {
    const at::DisableRecordFunctionGuard unwatched;
    const at::NoGradGuard no_grad;
    const bool derived = open.use.inputs.empty() && !open.indexed;
    for (const c10::IValue& value : call.outputs())
      visit_tensors(value, [&](const at::Tensor& tensor) {
        if (!is_activation(tensor) || find(tensor)) return;
        if (derived)
          follow(tensor, open.use.params);
        else
          open.use.outputs.push_back(tensor.detach().clone());
      });
    if (derived || open.use.outputs.empty()) return;
    open.use.random_before = std::exchange(random_, {});
    uses_.push_back(std::move(open.use));
  }

  void follow(const at::Tensor& tensor, std::vector<std::string> params) {
    const auto* const begin = static_cast<const char*>(tensor.const_data_ptr());
    if (tensor.numel() == 0) return;
    followed_.push_back({tensor, begin, begin + tensor.nbytes(), std::move(params)});
  }

  const Followed* find(const at::Tensor& tensor) const {
    if (tensor.numel() == 0) return nullptr;
    const auto* const data = static_cast<const char*>(tensor.const_data_ptr());
    for (const Followed& followed : followed_)
      if (data >= followed.begin && data < followed.end) return &followed;
    return nullptr;
  }

  int64_t microbatch_;
  std::vector<ParamUse>& uses_;
  Recorder* outer_;
  at::CallbackHandle handle_;
  std::vector<Followed> followed_;
  std::string random_;
  int64_t depth_ = 0;
};

ActivationTrace::ActivationTrace(const std::vector<NamedParameter>& params, int64_t microbatch,
                                 std::vector<ParamUse>& uses)
    : recorder_(std::make_unique<Recorder>(params, microbatch, uses)) {}

ActivationTrace::~ActivationTrace() = default;

}  // namespace lockstep::testing
