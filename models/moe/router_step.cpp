#include "lockstep/models/router_step.h"

#include "lockstep/models/router.h"

namespace lockstep {

std::vector<RouterBias> router_biases(const torch::nn::Module& module) {
  std::vector<RouterBias> biases;
  for (const auto& router : find_routers(module))
    if (router->expert_bias().defined() && !router->is_frozen())
      biases.push_back(
          {router->expert_bias(), router->tokens_per_expert(), router->bias_update_rate()});
  return biases;
}

void end_router_step(const torch::nn::Module& module) {
  for (const auto& router : find_routers(module)) router->end_step();
}

void abandon_router_step(const torch::nn::Module& module) {
  for (const auto& router : find_routers(module)) router->abandon_step();
}

}  // namespace lockstep
