#include "lockstep/training/operator_trials.h"

#include <algorithm>
#include <array>
#include <tuple>
#include <utility>

#include <ATen/ATen.h>

#include "lockstep/core/check.h"
#include "lockstep/kernels/adamw.h"
#include "lockstep/kernels/cross_entropy.h"
#include "lockstep/kernels/dropout.h"
#include "lockstep/kernels/matrix_product.h"
#include "lockstep/kernels/norm.h"
#include "lockstep/kernels/rotary.h"
#include "lockstep/kernels/sum_of_squares.h"
#include "lockstep/kernels/swiglu.h"
#include "lockstep/training/kernel_costs.h"
#include "lockstep/training/planned_device.h"
#include "lockstep/training/planned_host.h"

namespace lockstep {
namespace {

using Tensors = OperatorTrial::Tensors;
using Sizes = std::vector<int64_t>;

constexpr std::array<std::pair<int64_t, int64_t>, 4> kElementwise = {
    {{64, 64}, {256, 128}, {1024, 256}, {2048, 1024}}};  // rows and width

at::Tensor values(const Sizes& sizes, c10::Device device) {
  return at::rand(sizes, at::TensorOptions(device).dtype(at::kFloat)).sub_(0.5);
}

at::Tensor numbers(int64_t count, int64_t below, c10::Device device) {
  return at::arange(count, at::TensorOptions(device).dtype(at::kLong)).remainder_(below);
}

/// Makes operands of those sizes.
std::function<Tensors(c10::Device)> of_sizes(std::vector<Sizes> all) {
  return [all = std::move(all)](c10::Device device) {
    Tensors tensors;
    for (const Sizes& sizes : all) tensors.push_back(values(sizes, device));
    return tensors;
  };
}

class TrialList {
 public:
  void add(OperatorTrial trial) { trials_.push_back(std::move(trial)); }

  /// Forward and both products of backward of a layer; the weight's gradient is added.
  void add_products(int64_t rows, int64_t in, int64_t out) {
    add({.name = "aten::mm",
         .make = of_sizes({{rows, in}, {out, in}, {rows, out}}),
         .call = [](const Tensors& t) {
           kernels::product(t[0], t[1].t());
           kernels::product(t[2], t[1]);
         }});
    add({.name = "aten::addmm_",
         .make = of_sizes({{out, in}, {rows, out}, {rows, in}}),
         .call = [](const Tensors& t) { kernels::add_product(t[0], t[1].t(), t[2]); }});
    add({.name = "aten::addmm",
         .make = of_sizes({{rows, in}, {out, in}, {out}}),
         .call = [](const Tensors& t) { kernels::linear_product(t[0], t[1], t[2]); }});
  }

  void add_batched_product(int64_t batch, int64_t length, int64_t channels) {
    add({.name = "aten::bmm",
         .make = of_sizes({{batch, length, channels}, {batch, length, channels}}),
         .call = [](const Tensors& t) { at::bmm(t[0], t[1].transpose(1, 2)); }});
  }

  void add_attention(int64_t length, int64_t batch, int64_t heads, int64_t channels) {
    const Sizes sizes = {length, batch, heads, channels};
    const auto moved = [](const at::Tensor& x) { return x.permute({1, 2, 0, 3}); };
    add({.name = "aten::_scaled_dot_product_flash_attention",
         .make = of_sizes({sizes, sizes, sizes}),
         .call =
             [moved](const Tensors& t) {
               at::_scaled_dot_product_flash_attention_for_cpu(moved(t[0]), moved(t[1]),
                                                               moved(t[2]), 0.0, true);
             },
         .plan =
             [moved](const Tensors& t) {
               at::_scaled_dot_product_flash_attention(moved(t[0]), moved(t[1]), moved(t[2]), 0.0,
                                                       true);
             }});
    const auto with_sums = [of = of_sizes({sizes, sizes, sizes, sizes}),
                            moved](c10::Device device) {
      Tensors tensors = of(device);
      for (at::Tensor& tensor : tensors) tensor = moved(tensor);
      if (device.is_cpu()) {
        auto [out, sums] = at::_scaled_dot_product_flash_attention_for_cpu(tensors[0], tensors[1],
                                                                           tensors[2], 0.0, true);
        tensors.insert(tensors.end(), {out, sums});
      }
      return tensors;
    };
    add({.name = "aten::_scaled_dot_product_flash_attention_backward",
         .make = with_sums,
         .call =
             [](const Tensors& t) {
               at::_scaled_dot_product_flash_attention_for_cpu_backward(t[3], t[0], t[1], t[2],
                                                                        t[4], t[5], 0.0, true);
             },
         .plan =
             [](const Tensors& t) {
               at::_scaled_dot_product_flash_attention_backward(
                   t[3], t[0], t[1], t[2], t[0], t[0], {}, {}, t[0].size(2), t[0].size(2), 0.0,
                   true, at::Tensor(), at::Tensor());
             }});
  }

