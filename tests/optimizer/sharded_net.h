#pragma once

#include <optional>
#include <string>
#include <vector>

#include <ATen/ATen.h>
#include <torch/nn/module.h>

#include "lockstep/core/parameters.h"

/// A model of units: a table, layers of odd sizes, and a head, which may be the table.
namespace lockstep::testing {

class UnitNet : public torch::nn::Module {
 public:
  static constexpr int64_t kTokens = 11, kWidth = 6, kInner = 7;
  /// Units in the order of forward: table, layers, and the head if it is not the table.
  static constexpr int kLayers = 3;

  struct Layer : torch::nn::Module {
    Layer(const std::string& name, at::ScalarType dtype) {
      up = register_parameter("up", values(name + ".up", {kInner, kWidth}, dtype));
      bias = register_parameter("bias", values(name + ".bias", {kInner}, dtype));
      down = register_parameter("down", values(name + ".down", {kWidth, kInner}, dtype));
    }
    at::Tensor forward(const at::Tensor& x) const {
      return x + at::linear(at::tanh(at::linear(x, up, bias)), down);
    }
    at::Tensor up, bias, down;
  };

  struct Layers : torch::nn::Module {
    explicit Layers(at::ScalarType dtype) {
      for (int i = 0; i < kLayers; ++i) {
        const std::string name = std::to_string(i);
        list.push_back(register_module(name, std::make_shared<Layer>(name, dtype)));
      }
    }
    std::vector<std::shared_ptr<Layer>> list;
  };

  struct Table : torch::nn::Module {
    Table(const std::string& name, at::ScalarType dtype) {
      weight = register_parameter("weight", values(name, {kTokens, kWidth}, dtype));
    }
    at::Tensor weight;
  };

  /// `frozen`: adds a scale of the embeddings that is not trained.
  explicit UnitNet(bool tied, at::ScalarType dtype = at::kDouble, bool frozen = false)
      : table(register_module("table", std::make_shared<Table>("table", dtype))),
        layers(register_module("layers", std::make_shared<Layers>(dtype))) {
    if (frozen) {
      scale = register_parameter("scale", values("scale", {kWidth}, dtype),
                                 /*requires_grad=*/false);
    }
    if (!tied) head = register_module("head", std::make_shared<Table>("head", dtype));
  }

  /// The loss of predicting the next token, summed over `count` tokens of an endless text, starting
  /// at token `first`.
  at::Tensor loss(int64_t first, int64_t count) const {
    const at::Tensor places = at::arange(first, first + count + 1, at::kLong);
    const at::Tensor text = (places * places + places.div(3, "floor")).remainder(kTokens);
    at::Tensor x = at::embedding(table->weight, text.slice(0, 0, count));
    if (scale.defined()) x = x * scale;
    for (const auto& layer : layers->list) x = layer->forward(x);
    const at::Tensor logits = at::linear(x, head ? head->weight : table->weight);
    return at::nll_loss(at::log_softmax(logits, 1), text.slice(0, 1), {}, at::Reduction::Sum);
  }

  std::shared_ptr<Table> table;
  std::shared_ptr<Layers> layers;
  std::shared_ptr<Table> head;
  at::Tensor scale;

 private:
  static at::Tensor values(const std::string& name, std::vector<int64_t> shape,
                           at::ScalarType dtype) {
    at::Tensor tensor = at::empty(shape, at::TensorOptions(dtype));
    fill_normal(tensor, 0.4, 1, name, shape);
    return tensor;
  }
};

}  // namespace lockstep::testing
