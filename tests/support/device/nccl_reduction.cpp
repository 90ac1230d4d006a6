#include "lockstep/tests/support/device/nccl_reduction.h"

#include <algorithm>

#include <c10/util/BFloat16.h>
#include <c10/util/Exception.h>
#include <c10/util/Half.h>

namespace lockstep::testing {
namespace {

using ReduceType = c10d::ReduceOp::RedOpType;

template <class T>
struct Accumulator {
  using type = T;
};
template <>
struct Accumulator<c10::BFloat16> {
  using type = float;
};
template <>
struct Accumulator<c10::Half> {
  using type = float;
};

/// A NaN on either side propagates.
template <class C>
C combine_two(ReduceType op, C a, C b) {
  switch (op) {
    case c10d::ReduceOp::PRODUCT:
      return static_cast<C>(a * b);
    case c10d::ReduceOp::MAX:
      return a > b || a != a ? a : b;
    case c10d::ReduceOp::MIN:
      return a < b || a != a ? a : b;
    default:
      return static_cast<C>(a + b);
  }
}

template <class T>
void reduce_as(const std::vector<NcclTerm>& terms, int64_t count, void* out) {
  using C = typename Accumulator<T>::type;
  const ReduceType op = terms.front().reduction.op;
  const auto load = [](const NcclTerm& term, int64_t i) {
    const C value = static_cast<C>(static_cast<const T*>(term.elements)[i]);
    if (term.reduction.op != c10d::ReduceOp::PREMUL_SUM) return value;
    return static_cast<C>(value * static_cast<C>(static_cast<T>(term.reduction.factor)));
  };
  for (int64_t i = 0; i < count; ++i) {
    C result = load(terms.front(), i);
    for (size_t rank = 1; rank < terms.size(); ++rank)
      result = combine_two(op, result, load(terms[rank], i));
    if (op == c10d::ReduceOp::AVG) result = static_cast<C>(result / static_cast<C>(terms.size()));
    static_cast<T*>(out)[i] = static_cast<T>(result);
  }
}

}  // namespace

void reduce_in_rank_order(at::ScalarType dtype, const std::vector<NcclTerm>& terms, int64_t count,
                          void* out) {
  switch (dtype) {
    case at::kFloat:
      return reduce_as<float>(terms, count, out);
    case at::kDouble:
      return reduce_as<double>(terms, count, out);
    case at::kBFloat16:
      return reduce_as<c10::BFloat16>(terms, count, out);
    case at::kHalf:
      return reduce_as<c10::Half>(terms, count, out);
    case at::kChar:
      return reduce_as<int8_t>(terms, count, out);
    case at::kInt:
      return reduce_as<int32_t>(terms, count, out);
    case at::kLong:
      return reduce_as<int64_t>(terms, count, out);
    default:
      return reduce_as<uint8_t>(terms, count, out);
  }
}

NcclReduction nccl_reduction(const c10d::ReduceOp& op, at::ScalarType dtype) {
  check_nccl_dtype(dtype);
  TORCH_CHECK_TYPE(!c10::isFloat8Type(dtype), "NCCL does not reduce ", dtype);
  const ReduceType kind = op.op_;
  const bool bitwise =
      kind == c10d::ReduceOp::BAND || kind == c10d::ReduceOp::BOR || kind == c10d::ReduceOp::BXOR;
  TORCH_CHECK_VALUE(!bitwise, "NCCL has no bitwise reductions");
  if (dtype == at::kBool) {
    TORCH_CHECK_TYPE(kind != c10d::ReduceOp::AVG, "NCCL does not average Bool");
    if (kind == c10d::ReduceOp::SUM) return {c10d::ReduceOp::MAX};
  }
  if (kind != c10d::ReduceOp::PREMUL_SUM) return {kind};
  TORCH_CHECK_NOT_IMPLEMENTED(
      dtype != at::kBFloat16,
      "PREMUL_SUM of BFloat16: libtorch 2.11 hands NCCL four bytes of a float for the factor, of "
      "which NCCL reads two, so that every sum is zero (pytorch #190745)");
  TORCH_CHECK_TYPE(dtype == at::kHalf || dtype == at::kFloat || dtype == at::kDouble,
                   "PREMUL_SUM of ", dtype, ", allowed: Half, Float, Double");
  const auto* factor = dynamic_cast<const c10d::NCCLPreMulSumSupplement*>(op.supplement_.get());
  TORCH_CHECK_NOT_IMPLEMENTED(factor != nullptr && !factor->tensor_factor.defined(),
                              "PREMUL_SUM here takes a number as its factor, no tensor");
  return {c10d::ReduceOp::PREMUL_SUM, factor->double_factor};
}

void check_nccl_dtype(at::ScalarType dtype) {
  constexpr at::ScalarType kTypes[] = {
      at::kChar, at::kByte, at::kFloat,    at::kDouble,      at::kInt,          at::kLong,
      at::kHalf, at::kBool, at::kBFloat16, at::kFloat8_e5m2, at::kFloat8_e4m3fn};
  TORCH_CHECK_TYPE(std::find(std::begin(kTypes), std::end(kTypes), dtype) != std::end(kTypes),
                   "NCCL has no type for tensors of ", dtype);
}

}  // namespace lockstep::testing