  void add_elementwise(int64_t rows, int64_t width) {
    const Sizes sizes = {rows, width};
    add({.name = "aten::add", .make = of_sizes({sizes, sizes}), .call = [](const Tensors& t) {
           at::add(t[0], t[1]);
         }});
    add({.name = "aten::add_", .make = of_sizes({sizes, sizes}), .call = [](const Tensors& t) {
           t[0].add_(t[1]);
         }});
    add({.name = "aten::mul", .make = of_sizes({sizes, sizes}), .call = [](const Tensors& t) {
           at::mul(t[0], t[1]);
         }});
    add({.name = "aten::sum", .make = of_sizes({sizes}), .call = [](const Tensors& t) {
           at::sum(t[0], at::IntArrayRef({0}), true);
         }});
    add({.name = "aten::gelu", .make = of_sizes({sizes}), .call = [](const Tensors& t) {
           at::gelu(t[0]);
         }});
    add({.name = "aten::gelu_backward",
         .make = of_sizes({sizes, sizes}),
         .call = [](const Tensors& t) { at::gelu_backward(t[0], t[1]); }});
    add({.name = "aten::copy_",
         .make = of_sizes({{width / 32, rows, 32}, {rows, width / 32, 32}}),
         .call = [](const Tensors& t) {
           t[0].copy_(t[1].permute({1, 0, 2}));
         }});
    add({.name = "aten::zero_", .make = of_sizes({sizes}), .call = [](const Tensors& t) {
           t[0].zero_();
         }});
    add({.name = "dropout", .make = of_sizes({sizes, sizes}), .call = [rows](const Tensors& t) {
           kernels::dropout(t[0], t[1], /*probability=*/0.1, {.position = {1, rows}});
         }});
    add({.name = "swiglu", .make = of_sizes({{rows, 2 * width}}), .call = [](const Tensors& t) {
           kernels::swiglu(t[0]);
         }});
    add({.name = "swiglu_gradient",
         .make = of_sizes({sizes, {rows, 2 * width}}),
         .call = [](const Tensors& t) { kernels::swiglu_backward(t[0], t[1]); }});
  }

  void add_norm(int64_t rows, int64_t width) {
    const auto forward = [](const Tensors& t) {
      return kernels::norm_forward(kernels::NormKind::rms, t[0], t[1], t[2], {}, 1e-5);
    };
    add({.name = "norm",
         .make = of_sizes({{rows, width}, {rows, width}, {width}}),
         .call = [forward](const Tensors& t) { forward(t); }});
    add({.name = "norm_gradient",
         .make =
             [of = of_sizes({{rows, width}, {rows, width}, {width}}), forward](c10::Device device) {
               Tensors tensors = of(device);
               const kernels::NormResult result = forward(tensors);
               tensors.insert(tensors.end(), {result.sum, result.root});
               return tensors;
             },
         .call =
             [](const Tensors& t) {
               kernels::norm_backward(kernels::NormKind::rms, t[0], t[1],
                                      {.sum = t[3], .normalized = {}, .mean = {}, .root = t[4]},
                                      t[2],
                                      /*of_parameters=*/true);
             }});
  }

  void add_rotary(int64_t length, int64_t batch, int64_t groups, int64_t channels) {
    const kernels::QueryRange one = {.first = 0, .count = 1};
    add({.name = "rotary",
         .make = of_sizes({{length, batch, groups, 3, channels},
                           {length, channels / 2},
                           {length, channels / 2}}),
         .call = [one](const Tensors& t) {
           const kernels::RotaryTable table = {.cos = t[1], .sin = t[2], .positions = {}};
           const kernels::AttentionHeads heads = kernels::rotate_heads(t[0], table, one);
           kernels::rotate_heads_backward(heads, table, one, 1);
         }});
  }

