#include "lockstep/kernels/matrix_product.h"

#include <algorithm>
#include <cstdlib>
#include <string>
#include <string_view>

#include <ATen/ATen.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include "lockstep/core/check.h"
#include "lockstep/kernels/block_product.h"

namespace lockstep::kernels {
namespace {

constexpr char kVariable[] = "LOCKSTEP_ONEDNN";
/// Below these sizes a call of oneDNN costs more than it saves. Adding to a result is another pass
/// over it, for which a sum of few terms does not make up.
constexpr int64_t kMultiplications = int64_t{1} << 20, kAddedMultiplications = int64_t{1} << 22,
                  kLeastAddedTerms = 64;
/// The size of temporary memory, unless fewer than kLeastRows rows fit.
constexpr int64_t kTemporaryElements = int64_t{1} << 22, kLeastRows = 256;

using Linear = at::Tensor(const at::Tensor&, const at::Tensor&, const std::optional<at::Tensor>&,
                          std::string_view, c10::List<std::optional<at::Scalar>>,
                          std::optional<std::string_view>);
using LinearOperator = c10::TypedOperatorHandle<Linear>;

std::optional<LinearOperator> find_onednn() {
  const auto found =
      c10::Dispatcher::singleton().findSchema({"mkldnn::_linear_pointwise", /*overload=*/""});
  if (!found || !found->hasKernelForDispatchKey(c10::DispatchKey::CPU)) return {};
  return found->typed<Linear>();
}

bool processor_gains() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  return !__builtin_cpu_is("intel") && __builtin_cpu_supports("avx512f");
#else
  return false;
#endif
}

bool onednn_wanted() {
  const char* const value = std::getenv(kVariable);
  if (!value) return processor_gains();
  const std::string text = value;
  require<ConfigError>(text == "0" || text == "1",
                       "environment variable {}: found '{}', allowed: 0 or 1", kVariable, text);
  return text == "1";
}

/// The operator of oneDNN, if oneDNN is to multiply.
const std::optional<LinearOperator>& onednn() {
  static const std::optional<LinearOperator> found = onednn_wanted() ? find_onednn() : std::nullopt;
  return found;
}

/// Vectors are faster with libtorch.
bool takes_onednn(const at::Tensor& a, int64_t columns) {
  return a.numel() * columns >= kMultiplications && a.size(-1) > 1 && columns > 1 &&
         onednn_multiplies(a);
}

bool adds_by_onednn(const at::Tensor& a, int64_t columns) {
  return a.numel() * columns >= kAddedMultiplications && a.size(1) >= kLeastAddedTerms &&
         onednn_multiplies(a);
}

/// Makes a layout for which oneDNN has fast code: others take a thousand times as long.
at::Tensor without_gaps(const at::Tensor& x) {
  const bool fits = x.is_contiguous() || (x.dim() == 2 && x.t().is_contiguous());
  return fits ? x : x.contiguous();
}

/// Whether oneDNN can add the bias; libtorch takes others, or says what is wrong with them.
bool fits(const std::optional<at::Tensor>& bias, const at::Tensor& matrix) {
  return !bias || (bias->is_cpu() && bias->scalar_type() == at::kFloat && bias->dim() == 1 &&
                   bias->size(0) == matrix.size(0));
}

/// x matrix^T (+ bias). The operator reads a bias as if it were contiguous. It has no derivative:
/// autograd's fallback for such operators would only box its arguments.
at::Tensor by_onednn(const at::Tensor& x, const at::Tensor& matrix,
                     const std::optional<at::Tensor>& bias = {}) {
  static const c10::List<std::optional<at::Scalar>> no_scalars;
  const at::AutoDispatchBelowAutograd below;
  return onednn()->call(without_gaps(x), without_gaps(matrix),
                        bias ? std::optional(bias->contiguous()) : bias, "none", no_scalars, "");
}

/// Whether block_product() computes what takes_onednn() accepts. Its rows of the result are
/// contiguous.
bool by_blocks(const at::Tensor& result, const at::Tensor& a, const at::Tensor& b) {
  return result.stride(1) == 1 && fits_block_product(a, b);
}

/// Like by_onednn(), which takes what block_product() does not.
at::Tensor large_product(const at::Tensor& a, const at::Tensor& b) {
  const at::AutoDispatchBelowADInplaceOrView below;
  if (!fits_block_product(a, b)) return by_onednn(a, b.t());
  at::Tensor result = at::empty({a.size(0), b.size(1)}, a.options());
  block_product(result, a, b, /*adds=*/false);
  return result;
}

/// Calls visit(part of result, part of a) for some rows at a time. oneDNN copies a transposed `a`
/// and returns its result in new memory.
template <class Visit>
void in_parts(const at::Tensor& result, const at::Tensor& a, Visit visit) {
  const int64_t count =
      std::max(kLeastRows, kTemporaryElements / std::max<int64_t>(1, a.size(1) + result.size(1)));
  if (a.size(0) <= count) return visit(result, a);
  for (int64_t first = 0; first < a.size(0); first += count) {
    const int64_t end = std::min(first + count, a.size(0));
    visit(result.slice(0, first, end), a.slice(0, first, end));
  }
}

}  // namespace

