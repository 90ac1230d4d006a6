#include "lockstep/kernels/device_kernels.h"

#include <ATen/ops/empty.h>

#include "lockstep/kernels/adamw.h"
#include "lockstep/kernels/cross_entropy_operands.h"
#include "lockstep/kernels/dropout_operands.h"
#include "lockstep/kernels/fingerprint.h"
#include "lockstep/kernels/fp8.h"
#include "lockstep/kernels/fp8_tensors.h"
#include "lockstep/kernels/grouped_mm.h"
#include "lockstep/kernels/layer_kernels.h"
#include "lockstep/kernels/norm_operands.h"
#include "lockstep/kernels/rotary_operands.h"
#include "lockstep/kernels/sgd.h"
#include "lockstep/kernels/sum_of_squares.h"
#include "lockstep/tests/support/device/device_memory.h"
#include "lockstep/tests/support/device/device_registration.h"
#include "lockstep/tests/support/device/device_state.h"
#include "lockstep/tests/support/device/device_streams.h"

namespace lockstep::testing {
namespace {

// Like a CUDA kernel: on the current device's stream, whatever device the tensors are on.
c10::Stream launch_stream(std::initializer_list<at::Tensor> operands) {
  const c10::DeviceIndex device = current_device();
  for (const at::Tensor& operand : operands) check_pointer(operand, device);
  return current_stream(device);
}

/// One row for each segment: start, end. The host waits for the copy.
at::Tensor upload_rows(const std::vector<kernels::UpdateSegment>& segments, at::Device device) {
  at::Tensor rows = at::empty({static_cast<int64_t>(segments.size()), 2}, at::kLong);
  auto* row = rows.mutable_data_ptr<int64_t>();
  for (const kernels::UpdateSegment& segment : segments) {
    *row++ = segment.start;
    *row++ = segment.end;
  }
  return rows.to(device);
}

kernels::UpdateSegments segments_of(const at::Tensor& rows) {
  const auto* row = rows.const_data_ptr<int64_t>();
  std::vector<kernels::UpdateSegment> segments(static_cast<size_t>(rows.size(0)));
  for (kernels::UpdateSegment& segment : segments) {
    segment.start = *row++;
    segment.end = *row++;
  }
  return segments;
}

void adamw_lagging(const at::Tensor& master, const at::Tensor& grad, const at::Tensor& exp_avg,
                   const at::Tensor& exp_avg_sq, const at::Tensor& low_precision,
                   const kernels::UpdateSegments& segments, const kernels::AdamWScalars& scalars,
                   const kernels::StepControl& control) {
  if (segments.empty()) return;
  const at::Tensor& rows = segments.table_on(master.device(), &upload_rows);
  const c10::Stream stream =
      launch_stream({master, grad, exp_avg, exp_avg_sq, low_precision, control, rows});
  enqueue(stream, "adamw",
          [master = host_view(master), grad = host_view(grad), exp_avg = host_view(exp_avg),
           exp_avg_sq = host_view(exp_avg_sq), low_precision = host_view(low_precision),
           rows = host_view(rows), control = host_view(control), scalars] {
            kernels::adamw(master, grad, exp_avg, exp_avg_sq, low_precision, segments_of(rows),
                           scalars, control);
          });
}

void sgd_lagging(const at::Tensor& master, const at::Tensor& grad,
                 const at::Tensor& momentum_buffer, const at::Tensor& low_precision,
                 const kernels::UpdateSegments& segments, const kernels::SgdScalars& scalars,
                 const kernels::StepControl& control) {
  if (segments.empty()) return;
  const at::Tensor& rows = segments.table_on(master.device(), &upload_rows);
  const c10::Stream stream =
      launch_stream({master, grad, momentum_buffer, low_precision, control, rows});
  enqueue(stream, "sgd",
          [master = host_view(master), grad = host_view(grad),
           momentum_buffer = host_view(momentum_buffer), low_precision = host_view(low_precision),
           rows = host_view(rows), control = host_view(control), scalars] {
            kernels::sgd(master, grad, momentum_buffer, low_precision, segments_of(rows), scalars,
                         control);
          });
}

at::Tensor sum_of_squares_lagging(const at::Tensor& flat) {
  const at::Tensor sum = at::empty({}, flat.options().dtype(at::kDouble));
  enqueue(
      launch_stream({flat, sum}), "sum_of_squares",
      [flat = host_view(flat), sum = host_view(sum)] { sum.copy_(kernels::sum_of_squares(flat)); });
  return sum;
}

at::Tensor fingerprint_lagging(const at::Tensor& bytes) {
  const at::Tensor sum = at::empty({}, bytes.options().dtype(at::kLong));
  enqueue(
      launch_stream({bytes, sum}), "fingerprint",
      [bytes = host_view(bytes), sum = host_view(sum)] { sum.copy_(kernels::fingerprint(bytes)); });
  return sum;
}

at::Tensor grouped_rows_lagging(const at::Tensor& x, const at::Tensor& matrices,
                                const at::Tensor& ends) {
  const at::Tensor output = at::empty({x.size(0), matrices.size(2)}, x.options());
  enqueue(
      launch_stream({x, matrices, ends, output}), "grouped_rows",
      [x = host_view(x), matrices = host_view(matrices), ends = host_view(ends),
       output = host_view(output)] {
        const int64_t rows = ends[-1].item<int>();  // later rows stay poisoned
        output.narrow(0, 0, rows)
            .copy_(kernels::grouped_rows(x, matrices, kernels::RowGroups(ends)).narrow(0, 0, rows));
      });
  return output;
}

at::Tensor grouped_matrices_lagging(const at::Tensor& a, const at::Tensor& b,
                                    const at::Tensor& ends) {
  const at::Tensor output = at::empty({ends.size(0), a.size(1), b.size(1)}, a.options());
  enqueue(launch_stream({a, b, ends, output}), "grouped_matrices",
          [a = host_view(a), b = host_view(b), ends = host_view(ends), output = host_view(output)] {
            output.copy_(kernels::grouped_matrices(a, b, kernels::RowGroups(ends)));
          });
  return output;
}

at::Tensor grouped_sums_lagging(const at::Tensor& x, const at::Tensor&, const at::Tensor& ends) {
  const at::Tensor output = at::empty({ends.size(0), x.size(1)}, x.options());
  enqueue(launch_stream({x, ends, output}), "grouped_sums",
          [x = host_view(x), ends = host_view(ends), output = host_view(output)] {
            output.copy_(kernels::grouped_sums(x, kernels::RowGroups(ends)));
          });
  return output;
}

/// Queues `run` with host views of the tensors.
void enqueue_cross_entropy(const char* name, const kernels::CrossEntropyTensors& t,
                           void (*run)(const kernels::CrossEntropyTensors&)) {
  const kernels::CrossEntropyTensors views = {
      .logits = host_view(t.logits),
      .labels = host_view(t.labels),
      .sums = {host_view(t.sums.highest), host_view(t.sums.sums)},
      .grads = host_view(t.grads),
      .result = host_view(t.result),
      .losses = host_view(t.losses),
      .columns = t.columns,
      .vocab_size = t.vocab_size,
      .share = t.share};
  enqueue(
      launch_stream({t.logits, t.labels, t.sums.highest, t.sums.sums, t.grads, t.result, t.losses}),
      name, [views, run] { run(views); });
}

void cross_entropy_lagging(const kernels::CrossEntropyTensors& t) {
  enqueue_cross_entropy("cross_entropy", t, kernels::cross_entropy_cpu);
}

void cross_entropy_losses_lagging(const kernels::CrossEntropyTensors& t) {
  enqueue_cross_entropy("cross_entropy_losses", t, kernels::cross_entropy_losses_cpu);
}

void cross_entropy_gradient_lagging(const kernels::CrossEntropyTensors& t) {
  enqueue_cross_entropy("cross_entropy_gradient", t, kernels::cross_entropy_gradient_cpu);
}

void to_fp8_lagging(const kernels::Fp8Tensors& t) {
  constexpr uintptr_t kWord = 16;  // CUDA's kernel reads words of so many bytes
  TORCH_CHECK(reinterpret_cast<uintptr_t>(t.x.const_data_ptr()) % kWord == 0,
              "lagging device: misaligned address (in to_fp8)");
  const kernels::Fp8Tensors views = {host_view(t.x), host_view(t.scale), host_view(t.largest),
                                     host_view(t.values), host_view(t.transposed)};
  enqueue(launch_stream({t.x, t.scale, t.largest, t.values, t.transposed}), "to_fp8",
          [views] { kernels::to_fp8_by_operators(views); });
}

/// Refuses what at::_scaled_mm refuses on CUDA.
at::Tensor scaled_mm_lagging(const kernels::Fp8Matrix& a, const kernels::Fp8Matrix& b,
                             const std::optional<at::Tensor>& bias, at::ScalarType dtype,
                             bool fast_sums) {
  TORCH_CHECK(!bias || dtype != at::kFloat,
              "Bias is not supported when out_dtype is set to Float32");
  TORCH_CHECK(a.inverse_scales.numel() == 1 || dtype == at::kBFloat16,
              "Only bf16 high precision output types are supported for row-wise scaling");
  const at::Tensor product =
      at::empty({a.values.size(0), b.values.size(0)}, a.values.options().dtype(dtype));
  const auto view = [](const kernels::Fp8Matrix& matrix) {
    return kernels::Fp8Matrix{host_view(matrix.values), host_view(matrix.inverse_scales)};
  };
  const at::Tensor added = bias.value_or(at::Tensor());
  enqueue(launch_stream({a.values, a.inverse_scales, b.values, b.inverse_scales, added, product}),
          "scaled_mm",
          [a = view(a), b = view(b), added = host_view(added), product = host_view(product),
           fast_sums] {
            const auto bias = added.defined() ? std::optional(added) : std::nullopt;
            product.copy_(kernels::scaled_mm(a, b, bias, product.scalar_type(), fast_sums));
          });
  return product;
}

void norm_lagging(const kernels::NormTensors& t) {
  const kernels::NormTensors views = {
      host_view(t.x),    host_view(t.residual), host_view(t.weight),
      host_view(t.bias), host_view(t.sum),      host_view(t.normalized),
      host_view(t.mean), host_view(t.root),     t.epsilon};
  enqueue(launch_stream({t.x, t.residual, t.weight, t.bias, t.sum, t.normalized, t.mean, t.root}),
          "norm", [views] { kernels::norm_cpu(views); });
}

void norm_gradient_lagging(const kernels::NormGradientTensors& t) {
  const kernels::NormGradientTensors views = {host_view(t.grad),
                                              host_view(t.sum_grad),
                                              host_view(t.source),
                                              host_view(t.mean),
                                              host_view(t.root),
                                              host_view(t.weight),
                                              host_view(t.input_grad),
                                              host_view(t.weight_parts),
                                              host_view(t.bias_parts),
                                              t.num_parts,
                                              t.rows_a_part};
  enqueue(launch_stream({t.grad, t.sum_grad, t.source, t.mean, t.root, t.weight, t.input_grad,
                         t.weight_parts, t.bias_parts}),
          "norm_gradient", [views] { kernels::norm_gradient_cpu(views); });
}

void dropout_lagging(const kernels::DropoutTensors& t) {
  kernels::DropoutTensors views = {host_view(t.x), host_view(t.residual), host_view(t.result),
                                   t.probability, t.places};
  views.places.sample_on_device = host_view(t.places.sample_on_device);
  views.places.positions = host_view(t.places.positions);
  enqueue(launch_stream({t.x, t.residual, t.result, t.places.sample_on_device, t.places.positions}),
          "dropout", [views] { kernels::dropout_cpu(views); });
}

void rotary_lagging(const kernels::RotaryTensors& t) {
  const kernels::AttentionHeads& heads = t.heads;
  const kernels::RotaryTable& table = t.table;
  const kernels::RotaryTensors views = {
      host_view(t.packed),
      {host_view(heads.query), host_view(heads.key), host_view(heads.value)},
      {host_view(table.cos), host_view(table.sin), host_view(table.positions)},
      t.queries,
      t.backward};
  enqueue(launch_stream({t.packed, heads.query, heads.key, heads.value, table.cos, table.sin,
                         table.positions}),
          "rotary", [views] { kernels::rotary_cpu(views); });
}

void swiglu_lagging(const at::Tensor& inner, const at::Tensor& result) {
  enqueue(launch_stream({inner, result}), "swiglu",
          [inner = host_view(inner), result = host_view(result)] {
            kernels::swiglu_cpu(inner, result);
          });
}

void swiglu_gradient_lagging(const at::Tensor& grad, const at::Tensor& inner,
                             const at::Tensor& of_inner) {
  enqueue(launch_stream({grad, inner, of_inner}), "swiglu_gradient",
          [grad = host_view(grad), inner = host_view(inner), of_inner = host_view(of_inner)] {
            kernels::swiglu_gradient_cpu(grad, inner, of_inner);
          });
}

}  // namespace

void register_lockstep_kernels() {
  kernels::register_device_kernels(kLagging,
                                   {.adamw = &adamw_lagging,
                                    .sgd = &sgd_lagging,
                                    .sum_of_squares = &sum_of_squares_lagging,
                                    .fingerprint = &fingerprint_lagging,
                                    .grouped_rows = &grouped_rows_lagging,
                                    .grouped_matrices = &grouped_matrices_lagging,
                                    .grouped_sums = &grouped_sums_lagging,
                                    .cross_entropy = &cross_entropy_lagging,
                                    .cross_entropy_losses = &cross_entropy_losses_lagging,
                                    .cross_entropy_gradient = &cross_entropy_gradient_lagging,
                                    .dropout = &dropout_lagging,
                                    .to_fp8 = &to_fp8_lagging,
                                    .scaled_mm = &scaled_mm_lagging,
                                    .norm = &norm_lagging,
                                    .norm_gradient = &norm_gradient_lagging,
                                    .rotary = &rotary_lagging,
                                    .swiglu = &swiglu_lagging,
                                    .swiglu_gradient = &swiglu_gradient_lagging});
}

}  // namespace lockstep::testing
