#include "lockstep/benchmarks/bare_loops.h"

#include <algorithm>

#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>

#include "lockstep/core/parallel_for.h"
#include "lockstep/core/vector_clones.h"

namespace lockstep::benchmarks {
namespace {

constexpr int64_t kMostReads = 3, kMostWrites = 2, kElementsOfThread = 1 << 15;

struct Streams {
  const float* from[kMostReads];
  float* to[kMostWrites];
};

/// Each of `kWrites` tensors becomes the sum of `kReads`. Without writes the elements are added up
/// in lanes; the largest lane is returned, so that the compiler keeps the loop.
template <int kReads, int kWrites>
inline __attribute__((always_inline)) float pass(const Streams& streams, int64_t first,
                                                 int64_t end) {
  constexpr int kLanes = 32;
  float lanes[kLanes] = {};
  const auto sum_at = [&](int64_t i) __attribute__((always_inline)) {
    float sum = streams.from[0][i];
    for (int read = 1; read < kReads; ++read) sum += streams.from[read][i];
    return sum;
  };
  if constexpr (kWrites == 0) {
    for (int64_t i = first; i + kLanes <= end; i += kLanes)
      for (int lane = 0; lane < kLanes; ++lane) lanes[lane] += sum_at(i + lane);
  } else {
#pragma GCC ivdep
    for (int64_t i = first; i < end; ++i) {
      const float sum = sum_at(i);
      for (int write = 0; write < kWrites; ++write) streams.to[write][i] = sum;
    }
  }
  return *std::max_element(lanes, lanes + kLanes);
}

LOCKSTEP_VECTOR_CLONES
float run_pass(const MemoryPass& shape, const Streams& streams, int64_t first, int64_t end) {
  switch (10 * shape.reads + shape.writes) {
    case 10:
      return pass<1, 0>(streams, first, end);
    case 11:
      return pass<1, 1>(streams, first, end);
    case 21:
      return pass<2, 1>(streams, first, end);
    case 22:
      return pass<2, 2>(streams, first, end);
    case 31:
      return pass<3, 1>(streams, first, end);
    default:
      return pass<3, 2>(streams, first, end);
  }
}

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;
using Shapes = std::vector<std::vector<int64_t>>;

struct NothingFunction : torch::autograd::Function<NothingFunction> {
  static variable_list forward(AutogradContext* context, at::TensorList inputs,
                               const Shapes& shapes) {
    context->save_for_backward(inputs.vec());
    variable_list results;
    for (const auto& shape : shapes) results.push_back(at::empty(shape, inputs[0].options()));
    return results;
  }

  static variable_list backward(AutogradContext* context, const variable_list& /*grads*/) {
    variable_list of_inputs;
    for (const at::Tensor& input : context->get_saved_variables())
      of_inputs.push_back(at::empty(input.sizes(), input.options()));
    of_inputs.emplace_back();
    return of_inputs;
  }
};

}  // namespace

BareLoops::BareLoops(const std::vector<MemoryPass>& passes) : passes_(passes) {
  int64_t most = 0, tensors = 0;
  for (const MemoryPass& pass : passes) {
    most = std::max(most, pass.bytes / static_cast<int64_t>(sizeof(float)));
    tensors += pass.reads + pass.writes;
  }
  for (int64_t i = 0; i < tensors; ++i) memory_.push_back(at::ones({most}));
}

void BareLoops::run() const {
  size_t tensor = 0;
  for (const MemoryPass& pass : passes_) {
    Streams streams = {};
    for (int64_t i = 0; i < pass.reads; ++i)
      streams.from[i] = memory_[tensor++].const_data_ptr<float>();
    for (int64_t i = 0; i < pass.writes; ++i)
      streams.to[i] = memory_[tensor++].mutable_data_ptr<float>();
    parallel_for(0, pass.bytes / static_cast<int64_t>(sizeof(float)), kElementsOfThread,
                 [&](int64_t first, int64_t end) {
                   volatile float kept = run_pass(pass, streams, first, end);
                   static_cast<void>(kept);
                 });
  }
}

Rival nothing_like(const Rival& rival) {
  Shapes shapes;
  for (const at::Tensor& result : rival.forward()) shapes.push_back(result.sizes().vec());
  return {[inputs = rival.inputs, shapes] {
            return NothingFunction::apply(at::TensorList(inputs), shapes);
          },
          rival.inputs};
}

}  // namespace lockstep::benchmarks