  void add_vocabulary(int64_t tokens, int64_t width, int64_t vocabulary) {
    const kernels::TokenColumns columns = {.first = 0, .held = vocabulary};
    const auto make = [tokens, vocabulary](c10::Device device) {
      Tensors tensors = {values({tokens, vocabulary}, device), numbers(tokens, vocabulary, device)};
      const auto sums = kernels::make_cross_entropy_sums(tokens, tensors[0], /*smoothed=*/false);
      kernels::cross_entropy_sums(tensors[0], tensors[1], {.first = 0, .held = vocabulary}, sums);
      tensors.insert(tensors.end(), {sums.highest, sums.sums, values({tokens}, device),
                                     at::empty_like(tensors[0])});
      return tensors;
    };
    add({.name = "cross_entropy", .make = make, .call = [columns](const Tensors& t) {
           kernels::cross_entropy_sums(t[0], t[1], columns, {t[2], t[3]});
         }});
    add({.name = "cross_entropy_gradient",
         .make = make,
         .call = [columns, vocabulary](const Tensors& t) {
           kernels::cross_entropy_gradient(t[4], t[0], t[1], columns, {t[2], t[3]}, vocabulary, 0,
                                           t[5]);
         }});
    const auto table = [tokens, width, vocabulary](c10::Device device) {
      return Tensors{values({vocabulary, width}, device), numbers(tokens, vocabulary, device),
                     values({tokens, width}, device)};
    };
    add({.name = "aten::index_select", .make = table, .call = [](const Tensors& t) {
           at::embedding(t[0], t[1]);
         }});
    add({.name = "aten::embedding_dense_backward",
         .make = table,
         .call = [vocabulary](const Tensors& t) {
           at::embedding_dense_backward(t[2], t[1], vocabulary, -1, false);
         }});
  }

  void add_optimizer(int64_t elements) {
    const Sizes flat = {elements};
    add({.name = "adamw",
         .make =
             [of = of_sizes({flat, flat, flat, flat})](c10::Device device) {
               Tensors tensors = of(device);
               tensors[3].abs_();
               return tensors;
             },
         .call =
             [elements](const Tensors& t) {
               const kernels::AdamWScalars scalars = {.learning_rate = 1e-4,
                                                      .beta1 = 0.9,
                                                      .beta2 = 0.95,
                                                      .eps = 1e-8,
                                                      .weight_decay = 0.1,
                                                      .bias_correction1 = 0.1,
                                                      .bias_correction2 = 0.05};
               kernels::adamw(t[0], t[1], t[2], t[3], {}, {{0, elements}}, scalars);
             }});
    add({.name = "sum_of_squares", .make = of_sizes({flat}), .call = [](const Tensors& t) {
           kernels::sum_of_squares(t[0]);
         }});
  }

  std::vector<OperatorTrial> take() { return std::move(trials_); }

 private:
  std::vector<OperatorTrial> trials_;
};

/// Keeps the kernels of a call.
class KernelList : public PlannedHost {
 public:
  uint32_t stream_position() const override { return 0; }
  void wait_for_stream(uint32_t /*position*/) override {}
  void read(const at::Tensor& /*device*/, at::Tensor& host) const override { host.zero_(); }
  void on_kernel(const ProgramKernel& kernel) override { kernels.push_back(kernel); }

  std::vector<ProgramKernel> kernels;
};

void count_work(OperatorTrial& trial) {
  KernelList list;
  const Tensors operands = trial.make(PlannedDevice::device());
  list.kernels.clear();
  {
    const KernelObserver observer;
    (trial.plan ? trial.plan : trial.call)(operands);
  }
  for (const ProgramKernel& kernel : list.kernels) {
    if (kernel.name != trial.name) continue;
    trial.work += kernel.flops > 0 ? kernel.flops : static_cast<double>(kernel.bytes);
    ++trial.num_calls;
  }
  require<UsageError>(trial.num_calls > 0 && trial.work > 0, "no kernel {} was called", trial.name);
  trial.work /= static_cast<double>(trial.num_calls);
}

}  // namespace

std::vector<OperatorTrial> operator_trials() {
  TrialList list;
  list.add_products(128, 64, 192);
  list.add_products(256, 128, 384);
  list.add_products(512, 256, 768);
  list.add_products(1024, 512, 1536);
  list.add_batched_product(8, 64, 32);
  list.add_batched_product(16, 128, 64);
  list.add_batched_product(16, 512, 64);
  list.add_attention(64, 4, 4, 16);
  list.add_attention(128, 4, 4, 32);
  list.add_attention(256, 4, 8, 32);
  list.add_attention(512, 4, 8, 64);
  for (const auto& [rows, width] : kElementwise) {
    list.add_elementwise(rows, width);
    list.add_norm(rows, width);
    list.add_rotary(rows / 4, 4, width / 64, 64);
  }
  list.add_vocabulary(64, 64, 256);
  list.add_vocabulary(512, 128, 1024);
  list.add_vocabulary(1024, 256, 4096);
  for (const int64_t elements : {1 << 12, 1 << 16, 1 << 20, 1 << 23}) list.add_optimizer(elements);
  std::vector<OperatorTrial> trials = list.take();
  const PlannedDevice device(/*of_cpu=*/false);
  for (OperatorTrial& trial : trials) count_work(trial);
  std::stable_sort(trials.begin(), trials.end(), [](const auto& a, const auto& b) {
    return std::tie(a.name, a.work) < std::tie(b.name, b.work);
  });
  return trials;
}

}  // namespace lockstep