void check_matrix_products() { (void)onednn(); }

bool onednn_multiplies(const at::Tensor& x) {
  return x.is_cpu() && x.scalar_type() == at::kFloat && at::globalContext().userEnabledMkldnn() &&
         onednn().has_value();
}

at::Tensor linear_product(const at::Tensor& x, const at::Tensor& matrix,
                          const std::optional<at::Tensor>& bias) {
  if (!takes_onednn(x, matrix.size(0)) || !fits(bias, matrix)) return at::linear(x, matrix, bias);
  if (bias || !x.is_contiguous()) return by_onednn(x, matrix, bias);
  const at::AutoDispatchBelowADInplaceOrView below;
  std::vector<int64_t> shape = x.sizes().vec();
  shape.back() = matrix.size(0);
  return large_product(x.view({-1, x.size(-1)}), matrix.t()).view(shape);
}

void linear_product_into(at::Tensor result, const at::Tensor& x, const at::Tensor& matrix,
                         const std::optional<at::Tensor>& bias) {
  const bool here = takes_onednn(x, matrix.size(0)) && fits(bias, matrix);
  if (here && !bias && by_blocks(result, x, matrix.t()))
    block_product(result, x, matrix.t(), /*adds=*/false);
  else if (here)
    result.copy_(by_onednn(x, matrix, bias));
  else if (bias)
    at::addmm_out(result, *bias, x, matrix.t());
  else
    at::mm_out(result, x, matrix.t());
}

at::Tensor product(const at::Tensor& a, const at::Tensor& b) {
  return takes_onednn(a, b.size(1)) ? large_product(a, b) : at::mm(a, b);
}

void product_into(at::Tensor result, const at::Tensor& a, const at::Tensor& b) {
  if (!takes_onednn(a, b.size(1))) {
    at::mm_out(result, a, b);
    return;
  }
  if (by_blocks(result, a, b)) return block_product(result, a, b, /*adds=*/false);
  const at::Tensor matrix = without_gaps(b.t());
  in_parts(result, a, [&](const at::Tensor& part, const at::Tensor& rows) {
    part.copy_(by_onednn(rows, matrix));
  });
}

void add_product(const at::Tensor& result, const at::Tensor& a, const at::Tensor& b) {
  if (takes_onednn(a, b.size(1)) && by_blocks(result, a, b))
    return block_product(result, a, b, /*adds=*/true);
  if (!adds_by_onednn(a, b.size(1))) {
    at::Tensor(result).addmm_(a, b);
    return;
  }
  const at::Tensor matrix = without_gaps(b.t());
  in_parts(result, a, [&](const at::Tensor& part, const at::Tensor& rows) {
    part.add_(by_onednn(rows, matrix));
  });
}

}  // namespace lockstep::kernels
