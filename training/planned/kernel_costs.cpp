#include "lockstep/training/kernel_costs.h"

#include <algorithm>
#include <optional>
#include <string_view>
#include <vector>

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/record_function.h>
#include <torch/csrc/autograd/graph_task.h>

#include "lockstep/core/planned_cpu.h"
#include "lockstep/training/planned_host.h"

namespace lockstep {
namespace {

using at::Tensor;

bool is_in_backward() {
  const PlannedHost* const host = PlannedHost::current();
  return torch::autograd::get_current_graph_task_id() >= 0 || (host && host->is_in_backward());
}

/// Null if there is none, or if what runs is not the device's work.
PlannedHost* host_of_kernels() {
  return OnPlannedHost::is_active() ? nullptr : PlannedHost::current();
}

int64_t bytes_of(const Tensor& tensor) {
  if (!tensor.defined() || !tensor.is_meta()) return 0;
  const auto all = static_cast<int64_t>(tensor.nbytes());
  return std::min(all, static_cast<int64_t>(tensor.storage().nbytes()));
}

template <class Visit>
void visit_tensors(const c10::IValue& value, Visit&& visit) {
  if (value.isTensor())
    visit(value.toTensor());
  else if (value.isTensorList())
    for (const Tensor& tensor : value.toTensorList()) visit(tensor);
  else if (value.isOptionalTensorList())
    for (const std::optional<Tensor>& tensor : value.toOptionalTensorList())
      if (tensor) visit(*tensor);
}

double product_flops(const Tensor& a, const Tensor& b) {
  return 2 * static_cast<double>(a.numel()) * static_cast<double>(b.size(-1));
}

double attention_flops(const Tensor& query, const Tensor& key, bool causal, double each) {
  return each * static_cast<double>(query.numel()) * static_cast<double>(key.size(2)) /
         (causal ? 2 : 1);
}

double flops_of(std::string_view name, c10::ArrayRef<const c10::IValue> inputs) {
  const auto tensor = [&](size_t i) { return inputs[i].toTensor(); };
  if (name == "aten::mm" || name == "aten::bmm") return product_flops(tensor(0), tensor(1));
  if (name == "aten::addmm" || name == "aten::addmm_" || name == "aten::baddbmm" ||
      name == "aten::baddbmm_")
    return product_flops(tensor(1), tensor(2));
  if (name == "aten::_scaled_dot_product_flash_attention" ||
      name == "aten::_scaled_dot_product_flash_attention_for_cpu")
    return attention_flops(tensor(0), tensor(1), inputs[4].toBool(), 4);
  if (name == "aten::_scaled_dot_product_flash_attention_backward")
    return attention_flops(tensor(1), tensor(2), inputs[11].toBool(), 10);
  if (name == "aten::_scaled_dot_product_flash_attention_for_cpu_backward")
    return attention_flops(tensor(1), tensor(2), inputs[7].toBool(), 10);
  return 0;
}

bool is_lookup(std::string_view operation) {
  return operation == "aten::embedding" || operation.starts_with("aten::index") ||
         operation.starts_with("aten::gather");
}

/// Whether it only makes or redefines a tensor and does nothing on the device.
bool does_nothing(std::string_view operation) {
  for (const char* part : {"aten::empty", "aten::new_empty", "aten::resize", "aten::set_",
                           "aten::_local_scalar_dense", "aten::item", "aten::record_stream"})
    if (operation.starts_with(part)) return true;
  return false;
}

/// Whether the argument is only written, not read.
bool is_only_written(std::string_view name, const c10::Argument& argument) {
  if (!argument.alias_info() || !argument.alias_info()->isWrite()) return false;
  return argument.is_out() || name == "aten::copy_" || name == "aten::zero_" ||
         name == "aten::fill_";
}

/// The cost of an operator: its inputs when it begins, its results when it ends.
class Cost : public at::ObserverContext {
 public:
  explicit Cost(const at::RecordFunction& call) {
    kernel_.name = call.name();
    const auto schema = call.operator_schema();
    if (!schema || does_nothing(kernel_.name)) return;
    works_ = true;
    const auto inputs = call.inputs();
    for (size_t i = 0; i < std::min(inputs.size(), schema->arguments().size()); ++i)
      add_input(inputs[i], schema->arguments()[i]);
    if (!storages_.empty()) kernel_.flops = flops_of(kernel_.name, inputs);
    // The second input of all products is a factor; the result may be wider.
    if (kernel_.flops > 0) kernel_.dtype = c10::toString(inputs[1].toTensor().scalar_type());
    kernel_.backward = is_in_backward();
    // Machines have one rate for both names of attention.
    constexpr std::string_view kForCpu = "_for_cpu";
    const size_t suffix = kernel_.name.find(kForCpu);
    if (suffix != std::string::npos) kernel_.name.erase(suffix, kForCpu.size());
  }

