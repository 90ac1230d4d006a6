#include "lockstep/tests/support/device/operator_rules.h"

#include <algorithm>
#include <array>
#include <set>
#include <string_view>

#include <ATen/ops/embedding_dense_backward.h>

namespace lockstep::testing {
namespace {

/// A CUDA kernel, its name in CUDA's message, and the dtypes that it lacks.
struct Gap {
  std::string_view op;
  const char* kernel;
  bool (*lacks)(at::ScalarType);
};

bool is_bf16(at::ScalarType dtype) { return dtype == at::kBFloat16; }
bool is_integer(at::ScalarType dtype) { return at::isIntegralType(dtype, /*includeBool=*/true); }

constexpr std::string_view kUnscale = "aten::_amp_foreach_non_finite_check_and_unscale_";

constexpr std::array<Gap, 8> kGaps = {{
    {kUnscale, "_amp_foreach_non_finite_check_and_unscale_cuda", &is_bf16},
    {"aten::mm", "addmm_cuda", &is_integer},
    {"aten::addmm", "addmm_cuda", &is_integer},
    {"aten::bmm", "baddbmm_cuda", &is_integer},
    {"aten::baddbmm", "baddbmm_cuda", &is_integer},
    {"aten::addmv", "addmv_impl_cuda", &is_integer},
    {"aten::mv", "addmv_impl_cuda", &is_integer},
    {"aten::dot", "dot", &is_integer},
}};

/// Operators whose results have shapes that depend on values.
const std::set<std::string_view>& data_dependent() {
  static const auto* const names = new std::set<std::string_view>{
      "aten::nonzero",     "aten::masked_select",     "aten::_unique",
      "aten::_unique2",    "aten::unique_dim",        "aten::unique_consecutive",
      "aten::bincount",    "aten::repeat_interleave", "aten::unique_dim_consecutive",
      "aten::multinomial",
  };
  return *names;
}

/// Operators whose CUDA kernel takes a value as a host number, and the index of that argument.
struct HostNumber {
  std::string_view op, overload;
  size_t argument;
};
constexpr std::array<HostNumber, 2> kHostNumbers = {
    {{"aten::masked_fill_", "Tensor", 2}, {"aten::index_fill_", "int_Tensor", 3}}};

std::optional<at::ScalarType> first_dtype(const OperatorCall& call) {
  std::optional<at::ScalarType> dtype;
  for (const c10::IValue& argument : call.arguments)
    visit_tensors(argument, [&](const at::Tensor& tensor) {
      if (!dtype && tensor.defined()) dtype = tensor.scalar_type();
    });
  return dtype;
}

/// Its operands are on the device, numbers too, and its gradients have one dtype.
void check_unscale(const OperatorCall& call) {
  for (const c10::IValue& argument : call.arguments)
    visit_tensors(argument, [](const at::Tensor& tensor) {
      TORCH_CHECK(is_lagging(tensor), "inv_scale must be a CUDA tensor.");
    });
  visit_tensors(call.arguments.front(), [&](const at::Tensor& grad) {
    TORCH_CHECK(grad.scalar_type() == first_dtype(call), "scaled_grads must have one dtype");
  });
}

bool has_mask_index(const OperatorCall& call) {
  bool found = false;
  for (const c10::IValue& argument : call.arguments)
    if (argument.isOptionalTensorList())
      visit_tensors(argument, [&](const at::Tensor& index) {
        found = found || (index.defined() &&
                          (index.scalar_type() == at::kBool || index.scalar_type() == at::kByte));
      });
  return found;
}

bool takes_host_number(const OperatorCall& call) {
  return std::any_of(kHostNumbers.begin(), kHostNumbers.end(), [&](const HostNumber& number) {
    return call.name() == number.op && call.schema().overload_name() == number.overload &&
           is_lagging(call.arguments.at(number.argument).toTensor());
  });
}

bool returns_a_value(const c10::FunctionSchema& schema) {
  return std::any_of(schema.returns().begin(), schema.returns().end(), [](const auto& result) {
    return result.type()->kind() != c10::TypeKind::TensorType &&
           result.type()->kind() != c10::TypeKind::ListType;
  });
}

bool writes(const c10::Argument& argument) {
  return argument.alias_info() && argument.alias_info()->isWrite();
}

}  // namespace

void refuse_what_cuda_lacks(const OperatorCall& call) {
  if (call.name() == kUnscale) check_unscale(call);
  const auto dtype = first_dtype(call);
  for (const Gap& gap : kGaps)
    TORCH_CHECK_NOT_IMPLEMENTED(call.name() != gap.op || !dtype || !gap.lacks(*dtype), "\"",
                                gap.kernel, "\" not implemented for '", at::toString(*dtype), "'");
}

bool needs_values(const OperatorCall& call) {
  return data_dependent().count(call.name()) > 0 || returns_a_value(call.schema()) ||
         takes_host_number(call) || has_mask_index(call);
}

bool meta_kernel_is_stricter(const OperatorCall& call) {
  return call.name() == "aten::index_add" || call.name() == "aten::index_add_";
}

std::optional<at::Tensor> computed_as_by_cuda(const c10::OperatorHandle& op,
                                              const std::vector<c10::IValue>& arguments) {
  if (op.schema().name() != "aten::embedding_dense_backward") return std::nullopt;
  const at::Tensor& grad = arguments.front().toTensor();
  if (!at::isReducedFloatingType(grad.scalar_type())) return std::nullopt;
  return at::embedding_dense_backward(grad.to(at::kFloat), arguments[1].toTensor(),
                                      arguments[2].toInt(), arguments[3].toInt(),
                                      arguments[4].toBool())
      .to(grad.scalar_type());
}

bool works_in_place(const OperatorCall& call) {
  const c10::FunctionSchema& schema = call.schema();
  const bool has_out = std::any_of(schema.arguments().begin(), schema.arguments().end(),
                                   [](const c10::Argument& argument) { return argument.is_out(); });
  return !has_out && std::all_of(schema.returns().begin(), schema.returns().end(), writes);
}

bool only_draws(const OperatorCall& call) {
  if (!generator_argument(call.schema())) return false;
  const auto& arguments = call.schema().arguments();
  for (size_t i = 0; i < arguments.size(); ++i)
    if (call.arguments[i].isTensor() && !writes(arguments[i])) return false;
  return std::any_of(arguments.begin(), arguments.end(), writes);
}

std::optional<size_t> written_argument(const OperatorCall& call, size_t position) {
  const c10::Argument& result = call.schema().returns().at(position);
  if (!writes(result)) return std::nullopt;
  const auto& arguments = call.schema().arguments();
  for (size_t i = 0; i < arguments.size(); ++i)
    if (writes(arguments[i]) && *arguments[i].alias_info() == *result.alias_info()) return i;
  return std::nullopt;
}

std::optional<size_t> generator_argument(const c10::FunctionSchema& schema) {
  for (size_t i = 0; i < schema.arguments().size(); ++i)
    if (schema.arguments()[i].name() == "generator") return i;
  return std::nullopt;
}

}  // namespace lockstep::testing
