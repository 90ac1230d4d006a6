#pragma once

#include <string>
#include <vector>

#include <ATen/ATen.h>

#include "lockstep/pipeline/executor.h"

/// A model of equal small layers, one for each virtual stage, for tests of the executor.
namespace lockstep::testing {

inline constexpr int64_t kWidth = 6;

inline at::Tensor toy_values(int64_t seed, at::IntArrayRef sizes) {
  int64_t numel = 1;
  for (const int64_t size : sizes) numel *= size;
  return at::sin(at::arange(numel, at::kDouble) * 0.7 + static_cast<double>(seed)).view(sizes);
}

struct ToyLayer {
  at::Tensor weight, bias;

  explicit ToyLayer(int64_t virtual_stage)
      : weight(toy_values(virtual_stage, {kWidth, kWidth}).requires_grad_(true)),
        bias(toy_values(100 + virtual_stage, {kWidth}).requires_grad_(true)) {}

  at::Tensor forward(const at::Tensor& input) const {
    return at::tanh(at::linear(input, weight, bias)) + input;
  }
};

/// Micro-batches, either all with 3 rows or with different numbers of rows.
struct ToyBatch {
  bool vary = false;
  int64_t rows(int64_t m) const { return vary ? 1 + (m * 5) % 4 : 3; }
  at::Tensor input(int64_t m) const { return toy_values(1000 + m, {rows(m), kWidth}); }
  at::Tensor loss(int64_t m, const at::Tensor& output) const {
    return (output * toy_values(2000 + m, {rows(m), kWidth})).sum();
  }
};

/// Gradients of all virtual stages and the losses, computed in one process with plain autograd.
struct ToyOracle {
  std::vector<ToyLayer> layers;
  std::vector<double> losses;

  /// With `reversed` the last micro-batch comes first.
  ToyOracle(int64_t virtual_stages, int64_t microbatches, const ToyBatch& batch,
            bool reversed = false) {
    for (int64_t s = 0; s < virtual_stages; ++s) layers.emplace_back(s);
    for (int64_t i = 0; i < microbatches; ++i) {
      const int64_t m = reversed ? microbatches - 1 - i : i;
      at::Tensor hidden = batch.input(m);
      for (const ToyLayer& layer : layers) hidden = layer.forward(hidden);
      const at::Tensor loss = batch.loss(m, hidden);
      loss.backward();
      losses.push_back(loss.item<double>());
    }
  }
};

/// The chunks of one rank.
struct ToyChunks {
  std::vector<ToyLayer> layers;
  std::vector<double> losses;
  std::vector<PipelineStage> stages;

  ToyChunks(int64_t rank, int64_t pipeline, int64_t chunks, const ToyBatch& batch) {
    for (int64_t c = 0; c < chunks; ++c) layers.emplace_back(c * pipeline + rank);
    for (int64_t c = 0; c < chunks; ++c) {
      const bool last = rank == pipeline - 1 && c == chunks - 1;
      stages.push_back([this, c, last, batch](int64_t m, const at::Tensor& input) {
        const at::Tensor hidden =
            layers[static_cast<size_t>(c)].forward(input.defined() ? input : batch.input(m));
        if (!last) return hidden;
        const at::Tensor loss = batch.loss(m, hidden);
        losses.push_back(loss.item<double>());
        return loss;
      });
    }
  }
  ToyChunks(const ToyChunks&) = delete;
};

}  // namespace lockstep::testing