  void others_work() { works_ = false, others_work_ = true; }
  bool others_worked() const { return others_work_; }

  /// Unset if the device has nothing to do.
  std::optional<ProgramKernel> end(const std::vector<c10::IValue>& outputs) {
    if (!works_) return std::nullopt;
    int64_t written = 0;
    for (const c10::IValue& output : outputs)
      visit_tensors(output, [&](const Tensor& tensor) { written += bytes_written(tensor); });
    if (written == 0) return std::nullopt;
    kernel_.bytes = written + (is_lookup(kernel_.name) ? std::min(read_, written) : read_);
    return kernel_;
  }

 private:
  static const c10::StorageImpl* storage_of(const Tensor& tensor) {
    return tensor.storage().unsafeGetStorageImpl();
  }

  void add_input(const c10::IValue& input, const c10::Argument& argument) {
    if (argument.alias_info() && argument.alias_info()->isWrite()) changes_ = true;
    const bool reads = !is_only_written(kernel_.name, argument);
    visit_tensors(input, [&](const Tensor& tensor) {
      if (!tensor.defined() || !tensor.is_meta()) return;
      if (reads) read_ += bytes_of(tensor);
      storages_.push_back(storage_of(tensor));
    });
  }

  int64_t bytes_written(const Tensor& tensor) {
    if (!tensor.defined() || !tensor.is_meta()) return 0;
    const auto* const storage = storage_of(tensor);
    const bool is_view = std::find(storages_.begin(), storages_.end(), storage) != storages_.end();
    if (is_view && !changes_) return 0;
    if (kernel_.dtype.empty()) kernel_.dtype = c10::toString(tensor.scalar_type());
    return bytes_of(tensor);
  }

  ProgramKernel kernel_;
  int64_t read_ = 0;
  bool works_ = false, others_work_ = false, changes_ = false;
  std::vector<const c10::StorageImpl*> storages_;
};

/// Operators that run on this thread, the outermost first.
thread_local std::vector<Cost*> running;

std::unique_ptr<at::ObserverContext> begin(const at::RecordFunction& call) {
  auto cost = std::make_unique<Cost>(call);
  running.push_back(cost.get());
  return cost;
}

void end(const at::RecordFunction& call, at::ObserverContext* context) {
  auto* const cost = static_cast<Cost*>(context);
  if (running.empty() || running.back() != cost) return;
  running.pop_back();
  PlannedHost* const host = host_of_kernels();
  const std::optional<ProgramKernel> kernel = host ? cost->end(call.outputs()) : std::nullopt;
  if (kernel) host->on_kernel(*kernel);
  if ((kernel || cost->others_worked()) && !running.empty()) running.back()->others_work();
}

}  // namespace

struct KernelObserver::Impl {
  at::CallbackHandle handle = at::addThreadLocalCallback(at::RecordFunctionCallback(&begin, &end)
                                                             .needsInputs(true)
                                                             .needsOutputs(true)
                                                             .scopes({at::RecordScope::FUNCTION}));
};

KernelObserver::KernelObserver() : impl_(std::make_unique<Impl>()) {}

KernelObserver::~KernelObserver() {
  at::removeCallback(impl_->handle);
  running.clear();
}

void note_kernel(const char* name, at::TensorList tensors, double flops) {
  PlannedHost* const host = host_of_kernels();
  if (!host) return;
  ProgramKernel kernel{.name = name, .flops = flops};
  for (const Tensor& tensor : tensors) {
    kernel.bytes += bytes_of(tensor);
    if (kernel.dtype.empty() && tensor.defined())
      kernel.dtype = c10::toString(tensor.scalar_type());
  }
  kernel.backward = is_in_backward();
  host->on_kernel(kernel);
}

}  // namespace lockstep
