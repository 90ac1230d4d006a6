#include "lockstep/checkpoint/held_blocks.h"

#include "lockstep/parallel_state/piece_places.h"

namespace lockstep {

std::map<std::string, TensorBox> held_blocks(const std::vector<NamedParameter>& parameters,
                                             const ParallelState& state) {
  const std::map<std::string, PiecePlace> places = piece_places(parameters, state, "checkpoint");
  std::map<std::string, TensorBox> blocks;
  for (const NamedParameter& param : parameters) {
    const PiecePlace& place = places.at(param.name);
    blocks[param.name] = {place.whole, place.start, param.tensor.sizes().vec()};
  }
  return blocks;
}

}  // namespace lockstep
