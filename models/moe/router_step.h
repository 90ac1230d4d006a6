#pragma once

#include <vector>

#include <torch/nn/module.h>

#include "lockstep/core/router_bias.h"

/// What a training loop does for the routers of experts in `module`, such as a GPTModel or a module
/// that has MoELayers as children. Their forwards count the tokens of a step while the module
/// trains and gradients are on.
namespace lockstep {

/// The biases of the routers that are trained, in the order of the layers: the argument of
/// finalize_model_grads(), joined over the model chunks of this rank. Without it the biases stay as
/// they are. Empty without moe_router_enable_expert_bias; a router whose weight needs no gradient
/// has none.
std::vector<RouterBias> router_biases(const torch::nn::Module& module);

/// Ends a step; call it after finalize_model_grads(). Without it global_aux_loss balances the mean
/// over all steps so far instead of the global batch. Without global_aux_loss and frozen routers it
/// does nothing.
void end_router_step(const torch::nn::Module& module);

/// Ends a step that is to have no effect, in place of finalize_model_grads() and end_router_step():
/// discards all that its forwards have counted.
void abandon_router_step(const torch::nn::Module& module);

}  // namespace lockstep
