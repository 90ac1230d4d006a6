#pragma once

#include <memory>
#include <utility>
#include <vector>

#include <torch/nn/module.h>

namespace lockstep {

/// Puts the modules below `module` into evaluation mode, which turns dropout off. The destructor
/// restores the mode of each.
class EvaluationMode {
 public:
  explicit EvaluationMode(const torch::nn::Module& module) {
    for (const auto& below : module.modules(/*include_self=*/false))
      before_.emplace_back(below, below->is_training());
    for (const auto& child : module.children()) child->eval();
  }
  ~EvaluationMode() {
    // train() also sets the modules below, which come later in the list.
    for (const auto& [module, training] : before_) module->train(training);
  }
  EvaluationMode(const EvaluationMode&) = delete;
  EvaluationMode& operator=(const EvaluationMode&) = delete;

 private:
  std::vector<std::pair<std::shared_ptr<torch::nn::Module>, bool>> before_;
};

}  // namespace lockstep
